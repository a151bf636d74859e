/* The public operations: each checks its arguments and turns the call into one request. */
#include "device/sum.h"
#include "comm/work.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Checks for every call. `in` and `out` may be NULL where the rank moves nothing through them. */
static qd_status check(const qd_comm *comm, const qd_coll_request *r, bool uses_in, bool uses_out)
{
    const char *kind = qd_coll_kind_name(r->kind);
    if ((unsigned)r->dtype >= QD_DTYPE_COUNT)
        return QD_FAIL(QD_USAGE, "%s in group %s: %d is not an element type", kind, comm->name, (int)r->dtype);
    if (r->count < 0 || r->count > INT64_MAX / 16)
        return QD_FAIL(QD_USAGE, "%s in group %s: the count is %lld; it must be 0 or more and below 2^59", kind,
                       comm->name, (long long)r->count);
    if ((uses_in && !r->in) || (uses_out && !r->out))
        return QD_FAIL(QD_USAGE, "%s in group %s: the %s buffer is NULL", kind, comm->name,
                       uses_in && !r->in ? "input" : "output");
    bool reduces =
        r->kind == QD_COLL_ALL_REDUCE || r->kind == QD_COLL_REDUCE || r->kind == QD_COLL_REDUCE_SCATTER;
    if (reduces && (unsigned)r->reduce > QD_AVG)
        return QD_FAIL(QD_USAGE, "%s in group %s: %d is not a reduction", kind, comm->name, (int)r->reduce);
    if (reduces && !qd_sum_supported(r->dtype))
        return QD_FAIL(QD_USAGE, "%s in group %s: %s can be moved but not reduced", kind, comm->name,
                       qd_dtype_name(r->dtype));
    return QD_OK;
}

static qd_status check_root(const qd_comm *comm, qd_coll_kind kind, int root)
{
    if (root >= 0 && root < comm->size) return QD_OK;
    return QD_FAIL(QD_USAGE, "%s in group %s: rank %d does not exist; ranks are 0 to %d", qd_coll_kind_name(kind),
                   comm->name, root, comm->size - 1);
}

static qd_status submit(qd_comm *comm, const qd_coll_request *r, bool uses_in, bool uses_out, qd_work **work)
{
    if (work) *work = NULL;
    QD_TRY(check(comm, r, uses_in, uses_out));
    return qd_transfer_submit(comm, r, 0, NULL, work);
}

qd_status qd_comm_barrier(qd_comm *comm, qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_BARRIER, .dtype = QD_U8, .root = -1};
    return submit(comm, &r, false, false, work);
}

qd_status qd_comm_all_reduce(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_reduce_op op,
                             qd_work **work)
{
    qd_coll_request r = {
        .kind = QD_COLL_ALL_REDUCE, .dtype = dtype, .reduce = op, .root = -1, .count = count, .in = in, .out = out};
    return submit(comm, &r, count > 0, count > 0, work);
}

static int64_t own_slice(const qd_comm *comm, int64_t count)
{
    int64_t offset, length;
    qd_slice(count < 0 ? 0 : count, comm->size, comm->rank, &offset, &length);
    return length;
}

qd_status qd_comm_reduce_scatter(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype,
                                 qd_reduce_op op, qd_work **work)
{
    qd_coll_request r = {
        .kind = QD_COLL_REDUCE_SCATTER, .dtype = dtype, .reduce = op, .root = -1, .count = count, .in = in, .out = out};
    return submit(comm, &r, count > 0, own_slice(comm, count) > 0, work);
}

qd_status qd_comm_all_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_ALL_GATHER, .dtype = dtype, .root = -1, .count = count, .in = in, .out = out};
    return submit(comm, &r, own_slice(comm, count) > 0, count > 0, work);
}

