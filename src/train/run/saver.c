/* The phases of a save: copy the state, write it in a thread, agree on the result, commit. See
 * saver.h. */
#include "train/run/saver.h"

#include "base/thread.h"
#include "train/ranks/long_work.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum phase { PHASE_IDLE, PHASE_WRITING, PHASE_COMMITTING } phase;

/* Work for this rank's thread. */
typedef struct job {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool running, done;
    qd_status status;
    char message[512];
} job;

struct qd_saver {
    qd_trainer *trainer;
    qd_comm *control;
    char *root, *config;
    int keep;
    int64_t best;
    qd_arena *arena;
    qd_state_pieces pieces;
    float *snapshot; /* NULL: the state itself is read while it is written */
    float *tensor;   /* the tensor that was read last */
    int tensor_param;
    qd_ckpt_kind tensor_kind;
    qd_ckpt_meta meta; /* of the current save */
    phase phase;
    char *left;        /* NULL, or what the commit could not remove */
    job job;
    atomic_llong written; /* pieces, by the thread */
    atomic_int abandoned;
    long long seen;       /* of them at the last look, */
    double standing;      /* which was so many seconds ago */
    bool stuck;           /* the thread is in a call that does not return */
    char *base; /* NULL: checkpoints have all values */
    char base_hash[QD_CKPT_BASE_TEXT];
};

static const qd_tensor_kind tensor_of[QD_CKPT_KIND_COUNT] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};

/* Pieces of one tensor are consecutive: it is read once. */
static qd_status fetch_live(void *context, const qd_state_piece *piece, float *out)
{
    qd_saver *s = context;
    atomic_fetch_add_explicit(&s->written, 1, memory_order_relaxed);
    qd_atom held = qd_trainer_holding(s->trainer, piece->param, tensor_of[piece->kind]).box;
    if (s->tensor_param != piece->param || s->tensor_kind != piece->kind) {
        s->tensor_param = -1;
        QD_TRY(qd_trainer_get(s->trainer, piece->param, tensor_of[piece->kind], s->tensor));
        s->tensor_param = piece->param;
        s->tensor_kind = piece->kind;
    }
    const float *from = s->tensor + (piece->box.begin[0] - held.begin[0]) * held.length[1];
    memcpy(out, from, (size_t)piece->count * sizeof *out);
    return QD_OK;
}

static qd_status fetch_copied(void *context, const qd_state_piece *piece, float *out)
{
    qd_saver *s = context;
    if (atomic_load(&s->abandoned))
        return QD_FAIL(QD_INTERRUPTED, "the checkpoint is not completed");
    atomic_fetch_add_explicit(&s->written, 1, memory_order_relaxed);
    memcpy(out, s->snapshot + piece->before, (size_t)piece->count * sizeof *out);
    return QD_OK;
}

static qd_status take_snapshot(qd_saver *s)
{
    for (int i = 0; s->snapshot && i < s->pieces.count; i++)
        QD_TRY(fetch_live(s, &s->pieces.list[i], s->snapshot + s->pieces.list[i].before));
    return QD_OK;
}

/* Rank 0. Removing what a killed run has left may take long. */
static qd_status make_folder(void *saver)
{
    const qd_saver *s = saver;
    return qd_store_prepare(s->root, s->meta.step);
}

static qd_status work(qd_saver *s)
{
    const qd_ledger *ledger = qd_trainer_program(s->trainer)->ledger;
    if (s->phase == PHASE_COMMITTING)
        return qd_store_commit(s->root, ledger, &s->meta, qd_comm_size(s->control), s->keep, s->best, &s->left);
    return qd_store_write(s->root, s->meta.step, qd_comm_rank(s->control), ledger, &s->pieces, s->snapshot ? fetch_copied : fetch_live, s);
}

static void end_job(job *j, qd_status status)
{
    pthread_mutex_lock(&j->lock);
    j->status = status;
    snprintf(j->message, sizeof j->message, "%s", status == QD_OK ? "" : qd_error_message());
    j->done = true;
    pthread_cond_signal(&j->ended);
    pthread_mutex_unlock(&j->lock);
}

static void *thread_main(void *argument)
{
    qd_saver *s = argument;
    end_job(&s->job, work(s));
    return NULL;
}

static void start_job(qd_saver *s)
{
    s->job.done = false;
    int error = pthread_create(&s->job.thread, NULL, thread_main, s);
    s->job.running = error == 0;
    if (error != 0)
        end_job(&s->job, QD_FAIL(QD_SYSTEM, "cannot start a thread: %s", qd_thread_why(error)));
}

