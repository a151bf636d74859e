/* Forms a new world of the local ranks that are left, when ranks were lost or their number is to
 * change. Processes that are not to blame stay.
 *
 *   1. Each of them leaves its world and rests: it closes the files of the run and keeps its
 *      trainer.
 *   2. Those with the latest state write it to memory, each its part (train/elastic/handover.h). If
 *      that is not all of it, because a lost rank had a shard of its own, an earlier state or the
 *      newest checkpoint is used.
 *   3. The keeper decides: layout of the next world, or the end of the run.
 *   4. They join the next world, with new processes for ranks that are missing, and load the state.
 *
 * A rank that dies meanwhile is one more that is lost. What was written stays until the next world
 * has done a step, so that nothing depends on the ranks that are just loading it. */
#define _GNU_SOURCE
#include "train/launch/launch_crew.h"

#include "base/clock.h"
#include "train/elastic/handover.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Whether other ranks may continue with the state that they have in memory. */
static bool spares_others(qd_status status)
{
    return status == QD_OK || status == QD_SYSTEM || status == QD_REMOTE || status == QD_TIMEOUT || status == QD_IO ||
           status == QD_NO_MEMORY;
}

bool qd_crew_reforms(const crew *c)
{
    /* A signal that asks the run to stop comes second to a change without a failure: the ranks have
     * it, and stop with a checkpoint in the next world. */
    const bool may = c->stop_signal == 0 || (c->failure.status == QD_OK && c->phase == PHASE_RUNNING);
    return c->keeper && may && !c->over && (c->asked || c->failure.status != QD_OK) && spares_others(c->failure.status);
}

static void drop_state(crew *c)
{
    if (c->state >= 0)
        close(c->state);
    c->state = -1;
    c->state_step = -1;
    for (int rank = 0; rank < c->size; rank++)
        c->children[rank].writes = false;
}

static void let_go(child *k)
{
    if (k->orders >= 0)
        close(k->orders);
    k->orders = -1;
    k->leaves = true;
}

void qd_crew_release(crew *c)
{
    for (int rank = 0; rank < c->size; rank++)
        if (c->children[rank].pid > 0 && c->children[rank].rests)
            let_go(&c->children[rank]);
}

void qd_crew_end_busy(crew *c)
{
    for (int rank = 0; rank < c->size; rank++)
        if (c->children[rank].pid > 0 && !c->children[rank].rests)
            kill(c->children[rank].pid, SIGKILL);
    c->next = qd_clock_now() + 1.0;
}

void qd_crew_take_report(crew *c, const qd_report *report)
{
    child *k = report->rank >= 0 && report->rank < c->size ? &c->children[report->rank] : NULL;
    if (report->kind == QD_REPORT_STEP && report->step.step > c->state_step && c->state_step >= 0) {
        drop_state(c);
    } else if (k && report->kind == QD_REPORT_RESTS) {
        k->rests = true;
        k->has = report->rests;
    } else if (k && report->kind == QD_REPORT_WRITTEN) {
        k->written = true;
        k->complete = report->complete;
    }
}

void qd_crew_look(crew *c)
{
    const qd_order order = {.kind = QD_ORDER_REST};
    if (c->phase != PHASE_RUNNING || c->asked || c->stop_signal != 0 || c->over || c->failure.status != QD_OK || c->patience.steps == 0)
        return;
    int wanted = c->keeper->wanted(c->keeper->context, c->size);
    if (wanted < 0)
        kill(getpid(), SIGUSR1); /* as if a scheduler had: the ranks write a checkpoint and end */
    if (wanted > 0 && wanted != c->size)
        c->asked = qd_order_send(c->children[0].orders, &order, NULL, 0);
}

static bool all_rest(const crew *c)
{
    int left = 0;
    for (int rank = 0; rank < c->size; rank++) {
        if (c->children[rank].pid > 0 && !c->children[rank].rests)
            return false;
        left += c->children[rank].pid > 0;
    }
    return left > 0;
}

/* The latest state that ranks have and that is not known to be incomplete; -1: none. */
static int64_t latest(const crew *c)
{
    int64_t step = -1;
    for (int rank = 0; rank < c->size; rank++) {
        const child *k = &c->children[rank];
        if (k->pid > 0 && k->has < c->below && k->has > step)
            step = k->has;
    }
    return step;
}

static void order_state(crew *c, int64_t step)
{
    qd_order order = {.kind = QD_ORDER_WRITE};
    drop_state(c);
    if (c->size > 64 || qd_handover_create(&c->state) != QD_OK) {
        qd_error_clear();
        c->below = 0; /* from the checkpoint */
        return;
    }
    for (int rank = 0; rank < c->size; rank++) {
        child *k = &c->children[rank];
        k->writes = k->pid > 0 && k->has == step;
        k->written = k->complete = false;
        order.left |= k->writes ? (uint64_t)1 << rank : 0;
    }
    c->ordered_at = qd_clock_now();
    for (int rank = 0; rank < c->size; rank++)
        if (c->children[rank].writes)
            qd_order_send(c->children[rank].orders, &order, &c->state, 1);
}