static uint64_t mix(uint64_t hash, int64_t value)
{
    hash = (hash ^ (uint64_t)value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

/* Checks the lists, sums their counts and hashes them. */
static qd_status check_lists(const qd_comm *comm, qd_coll_kind kind, const qd_segment_list *lists, int64_t *total,
                             int64_t *own, uint64_t *shape)
{
    *total = *own = 0;
    *shape = 1;
    if (!lists) return QD_FAIL(QD_USAGE, "%s in group %s: the segment lists are NULL", qd_coll_kind_name(kind), comm->name);
    for (int r = 0; r < comm->size; r++) {
        *shape = mix(*shape, lists[r].count);
        for (int i = 0; i < lists[r].count; i++) {
            qd_segment segment = lists[r].segments[i];
            if (segment.offset < 0 || segment.count < 0)
                return QD_FAIL(QD_USAGE,
                               "%s in group %s: segment %d of rank %d is (offset %lld, count %lld); both must be 0 or more",
                               qd_coll_kind_name(kind), comm->name, i, r, (long long)segment.offset,
                               (long long)segment.count);
            *total += segment.count;
            if (r == comm->rank) *own += segment.count;
            *shape = mix(mix(*shape, segment.offset), segment.count);
        }
    }
    *shape |= 1; /* 0 means "no lists" */
    return QD_OK;
}

/* One allocation: the lists, then all segments. The caller of an asynchronous call may free its
 * own. */
static qd_segment_list *copy_lists(const qd_comm *comm, const qd_segment_list *lists)
{
    size_t segments = 0;
    for (int r = 0; r < comm->size; r++) segments += (size_t)lists[r].count;
    qd_segment_list *copy = malloc((size_t)comm->size * sizeof *copy + segments * sizeof(qd_segment));
    if (!copy) return NULL;
    qd_segment *next = (qd_segment *)(copy + comm->size);
    for (int r = 0; r < comm->size; r++) {
        copy[r] = (qd_segment_list){.segments = next, .count = lists[r].count};
        if (lists[r].count > 0) memcpy(next, lists[r].segments, (size_t)lists[r].count * sizeof *next);
        next += lists[r].count;
    }
    return copy;
}

static qd_status no_memory(const qd_comm *comm, qd_coll_kind kind)
{
    return QD_FAIL(QD_NO_MEMORY, "no memory for an asynchronous %s of group %s", qd_coll_kind_name(kind), comm->name);
}

static qd_status submit_lists(qd_comm *comm, qd_coll_request *r, const qd_segment_list *lists, qd_work **work)
{
    int64_t own;
    uint64_t shape;
    if (work) *work = NULL;
    QD_TRY(check_lists(comm, r->kind, lists, &r->count, &own, &shape));
    bool gathers = r->kind == QD_COLL_ALL_GATHER;
    QD_TRY(check(comm, r, (gathers ? own : r->count) > 0, (gathers ? r->count : own) > 0));
    r->lists = lists;
    qd_segment_list *copy = NULL;
    if (work) {
        copy = copy_lists(comm, lists);
        if (!copy) return no_memory(comm, r->kind);
        r->lists = copy;
    }
    return qd_transfer_submit(comm, r, shape, copy, work);
}

qd_status qd_comm_reduce_scatter_v(qd_comm *comm, const void *full, void *packed, const qd_segment_list *lists,
                                   qd_dtype dtype, qd_reduce_op op, qd_work **work)
{
    qd_coll_request r = {
        .kind = QD_COLL_REDUCE_SCATTER, .dtype = dtype, .reduce = op, .root = -1, .in = full, .out = packed};
    return submit_lists(comm, &r, lists, work);
}

qd_status qd_comm_all_gather_v(qd_comm *comm, const void *packed, void *full, const qd_segment_list *lists,
                               qd_dtype dtype, qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_ALL_GATHER, .dtype = dtype, .root = -1, .in = packed, .out = full};
    return submit_lists(comm, &r, lists, work);
}

qd_status qd_comm_all_to_all(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work)
{
    if (work) *work = NULL;
    qd_coll_request r = {.kind = QD_COLL_ALL_TO_ALL, .dtype = dtype, .root = -1, .count = count, .in = in, .out = out};
    QD_TRY(check(comm, &r, count > 0, count > 0));
    int64_t *table = malloc(2 * (size_t)comm->size * sizeof *table); /* counts, offsets */
    if (!table) return no_memory(comm, r.kind);
    for (int i = 0; i < comm->size; i++) {
        table[i] = count;
        table[comm->size + i] = count * i;
    }
    r.count = 0; /* counts are compared per pair instead */
    r.in_counts = r.out_counts = table;
    r.in_offsets = r.out_offsets = table + comm->size;
    return qd_transfer_submit(comm, &r, 0, table, work);
}

qd_status qd_comm_all_to_all_v(qd_comm *comm, const void *in, const int64_t *in_counts, const int64_t *in_offsets,
                               void *out, const int64_t *out_counts, const int64_t *out_offsets, qd_dtype dtype,
                               qd_work **work)
{
    if (work) *work = NULL;
    qd_coll_request r = {.kind = QD_COLL_ALL_TO_ALL, .dtype = dtype, .root = -1, .in = in, .out = out};
    if (!in_counts || !in_offsets || !out_counts || !out_offsets)
        return QD_FAIL(QD_USAGE, "all-to-all in group %s: counts and offsets must not be NULL", comm->name);
    int64_t sends = 0, receives = 0;
    for (int i = 0; i < comm->size; i++) {
        if (in_counts[i] < 0 || out_counts[i] < 0 || in_offsets[i] < 0 || out_offsets[i] < 0)
            return QD_FAIL(QD_USAGE, "all-to-all in group %s: a count or offset for rank %d is negative", comm->name, i);
        sends += in_counts[i];
        receives += out_counts[i];
    }
    QD_TRY(check(comm, &r, sends > 0, receives > 0));
    if (in_counts[comm->rank] != out_counts[comm->rank])
        return QD_FAIL(QD_USAGE, "all-to-all in group %s: rank %d sends %lld elements to itself but expects %lld",
                       comm->name, comm->rank, (long long)in_counts[comm->rank], (long long)out_counts[comm->rank]);
    r.in_counts = in_counts;
    r.in_offsets = in_offsets;
    r.out_counts = out_counts;
    r.out_offsets = out_offsets;
    int64_t *table = NULL;
    if (work) {
        size_t n = (size_t)comm->size;
        table = malloc(4 * n * sizeof *table);
        if (!table) return no_memory(comm, r.kind);
        r.in_counts = memcpy(table, in_counts, n * sizeof *table);
        r.in_offsets = memcpy(table + n, in_offsets, n * sizeof *table);
        r.out_counts = memcpy(table + 2 * n, out_counts, n * sizeof *table);
        r.out_offsets = memcpy(table + 3 * n, out_offsets, n * sizeof *table);
    }
    return qd_transfer_submit(comm, &r, 0, table, work);
}

static qd_status submit_rooted(qd_comm *comm, const qd_coll_request *r, bool uses_in, bool uses_out, qd_work **work)
{
    if (work) *work = NULL;
    QD_TRY(check_root(comm, r->kind, r->root));
    return submit(comm, r, uses_in, uses_out, work);
}

qd_status qd_comm_broadcast(qd_comm *comm, void *data, int64_t count, qd_dtype dtype, int root, qd_work **work)
{
    qd_coll_request r = {
        .kind = QD_COLL_BROADCAST, .dtype = dtype, .root = root, .count = count, .in = data, .out = data};
    return submit_rooted(comm, &r, count > 0, count > 0, work);
}

qd_status qd_comm_reduce(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_reduce_op op,
                         int root, qd_work **work)
{
    qd_coll_request r = {
        .kind = QD_COLL_REDUCE, .dtype = dtype, .reduce = op, .root = root, .count = count, .in = in, .out = out};
    return submit_rooted(comm, &r, count > 0, count > 0 && comm->rank == root, work);
}

qd_status qd_comm_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, int root,
                         qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_GATHER, .dtype = dtype, .root = root, .count = count, .in = in, .out = out};
    return submit_rooted(comm, &r, own_slice(comm, count) > 0, count > 0 && comm->rank == root, work);
}

