/* Cluster and accelerator files embedded in the library, so that no file has to be found at run
 * time. */
#ifndef QD_SIM_CLUSTER_FILES_H
#define QD_SIM_CLUSTER_FILES_H

typedef struct qd_cluster_file {
    const char *name; /* NULL ends the list */
    const char *text, *end;
} qd_cluster_file;

extern const qd_cluster_file qd_clusters_files[], qd_accelerators_files[];
extern const char *const qd_clusters_names[], *const qd_accelerators_names[]; /* NULL-terminated */
#endif
