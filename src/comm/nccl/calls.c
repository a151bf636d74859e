/* Translates each operation into NCCL calls. */
#include "comm/nccl/nccl_impl.h"

static ncclDataType_t type_of(qd_dtype dtype)
{
    static const ncclDataType_t types[QD_DTYPE_COUNT] = {
        [QD_F32] = ncclFloat32, [QD_BF16] = ncclBfloat16, [QD_F16] = ncclFloat16, [QD_I32] = ncclInt32,
        [QD_I64] = ncclInt64,   [QD_F64] = ncclFloat64,   [QD_U8] = ncclUint8,
        [QD_F8E4M3] = ncclUint8, /* moved, never reduced */
        [QD_F8E5M2] = ncclUint8,
    };
    return types[dtype];
}

/* The average over one rank is its sum. NCCL 2.28's fp64 average over a single rank is wrong in the
 * last element. */
static ncclRedOp_t reduction_of(const qd_comm *comm, qd_reduce_op op)
{
    return op == QD_MAX ? ncclMax : op == QD_AVG && comm->size > 1 ? ncclAvg : ncclSum;
}

/* Whether slices or segments have equal sizes and are contiguous: NCCL then has a single call. */
static bool is_even(const qd_transfer *op)
{
    return !op->request.lists && op->request.count % op->comm->size == 0;
}

/* One call for each segment of each rank, in an NCCL group. */
static ncclResult_t reduce_segments(const qd_transfer *op, ncclComm_t nccl, cudaStream_t stream)
{
    const qd_coll_request *r = &op->request;
    int64_t size = (int64_t)qd_dtype_size(r->dtype);
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < op->comm->size; rank++) {
        int64_t packed = 0;
        for (int i = 0; i < qd_transfer_segment_count(op, rank) && result == ncclSuccess; i++) {
            qd_segment segment = qd_transfer_segment(op, rank, i);
            char *to = rank == op->comm->rank ? (char *)r->out + packed * size : NULL;
            if (segment.count > 0)
                result = ncclReduce((const char *)r->in + segment.offset * size, to, (size_t)segment.count, type_of(r->dtype),
                                    reduction_of(op->comm, r->reduce), rank, nccl, stream);
            packed += segment.count;
        }
    }
    return result;
}

static ncclResult_t gather_segments(const qd_transfer *op, ncclComm_t nccl, cudaStream_t stream)
{
    const qd_coll_request *r = &op->request;
    int64_t size = (int64_t)qd_dtype_size(r->dtype);
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < op->comm->size; rank++) {
        int64_t packed = 0;
        for (int i = 0; i < qd_transfer_segment_count(op, rank) && result == ncclSuccess; i++) {
            qd_segment segment = qd_transfer_segment(op, rank, i);
            char *to = (char *)r->out + segment.offset * size;
            const char *from = rank == op->comm->rank ? (const char *)r->in + packed * size : to;
            if (segment.count > 0)
                result = ncclBroadcast(from, to, (size_t)segment.count, type_of(r->dtype), rank, nccl, stream);
            packed += segment.count;
        }
    }
    return result;
}

/* Gather (receives at the root) or scatter (sends from it); the root's own part is copied
 * separately. */
static ncclResult_t rooted(const qd_transfer *op, ncclComm_t nccl, cudaStream_t stream)
{
    const qd_coll_request *r = &op->request;
    int64_t size = (int64_t)qd_dtype_size(r->dtype);
    ncclDataType_t type = type_of(r->dtype);
    bool gathers = r->kind == QD_COLL_GATHER;
    int me = op->comm->rank;
    ncclResult_t result = ncclSuccess;
    if (me != r->root) {
        size_t count = (size_t)qd_transfer_segment(op, me, 0).count;
        if (count == 0) return ncclSuccess;
        return gathers ? ncclSend(r->in, count, type, r->root, nccl, stream)
                       : ncclRecv(r->out, count, type, r->root, nccl, stream);
    }
    for (int rank = 0; rank < op->comm->size && result == ncclSuccess; rank++) {
        qd_segment segment = qd_transfer_segment(op, rank, 0);
        if (rank == me || segment.count == 0) continue;
        result = gathers ? ncclRecv((char *)r->out + segment.offset * size, (size_t)segment.count, type, rank, nccl, stream)
                         : ncclSend((const char *)r->in + segment.offset * size, (size_t)segment.count, type, rank, nccl, stream);
    }
    return result;
}

static ncclResult_t all_to_all(const qd_transfer *op, ncclComm_t nccl, cudaStream_t stream)
{
    const qd_coll_request *r = &op->request;
    int64_t size = (int64_t)qd_dtype_size(r->dtype);
    ncclDataType_t type = type_of(r->dtype);
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < op->comm->size && result == ncclSuccess; peer++) {
        if (peer == op->comm->rank) continue;
        if (r->in_counts[peer] > 0)
            result = ncclSend((const char *)r->in + r->in_offsets[peer] * size, (size_t)r->in_counts[peer], type, peer, nccl, stream);
        if (result == ncclSuccess && r->out_counts[peer] > 0)
            result = ncclRecv((char *)r->out + r->out_offsets[peer] * size, (size_t)r->out_counts[peer], type, peer, nccl, stream);
    }
    return result;
}

