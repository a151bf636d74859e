/* What a rank does between two worlds. See launch_rejoin.h.
 *
 *   1. It has left its world, whose connections stay open until the next one exists, and waits
 *      for the others up to run.join_deadline.
 *   2. All tell all what they know of the failure and which state they have, and judge it. If a
 *      layout uses only some of them (launch_rejoin_size.c), these meet once more without the
 *      others.
 *   3. Those with the latest state write it to memory, each its part. If that is not all of it, an
 *      earlier state or the newest checkpoint is used.
 *   4. The trainers of the last world are freed, those of the next one created, and the parts are
 *      broadcast from rank to rank (train/elastic/handover.h).
 *
 * The parts stay until the next world has done a step, so that the loss of a rank that has written
 * none costs none meanwhile. The loss of one that has costs the state. */
#define _GNU_SOURCE
#include "train/launch/launch_rejoin_impl.h"

#include "base/clock.h"
#include "comm/guard.h"
#include "train/launch/launch.h"
#include "train/ranks/common.h"
#include "train/elastic/handover.h"
#include "train/ranks/long_work.h"
#include "train/run/run_state.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAUSE_SECONDS 0.2 /* before the ranks meet once more */
#define SOON_SECONDS 10.0 /* ranks of which none was lost meet within this time */

static void drop_part(qd_rejoin *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
    r->part = -1;
}

/* After the first step in a world, its ranks have what they need. */
static void drop_state(void *context)
{
    qd_rejoin *r = context;
    qd_handover_close(r->run->handover);
    r->run->handover = NULL;
    drop_part(r);
}

/* The journal is written once the ranks have agreed that the run may use its folder. */
static void begin_journal(qd_rejoin *r, const qd_train_observer *observer)
{
    qd_journal_begin(&r->journal, r->run, observer);
    r->journal.held = true;
}

qd_status qd_rejoin_create(qd_run *run, int rank, int ranks, const qd_train_observer *observer, qd_rejoin **rejoin)
{
    qd_rejoin *r = *rejoin = calloc(1, sizeof *r);
    if (!r)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a rank");
    *r = (qd_rejoin){.run = run, .given = run->options, .started = run->options, .rank = rank, .places = ranks, .step = -1, .fd = -1,
                     .part = -1, .begin = qd_clock_now()};
    begin_journal(r, rank == 0 ? observer : NULL);
    run->on_first_step = drop_state;
    run->first_step_context = r;
    r->cored = qd_thread_cores(&r->cores) == QD_OK;
    qd_rejoin_begin_size(r);
    return rank == 0 ? qd_door_create(ranks, &r->door) : QD_OK;
}

/* Frees what the rank has kept of the world that it has left, the trainer above all. */
static void let_go(qd_rejoin *r)
{
    qd_kept_destroy(r->kept);
    qd_comm_destroy(r->left);
    r->kept = NULL;
    r->left = NULL;
}

void qd_rejoin_forget(qd_rejoin *r)
{
    let_go(r);
    drop_part(r);
    qd_options_destroy(r->adopted);
    r->adopted = NULL;
    r->run->options = r->given = r->started;
    r->run->config.resume = r->run->state_in_memory = r->run->ranks_stay = false;
    qd_rejoin_begin_size(r);
    qd_journal_end(&r->journal);
    begin_journal(r, NULL); /* rank 0 forgets nothing */
    r->failure = (qd_failure){0};
    r->knows = r->stayed = r->judged = false;
    r->waits = true;
    r->step = -1;
    r->before = 0;
    r->begin = qd_clock_now();
}

void qd_rejoin_destroy(qd_rejoin *r, qd_status status)
{
    if (!r)
        return;
    if (r->door) /* of a failure, the ranks of the last world have a message */
        qd_door_say_end(r->door, status == QD_OK || qd_ended_in_order(status) ? status : QD_REMOTE);
    if (r->journal.text.length > 0) /* the ranks may have cleared the folder */
        qd_journal_write(&r->journal);
    let_go(r);
    drop_part(r);
    r->run->options = r->started;
    qd_options_destroy(r->options);
    qd_options_destroy(r->sized);
    qd_options_destroy(r->adopted);
    qd_elastic_end(&r->elastic);
    qd_journal_end(&r->journal);
    qd_door_destroy(r->door);
    free(r);
}

