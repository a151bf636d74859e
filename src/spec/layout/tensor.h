/* Tensor parallelism: how the ranks of tp share a layer (as Megatron does).
 *
 * Query, key and value heads, the inner width of the MLP and the vocabulary are cut: q, k, v, gate,
 * up, the token table and the head by rows (their outputs), attention output and down by columns
 * (their inputs). A kv head that fewer query heads than a rank has need is held by several
 * neighbours. */
#ifndef QD_SPEC_LAYOUT_TENSOR_H
#define QD_SPEC_LAYOUT_TENSOR_H

#include "spec/layout/ledger.h"

#define QD_TENSOR_MOST 1024 /* ranks of tp */

/* QD_USAGE, with the reason, when the model cannot be cut so. */
qd_status qd_tensor_check(const qd_model *model, const qd_mesh *mesh);
/* Fills in how a parameter is placed on tp. */
void qd_tensor_place(const qd_model *model, const qd_mesh *mesh, qd_split split, qd_param *param);
#endif
