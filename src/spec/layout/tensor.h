/* Tensor parallelism: how the ranks of tp share a layer, following Megatron-LM.
 *
 * Query, key and value heads, the inner width of the MLP and the vocabulary are sharded: q, k, v,
 * gate, up, the token table and the head by rows (their outputs), attention output and down
 * projection by columns (their inputs). With more ranks than kv heads, neighbouring ranks hold the
 * same kv head. */
#ifndef QD_SPEC_LAYOUT_TENSOR_H
#define QD_SPEC_LAYOUT_TENSOR_H

#include "spec/layout/ledger.h"

#define QD_TENSOR_MOST 1024 /* maximum degree of tp */

/* QD_USAGE, with the reason, when tp cannot shard the model. */
qd_status qd_tensor_check(const qd_model *model, const qd_mesh *mesh);
/* Whether a rank counts its keys in sums over the keys of all ranks of tp: of the ranks that hold
 * the same ones, the first does. */
bool qd_tensor_counts_keys(const qd_model *model, const qd_mesh *mesh, int rank);
/* Kv heads of one rank of tp. */
static inline int qd_tensor_kv_heads(const qd_model *model, const qd_mesh *mesh)
{
    int tp = mesh->degree[QD_AXIS_TP];
    return model->kv_heads > tp ? model->kv_heads / tp : 1;
}
/* Sets how a parameter is placed on tp. */
void qd_tensor_place(const qd_model *model, const qd_mesh *mesh, qd_split split, qd_param *param);
/* QD_USAGE where a rank would have nothing of a parameter that is cut. */
qd_status qd_tensor_check_param(const qd_mesh *mesh, const qd_param *param);
#endif