qd_journal *qd_rejoin_journal(qd_rejoin *r)
{
    return &r->journal;
}

void qd_rejoin_begun(qd_rejoin *r)
{
    r->journal.past.begun = 1;
    qd_rejoin_forget_size(r);
    if (r->journal.held && r->journal.text.length > 0) { /* lines of before */
        r->journal.held = false;
        qd_journal_write(&r->journal);
    }
    r->journal.held = false;
}

bool qd_rejoin_stayed(const qd_rejoin *r)
{
    return r->stayed;
}

static double deadline(const qd_rejoin *r)
{
    return qd_options_float(r->given, "run.join_deadline");
}

/* Whether a signal ends the wait for the others. Where none was lost they are about to be there,
 * and stop with a checkpoint in the next world. */
static bool ends_wait(void *context)
{
    const qd_rejoin *r = context;
    const bool all_there = r->left && r->failure.status == QD_OK && qd_clock_now() < r->begin + SOON_SECONDS;
    return atomic_load(r->run->stop) != 0 && !all_there;
}

void qd_rejoin_how(qd_rejoin *r, qd_comm_join *how)
{
    const double left = ceil(10.0 * (r->begin + deadline(r) - qd_clock_now())) / 10.0, least = deadline(r) < 1.0 ? deadline(r) : 1.0;
    r->knew = r->knows;
    r->run->options = r->given;
    how->least = r->elastic.least < r->places ? r->elastic.least : r->places;
    how->patience = qd_options_float(r->given, "run.rejoin_wait");
    how->seconds = left > least ? left : least;
    how->stays = r->stayed;
    how->stops = ends_wait;
    how->context = r;
    how->door = r->door;
}

/* That this rank knows of: rank 0 has the report of each. */
static int64_t last_step(const qd_rejoin *r)
{
    return r->step > r->journal.past.step ? r->step : r->journal.past.step;
}

/* A signal while ranks are missing: the state in memory is not that of all ranks. */
static qd_status end_by_signal(const qd_rejoin *r, int asked)
{
    const qd_status status = asked == SIGINT ? QD_INTERRUPTED : QD_STOPPED;
    return QD_FAIL(status, "stopped while ranks were missing, after step %lld: what follows the newest checkpoint is lost; resume with "
                           "--dir %s --resume", (long long)last_step(r), r->run->config.run_dir);
}

/* The others have not come back. */
static qd_status end_alone(qd_rejoin *r, qd_status status)
{
    char why[QD_ERROR_MESSAGE_BYTES];
    snprintf(why, sizeof why, "%s", qd_error_message());
    r->journal.past.step = last_step(r);
    const qd_status failure = qd_failure_raise(&r->failure), judged = qd_journal_judge(&r->journal, failure, NULL, NULL);
    if (judged != QD_OK)
        return judged;
    r->journal.past.attempt--;
    return qd_journal_give_up(&r->journal, status, why);
}

bool qd_rejoin_tries(qd_rejoin *r, qd_status *status)
{
    const int asked = atomic_load(r->run->stop);
    /* Another rank that was asked to stop, too, may have ended first, which fails the join. */
    const bool stops = *status == QD_STOPPED || *status == QD_INTERRUPTED || *status == QD_SYSTEM || *status == QD_REMOTE;
    if (asked != 0 && r->stayed && stops) {
        *status = end_by_signal(r, asked);
        return false;
    }
    if (*status == QD_SYSTEM && asked == 0 && qd_clock_now() < r->begin + deadline(r)) { /* another rank is lost, or has just ended */
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * PAUSE_SECONDS)}, NULL);
        qd_error_clear();
        return true;
    }
    if (r->stayed && last_step(r) >= r->run->config.steps && qd_run_is_complete(&r->run->config)) {
        qd_error_clear();
        *status = QD_OK;
    } else if (r->stayed && (*status == QD_TIMEOUT || *status == QD_SYSTEM)) {
        *status = end_alone(r, *status);
    }
    return false;
}