qd_status qd_comm_scatter(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, int root,
                          qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_SCATTER, .dtype = dtype, .root = root, .count = count, .in = in, .out = out};
    return submit_rooted(comm, &r, count > 0 && comm->rank == root, own_slice(comm, count) > 0, work);
}

static qd_status submit_message(qd_comm *comm, const qd_coll_request *r, qd_work **work)
{
    if (work) *work = NULL;
    if (r->root == comm->rank)
        return QD_FAIL(QD_USAGE, "%s in group %s: rank %d cannot exchange messages with itself",
                       qd_coll_kind_name(r->kind), comm->name, comm->rank);
    bool sends = r->kind == QD_COLL_SEND;
    return submit_rooted(comm, r, sends && r->count > 0, !sends && r->count > 0, work);
}

qd_status qd_comm_send(qd_comm *comm, const void *data, int64_t count, qd_dtype dtype, int to, qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_SEND, .dtype = dtype, .root = to, .count = count, .in = data};
    return submit_message(comm, &r, work);
}

qd_status qd_comm_recv(qd_comm *comm, void *data, int64_t count, qd_dtype dtype, int from, qd_work **work)
{
    qd_coll_request r = {.kind = QD_COLL_RECV, .dtype = dtype, .root = from, .count = count, .out = data};
    return submit_message(comm, &r, work);
}
