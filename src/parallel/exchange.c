/* Executes communicating ops: maps each op to a collective, keeps asynchronous ones in flight, and
 * copies tables of counts between device and host. */
#include "parallel/exchange.h"

#include "base/clock.h"
#include "comm/device.h"
#include "parallel/context.h"
#include "parallel/dispatch.h"

#include <stdlib.h>

/* The rows of each rank in a gather or scatter by rows; created on first use, then cached. */
typedef struct row_lists {
    struct row_lists *next;
    const qd_op *op;
    qd_segment_list *ranks;
    qd_segment *segments;
} row_lists;

/* The host copy of a table of counts on the device at `table`, either gathered there or composed by
 * the host. Tables live as long as the activations of their micro-batch, so the backward pass finds
 * the copy that the forward pass made. */
typedef struct counts_copy {
    struct counts_copy *next;
    const void *table;
    int64_t bytes, composed; /* size of host; size of what tell copies */
    int32_t *host;    /* page-locked */
    qd_event *copied; /* copy to the host, or from it */
    bool under_way, told;
} counts_copy;

struct qd_exchanger {
    qd_exchange view;
    qd_bound *bound;
    qd_work **work; /* per op of a list, two each: in flight */
    int work_count;
    row_lists *lists;
    counts_copy *counts;
    qd_exchange_observer observer;
    void *observer_context;
    qd_exchange_watch watch;
    qd_dispatcher dispatcher;
};

/* Rows are divided evenly; the op moves one piece of each rank's rows. */
static qd_status find_lists(qd_exchanger *e, const qd_op *op, const row_lists **found)
{
    for (const row_lists *l = e->lists; l; l = l->next) {
        if (l->op == op) {
            *found = l;
            return QD_OK;
        }
    }
    int size = op->exchange.group.size;
    bool positions = op->kind == QD_OP_CONTEXT_GATHER || op->kind == QD_OP_CONTEXT_SCATTER;
    int64_t each = positions ? QD_CONTEXT_SEGMENTS(e->bound->program) : 1;
    row_lists *l = calloc(1, sizeof *l);
    if (!l)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rows of %d ranks", size);
    *l = (row_lists){.next = e->lists, .op = op, .ranks = calloc((size_t)size, sizeof *l->ranks),
                     .segments = calloc((size_t)(size * each), sizeof *l->segments)};
    e->lists = l;
    if (!l->ranks || !l->segments) {
        l->op = NULL;
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rows of %d ranks", size);
    }
    for (int r = 0; r < size; r++) {
        int64_t first, rows, piece, count;
        if (positions) {
            l->ranks[r] = qd_context_segments(e->bound->program, r, op->n, &l->segments[r * each]);
            continue;
        }
        qd_slice(op->m, size, r, &first, &rows);
        qd_slice(rows, op->exchange.pieces, op->exchange.piece, &piece, &count);
        l->segments[r] = (qd_segment){(first + piece) * op->n, count * op->n};
        l->ranks[r] = (qd_segment_list){&l->segments[r], count > 0 ? 1 : 0};
    }
    *found = l;
    return QD_OK;
}

/* Address of this rank's piece within its own rows. */
static char *own_piece(const qd_exchanger *e, const qd_op *op, void *own)
{
    int64_t first, rows, piece, count;
    int rank = qd_comm_rank(e->bound->groups[op->exchange.index]);
    qd_slice(op->m, op->exchange.group.size, rank, &first, &rows);
    qd_slice(rows, op->exchange.pieces, op->exchange.piece, &piece, &count);
    return (char *)own + piece * op->n * (int64_t)qd_dtype_size(op->exchange.dtype);
}

static counts_copy *find_counts(const qd_exchanger *e, const void *table)
{
    counts_copy *c = e->counts;
    while (c && c->table != table)
        c = c->next;
    return c;
}

