/* Collects the times of communication from a timeline of the communication stream. */
#include "train/exec/stream_times.h"

#include "comm/device.h"

#include <stdlib.h>

/* Ids of pieces: actions first; from first_id on, the ops of actions. */
typedef struct entry {
    int id;
    double begin, end, waited; /* waited: when the compute stream began to wait for it */
} entry;

struct qd_watch {
    qd_bound *bound;
    qd_exchanger *exchanger;
    qd_timeline *compute, *comm;
    int first_id, most; /* most: length of the longest op list */
    entry *entries;
    int count, capacity, cursor;
    bool out_of_memory;
};

static bool watch_groups(const qd_watch *w, qd_timeline *timeline, int id)
{
    bool any = false;
    for (int g = 0; g < w->bound->program->group_count; g++)
        if (w->bound->groups[g])
            any = qd_comm_watch(w->bound->groups[g], timeline, id) || any;
    return any;
}

qd_status qd_watch_create(qd_bound *bound, qd_exchanger *exchanger, qd_timeline *compute, int first_id, qd_watch **watch)
{
    *watch = NULL;
    qd_watch *w = calloc(1, sizeof *w);
    if (!w)
        return QD_FAIL(QD_NO_MEMORY, "no memory to watch the communication stream");
    *w = (qd_watch){
        .bound = bound, .exchanger = exchanger, .compute = compute, .first_id = first_id, .most = 1};
    for (int module = 0; module < bound->program->ledger->module_count; module++) {
        int ops = qd_program_class(bound->program, module)->op_count;
        w->most = ops > w->most ? ops : w->most;
    }
    qd_status status = QD_OK;
    if (watch_groups(w, NULL, 0))
        status = qd_timeline_create(qd_device_comm_stream(bound->device), &w->comm);
    if (!w->comm) {
        free(w);
        return status;
    }
    *watch = w;
    return QD_OK;
}

void qd_watch_destroy(qd_watch *w)
{
    if (!w)
        return;
    qd_timeline_destroy(w->comm);
    free(w->entries);
    free(w);
}

qd_status qd_watch_start(qd_watch *w)
{
    if (!w)
        return QD_OK;
    w->count = w->cursor = 0;
    return qd_timeline_start(w->comm, w->compute);
}

void qd_watch_action(qd_watch *w, int action)
{
    if (!w)
        return;
    watch_groups(w, w->comm, action);
    qd_exchanger_watch(w->exchanger, (qd_exchange_watch){w->compute, w->comm, w->first_id + action * w->most});
}

void qd_watch_stop(qd_watch *w)
{
    if (!w)
        return;
    watch_groups(w, NULL, 0);
    qd_exchanger_watch(w->exchanger, (qd_exchange_watch){NULL, NULL, 0});
}

/* Merges consecutive rounds of one op into one entry. */
static void take(void *context, int id, double begin, double end)
{
    qd_watch *w = context;
    if (id >= w->first_id && w->count > 0 && w->entries[w->count - 1].id == id) {
        w->entries[w->count - 1].end = end;
        return;
    }
    if (w->count == w->capacity) {
        int capacity = w->capacity ? 2 * w->capacity : 256;
        entry *grown = realloc(w->entries, (size_t)capacity * sizeof *grown);
        if (!grown) {
            w->out_of_memory = true;
            return;
        }
        w->entries = grown;
        w->capacity = capacity;
    }
    w->entries[w->count++] = (entry){id, begin, end, begin};
}

qd_status qd_watch_collect(qd_watch *w)
{
    if (!w)
        return QD_OK;
    QD_TRY(qd_timeline_collect(w->comm, take, w));
    return w->out_of_memory ? QD_FAIL(QD_NO_MEMORY, "no memory for the trace of %d operations", w->count) : QD_OK;
}

/* Waits come roughly in the order of the ops: the search begins where the last one ended. */
void qd_watch_stood(qd_watch *w, int id, double begin)
{
    for (int i = 0; w && i < w->count; i++) {
        entry *e = &w->entries[(w->cursor + i) % w->count];
        if (e->id != id)
            continue;
        e->waited = begin;
        w->cursor = (w->cursor + i) % w->count;
        return;
    }
}

void qd_watch_tell(qd_watch *w, qd_trace *trace, int64_t step)
{
    for (int i = 0; w && i < w->count; i++) {
        const entry *e = &w->entries[i];
        int op = e->id - w->first_id;
        if (op < 0)
            qd_trace_add(trace, step, e->id, e->begin, e->end);
        else
            qd_trace_add_exchange(trace, step, op / w->most, op % w->most, e->begin, e->end, e->waited);
    }
}