typedef enum progress { NOTHING, BUSY, FAILED, COMPLETE } progress;

/* How far the ranks are that were ordered to write. One that has died takes a part of the state
 * with it; what is left is asked for again. */
static progress look_at_writers(crew *c)
{
    bool any = false, busy = false, complete = true;
    int64_t step = -1;
    for (int rank = 0; rank < c->size; rank++) {
        const child *k = &c->children[rank];
        if (!k->writes)
            continue;
        any = true;
        step = k->has;
        busy = busy || (k->pid > 0 && !k->written);
        if (k->pid == 0) {
            drop_state(c);
            c->below = INT64_MAX;
            return FAILED;
        }
        complete = complete && k->complete;
    }
    if (!any || busy)
        return any ? BUSY : NOTHING;
    if (complete) {
        c->state_step = step;
        for (int rank = 0; rank < c->size; rank++)
            c->children[rank].writes = false;
        return COMPLETE;
    }
    drop_state(c);
    c->below = step;
    return FAILED;
}

/* Memory is fast: a rank that has not written its part by now does not run. */
static void end_late_writers(const crew *c)
{
    for (int rank = 0; rank < c->size && qd_clock_now() > c->ordered_at + 10.0 * c->run->config.deadline; rank++)
        if (c->children[rank].writes && !c->children[rank].written && c->children[rank].pid > 0)
            kill(c->children[rank].pid, SIGKILL);
}

/* The ranks that rest become the first of the next world; those that are too many leave. */
static void move_children(crew *c, int size)
{
    child *next = calloc(QD_CREW_MOST, sizeof *next);
    int ranks = 0, count = size;
    for (int i = 0; next && i < QD_CREW_MOST; i++)
        next[i].orders = -1;
    for (int i = 0; next && i < c->count; i++) {
        child *k = &c->children[i];
        if (k->pid <= 0)
            continue;
        if (!k->leaves && ranks < size) {
            next[ranks++] = (child){.pid = k->pid, .orders = k->orders, .has = -1};
            continue;
        }
        let_go(k);
        if (count < QD_CREW_MOST) {
            next[count++] = *k;
        } else { /* it has had the time of several worlds */
            kill(k->pid, SIGKILL);
            waitpid(k->pid, NULL, 0);
            c->alive--;
        }
    }
    if (!next)
        return;
    free(c->children);
    c->children = next;
    c->size = size;
    c->count = count;
}

static qd_status form(crew *c)
{
    const int size = c->run->config.world;
    int fds[QD_ORDER_FDS];
    qd_local_world *next = NULL;
    QD_TRY(qd_crew_world(c, size, &next));
    qd_local_world_destroy(c->world);
    c->world = next;
    c->excused = false;
    if (c->config >= 0)
        close(c->config);
    c->config = -1;
    QD_TRY(qd_launch_config_write(c->run->options, &c->config));
    move_children(c, size);
    if (c->size != size)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", size);
    c->failure = (qd_failure){0};
    c->phase = PHASE_RUNNING;
    c->asked = false;
    c->patience = (qd_patience){0};
    c->standing = 0.0;
    c->below = INT64_MAX;
    fds[0] = qd_local_world_fd(c->world);
    fds[1] = c->config;
    fds[2] = c->state;
    for (int rank = 0; rank < size; rank++)
        if (c->children[rank].pid > 0) /* one that has died is noticed when it is reaped */
            qd_order_send(c->children[rank].orders, &(qd_order){.kind = QD_ORDER_JOIN, .rank = rank}, fds, c->state >= 0 ? 3 : 2);
    return qd_crew_start(c);
}

static void decide(crew *c, bool in_memory)
{
    int left = 0;
    qd_status result = QD_OK;
    for (int rank = 0; rank < c->size; rank++)
        left += c->children[rank].pid > 0;
    if (!in_memory)
        drop_state(c);
    const qd_status failure = qd_failure_raise(&c->failure);
    if (c->keeper->again(c->keeper->context, failure, in_memory, left, &result)) {
        result = form(c);
        if (result == QD_OK)
            return;
        for (int rank = 0; rank < c->count; rank++)
            if (c->children[rank].pid > 0)
                kill(c->children[rank].pid, SIGKILL);
    }
    c->over = true;
    c->failure = (qd_failure){0};
    qd_failure_add_own(&c->failure, result);
    qd_crew_release(c);
}

void qd_crew_advance(crew *c)
{
    if (!qd_crew_reforms(c)) {
        if (c->stop_signal != 0 || c->failure.status != QD_OK)
            qd_crew_release(c);
        return;
    }
    while (qd_crew_reforms(c) && all_rest(c)) {
        const int64_t step = latest(c);
        const progress writers = look_at_writers(c);
        if (writers == BUSY) {
            end_late_writers(c);
            return;
        }
        if (writers == COMPLETE || (writers == NOTHING && c->state_step >= 0 && step <= c->state_step))
            decide(c, true);
        else if (writers == NOTHING && step < 0)
            decide(c, false);
        else if (writers == NOTHING)
            order_state(c, step);
    }
}