static void join_job(qd_saver *s)
{
    if (s->job.running)
        pthread_join(s->job.thread, NULL);
    s->job.running = false;
}

#define LOOK_SECONDS 0.25

/* Whether the work has ended; waits for it at most a quarter of a second. */
static bool job_ended(job *j, bool wait)
{
    const struct timespec until = qd_cond_until(LOOK_SECONDS);
    pthread_mutex_lock(&j->lock);
    while (wait && !j->done && pthread_cond_timedwait(&j->ended, &j->lock, &until) == 0)
        continue;
    bool ended = j->done;
    pthread_mutex_unlock(&j->lock);
    return ended;
}

/* Collective: whether any rank is still working, and the lowest rank that failed (-1: none). */
static qd_status agree(qd_saver *s, bool busy, bool failed, bool *any_busy, int *who)
{
    int size = qd_comm_size(s->control);
    int32_t mine[2] = {busy, failed ? size - qd_comm_rank(s->control) : 0}, all[2];
    QD_TRY(qd_comm_all_reduce(s->control, mine, all, 2, QD_I32, QD_MAX, NULL));
    *any_busy = all[0] != 0;
    *who = all[1] > 0 ? size - all[1] : -1;
    return QD_OK;
}

/* Collective: reports the failure of rank `who` on all ranks and removes what was written. */
static qd_status give_up(qd_saver *s, int who, qd_save_report *report)
{
    struct {
        int32_t status;
        char message[sizeof s->job.message];
    } said = {.status = (int32_t)s->job.status};
    report->state = QD_SAVE_FAILED;
    snprintf(said.message, sizeof said.message, "%s", s->job.message);
    QD_TRY(qd_comm_broadcast(s->control, &said, sizeof said, QD_U8, who, NULL));
    report->status = (qd_status)said.status;
    snprintf(report->message, sizeof report->message, "rank %d: %.480s", who, said.message);
    if (qd_comm_rank(s->control) == 0)
        qd_store_abandon(s->root, s->meta.step);
    s->phase = PHASE_IDLE;
    return QD_OK;
}

/* Disks of networks can be slow for minutes; a write that takes this many times run.deadline does
 * not end. Looks are counted, not time: a suspended run does not write. */
#define DEADLINES_OF_A_WRITE 10.0
static qd_status watch_job(qd_saver *s, bool busy, bool wait)
{
    const double most = DEADLINES_OF_A_WRITE * qd_trainer_config(s->trainer)->deadline;
    const long long written = atomic_load_explicit(&s->written, memory_order_relaxed);
    if (!busy || !wait || written != s->seen)
        s->standing = 0.0;
    s->seen = written;
    s->standing += LOOK_SECONDS;
    if (s->standing <= most)
        return QD_OK;
    s->stuck = true;
    return QD_FAIL(QD_TIMEOUT, "the checkpoint of step %lld has not advanced for %.0f s (%lld tensors written): %s does not answer",
                   (long long)s->meta.step, s->standing, written, s->root);
}

/* One step through the phases: all ranks write, then rank 0 commits. */
static qd_status advance(qd_saver *s, bool wait, qd_save_report *report)
{
    int who;
    bool busy = !job_ended(&s->job, wait), any_busy;
    QD_TRY(watch_job(s, busy, wait));
    QD_TRY(agree(s, busy, !busy && s->job.status != QD_OK, &any_busy, &who));
    report->step = s->meta.step;
    report->state = QD_SAVE_GOING_ON;
    if (any_busy)
        return QD_OK;
    join_job(s);
    if (who >= 0)
        return give_up(s, who, report);
    if (s->phase == PHASE_WRITING) {
        s->phase = PHASE_COMMITTING;
        if (qd_comm_rank(s->control) == 0)
            start_job(s);
        return QD_OK;
    }
    s->phase = PHASE_IDLE;
    report->state = QD_SAVE_DONE;
    if (s->left)
        snprintf(report->message, sizeof report->message, "the checkpoint was written, but an old one could not be removed: %.440s",
                 s->left);
    return QD_OK;
}

