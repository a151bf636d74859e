/* Offsets of a rank's parameters in its buffers, in elements, and the part of each that it owns.
 *
 * A whole buffer holds every local tensor. Gradients and optimizer state use the same offsets, and
 * values too unless parameters are frozen: those have values only. Each fused group starts at a
 * multiple of QD_STORAGE_ALIGN elements. Gradients of tied parameters have a buffer of their own.
 *
 * A sharded buffer holds one part of each tensor. Tensors keep their shape and are cut by rows,
 * unevenly where the rows do not divide (each logical tensor by its own rows, fused or not), and
 * the parts are contiguous. So the parts of consecutive parameters are one range of a sharded
 * buffer and a list of segments of a whole one, and one vectored collective transfers them. */
#ifndef QD_SPEC_LAYOUT_STORAGE_H
#define QD_SPEC_LAYOUT_STORAGE_H

#include "spec/layout/ledger.h"

#define QD_STORAGE_ALIGN 32
/* The rows of each tensor of a parameter family are cut into `parts` parts, and this rank owns one
 * of them. 1 and 0: not sharded. */
typedef struct qd_share {
    int parts, part;
} qd_share;

typedef struct qd_storage {
    int64_t *offset;      /* per parameter, in a whole buffer of gradients or state; of a tied one: in the tied-gradient buffer */
    int64_t *count;       /* local elements */
    int64_t *rows;        /* local rows; a vector has one element per row */
    int64_t *trained;     /* local elements that have gradients and state: `count`, or 0 if it is frozen */
    int64_t *value;       /* offset where values are read: its own, that of the parameter it is tied to, or that of the copy */
    /* A tied parameter whose owner is on other ranks, or -1. This rank keeps a copy of its values
     * after all others; only parameter buffers contain it. */
    int copied;
    int64_t values, tied; /* elements of the two whole buffers of gradients, including padding */
    int64_t stored;       /* elements of whole values, including padding, without the copy */
    int64_t params, shard_params; /* elements of parameter buffers, whole and sharded, including the copy */
    int64_t held;         /* elements of the whole local tensors, without padding */
    uint8_t *family;      /* per parameter */
    qd_share share[QD_FAMILY_COUNT];
    int parts, part;      /* the share of family 0 */
    int64_t *shard_offset, *shard_count; /* per parameter, in a sharded buffer of gradients or state; tied parameters have none */
    int64_t *shard_value; /* offset in a sharded buffer of values */
    int64_t *shard_row;   /* number of rows before this parameter's in this rank's parts of the same family */
    int64_t shard_values; /* elements of a sharded buffer of gradients or state */
    int64_t shard_rows[QD_FAMILY_COUNT]; /* rows of this rank's parts */
    int64_t whole_rows[QD_FAMILY_COUNT]; /* rows of the whole local tensors that are trained and not tied to others */
} qd_storage;

/* parts 1: no sharding. */
qd_status qd_storage_create(const qd_ledger *ledger, int rank, int parts, int part, qd_arena *arena, qd_storage *storage);
/* The same with one share per family; NULL: no sharding. */
qd_status qd_storage_create_shares(const qd_ledger *ledger, int rank, const qd_share shares[QD_FAMILY_COUNT], qd_arena *arena,
                                   qd_storage *storage);

/* A range of a local tensor, in rows and in elements. */
typedef struct qd_extent {
    int64_t first_row, rows, first, count;
} qd_extent;
/* The number of parts that a parameter is cut into, and the part that this rank owns. */
static inline qd_share qd_storage_share(const qd_storage *storage, int param)
{
    return storage->share[storage->family[param]];
}
qd_extent qd_storage_part(const qd_storage *storage, int param, int parts, int part);

/* Whether the rank stores values of a parameter: true for all that it holds except tied ones, and
 * for the copy. */
static inline bool qd_storage_has(const qd_ledger *ledger, const qd_storage *storage, int param)
{
    return ledger->params[param].tied_to < 0 || param == storage->copied;
}

/* Whether a transfer of a run of parameters includes this one. `all`: their values; otherwise what
 * changes in a step, gradients and the values of those that are trained. */
static inline bool qd_storage_moves(const qd_ledger *ledger, const qd_storage *storage, int param, bool all)
{
    return qd_storage_has(ledger, storage, param) && (all || !ledger->params[param].frozen);
}

/* Number of elements in part `part` of `parts` of parameters [param, param + params). Tied ones
 * count nothing, except the copy. */
int64_t qd_storage_run(const qd_ledger *ledger, const qd_storage *storage, int param, int params, int parts, int part, bool all);
#endif
