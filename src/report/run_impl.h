/* Internals of the report of a run folder: the data that was read, and the description that points
 * into it. */
#ifndef QD_REPORT_RUN_IMPL_H
#define QD_REPORT_RUN_IMPL_H

#include "base/arena.h"
#include "report/run.h"
#include "report/table.h"
#include "spec/config/config.h"

#include <quadrille/check.h>
#include <sys/stat.h>

enum { QD_RUN_FIGURES = 10, QD_RUN_NOTES = 8, QD_RUN_SERIES = 12, QD_RUN_MARKS = 64 };

/* Files that are read again when they change. */
typedef enum qd_run_file_id {
    QD_RUN_CONFIG,
    QD_RUN_EFFECTIVE,
    QD_RUN_MEMORY,
    QD_RUN_TRACE,
    QD_RUN_STARTS,
    QD_RUN_SAMPLES,
    QD_RUN_FILE_COUNT
} qd_run_file_id;

typedef struct qd_run_stamp {
    ino_t inode;
    off_t bytes;
    struct timespec changed;
} qd_run_stamp; /* all zero: the file is missing */

struct qd_run_report {
    qd_report report;
    char *path;
    bool live;
    int64_t version;
    qd_run_stamp stamps[QD_RUN_FILE_COUNT];
    qd_arena *arena; /* what depends on these files: texts, the programs, the memory table */
    qd_options *options;
    qd_config config;
    qd_check_report plan;
    char *config_text;
    bool one_process; /* the ranks were threads */
    bool trace_failed; /* live: there is one, but it cannot be read (yet) */
    qd_report_mark marks[QD_RUN_MARKS]; /* of starts.jsonl */
    int mark_count;
    qd_report_table samples;
    qd_report_memory memory;
    qd_report_memory_rank *memory_ranks;
    qd_report_trace *measured;
    qd_report_timeline timeline; /* the measured one, with mesh coordinates */
    qd_table metrics, evaluations;
    qd_arena *texts; /* of figures, replaced at each refresh */
    qd_report_figure figures[QD_RUN_FIGURES];
    const char *notes[QD_RUN_NOTES];
    qd_report_series series[QD_RUN_SERIES];
};

/* Opens a file of the folder; *fd is -1 if it is missing. */
qd_status qd_run_file_open(const qd_run_report *run, int folder, const char *name, int *fd);
/* Reads a file of the folder; *text is NULL if it is missing. The caller frees it. */
qd_status qd_run_file_read(const qd_run_report *run, int folder, const char *name, size_t most, char **text, size_t *length);

/* Stores a text of an arena, or fails if there is none. */
static inline qd_status qd_run_keep(const char **text, char *printed)
{
    *text = printed;
    return printed ? QD_OK : QD_NO_MEMORY;
}

/* run_figures.c: figures, notes and curves of the rows read so far. */
qd_status qd_run_fill_figures(qd_run_report *run);
/* run_samples.c: the table of sample texts. */
qd_status qd_run_samples(qd_run_report *run, int folder, const char *name);
/* run_memory.c: planned and measured memory of the ranks. */
qd_status qd_run_memory(qd_run_report *run, int folder);
#endif
