/* What a supervised run remembers of its failures: decides from them whether a restart can help,
 * and keeps the journal in the run folder. */
#ifndef QD_TRAIN_LAUNCH_JOURNAL_H
#define QD_TRAIN_LAUNCH_JOURNAL_H

#include "base/text/json_writer.h"
#include "train/ranks/failure.h"
#include "train/run/run.h"

/* The journal of restarts, in the run folder. */
#define QD_JOURNAL_FILE "restarts.jsonl"

/* Plain data: ranks that join a run get it, as bytes, from those that stay. */
typedef struct qd_past {
    int64_t attempt;     /* from 1 */
    int64_t step;        /* last step that was done, in this attempt or an earlier one; -1: none */
    int64_t before_step; /* the same before the last failure, */
    qd_failure before;   /* which was this */
    int32_t equal;       /* consecutive equal failures */
    int32_t resumed;     /* the first attempt resumed a run: what the folder holds is of this one */
    int32_t begun;       /* ranks that meet: they have agreed that the run may use its folder */
} qd_past;

typedef struct qd_journal {
    const qd_run *run;                 /* its present configuration */
    const qd_train_observer *observer; /* notes; NULL: another rank writes the journal, and this one only decides */
    bool held; /* nothing is written: the folder may be that of another run */
    qd_strbuf text;
    qd_past past;
    double failed_at; /* clock time of the failure that the present attempt follows; 0: none, or it has recovered */
} qd_journal;

/* A resumed run continues the journal of its folder. */
void qd_journal_begin(qd_journal *journal, const qd_run *run, const qd_train_observer *observer);
void qd_journal_load(qd_journal *journal);
void qd_journal_end(qd_journal *journal);
/* A line: members are written between the two. */
qd_json_writer qd_journal_line(qd_journal *journal, const char *event);
void qd_journal_end_line(qd_journal *journal, qd_json_writer *writer);
/* Writes the whole journal: a restart without a checkpoint clears the folder. The journal is for
 * people, so a disk that refuses it does not end the run. */
void qd_journal_write(qd_journal *journal);
void qd_journal_note(const qd_journal *journal, const char *text);

/* Why a run failed, in the words of the journal; NULL: a restart would fail in the same way. */
const char *qd_journal_cause(qd_status status);
/* A step is done. */
void qd_journal_step(qd_journal *journal, int64_t step);
/* After a failure, whose message is in the error record. QD_OK: the run restarts; otherwise it ends
 * with this status. excludes: NULL, or whether the run can continue without what fails
 * repeatedly. */
qd_status qd_journal_judge(qd_journal *journal, qd_status status, bool (*excludes)(void *context), void *context);
/* Ends the run with the evidence: why there is no further restart, and the last failure. */
qd_status qd_journal_give_up(qd_journal *journal, qd_status status, const char *why);
/* The restart that judge() has allowed begins: from the state of the `surviving` ranks that stay,
 * or as run.resume says. */
void qd_journal_restart(qd_journal *journal, bool in_memory, int surviving);

/* Whether the last checkpoint of the run is there: ranks may fail after it, while they end. */
bool qd_run_is_complete(const qd_config *config);
#endif
