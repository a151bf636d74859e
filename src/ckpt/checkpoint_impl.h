/* Names, paths and helpers shared by the files that read and write checkpoints. */
#ifndef QD_CKPT_CHECKPOINT_IMPL_H
#define QD_CKPT_CHECKPOINT_IMPL_H

#include "ckpt/checkpoint.h"
#include "ckpt/folder.h"

#include <quadrille/json_writer.h>

#define QD_CKPT_FORMAT "quadrille checkpoint"
#define QD_CKPT_VERSION 2
#define QD_CKPT_MANIFEST "manifest.json"
#define QD_CKPT_MANIFEST_HASH "manifest.xxh3"
#define QD_CKPT_PART "part-%05d.json" /* pieces written by one rank; removed once the manifest exists */
#define QD_CKPT_LATEST "latest"
#define QD_CKPT_BEST "best"
#define QD_CKPT_RUN_ID "run-id"
#define QD_CKPT_ASIDE ".part"
#define QD_CKPT_HASH_TEXT 17

extern const char *const qd_ckpt_kind_names[QD_CKPT_KIND_COUNT];

char *qd_ckpt_path(const char *folder, const char *name); /* folder/name; free it; NULL when out of memory */
/* root/step-000000000012 followed by `suffix`; as above. */
char *qd_ckpt_step_path(const char *root, int64_t step, const char *suffix);
void qd_ckpt_hash_text(uint64_t hash, char text[QD_CKPT_HASH_TEXT]);
/* Index of the first value that is infinite or NaN; -1: all are finite. */
int64_t qd_ckpt_first_not_finite(const float *values, int64_t count);
/* False if the text is not a hash. */
bool qd_ckpt_hash_parse(const char *text, uint64_t *hash);

/* base.c: the frozen values of an adapter checkpoint. */
typedef struct qd_ckpt_base qd_ckpt_base;
qd_status qd_ckpt_base_open(const qd_ckpt_meta *meta, const qd_ledger *ledger, qd_ckpt_base **base);
/* QD_USAGE if the weights at `path` are not those that the checkpoint names. */
qd_status qd_ckpt_base_check(const qd_ckpt_meta *meta, const char *path);
void qd_ckpt_base_close(qd_ckpt_base *base); /* NULL is legal */
qd_status qd_ckpt_base_read(qd_ckpt_base *base, const qd_param *param, const qd_atom *box, float *out);

void qd_ckpt_put_sizes(qd_json_writer *json, const char *key, const int64_t *sizes, int count);

/* Writes the manifest of `parts` parts into a folder. */
qd_status qd_ckpt_manifest_write(const char *folder, const qd_ledger *ledger, const qd_ckpt_meta *meta, int parts);
#endif