/* Goes to meet the others. */
static void leave(qd_rejoin *r, qd_comm *world, qd_kept *kept)
{
    r->left = world;
    r->kept = kept;
    r->before = qd_comm_size(world);
    r->begin = r->journal.failed_at = qd_clock_now();
    r->stayed = true;
}

static void unbind(const qd_rejoin *r)
{
    if (r->cored)
        (void)qd_thread_bind(&r->cores);
}

void qd_rejoin_pauses(qd_rejoin *r, qd_comm *world, qd_kept *kept)
{
    qd_comm_forsake(world);
    r->step = qd_kept_last(kept);
    leave(r, world, kept);
    unbind(r);
}

bool qd_rejoin_rests(qd_rejoin *r, qd_comm *world, qd_kept *kept, qd_status *status)
{
    char text[QD_ERROR_MESSAGE_BYTES + 128];
    if (!r->knows && !qd_journal_cause(*status)) { /* a new process that cannot join: the others wait for another one */
        qd_kept_destroy(kept);
        qd_comm_destroy(world);
        return false;
    }
    if (!r->left)
        r->step = kept ? qd_kept_last(kept) : -1; /* also of a state that is spoilt: there may be checkpoints */
    if (last_step(r) >= r->run->config.steps && qd_run_is_complete(&r->run->config)) { /* a rank was lost while it ended */
        qd_kept_destroy(kept);
        qd_comm_destroy(world);
        qd_error_clear();
        *status = QD_OK;
        return false;
    }
    const char *words = qd_comm_failure(world);
    /* Without what this rank did meanwhile. */
    if (words[0] != '\0' && (*status == QD_REMOTE || *status == QD_TIMEOUT || *status == QD_SYSTEM))
        (void)QD_FAIL(*status, "%s", words);
    qd_failure_add_own(&r->failure, *status);
    qd_comm_forsake(world);
    if (r->left) { /* they have met, but not begun: what they had before still holds */
        qd_kept_destroy(kept);
        qd_comm_destroy(world);
    } else {
        leave(r, world, kept);
    }
    unbind(r);
    if (qd_journal_cause(*status)) {
        snprintf(text, sizeof text, "%s: waiting up to %g s until all ranks are back", qd_error_message(),
                 r->elastic.most > 0 ? fmin(deadline(r), qd_options_float(r->given, "run.rejoin_wait")) : deadline(r));
        qd_journal_note(&r->journal, text);
    }
    qd_error_clear();
    r->stayed = true;
    return true;
}

bool qd_rejoin_parts(qd_rejoin *r, qd_comm *world, qd_status *status, bool *again)
{
    const bool mine = qd_error_message()[0] != '\0'; /* qd_agree() */
    const int size = qd_comm_size(world);
    /* Whether ranks stay, whether one of them has failed, and the first that has. */
    int32_t known[3] = {r->knew, r->final || (r->knew && mine), mine ? size - qd_comm_rank(world) : 0};
    qd_error_record record;
    char text[160];
    if (qd_ended_in_order(*status))
        return false;
    qd_error_keep(&record);
    const bool good = qd_comm_all_reduce(world, known, known, 3, QD_I32, QD_MAX, NULL) == QD_OK;
    qd_error_put_back(&record);
    if (!good || !known[0] || known[1])
        return false;
    *again = !mine;
    if (mine)
        return true;
    qd_error_clear();
    snprintf(text, sizeof text, "the new process of rank %d cannot take part, and reports why: waiting for another one", size - known[2]);
    qd_journal_note(&r->journal, text);
    *status = QD_OK;
    return true;
}