/* The copy for `table`, with space for `bytes`. */
static qd_status make_counts(qd_exchanger *e, const void *table, int64_t bytes, counts_copy **made)
{
    qd_device *device = e->bound->device;
    counts_copy *c = find_counts(e, table);
    if (!c) {
        c = calloc(1, sizeof *c);
        if (!c)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the counts of experts");
        c->next = e->counts;
        e->counts = c;
        QD_TRY(qd_event_create(device, &c->copied));
    }
    if (c->bytes < bytes) {
        void *host;
        if (c->under_way || c->told) /* a copy that may still access the old memory */
            QD_TRY(qd_event_wait(c->copied));
        qd_host_free(device, c->host);
        c->host = NULL;
        c->bytes = 0;
        QD_TRY(qd_host_alloc(device, bytes, &host));
        c->host = host;
        c->bytes = bytes;
    }
    c->table = table;
    *made = c;
    return QD_OK;
}

/* Counts were written to `table`: starts the copy that the host will ask for. */
static qd_status copy_counts(qd_exchanger *e, const void *table, int64_t bytes)
{
    qd_device *device = e->bound->device;
    counts_copy *c;
    if (qd_device_get_caps(device)->host_memory)
        return QD_OK;
    QD_TRY(make_counts(e, table, bytes, &c));
    c->under_way = true;
    c->told = false;
    QD_TRY(qd_copy(qd_device_compute_stream(device), c->host, table, bytes));
    return qd_event_record(c->copied, qd_device_compute_stream(device));
}

static qd_status host_counts(void *context, const int32_t *table, const int32_t **host)
{
    qd_exchanger *e = context;
    *host = table;
    if (qd_device_get_caps(e->bound->device)->host_memory)
        return QD_OK;
    counts_copy *c = find_counts(e, table);
    if (!c)
        return QD_FAIL(QD_SYSTEM, "step program: rows are sent to experts before the counts are gathered");
    if (c->under_way)
        QD_TRY(qd_event_wait(c->copied));
    c->under_way = false;
    *host = c->host;
    return QD_OK;
}

static qd_status compose(void *context, int32_t *table, int64_t count, int32_t **host)
{
    qd_exchanger *e = context;
    *host = table;
    if (qd_device_get_caps(e->bound->device)->host_memory)
        return QD_OK;
    counts_copy *c = find_counts(e, table);
    if (c && (c->under_way || c->told)) /* a copy may still be in flight */
        QD_TRY(qd_event_wait(c->copied));
    int64_t bytes = count * (int64_t)sizeof **host;
    QD_TRY(make_counts(e, table, bytes, &c));
    c->under_way = c->told = false;
    c->composed = bytes;
    *host = c->host;
    return QD_OK;
}

static qd_status tell(void *context, int32_t *table)
{
    qd_exchanger *e = context;
    qd_device *device = e->bound->device;
    if (qd_device_get_caps(device)->host_memory)
        return QD_OK;
    counts_copy *c = find_counts(e, table);
    if (!c)
        return QD_FAIL(QD_SYSTEM, "step program: a table is copied before it is composed");
    QD_TRY(qd_copy(qd_device_compute_stream(device), table, c->host, c->composed));
    c->told = true;
    return qd_event_record(c->copied, qd_device_compute_stream(device));
}

/* Waits for the works of an op that are in flight, if any; *begin and *end: when it ran. */
static qd_status settle(qd_exchanger *e, int index, double *begin, double *end)
{
    qd_status status = QD_OK;
    for (int i = 0; i < 2; i++) {
        qd_work *work = e->work[2 * index + i];
        double from, to;
        e->work[2 * index + i] = NULL;
        if (!work)
            continue;
        qd_status ended = qd_work_wait_timed(work, &from, &to);
        *begin = i == 0 || from < *begin ? from : *begin;
        *end = i == 0 || to > *end ? to : *end;
        status = status != QD_OK ? status : ended;
    }
    return status;
}

