/* One bit of a message flips on its way, in every kind of operation: a world that checks its
 * messages reports it before the data is used, and names sender, receiver, operation and place.
 * QUADRILLE_FLIPS=200 for the long form.
 * ctest: timeout 200 */
#include "comm/checked.h"
#include "comm/comm_impl.h"
#include "support/ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 3, VICTIM = 1, SMALL = 100, LARGE = 40001 };

/* The damage: this bit of what the victim has received from `from` in its n-th operation of the
 * backend that receives anything. */
static int nth, from;
static int64_t bit;
static const qd_comm_backend_ops *intact;
static _Atomic int flipped;

/* What came from a peer in the backend's operation. */
static int64_t arrived(const qd_transfer *op, int peer, unsigned char **data)
{
    const qd_coll_request *r = &op->request;
    int64_t size = (int64_t)qd_dtype_size(r->dtype);
    qd_segment part;
    *data = r->out;
    switch (r->kind) {
    case QD_COLL_GATHER:
    case QD_COLL_ALL_GATHER:
        if (r->kind == QD_COLL_GATHER && r->root != VICTIM) return 0;
        part = qd_transfer_segment(op, peer, 0);
        break;
    case QD_COLL_ALL_TO_ALL: part = (qd_segment){r->out_offsets[peer], r->out_counts[peer]}; break;
    case QD_COLL_SCATTER:
        if (r->root == VICTIM) return 0;
        part = (qd_segment){0, qd_transfer_packed_count(op, VICTIM)};
        break;
    case QD_COLL_BROADCAST:
        if (r->root == VICTIM) return 0;
        part = (qd_segment){0, r->count};
        break;
    case QD_COLL_RECV: part = (qd_segment){0, r->count}; break;
    default: return 0;
    }
    *data += part.offset * size;
    return part.count * size;
}

static qd_status damaging_poll(qd_transfer *op, bool *done, bool *moved)
{
    unsigned char *data;
    QD_TRY(intact->poll(op, done, moved));
    if (!*done || op->comm->rank != VICTIM) return QD_OK;
    int64_t bytes = arrived(op, from, &data);
    if (bytes == 0 || nth-- != 0) return QD_OK;
    data[bit / 8 % bytes] ^= (unsigned char)(1 << bit % 8);
    flipped = 1;
    return QD_OK;
}

static qd_status exchange(qd_comm *world, const char *what, int64_t count, float *in, float *out, qd_work **work)
{
    int rank = qd_comm_rank(world);
    int64_t counts[RANKS], offsets[RANKS];
    qd_segment segments[RANKS][2];
    qd_segment_list lists[RANKS];
    for (int r = 0; r < RANKS; r++) {
        counts[r] = count / 8;
        offsets[r] = r * (count / 8);
        segments[r][0] = (qd_segment){r * 2 * (count / 8), count / 8};
        segments[r][1] = (qd_segment){(r * 2 + 1) * (count / 8), count / 8};
        lists[r] = (qd_segment_list){segments[r], 2};
    }
    if (strcmp(what, "all-reduce") == 0) return qd_comm_all_reduce(world, in, out, count, QD_F32, QD_SUM, work);
    if (strcmp(what, "reduce") == 0) return qd_comm_reduce(world, in, out, count, QD_F32, QD_SUM, VICTIM, work);
    if (strcmp(what, "reduce-scatter") == 0) return qd_comm_reduce_scatter(world, in, out, count, QD_F32, QD_AVG, work);
    if (strcmp(what, "all-gather") == 0) return qd_comm_all_gather(world, in, out, count, QD_F32, work);
    if (strcmp(what, "broadcast") == 0) return qd_comm_broadcast(world, out, count, QD_F32, 0, work);
    if (strcmp(what, "gather") == 0) return qd_comm_gather(world, in, out, count, QD_F32, VICTIM, work);
    if (strcmp(what, "scatter") == 0) return qd_comm_scatter(world, in, out, count, QD_F32, 0, work);
    if (strcmp(what, "all-to-all") == 0) return qd_comm_all_to_all(world, in, out, count / RANKS, QD_F32, work);
    if (strcmp(what, "uneven all-to-all") == 0)
        return qd_comm_all_to_all_v(world, in, counts, offsets, out, counts, offsets, QD_F32, work);
    if (strcmp(what, "reduce-scatter in segments") == 0)
        return qd_comm_reduce_scatter_v(world, in, out, lists, QD_F32, QD_SUM, work);
    if (strcmp(what, "all-gather in segments") == 0) return qd_comm_all_gather_v(world, in, out, lists, QD_F32, work);
    if (rank == 0) return qd_comm_send(world, in, count, QD_F32, VICTIM, work);
    return rank == VICTIM ? qd_comm_recv(world, out, count, QD_F32, 0, work) : QD_OK;
}