/* What is of this machine stays as it is given here. */
static qd_status adopt(qd_rejoin *r, const qd_strbuf *own, const char *theirs, size_t length)
{
    QD_TRY(qd_launch_config_parse(theirs, length, &r->adopted));
    for (size_t at = 0; at < own->length; at += strlen(own->data + at) + 1)
        if (qd_common_may_differ(own->data + at))
            QD_TRY(qd_options_assign(r->adopted, own->data + at));
    r->run->options = r->given = r->adopted;
    qd_rejoin_begin_size(r);
    return QD_OK;
}

qd_status qd_rejoin_settle(qd_rejoin *r, qd_comm *world, int *first)
{
    const int size = qd_comm_size(world), rank = qd_comm_rank(world);
    int64_t known[2] = {r->knows ? size - rank : 0, r->waits}, length = 0;
    qd_strbuf own = {0};
    char *theirs = NULL;
    QD_TRY(qd_comm_all_reduce(world, known, known, 2, QD_I64, QD_MAX, NULL));
    const int root = (size - (int)known[0]) % size; /* the first that stays; rank 0, which never waits, if none does */
    *first = root;
    r->fresh = known[0] == 0;
    if (r->fresh && !known[1])
        return QD_OK;
    const bool resumes = !r->fresh && qd_options_bool(r->given, "run.resume"), adopts = !r->knows && !r->adopted && (r->waits || resumes);
    qd_launch_config_put(r->given, &own);
    length = (int64_t)own.length;
    qd_status status = qd_comm_broadcast(world, &length, 1, QD_I64, root, NULL);
    theirs = status == QD_OK ? calloc(1, (size_t)length + 1) : NULL;
    if (status == QD_OK && (!theirs || own.failed))
        status = QD_FAIL(QD_NO_MEMORY, "no memory to compare configurations");
    if (status == QD_OK && rank == root && length > 0)
        memcpy(theirs, own.data, (size_t)length);
    if (status == QD_OK)
        status = qd_comm_broadcast(world, theirs, length, QD_U8, root, NULL);
    if (status == QD_OK && adopts)
        status = adopt(r, &own, theirs, (size_t)length);
    free(theirs);
    qd_strbuf_free(&own);
    return status;
}

static void tell(const qd_rejoin *r, offer *own)
{
    *own = (offer){.attempt = r->knows ? r->journal.past.attempt : 0, .step = r->step, .has = r->kept ? qd_kept_step(r->kept) : -1,
                   .part = r->fd >= 0 ? r->part : -1, .writers = r->writers, .rank = r->left ? qd_comm_rank(r->left) : -1,
                   .ranks = r->before, .place = r->rank, .since = qd_clock_now() - r->journal.failed_at,
                   .status = r->failure.status};
    memcpy(own->message, r->failure.message, sizeof own->message);
    if (r->run->config.from_checkpoint || own->rank >= MOST_LEFT)
        own->has = own->part = -1;
}

/* Collective. What all ranks know of the failure, as if each had seen it: in r->journal and
 * *failure. Returns how many stay. */
static qd_status learn(qd_rejoin *r, qd_comm *world, offer *offers, int *staying, qd_status *failure)
{
    const int size = qd_comm_size(world), rank = qd_comm_rank(world);
    qd_failure cause = {0};
    double since = 0.0;
    int64_t step = -1;
    int first = -1;
    *staying = 0;
    QD_TRY(qd_comm_all_gather(world, &offers[rank], offers, size * (int64_t)sizeof *offers, QD_U8, NULL));
    for (int p = 0; p < size; p++)
        if (offers[p].attempt > (first < 0 ? 0 : offers[first].attempt))
            first = p;
    if (first < 0)
        return QD_OK;
    if (offers[rank].attempt < offers[first].attempt) { /* a new process, or one that has slept for a whole world */
        let_go(r);
        drop_part(r);
    }
    QD_TRY(qd_comm_broadcast(world, &r->journal.past, sizeof r->journal.past, QD_U8, first, NULL));
    for (int p = 0; p < size; p++) {
        offer *o = &offers[p];
        if (o->attempt < offers[first].attempt) {
            *o = (offer){.step = -1, .has = -1, .part = -1, .rank = -1, .place = o->place};
            continue;
        }
        ++*staying;
        o->message[sizeof o->message - 1] = '\0';
        qd_failure_add(&cause, (qd_status)o->status, o->message, "");
        if (first > 0) /* rank 0, which knows, is new */
            step = o->step > step ? o->step : step;
        since = o->since > since ? o->since : since;
        r->before = o->ranks > r->before ? (int)o->ranks : r->before;
    }
    if (step >= 0)
        r->journal.past.step = step;
    if (r->journal.held && r->journal.past.begun) { /* this process is new, and the journal is not */
        r->journal.held = false;
        qd_journal_load(&r->journal);
    }
    r->knows = true;
    r->journal.failed_at = qd_clock_now() - since;
    *failure = qd_failure_raise(&cause);
    return QD_OK;
}