static qd_status carry_out(qd_exchanger *e, int index, const qd_op *op, void *const *at)
{
    const qd_op_exchange *x = &op->exchange;
    if (x->index < 0 || index >= e->work_count)
        return QD_FAIL(QD_SYSTEM, "step program: an op communicates in a group that is not bound");
    qd_comm *group = e->bound->groups[x->index];
    qd_work **work = x->async ? &e->work[2 * index] : NULL;
    const row_lists *lists;
    const int32_t *counts;
    switch (op->kind) {
    case QD_OP_ALL_REDUCE: {
        char *data = (char *)at[QD_ALL_REDUCE_X] + op->first * op->n * (int64_t)qd_dtype_size(x->dtype);
        return qd_comm_all_reduce(group, data, data, x->count, x->dtype, x->reduce, work);
    }
    case QD_OP_ALL_GATHER:
        QD_TRY(find_lists(e, op, &lists));
        QD_TRY(qd_comm_all_gather_v(group, own_piece(e, op, at[QD_ALL_GATHER_X]), at[QD_ALL_GATHER_Y], lists->ranks, x->dtype, work));
        return x->dtype == QD_I32 && !x->async ? copy_counts(e, at[QD_ALL_GATHER_Y], op->m * op->n * (int64_t)sizeof *counts) : QD_OK;
    case QD_OP_REDUCE_SCATTER:
        QD_TRY(find_lists(e, op, &lists));
        return qd_comm_reduce_scatter_v(group, at[QD_REDUCE_SCATTER_X], own_piece(e, op, at[QD_REDUCE_SCATTER_Y]), lists->ranks, x->dtype,
                                        x->reduce, work);
    case QD_OP_DISPATCH:
    case QD_OP_RETURN:
        QD_TRY(host_counts(e, at[QD_DISPATCH_TABLE], &counts));
        return qd_dispatch_run(&e->dispatcher, e->bound, op, 0, op->kind == QD_OP_RETURN, counts, at[QD_DISPATCH_X],
                               at[QD_DISPATCH_Y], work);
    case QD_OP_NODE_DISPATCH:
    case QD_OP_NODE_RETURN:
        QD_TRY(host_counts(e, at[QD_NODE_DISPATCH_TABLE], &counts));
        return qd_dispatch_nodes(&e->dispatcher, e->bound, op, counts, at, work);
    case QD_OP_NODE_RESEND:
        QD_TRY(host_counts(e, at[QD_NODE_RESEND_TABLE], &counts));
        return qd_dispatch_nodes(&e->dispatcher, e->bound, op, counts, at, work);
    case QD_OP_CONTEXT_GATHER:
        QD_TRY(find_lists(e, op, &lists));
        return qd_comm_all_gather_v(group, at[QD_CONTEXT_GATHER_X], at[QD_CONTEXT_GATHER_Y], lists->ranks, x->dtype, work);
    case QD_OP_CONTEXT_SCATTER:
        QD_TRY(find_lists(e, op, &lists));
        return qd_comm_reduce_scatter_v(group, at[QD_CONTEXT_SCATTER_X], at[QD_CONTEXT_SCATTER_Y], lists->ranks, x->dtype, x->reduce,
                                        work);
    case QD_OP_CONTEXT_SHIFT:
        QD_TRY(qd_context_shift(e->bound, op, at, &e->work[2 * index]));
        return x->async ? QD_OK : settle(e, index, &(double){0}, &(double){0});
    case QD_OP_CONTEXT_SWAP: return qd_context_swap(e->bound, op, at, work);
    default: return QD_FAIL(QD_SYSTEM, "step program: %s does not communicate", qd_op_name(op->kind));
    }
}

static qd_status start(void *context, int index, const qd_op *op, const qd_slot *slots, void *const *at)
{
    qd_exchanger *e = context;
    double begin = qd_clock_now();
    int piece = 0;
    bool stands = e->watch.compute && !op->exchange.async;
    (void)slots;
    if (e->watch.comm && op->exchange.index >= 0)
        qd_comm_watch(e->bound->groups[op->exchange.index], e->watch.comm, e->watch.first_id + index);
    if (stands)
        QD_TRY(qd_timeline_begin(e->watch.compute, e->watch.first_id + index, &piece));
    QD_TRY(carry_out(e, index, op, at));
    if (stands)
        QD_TRY(qd_timeline_end(e->watch.compute, piece));
    if (e->observer && !op->exchange.async)
        e->observer(e->observer_context, index, begin, qd_clock_now(), begin);
    return QD_OK;
}

