/* Reads the golden fixtures (tests/golden/fixtures, written by tools/golden.py) and compares
 * tensors.
 *
 * Use in a test:
 *
 *     qd_golden *g;
 *     qd_golden_open(QD_GOLDEN_DIR "/llama-mha.safetensors", &g);
 *     int64_t layers;
 *     qd_golden_config_int(g, "layers", &layers);    and so on: build the model from the config
 *     qd_golden_find(g, "init.block.0.attn.q.weight", QD_F32, &t);
 *                                                    overwrite each parameter with t->data
 *     qd_golden_find(g, "tokens", QD_I32, &t);       step s begins at s * batch * seq
 *     … one step on batch 0 without update: the loss against losses[0], each gradient against
 *     grad.<parameter>:
 *     double rms = qd_golden_rms_norm(g, "grad.");
 *     qd_golden_compare(gradient, count, t, rms, 1e-5);
 *     … then, again from the initial weights, 20 steps: losses and grad_norms by
 *     qd_golden_compare_scalar(…, 1e-4).
 *
 * Contents of a fixture:
 *
 *     init.<parameter>    fp32   initial weights by logical name, linear weights (out, in)
 *     grad.<parameter>    fp32   gradient of step 1 before clipping; tied table: both uses summed
 *     tokens, targets     int32  (steps, batch, seq); the loss is the mean over all tokens
 *     doc_start           int32  (steps, batch, seq), only if config.packed: position within the
 *                                row at which the token's document begins; attention does not look
 *                                before it, positions are not reset
 *     after.<parameter>   fp32   Muon and QK-Clip only: weights after 5 steps
 *     max_scores          fp64   (steps), QK-Clip only: the largest attention score
 *     losses, grad_norms  fp64   (steps), of the float64 run; the loss of a step is taken before
 *                                its update, the norm before clipping
 *     losses_f32          fp64   (steps), PyTorch's float32 run
 *
 * Config keys, named as in data/models.json: family ("gpt2", "llama"), layers, hidden, heads,
 * kv_heads, head_dim, ffn, vocab, max_seq, seq, batch, steps, norm ("layernorm", "rmsnorm"),
 * norm_eps, position ("learned", "rope"), rope_base, rope_scaling (null, or factor,
 * low_freq_factor, high_freq_factor, original_max_seq), activation ("gelu_tanh", "gelu", "swiglu"),
 * tied, qkv_bias, out_bias, mlp_bias (older fixtures: linear_bias for both), packed, optimizer (lr,
 * beta1, beta2, eps, weight_decay, clip; AdamW with a constant rate, decay on two-dimensional
 * parameters only; name "muon": muon_momentum, muon_nesterov, muon_steps, muon_lr, muon_scale for
 * two-dimensional weights of blocks; qk_clip). optimizer.clip differs between fixtures. */
#ifndef QD_TESTS_SUPPORT_GOLDEN_H
#define QD_TESTS_SUPPORT_GOLDEN_H

#include "ckpt/safetensors.h"
#include "model/model.h"

#define QD_GOLDEN_DIR QD_TEST_SOURCE_DIR "/tests/golden/fixtures"

typedef struct qd_golden qd_golden;

typedef qd_safetensors_entry qd_golden_tensor; /* data is aligned to the element and valid until qd_golden_close */

/* QD_CORRUPT with the reason if it is missing or not a valid safetensors file. */
qd_status qd_golden_open(const char *path, qd_golden **golden);
void qd_golden_close(qd_golden *golden); /* NULL is legal */

/* Tensors sorted by name. */
int qd_golden_count(const qd_golden *golden);
const qd_golden_tensor *qd_golden_at(const qd_golden *golden, int index);

/* NULL if there is no tensor of this name. */
const qd_golden_tensor *qd_golden_lookup(const qd_golden *golden, const char *name);
/* QD_USAGE if there is none, or if it has another type. */
qd_status qd_golden_find(const qd_golden *golden, const char *name, qd_dtype dtype, const qd_golden_tensor **tensor);

/* A string of the header's __metadata__; NULL if there is none. */
const char *qd_golden_metadata(const qd_golden *golden, const char *key);

/* Values of the config by path ("layers", "optimizer.lr"). QD_USAGE if missing or of another
 * type. */
qd_status qd_golden_config_int(const qd_golden *golden, const char *path, int64_t *value);
qd_status qd_golden_config_double(const qd_golden *golden, const char *path, double *value);
qd_status qd_golden_config_bool(const qd_golden *golden, const char *path, bool *value);
qd_status qd_golden_config_string(const qd_golden *golden, const char *path, const char **value);
/* The model of the config. */
qd_status qd_golden_model(const qd_golden *golden, qd_model *model);

/* The comparison rule is ‖a−b‖ ≤ tol · max(‖b‖, 1e-3 · RMS norm over all tensors). */

/* ‖a‖ of fp32 numbers, in double. */
double qd_norm_of(const float *a, int64_t count);

/* The RMS norm, √(mean over tensors of ‖b‖²), of all fp32 tensors whose name begins with
 * `prefix`. */
double qd_golden_rms_norm(const qd_golden *golden, const char *prefix);

/* ‖a−b‖ / max(‖b‖, 1e-3 · rms_norm); infinite if a number is not finite, 0 if nothing differs. */
double qd_relative_error(const float *a, const float *b, int64_t count, double rms_norm);

/* QD_DIFFERENT if the rule is violated, with the tensor, the error and the element that differs
 * most. */
qd_status qd_golden_compare(const float *a, int64_t count, const qd_golden_tensor *b, double rms_norm,
                            double tolerance);

/* |a−b| ≤ tolerance · |b|, otherwise QD_DIFFERENT that names `what`. */
qd_status qd_golden_compare_scalar(const char *what, double a, double b, double tolerance);

#endif