typedef struct writing {
    qd_rejoin *r;
    uint64_t left;
    int fd;
    bool complete;
} writing;

static qd_status write_part(void *context)
{
    writing *w = context;
    if (w->fd >= 0 && qd_kept_write(w->r->kept, w->fd, w->left, &w->complete) != QD_OK)
        w->complete = false;
    return QD_OK;
}

/* Collective: the ranks that have the state after `step` write it, each its part. */
static qd_status write_state(qd_rejoin *r, qd_comm *world, const offer *offers, int64_t step, bool *complete)
{
    writing w = {.r = r, .fd = -1, .complete = true};
    const bool mine = offers[qd_comm_rank(world)].has == step;
    int writers = 0;
    for (int p = 0; p < qd_comm_size(world); p++)
        if (offers[p].has == step) {
            w.left |= (uint64_t)1 << offers[p].rank;
            writers++;
        }
    if (mine && qd_handover_create(&w.fd) != QD_OK)
        w.complete = false;
    qd_status status = qd_long_work_run_all(world, write_part, &w);
    int32_t lacks = !w.complete;
    if (status == QD_OK)
        status = qd_comm_all_reduce(world, &lacks, &lacks, 1, QD_I32, QD_MAX, NULL);
    if (status == QD_OK)
        qd_error_clear();
    *complete = status == QD_OK && lacks == 0;
    if (*complete) {
        drop_part(r);
        r->fd = w.fd;
        r->part = step;
        r->writers = writers;
    } else if (w.fd >= 0) {
        close(w.fd);
    }
    return status;
}

int64_t qd_rejoin_latest(const offer *offers, int size, int64_t below, bool *written)
{
    int64_t step = -1;
    *written = false;
    for (int p = 0; p < size; p++)
        if (offers[p].has < below && offers[p].has > step)
            step = offers[p].has;
    for (int p = 0; p < size; p++) {
        int64_t writers = 0;
        for (int k = 0; k < size; k++)
            writers += offers[k].part == offers[p].part;
        if (offers[p].part >= 0 && offers[p].part < below && offers[p].part >= step && writers == offers[p].writers) {
            step = offers[p].part;
            *written = true;
        }
    }
    return step;
}

/* Collective. The state of the ranks that stay, if it is complete; frees what they had. */
static qd_status take_state(qd_rejoin *r, qd_comm *world, const offer *offers, bool *in_memory)
{
    const int size = qd_comm_size(world);
    int64_t step = -1;
    *in_memory = false;
    for (int64_t below = INT64_MAX; !*in_memory; below = step) {
        step = qd_rejoin_latest(offers, size, below, in_memory);
        if (step < 0 || *in_memory)
            break;
        QD_TRY(write_state(r, world, offers, step, in_memory));
    }
    if (!*in_memory || r->part != step)
        drop_part(r);
    let_go(r);
    return *in_memory ? qd_handover_gather(r->fd, world, &r->run->handover) : QD_OK;
}

/* The run resumes or, where nothing was saved yet, starts again; a folder that it may not use yet
 * is used as the user says. */