/* The text: elements, 1 for an asynchronous call, n-th, sender, bit, operation. */
static qd_status body_damage(qd_comm *world, void *arg)
{
    static qd_comm_backend_ops damaging; /* ranks as threads: used by the victim only */
    static float memory[RANKS][2][LARGE];
    qd_ranks_call *call = arg;
    long long count, which;
    int asynchronous, at, rank = qd_comm_rank(world), first, sender;
    if (sscanf(call->text, "%lld %d %d %d %lld %n", &count, &asynchronous, &at, &sender, &which, &first) < 5)
        return QD_FAIL(QD_USAGE, "bad text");
    float *in = memory[rank][0], *out = memory[rank][1];
    for (int i = 0; i < LARGE; i++) in[i] = out[i] = (float)(i % 1000 + rank);
    qd_comm_check_messages(world, true);
    QD_TRY(qd_comm_barrier(world, NULL));
    if (rank == VICTIM) {
        nth = at;
        from = sender;
        bit = which;
        flipped = 0;
        intact = world->world->backend;
        damaging = *intact;
        damaging.poll = damaging_poll;
        world->world->backend = &damaging;
    }
    qd_comm_at(world, "step 7, backward");
    qd_work *work = NULL;
    qd_status status = exchange(world, call->text + first, count, in, out, asynchronous ? &work : NULL);
    if (status == QD_OK && work) status = qd_work_wait(work);
    if (status == QD_OK) status = qd_comm_barrier(world, NULL);
    if (rank == VICTIM) {
        world->world->backend = intact;
        call->value = (uint64_t)flipped;
    }
    return status;
}

static const qd_ranks_entry bodies[] = {{"damage", body_damage}};

/* How many of the backend's operations receive something; the last of each pair are checksums. */
typedef struct kind {
    const char *name;
    int64_t count;
    int operations;
    bool only_from_0;
} kind;
static const kind kinds[] = {
    {"all-reduce", SMALL, 1, false},
    {"all-reduce", LARGE, 4, false},
    {"reduce", SMALL, 2, false},
    {"reduce", LARGE, 2, false},
    {"reduce-scatter", LARGE, 2, false},
    {"reduce-scatter in segments", LARGE, 2, false},
    {"all-gather", SMALL, 2, false},
    {"all-gather", LARGE, 2, false},
    {"all-gather in segments", LARGE, 2, false},
    {"broadcast", LARGE, 2, true},
    {"gather", LARGE, 2, false},
    {"scatter", LARGE, 2, true},
    {"all-to-all", SMALL, 2, false},
    {"all-to-all", LARGE, 2, false},
    {"uneven all-to-all", LARGE, 2, false},
    {"send", SMALL, 2, true},
    {"send", LARGE, 2, true},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static uint64_t drawn = 88172645463325252u;
static int64_t draw(int64_t below)
{
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    drawn ^= drawn << 17;
    return (int64_t)(drawn % (uint64_t)below);
}

static void damage(qd_ranks_mode mode, const kind *k)
{
    char text[128], ranks[64];
    qd_ranks_result results[RANKS];
    int sender = k->only_from_0 || draw(2) ? 0 : 2;
    snprintf(text, sizeof text, "%lld %d %d %d %lld %s", (long long)k->count, (int)draw(2), (int)draw(k->operations), sender,
             (long long)draw(INT64_C(1) << 40), k->name);
    qd_ranks_options options = {.text = text, .deadline_seconds = 60, .limit_seconds = 120};
    if (qd_ranks_run("damage", mode, RANKS, &options, results) != QD_OK) fail_msg("%s", qd_error_message());
    const char *message = results[VICTIM].message;
    snprintf(ranks, sizeof ranks, "a message from rank %d to rank %d was damaged: ", sender, VICTIM);
    bool named = strstr(message, ranks) && strstr(message, "of group world, at 'step 7, backward'") &&
                 (strstr(message, "operation ") || strstr(message, "message 2"));
    if (!results[VICTIM].value || results[VICTIM].status != QD_DIFFERENT || !named)
        fail_msg("%s, '%s': flipped %d, %s: %s", qd_ranks_mode_name(mode), text, (int)results[VICTIM].value,
                 qd_status_text(results[VICTIM].status), message);
    for (int r = 0; r < RANKS; r++)
        if (r != VICTIM && results[r].status != QD_REMOTE)
            fail_msg("%s, '%s': rank %d got %s", qd_ranks_mode_name(mode), text, r, qd_status_text(results[r].status));
}

static void each_kind_on_each_backend(void **unused)
{
    (void)unused;
    for (int i = 0; i < KINDS; i++) {
        damage(QD_RANKS_THREADS, &kinds[i]);
        damage(QD_RANKS_PROCESSES, &kinds[i]);
        if (i % 6 == 1) damage(QD_RANKS_STAGED, &kinds[i]);
        if (i % 6 == 1 && qd_ranks_mode_available(QD_RANKS_MPI)) damage(QD_RANKS_MPI, &kinds[i]);
        if (i % 6 == 4 && qd_ranks_mode_available(QD_RANKS_UCX)) damage(QD_RANKS_UCX, &kinds[i]);
    }
}

static void many(void **unused)
{
    (void)unused;
    const char *text = getenv("QUADRILLE_FLIPS");
    static const qd_ranks_mode modes[] = {QD_RANKS_THREADS, QD_RANKS_PROCESSES, QD_RANKS_STAGED, QD_RANKS_MPI, QD_RANKS_UCX};
    for (int n = 0; text && n < atoi(text); n++)
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++)
            if (qd_ranks_mode_available(modes[m])) damage(modes[m], &kinds[n % KINDS]);
}

int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_kind_on_each_backend), cmocka_unit_test(many)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
