/* Names, sizes and traffic of data types and collectives; qd_slice(), which all shards follow. */
#include <quadrille/types.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[QD_DTYPE_COUNT] = {
    [QD_F32] = {"fp32", 4},  [QD_BF16] = {"bf16", 2}, [QD_F16] = {"fp16", 2}, [QD_I32] = {"int32", 4},
    [QD_I64] = {"int64", 8}, [QD_F64] = {"fp64", 8},  [QD_U8] = {"uint8", 1},
    [QD_F8E4M3] = {"fp8_e4m3", 1}, [QD_F8E5M2] = {"fp8_e5m2", 1},
};

static const char *const reduce_ops[] = {[QD_SUM] = "sum", [QD_MAX] = "max", [QD_AVG] = "avg"};

static const char *const coll_kinds[QD_COLL_KIND_COUNT] = {
    [QD_COLL_ALL_REDUCE] = "all-reduce",
    [QD_COLL_REDUCE_SCATTER] = "reduce-scatter",
    [QD_COLL_ALL_GATHER] = "all-gather",
    [QD_COLL_ALL_TO_ALL] = "all-to-all",
    [QD_COLL_BROADCAST] = "broadcast",
    [QD_COLL_REDUCE] = "reduce",
    [QD_COLL_GATHER] = "gather",
    [QD_COLL_SCATTER] = "scatter",
    [QD_COLL_SEND] = "send",
    [QD_COLL_RECV] = "recv",
    [QD_COLL_BARRIER] = "barrier",
};

/* Up to these sizes a single direct exchange is faster than sliced algorithms, whose traffic is
 * lower. With two ranks slicing saves only additions. */
enum { DIRECT_BYTES = 16 * 1024, DIRECT_BYTES_PAIR = 64 * 1024, SPLIT_BYTES = 16 * 1024 };

size_t qd_dtype_size(qd_dtype dtype)
{
    return (unsigned)dtype < QD_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *qd_dtype_name(qd_dtype dtype)
{
    return (unsigned)dtype < QD_DTYPE_COUNT ? dtypes[dtype].name : "unknown type";
}

const char *qd_reduce_op_name(qd_reduce_op op)
{
    return (unsigned)op <= QD_AVG ? reduce_ops[op] : "unknown operation";
}

const char *qd_coll_kind_name(qd_coll_kind kind)
{
    return (unsigned)kind < QD_COLL_KIND_COUNT ? coll_kinds[kind] : "unknown collective";
}

bool qd_coll_direct(int64_t bytes, int group_size)
{
    return bytes <= DIRECT_BYTES || (group_size == 2 && bytes <= DIRECT_BYTES_PAIR);
}

bool qd_coll_split(int64_t bytes)
{
    return bytes >= SPLIT_BYTES;
}

int64_t qd_coll_bytes(qd_coll_kind kind, int64_t count, qd_dtype dtype, int group_size)
{
    int64_t size = (int64_t)qd_dtype_size(dtype);
    int64_t bytes = count * size;
    int64_t others = group_size - 1;
    if (others <= 0)
        return 0;
    switch (kind) {
    case QD_COLL_ALL_REDUCE:
        return qd_coll_direct(bytes, group_size) ? group_size * others * bytes : 2 * others * bytes;
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_ALL_GATHER:
    case QD_COLL_BROADCAST:
        return others * bytes;
    case QD_COLL_REDUCE:
        return others * bytes + (qd_coll_split(bytes) ? qd_coll_bytes(QD_COLL_GATHER, count, dtype, group_size) : 0);
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER: {
        /* All but the root's own slice. Slices differ by at most one element; the root is assumed
         * to own slice 0. */
        int64_t offset, length;
        qd_slice(count, group_size, 0, &offset, &length);
        return bytes - length * size;
    }
    case QD_COLL_ALL_TO_ALL: /* count excludes what stays on its own rank */
    case QD_COLL_RECV:
        return bytes;
    case QD_COLL_SEND: /* counted at the receiver, so that nothing is counted twice */
    case QD_COLL_BARRIER:
    case QD_COLL_KIND_COUNT:
        break;
    }
    return 0;
}

void qd_slice(int64_t count, int parts, int index, int64_t *offset, int64_t *length)
{
    int64_t quotient = count / parts, rest = count % parts;
    *length = quotient + (index < rest ? 1 : 0);
    *offset = quotient * index + (index < rest ? index : rest);
}
