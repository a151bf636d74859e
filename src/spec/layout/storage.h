/* Where a rank's parameters lie in its buffers, in elements, and what of them it answers for.
 *
 * A whole buffer holds each local tensor; values, gradients and optimizer state share its offsets.
 * Each fused group starts at a multiple of QD_STORAGE_ALIGN elements. Gradients of tied parameters
 * lie in a buffer of their own.
 *
 * A sharded buffer holds one part of each tensor: tensors keep their shape and are cut by rows,
 * unevenly where rows do not divide (each logical tensor by its own rows, fused or not), and the
 * parts follow each other without gaps. So the parts of any run of parameters are one stretch of a
 * sharded buffer and a list of segments of a whole one, and one vectored collective carries
 * them. */
#ifndef QD_SPEC_LAYOUT_STORAGE_H
#define QD_SPEC_LAYOUT_STORAGE_H

#include "spec/layout/ledger.h"

#define QD_STORAGE_ALIGN 32
/* Rows of each tensor of a family of parameters are cut into so many parts, and this rank has one
 * of them; 1 and 0: whole. */
typedef struct qd_share {
    int parts, part;
} qd_share;

typedef struct qd_storage {
    int64_t *offset;      /* per parameter, in a whole buffer; of a tied one: in the tied-gradient buffer */
    int64_t *count;       /* local elements */
    int64_t *rows;        /* local rows; a vector has one element per row */
    int64_t *value;       /* where values are read: offset, or that of the parameter it is tied to, or that of the copy */
    int copied;           /* a tied parameter whose owner is on other ranks, so that this one keeps a copy of the values behind all
                             others: buffers of parameters alone have it; -1: none */
    int64_t values, tied; /* elements of the two whole buffers, padding included */
    int64_t params, shard_params; /* elements of buffers of parameters, whole and sharded: with the copy */
    int64_t held;         /* elements of parameters of the whole local tensors, padding excluded */
    uint8_t *family;      /* per parameter */
    qd_share share[QD_FAMILY_COUNT];
    int parts, part;      /* those of family 0 */
    int64_t *shard_offset, *shard_count; /* per parameter, in a sharded buffer; tied ones have none */
    int64_t *shard_row;   /* rows of this rank's parts of its family before this parameter's */
    int64_t shard_values; /* elements of a sharded buffer */
    int64_t shard_rows[QD_FAMILY_COUNT]; /* of this rank's parts; */
    int64_t whole_rows[QD_FAMILY_COUNT]; /* and of the whole local tensors that are not tied to others */
} qd_storage;

/* parts 1: nothing is sharded. */
qd_status qd_storage_create(const qd_ledger *ledger, int rank, int parts, int part, qd_arena *arena, qd_storage *storage);
/* With a share of its own for each family; NULL: nothing is sharded. */
qd_status qd_storage_create_shares(const qd_ledger *ledger, int rank, const qd_share shares[QD_FAMILY_COUNT], qd_arena *arena,
                                   qd_storage *storage);

/* A stretch of a local tensor: rows, and the elements they are. */
typedef struct qd_extent {
    int64_t first_row, rows, first, count;
} qd_extent;
/* Into how many parts a parameter is cut, and which of them this rank has. */
static inline qd_share qd_storage_share(const qd_storage *storage, int param)
{
    return storage->share[storage->family[param]];
}
qd_extent qd_storage_part(const qd_storage *storage, int param, int parts, int part);

/* Whether the rank has values of a parameter of its own: all that it holds but tied ones, and the
 * copy. */
static inline bool qd_storage_has(const qd_ledger *ledger, const qd_storage *storage, int param)
{
    return ledger->params[param].tied_to < 0 || param == storage->copied;
}

/* Elements of the parts of parameters [param, param + params) that rank `part` of `parts` has; tied
 * ones have none, but the copy. */
int64_t qd_storage_run(const qd_ledger *ledger, const qd_storage *storage, int param, int params, int parts, int part);
#endif