static qd_status run_round(void *context, const qd_op *op, int64_t round, bool back, const int32_t *table, const void *from, void *to)
{
    qd_exchanger *e = context;
    return qd_dispatch_run(&e->dispatcher, e->bound, op, round, back, table, from, to, NULL);
}

static qd_status finish(void *context, int index)
{
    qd_exchanger *e = context;
    double begin = 0, end = 0, waited = qd_clock_now();
    bool any = e->work[2 * index] || e->work[2 * index + 1], stands = any && e->watch.compute;
    int piece = 0;
    if (stands)
        QD_TRY(qd_timeline_begin(e->watch.compute, e->watch.first_id + index, &piece));
    QD_TRY(settle(e, index, &begin, &end));
    if (stands)
        QD_TRY(qd_timeline_end(e->watch.compute, piece));
    if (any && e->observer)
        e->observer(e->observer_context, index, begin, end, waited);
    return QD_OK;
}

qd_status qd_exchanger_create(qd_bound *bound, qd_exchanger **exchanger)
{
    const qd_program *p = bound->program;
    int most = 0;
    bool any = false;
    *exchanger = NULL;
    for (int module = 0; module < p->ledger->module_count; module++) {
        const qd_module_class *c = qd_program_class(p, module);
        most = c->op_count > most ? c->op_count : most;
        for (int i = 0; i < c->op_count && !any; i++)
            any = qd_op_communicates(&c->ops[i]);
    }
    if (!any)
        return QD_OK;
    qd_exchanger *e = calloc(1, sizeof *e);
    qd_work **work = calloc(2 * (size_t)most, sizeof *work);
    int64_t *rows = calloc((size_t)(4 * p->ledger->mesh.world), sizeof *rows);
    if (!e || !work || !rows) {
        free(e);
        free(work);
        free(rows);
        return QD_FAIL(QD_NO_MEMORY, "no memory for the exchanges of %d ops", most);
    }
    *e = (qd_exchanger){.view = {e, start, finish, run_round, host_counts, compose, tell},
                        .bound = bound,
                        .work = work,
                        .work_count = most,
                        .dispatcher = {.lists = rows}};
    *exchanger = e;
    return QD_OK;
}

void qd_exchanger_destroy(qd_exchanger *e)
{
    if (!e)
        return;
    while (e->lists) {
        row_lists *next = e->lists->next;
        free(e->lists->ranks);
        free(e->lists->segments);
        free(e->lists);
        e->lists = next;
    }
    while (e->counts) {
        counts_copy *next = e->counts->next;
        qd_host_free(e->bound->device, e->counts->host);
        qd_event_destroy(e->counts->copied);
        free(e->counts);
        e->counts = next;
    }
    free(e->dispatcher.lists);
    free(e->work);
    free(e);
}

const qd_dispatcher *qd_exchanger_dispatcher(const qd_exchanger *e)
{
    return e ? &e->dispatcher : NULL;
}

const qd_exchange *qd_exchanger_view(qd_exchanger *e)
{
    return e ? &e->view : NULL;
}

void qd_exchanger_observe(qd_exchanger *e, qd_exchange_observer observer, void *context)
{
    if (!e)
        return;
    e->observer = observer;
    e->observer_context = context;
}

void qd_exchanger_watch(qd_exchanger *e, qd_exchange_watch watch)
{
    if (e)
        e->watch = watch;
}

void qd_exchanger_drain(qd_exchanger *e)
{
    for (int i = 0; e && i < e->work_count; i++)
        finish(e, i);
}