static qd_status set_options(qd_rejoin *r, bool resumes)
{
    qd_options *next = NULL;
    qd_status status = QD_OK;
    QD_TRY(qd_options_copy(r->sized ? r->sized : r->given, &next));
    if (r->journal.past.begun)
        status = qd_options_set(next, "run.resume", resumes ? "true" : "false");
    if (status == QD_OK && r->journal.past.begun)
        status = qd_options_set(next, "run.overwrite", resumes ? "false" : "true");
    if (status != QD_OK) {
        qd_options_destroy(next);
        return status;
    }
    qd_options_destroy(r->options);
    r->run->options = r->options = next;
    return QD_OK;
}

/* Collective. Rank 0 looks into the run folder, for all. */
static qd_status look(const qd_rejoin *r, qd_comm *world, bool *holds, bool *complete)
{
    const qd_past *past = &r->journal.past;
    qd_run_file checkpoints;
    int32_t found[2] = {0};
    if (qd_comm_rank(world) == 0 && qd_run_path(&r->run->config, "checkpoints", checkpoints) == QD_OK) {
        /* If rank 0 was lost and the others have no trainer any more, only the folder knows of
         * steps. */
        bool stepped = past->step >= 0 || (past->begun && qd_launch_last_step(&r->run->config) >= 0);
        found[0] = (past->resumed || stepped) && qd_store_holds(checkpoints);
        found[1] = past->step >= r->run->config.steps && qd_run_is_complete(&r->run->config);
    }
    qd_error_clear();
    QD_TRY(qd_comm_broadcast(world, found, 2, QD_I32, 0, NULL));
    *holds = found[0] != 0;
    *complete = found[1] != 0;
    return QD_OK;
}

/* Collective. The run continues after `failure`. */
static qd_status go_on(qd_rejoin *r, qd_comm *world, const offer *offers, int staying, qd_status failure, bool *agreed, bool *complete,
                       bool *narrows)
{
    bool holds, in_memory;
    qd_status status = failure != QD_OK ? qd_journal_judge(&r->journal, failure, NULL, NULL) : QD_OK;
    r->final = *agreed = status != QD_OK;
    if (*agreed && r->rank != 0)
        qd_error_clear(); /* rank 0 reports it */
    QD_TRY(status);
    qd_error_clear();
    if (failure != QD_OK || !r->judged)
        r->staying = staying;
    r->judged = r->judged || failure != QD_OK;
    r->failure = (qd_failure){0};
    QD_TRY(look(r, world, &holds, complete));
    if (!*complete)
        QD_TRY(qd_rejoin_narrow(r, world, offers, narrows));
    if (*complete || *narrows)
        return QD_OK;
    QD_TRY(take_state(r, world, offers, &in_memory));
    QD_TRY(set_options(r, in_memory || holds));
    QD_TRY(qd_config_resolve(r->run->options, qd_comm_size(world), &r->run->config));
    r->run->state_in_memory = in_memory;
    r->run->ranks_stay = true;
    if (r->judged)
        qd_journal_restart(&r->journal, in_memory, r->staying < r->run->config.world ? r->staying : r->run->config.world);
    r->judged = false;
    qd_rejoin_note_size(r, offers, in_memory);
    return QD_OK;
}

qd_status qd_rejoin_agree(qd_rejoin *r, qd_comm *world, bool *agreed, bool *complete, bool *narrows)
{
    const int size = qd_comm_size(world);
    int staying = 0;
    qd_status failure = QD_OK;
    *complete = *narrows = false;
    QD_TRY(qd_rejoin_fit(r, world, agreed));
    offer *offers = calloc((size_t)size, sizeof *offers);
    if (!offers)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", size);
    tell(r, &offers[qd_comm_rank(world)]);
    qd_status status = learn(r, world, offers, &staying, &failure);
    if (status == QD_OK && staying > 0) {
        status = go_on(r, world, offers, staying, failure, agreed, complete, narrows);
    } else if (status == QD_OK) {
        status = qd_rejoin_narrow(r, world, offers, narrows);
        r->knows = status == QD_OK && !*narrows;
    }
    if (status == QD_OK && staying == 0 && r->knows) {
        r->journal.past.resumed = r->run->config.resume;
        if (r->run->config.resume)
            qd_journal_load(&r->journal);
    }
    free(offers);
    return status;
}