qd_status qd_saver_begin(qd_saver *s, const char *config)
{
    qd_position position = qd_trainer_position(s->trainer);
    free(s->config);
    free(s->left);
    s->left = NULL;
    s->config = config ? strdup(config) : NULL;
    s->meta = (qd_ckpt_meta){.step = position.step, .next_sample = position.next_sample, .seed = qd_trainer_seed(s->trainer),
                             .config = s->config ? s->config : "", .base = s->base ? s->base : "",
                             .base_hash = s->base_hash, .tensors = qd_pieces_tensors(qd_trainer_program(s->trainer))};
    s->phase = PHASE_WRITING;
    s->tensor_param = -1;
    atomic_store(&s->written, 0);
    qd_status folder = qd_long_work_run(s->control, make_folder, s);
    if (qd_comm_rank(s->control) != 0)
        QD_TRY(folder); /* failed communication; rank 0 sees it in agree() */
    qd_status status = folder != QD_OK           ? folder
                       : config && !s->config    ? QD_FAIL(QD_NO_MEMORY, "no memory for a checkpoint")
                                                 : take_snapshot(s);
    int who;
    bool busy;
    end_job(&s->job, status);
    QD_TRY(agree(s, false, status != QD_OK, &busy, &who));
    if (who < 0) /* the folder exists on all ranks */
        start_job(s);
    return QD_OK;
}

qd_status qd_saver_poll(qd_saver *s, bool wait, qd_save_report *report)
{
    *report = (qd_save_report){.state = QD_SAVE_IDLE};
    if (s->phase == PHASE_IDLE)
        return QD_OK;
    do
        QD_TRY(advance(s, wait, report));
    while (wait && report->state == QD_SAVE_GOING_ON);
    return QD_OK;
}

static qd_status build(qd_saver *s, const char *root, bool snapshot)
{
    const qd_program *p = qd_trainer_program(s->trainer);
    int64_t largest = qd_trainer_largest(s->trainer);
    QD_TRY(qd_arena_create(&s->arena));
    QD_TRY(qd_pieces_plan(p, qd_pieces_kinds(p), s->arena, &s->pieces));
    s->root = strdup(root);
    s->tensor = malloc((size_t)largest * sizeof *s->tensor);
    s->snapshot = snapshot ? malloc((size_t)s->pieces.elements * sizeof *s->snapshot + 1) : NULL;
    if (!s->root || !s->tensor || (snapshot && !s->snapshot))
        return QD_FAIL(QD_NO_MEMORY, "no memory for the copy of the state that checkpoints are written from (%lld bytes): "
                                     "run.async_save=false needs none", (long long)(s->pieces.elements * 4));
    return QD_OK;
}

qd_status qd_saver_create(qd_trainer *trainer, qd_comm *control, const char *root, int keep, bool snapshot, qd_saver **saver)
{
    qd_saver *s = calloc(1, sizeof *s);
    if (!s)
        return QD_FAIL(QD_NO_MEMORY, "no memory for checkpoints");
    s->trainer = trainer;
    s->control = control;
    s->keep = keep;
    s->best = -1;
    pthread_mutex_init(&s->job.lock, NULL);
    qd_cond_init(&s->job.ended);
    qd_status status = build(s, root, snapshot);
    if (status != QD_OK) {
        qd_saver_destroy(s);
        return status;
    }
    *saver = s;
    return QD_OK;
}

bool qd_saver_is_stuck(const qd_saver *s)
{
    return s && s->stuck;
}

void qd_saver_abandon(qd_saver *s)
{
    if (s)
        atomic_store(&s->abandoned, 1);
}

void qd_saver_destroy(qd_saver *s)
{
    if (!s || s->stuck) /* its thread may still use everything: the process is about to end */
        return;
    join_job(s);
    pthread_cond_destroy(&s->job.ended);
    pthread_mutex_destroy(&s->job.lock);
    free(s->snapshot);
    free(s->tensor);
    free(s->config);
    free(s->left);
    free(s->base);
    free(s->root);
    qd_arena_destroy(s->arena);
    free(s);
}

qd_status qd_saver_set_base(qd_saver *s, const char *path)
{
    free(s->base);
    return qd_ckpt_base_fingerprint(path, s->base_hash, &s->base);
}

void qd_saver_set_best(qd_saver *s, int64_t step)
{
    s->best = step;
}

int64_t qd_saver_snapshot(const qd_saver *s)
{
    return s->snapshot ? s->pieces.elements * (int64_t)sizeof *s->snapshot : 0;
}

bool qd_saver_copies(const qd_saver *s)
{
    return s->snapshot != NULL;
}