static ncclResult_t issue(const qd_transfer *op, ncclComm_t nccl, cudaStream_t stream)
{
    const qd_coll_request *r = &op->request;
    size_t count = (size_t)r->count, each = count / (size_t)op->comm->size;
    ncclDataType_t type = type_of(r->dtype);
    ncclRedOp_t reduce = reduction_of(op->comm, r->reduce);
    if (r->count == 0 && r->kind != QD_COLL_ALL_TO_ALL) return ncclSuccess;
    switch (r->kind) {
    case QD_COLL_ALL_REDUCE: return ncclAllReduce(r->in, r->out, count, type, reduce, nccl, stream);
    case QD_COLL_REDUCE_SCATTER:
        return is_even(op) ? ncclReduceScatter(r->in, r->out, each, type, reduce, nccl, stream) : reduce_segments(op, nccl, stream);
    case QD_COLL_ALL_GATHER:
        return is_even(op) ? ncclAllGather(r->in, r->out, each, type, nccl, stream) : gather_segments(op, nccl, stream);
    case QD_COLL_ALL_TO_ALL: return all_to_all(op, nccl, stream);
    case QD_COLL_BROADCAST: return ncclBroadcast(r->in, r->out, count, type, r->root, nccl, stream);
    case QD_COLL_REDUCE: return ncclReduce(r->in, r->out, count, type, reduce, r->root, nccl, stream);
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER: return rooted(op, nccl, stream);
    case QD_COLL_SEND: return ncclSend(r->in, count, type, 1, nccl, stream); /* in a pair the sender is rank 0 */
    case QD_COLL_RECV: return ncclRecv(r->out, count, type, 0, nccl, stream);
    default: return ncclSuccess; /* a barrier only orders the streams */
    }
}

/* Own parts that NCCL does not move, of operations made of sends and receives. */
typedef struct copies {
    cudaStream_t stream;
    cudaError_t error;
} copies;

static void copy_piece(void *context, void *to, const void *from, int64_t bytes)
{
    copies *c = context;
    if (c->error == cudaSuccess) c->error = cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, c->stream);
}

/* Bytes that this rank receives from the others. */
static int64_t bytes_taken(const qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = (int64_t)qd_dtype_size(r->dtype), own = 0, all = r->count;
    bool segments = r->kind == QD_COLL_ALL_REDUCE || r->kind == QD_COLL_REDUCE_SCATTER || r->kind == QD_COLL_ALL_GATHER ||
                    r->kind == QD_COLL_GATHER || r->kind == QD_COLL_SCATTER || qd_transfer_is_split(op);
    if (segments) own = qd_transfer_packed_count(op, me);
    switch (r->kind) {
    case QD_COLL_ALL_REDUCE: return (own * (n - 1) + all - own) * size;
    case QD_COLL_REDUCE_SCATTER: return own * (n - 1) * size;
    case QD_COLL_ALL_GATHER: return (all - own) * size;
    case QD_COLL_GATHER: return me == r->root ? (all - own) * size : 0;
    case QD_COLL_SCATTER: return me == r->root ? 0 : own * size;
    case QD_COLL_BROADCAST: return me == r->root ? 0 : all * size;
    case QD_COLL_REDUCE:
        if (qd_transfer_is_split(op)) return (own * (n - 1) + (me == r->root ? all - own : 0)) * size;
        return me == r->root ? all * (n - 1) * size : 0;
    case QD_COLL_RECV: return all * size;
    case QD_COLL_ALL_TO_ALL:
        for (int p = 0; p < n; p++) own += p == me ? 0 : r->out_counts[p];
        return own * size;
    default: return 0;
    }
}

qd_status qd_nccl_call(qd_transfer *op)
{
    qd_nccl_lane *lane = qd_nccl_state_of(op)->lane;
    qd_coll_kind kind = op->request.kind;
    copies own = {.stream = lane->stream};
    if (kind == QD_COLL_ALL_TO_ALL || kind == QD_COLL_GATHER || kind == QD_COLL_SCATTER)
        qd_transfer_own_pieces(op, copy_piece, &own);
    if (own.error != cudaSuccess) return qd_nccl_cuda_fail("cudaMemcpyAsync", op->comm, own.error);
    ncclResult_t result = ncclGroupStart();
    if (result == ncclSuccess) {
        result = issue(op, lane->comm, lane->stream);
        ncclResult_t ended = ncclGroupEnd();
        if (result == ncclSuccess || result == ncclInProgress) result = ended;
    }
    if (result != ncclSuccess && result != ncclInProgress) return qd_nccl_fail(qd_coll_kind_name(kind), op->comm, result);
    op->bytes += bytes_taken(op);
    return QD_OK;
}
