/* The proof of gradients refuses wrong programs: finished programs of dense models and models with
 * experts are changed in one place, identically on all ranks, so that their communication still
 * matches; each is refused, naming what was changed. The changes include bugs reported by users of
 * other systems: gradients scaled by the degree of an axis, losses off by its logarithm, norms that
 * count parameters several times, gradients that are not summed over an axis. QUADRILLE_SHOW=1
 * shows the messages.
 * ctest: timeout 120 */
#include "support/mutate.h"

#include "spec/proof/proof.h"

#include <quadrille/check.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SIZES "model.layers=2 model.hidden=32 model.heads=4 model.vocab=97 data.seq=8 train.global_batch=8 train.micro_batch=2 "
#define LLAMA SIZES "model.kv_heads=2 model.tied=false "
#define GPT2 SIZES "model.arch=gpt2 "
#define OLMO2 SIZES "model.arch=olmo2 model.kv_heads=2 model.tied=false "
#define OLMO SIZES "model.arch=olmo model.kv_heads=2 model.clip_qkv=0.5 "
#define GEMMA2 SIZES "model.arch=gemma2 model.kv_heads=2 model.logit_softcap=5 "
#define GEMMA3 SIZES "model.arch=gemma3 model.kv_heads=2 model.window=3 model.full_every=2 model.rope_local_base=100 "
#define LATENT \
    SIZES "model.arch=deepseek model.q_lora_rank=24 model.kv_lora_rank=16 model.qk_nope_head_dim=8 model.qk_rope_head_dim=4 " \
          "model.v_head_dim=6 "
#define MTP LATENT "model.tied=false model.mtp_modules=1 "
#define MOE SIZES "model.kv_heads=4 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 model.aux_loss=0.05 "
#define DEEPSEEK MOE "model.shared_experts=1 model.router=sigmoid model.router_bias_rate=0.01 model.z_loss=0.001 "
#define QWEN2_MOE MOE "model.shared_experts=1 model.shared_ffn=40 model.shared_gate=true model.qkv_bias=true "
#define BIASES MOE "model.mlp_bias=true model.router_logit_bias=true parallel.ranks=4 parallel.ep=2 parallel.etp=2 "
#define SINKS LLAMA "model.sinks=true "
#define CP2 "parallel.ranks=4 parallel.tp=2 parallel.cp=2 "
#define TP2 "parallel.ranks=4 parallel.tp=2 "
#define PLAIN "parallel.sp=false parallel.overlap=false "
#define LORA "lora.rank=2 lora.alpha=6 "
/* All sizes on a rank are multiples of 16. */
#define FP8 "train.precision=fp8 model.hidden=64 model.ffn=128 model.kv_heads=4 data.seq=32 "
#define AWAY "train.qk_clip=3 train.precision=bf16 train.offload=optimizer "
#define EP2 "parallel.ranks=4 parallel.ep=2 "

typedef struct mutant {
    const char *words;
    mutation m;
    const char *expected[3]; /* parts of the message; NULL: none */
} mutant;

static const mutant mutants[] = {
    /* Tensor parallelism: partial sums that are not reduced, reduced twice, or over other ranks. */
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 0}, {"(norm)", "'attn_branch'", "axis tp: it is a partial sum"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 1}, {"(add)", "'mlp_branch'", "axis tp"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 2}, {"(norm.grad)", "'d_mlp_normed'", "axis tp: it is a partial sum"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 3}, {"(norm.grad)", "'d_attn_normed'", "axis tp: it is a partial sum"}},
    {LLAMA TP2 PLAIN, {OP_TWICE, "all_reduce", "block.0", .nth = 0}, {"(all_reduce)", "'attn_branch'", "axis tp: it is replicated"}},
    {LLAMA TP2 PLAIN, {OP_TWICE, "all_reduce", "block.0", .nth = 3}, {"(all_reduce)", "'d_attn_normed'", "multiplies it by 2"}},
    {LLAMA TP2 PLAIN, {OP_GROUP, "all_reduce", "block.0", .nth = 1, .to = "dp×cp"}, {"(all_reduce)", "'mlp_branch'", "axis dp"}},
    {LLAMA TP2 PLAIN, {OP_REDUCE, "all_reduce", "block.0", .nth = 1}, {"(all_reduce)", "'mlp_branch'", "a partial maximum"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "embed", .nth = 0}, {"(embed)", "axis tp", "leaves the module a partial sum"}},
    {LLAMA TP2 PLAIN, {OP_TWICE, "all_reduce", "embed", .nth = 0}, {"embed", "(all_reduce)", "it is replicated"}},
    {LLAMA TP2 PLAIN, {OP_FIRST, "embed", "embed", .nth = 0, .number = 7}, {"(embed)", "'tokens.weight'", "tokens from"}},
    {LLAMA TP2 PLAIN, {OP_FIRST, "embed.grad", "embed", .nth = 0, .number = 7}, {"(embed.grad)", "'tokens.weight'", "tokens from"}},
    {LLAMA TP2 "parallel.sp=false ",
     {OP_EARLY, "all_reduce", "block.0", .nth = 1, .number = 3},
     {"(add)", "'mlp_branch'", "may still write"}},
    {LLAMA TP2, {OP_DROP, "all_gather", "block.0", .nth = 0}, {"(linear)", "'attn_normed of all ranks'", "no op has written it"}},
    {LLAMA TP2, {OP_SLOT, "linear", "block.0", .nth = 0, .number = QD_LINEAR_X, .to = "attn_normed"}, {"(linear)", "'attn_normed'", NULL}},
    {LLAMA TP2, {OP_SLOT, "norm", "block.0", .nth = 1, .number = QD_NORM_ADD, .to = "attn_branch"}, {"(norm)", "'attn_branch'", "axis tp"}},
    {LLAMA TP2,
     {OP_SLOT, "linear.dw", "block.0", .nth = 3, .number = QD_LINEAR_DW_X, .to = "attn_normed"},
     {"(linear.dw)", "'attn_normed'", NULL}},
    {LLAMA TP2, {OP_DROP, "reduce_scatter", "block.0", .nth = 2}, {"(norm.grad)", "'d_mlp_normed of the port'", "no op has written"}},
    {LLAMA TP2 "parallel.tp_overlap=2 ", {OP_DROP, "reduce_scatter", "block.0", .nth = 1}, {"(norm)", "'attn_branch of the port'", "rows"}},
    {LLAMA TP2 "parallel.tp_overlap=2 ", {OP_DROP, "linear", "block.0", .nth = -1}, {"(reduce_scatter)", "'mlp_branch'", "rows"}},
    {LLAMA TP2 PLAIN, {PLACE_TP, "block.0.attn.out.weight", .number = 0}, {"(linear)", "'attended'", "axis tp"}},
    {LLAMA TP2 PLAIN, {PLACE_TP, "block.0.mlp_norm.weight", .number = 1}, {"(norm)", "'mlp_norm.weight'", "axis tp"}},
    /* Norms behind the branches, and over the queries and keys of all ranks. */
    {OLMO2 TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 0}, {"(qk.norm)", "'qk_squares'", "axis tp: it is a partial sum"}},
    {OLMO2 TP2 PLAIN, {OP_TWICE, "all_reduce", "block.0", .nth = 0}, {"(all_reduce)", "'qk_squares'", "multiplies it by 2"}},
    {OLMO2 TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 1}, {"(norm)", "'attn_branch'", "axis tp: it is a partial sum"}},
    {OLMO2 TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 2}, {"(norm)", "'mlp_branch'", "axis tp: it is a partial sum"}},
    {OLMO2 TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 4}, {"(qk.norm.grad)", "'qk_dots'", "axis tp: it is a partial sum"}},
    {OLMO2 TP2, {OP_DROP, "reduce_scatter", "block.0", .nth = 0}, {"(norm)", "'attn_branch of the port'", "no op has written"}},
    {OLMO2 TP2 PLAIN, {PLACE_TP, "block.0.attn.q_norm.weight", .number = 0}, {"(qk.norm)", "'attn.q_norm.weight'", "axis tp"}},
    {OLMO2 "parallel.ranks=4 parallel.tp=4 ",
     {OP_ROWS, "qk.squares", "block.0", .nth = 0, .number = 8},
     {"(qk.squares)", "0 of 2 ranks with the same keys count them", NULL}},
    {OLMO2 "parallel.ranks=4 parallel.tp=4 ",
     {OP_ROWS, "qk.norm.grad", "block.0", .nth = 0, .number = 8},
     {"(qk.norm.grad)", "0 of 2 ranks with the same keys count them", NULL}},
    {GEMMA2 TP2, {OP_SCALE, "scale", "embed", .nth = 0, .number = 2}, {"(scale)", "its factor is not the one", NULL}},
    {GEMMA2 TP2, {OP_SCALE, "scale", "embed", .nth = 1, .number = 2}, {"(scale)", "its factor is not the one", NULL}},
    {GEMMA2 TP2, {OP_DROP, "scale", "embed", .nth = 1}, {"'d_embedded_unscaled'", "no op has written it", NULL}},
    {GEMMA2 TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 0}, {"(norm)", "'attn_branch'", "axis tp: it is a partial sum"}},
    {GEMMA2 TP2, {OP_CAP, "loss.max", "head", .nth = 0}, {"(loss.max)", "'logits'", "they are capped at 0"}},
    {GEMMA2 TP2, {OP_CAP, "loss.part", "head", .nth = 0}, {"(loss.part)", "'logits'", "they are capped at 0"}},
    {GEMMA2 TP2, {OP_CAP, "loss.grad", "head", .nth = 0}, {"(loss.grad)", "'logits'", "they are capped at 0"}},
    {GEMMA2 "parallel.ranks=2 ", {OP_CAP, "head.loss", "head", .nth = 0}, {"(head.loss)", "'logits'", "but the model says 5"}},
    {GEMMA3 TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 0}, {"(norm)", "'attn_branch'", "axis tp: it is a partial sum"}},
    /* Adapters: partial sums of the narrow values, factors that are placed wrongly, frozen
     * parameters. */
    {LLAMA TP2 PLAIN LORA, {OP_DROP, "all_reduce", "block.0", .nth = 0}, {"block.0", "axis tp: it is a partial sum", NULL}},
    {LLAMA TP2 PLAIN LORA, {OP_DROP, "all_reduce", "block.0", .nth = 1}, {"block.0", "axis tp: it is a partial sum", NULL}},
    {LLAMA TP2 PLAIN LORA, {OP_DROP, "adapt", "block.0", .nth = 0}, {"block.0", "lora_B", "no rank uses it"}},
    {LLAMA TP2 PLAIN LORA, {OP_DROP, "adapt.dw", "block.0", .nth = 0}, {"block.0", "lora_B", "no op computes its gradient"}},
    {LLAMA TP2 PLAIN LORA, {OP_DROP, "adapt.dx", "block.0", .nth = 0}, {"block.0", "no op has written it", NULL}},
    {LLAMA TP2 PLAIN LORA, {OP_SCALE, "scale", "block.0", .nth = 0, .number = 2}, {"(scale)", "its factor is not the one", NULL}},
    {LLAMA TP2 PLAIN LORA,
     {OP_SLOT, "linear.dw", "block.0", .nth = 0, .number = QD_LINEAR_DW_WEIGHT_GRAD, .to = "attn.q.weight"},
     {"block.0", NULL, NULL}},
    {LLAMA TP2 PLAIN LORA, {PLACE_TP, "block.0.attn.q.lora_A.weight", .number = 1}, {"(adapt)", "'qkv_lora_scaled'", NULL}},
    {LLAMA TP2 PLAIN LORA, {PLACE_TP, "block.0.attn.q.lora_B.weight", .number = 0}, {"(adapt)", "axis tp", NULL}},
    {LLAMA TP2 PLAIN LORA, {PLACE_TP, "block.0.mlp.down.lora_A.weight", .number = 0}, {"(linear)", "axis tp", NULL}},
    {LLAMA TP2 LORA, {OP_DROP, "reduce_scatter", "block.0", .nth = 0}, {"block.0", "no op has written", NULL}},
    {LLAMA TP2 LORA, {ACTION_DROP, "reduce", "tp", .param = "block.0.attn.q.lora_A.weight"}, {"lora_A", "axis tp", "never summed"}},
    {LLAMA TP2 PLAIN LORA, {FROZEN, "block.0.attn.q.lora_A.weight", .number = 1}, {"lora_A", "is frozen, but an op computes", NULL}},
    {LLAMA TP2 PLAIN LORA, {FROZEN, "block.0.mlp.down.weight", .number = 0}, {"mlp.down.weight", "no op computes its gradient", NULL}},
    {LLAMA TP2 PLAIN LORA, {NORM_HOLDERS, "block.0.attn.q.weight", .number = 2}, {"attn.q.weight", "must not count in the norm", NULL}},
    {LLAMA TP2 PLAIN LORA, {NORM_HOLDERS, "block.0.attn.q.lora_A.weight", .number = 0}, {"lora_A", "elements are counted", NULL}},
    /* Latent attention: compressed queries and keys are replicated, the heads that read them
     * not. */
    {LATENT TP2 PLAIN,
     {OP_DROP, "all_reduce", "block.0", .nth = 4},
     {"(norm.grad)", "'d_kv_latent_normed'", "axis tp: it is a partial sum"}},
    {LATENT TP2 PLAIN,
     {OP_DROP, "all_reduce", "block.0", .nth = 5},
     {"(norm.grad)", "'d_q_latent_normed'", "axis tp: it is a partial sum"}},
    {LATENT TP2 PLAIN, {OP_DROP, "all_reduce", "block.0", .nth = 3}, {"(add)", "'d_attn_normed'", "axis tp: it is a partial sum"}},
    {LATENT TP2 PLAIN, {OP_TWICE, "all_reduce", "block.0", .nth = 3}, {"(all_reduce)", "'d_k_rope'", "multiplies it by 2"}},
    {LATENT TP2, {OP_DROP, "reduce_scatter", "block.0", .nth = 3}, {"(linear.d", "'d_k_rope of the port'", "no op has written"}},
    {LATENT TP2, {ACTION_DROP, "reduce", "tp", .param = "block.0.attn.q_a_norm.weight", .nth = 0},
     {"squares", "axis tp", "never summed over that axis"}},
    {LATENT TP2, {ACTION_DROP, "reduce", "tp", .param = "block.0.attn.kv_a_norm.weight", .nth = 0},
     {"squares", "axis tp", "never summed over that axis"}},
    {LATENT TP2, {ACTION_DROP, "reduce", "tp", .param = "block.1.attn.kv_a.weight", .nth = 0},
     {"squares", "block.1.attn.kv_a.weight, axis tp", "(of linear.dw)"}},
    {LATENT TP2 PLAIN, {PLACE_TP, "block.0.attn.kv_b.weight", .number = 0}, {"(l", "axis tp", NULL}},
    {LATENT TP2 PLAIN,
     {OP_SLOT, "latent.qkv", "block.0", .nth = 0, .number = QD_LATENT_QKV_K_ROPE, .to = "d_k_rope"},
     {"(latent.qkv)", "'d_k_rope'", "no op has written it"}},
    /* Biases, and positions, on every rank of a partial sum. */
    {GPT2 TP2 PLAIN,
     {OP_SLOT, "linear", "block.0", .nth = 1, .number = QD_LINEAR_BIAS, .to = "attn.out.bias"},
     {"(linear)", "'attn.out.bias'", "2 of 2 ranks add it to a partial sum"}},
    {GPT2 TP2,
     {OP_SLOT, "linear", "block.0", .nth = 3, .number = QD_LINEAR_BIAS, .to = "mlp.down.bias"},
     {"(linear)", "'mlp.down.bias'", "2 of 2 ranks add it to a partial sum"}},
    {GPT2 TP2,
     {OP_SLOT, "embed", "embed", .nth = 0, .number = QD_EMBED_POSITION_TABLE, .to = "positions.weight"},
     {"(embed)", "'positions.weight'", "2 of 2 ranks add it"}},
    {GPT2 TP2,
     {OP_SLOT, "linear", "block.0", .nth = 1, .number = QD_LINEAR_BIAS, .to = "-"},
     {"block.0", "attn.out.bias", "no rank uses it"}},
    {GPT2 TP2,
     {OP_DROP, "bias.grad", "block.0", .nth = 0},
     {"block.0", "mlp.down.bias", "no op computes its gradient"}},
    {GPT2 TP2,
     {OP_SLOT, "bias.grad", "block.0", .nth = 1, .number = QD_BIAS_GRAD_DY, .to = "d_qkv"},
     {"(bias.grad)", "mlp.up.bias|'d_qkv'", NULL}},
    {GPT2 "parallel.ranks=2 run.device=cuda ",
     {OP_SLOT, "linear.dw", "block.0", .nth = 1, .number = QD_LINEAR_DW_BIAS_GRAD, .to = "-"},
     {"block.0", "mlp.up.bias", "no op computes its gradient"}},
    /* The loss over a sharded vocabulary: off by log(tp) and the like. */
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "head", .nth = 0}, {"(loss.part)", "'row_max'", "axis tp: it is a partial maximum"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "head", .nth = 1}, {"(loss.grad)", "'row_sums'", "axis tp: it is a partial sum"}},
    {LLAMA TP2 PLAIN, {OP_REDUCE, "all_reduce", "head", .nth = 0}, {"(all_reduce)", "'row_max'", "axis tp"}},
    {LLAMA TP2 PLAIN, {OP_REDUCE, "all_reduce", "head", .nth = 1}, {"(all_reduce)", "'row_sums'", "axis tp"}},
    {LLAMA TP2 PLAIN, {OP_TWICE, "all_reduce", "head", .nth = 1}, {"(all_reduce)", "'row_sums'", "multiplies it by 2"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "all_reduce", "head", .nth = 2}, {"(norm.grad)", "'d_normed'", "axis tp: it is a partial sum"}},
    {LLAMA TP2 PLAIN, {OP_DROP, "loss.grad", "head", .nth = 0}, {"(linear.dx)", "'logits'", "used as a gradient"}},
    {LLAMA TP2 PLAIN, {OP_TO, "loss.grad", "head", .nth = 0, .number = 1}, {"(loss.grad)", "'logits'", "used as token"}},
    {LLAMA TP2 PLAIN, {OP_TWICE, "loss.sum", "head", .nth = 0}, {"(loss.sum)", "'losses'", "a second time"}},
    {LLAMA TP2 PLAIN, {OP_ROWS, "linear.dw", "head", .nth = 0, .number = 1}, {"(linear.dw)", "count in the gradient", NULL}},
    /* Pairs: sums of a sequence's rows without those of other ranks, and losses of tokens. */
    {LLAMA "data.format=preferences parallel.ranks=2 parallel.cp=2 ",
     {OP_DROP, "all_reduce", "head", .nth = 0},
     {"(pairs.loss)", "'scores'", "axis cp: it is a partial sum"}},
    {LLAMA "data.format=preferences parallel.ranks=2 parallel.cp=2 ",
     {OP_TWICE, "all_reduce", "head", .nth = 0},
     {"(all_reduce)", "'scores'", "multiplies it by 2"}},
    {LLAMA "data.format=preferences parallel.ranks=2 ",
     {OP_SLOT, "loss.grad", "head", .nth = 0, .number = QD_LOSS_GRAD_FACTORS, .to = "-"},
     {"(loss.grad)", "losses of tokens are minimized", NULL}},
    {LLAMA "data.format=preferences parallel.ranks=2 ",
     {OP_TWICE, "pairs.loss", "head", .nth = 0},
     {"(pairs.loss)", "a second time", NULL}},
    /* Gradients of parameters that tp replicates. */
    {LLAMA TP2,
     {ACTION_DROP, "reduce", "tp", .param = "block.0.attn_norm.weight", .nth = -1},
     {"squares", "block.0.attn_norm.weight, axis tp", "(of norm.grad)"}},
    {LLAMA TP2 "parallel.zero=2 ",
     {ACTION_TWICE, "reduce", "tp", .param = "block.0.mlp_norm.weight", .nth = 0},
     {"reduce", "block.0.mlp_norm.weight, axis tp", "multiplies it by 2"}},
    {LLAMA TP2 "model.qk_norm=true ",
     {ACTION_DROP, "reduce", "tp", .param = "block.1.attn.q_norm.weight", .nth = 0},
     {"squares", "block.1.attn.q_norm.weight, axis tp", "(of head.norm.grad)"}},
    {LLAMA TP2 "model.qk_norm=true parallel.sp=false ",
     {ACTION_DROP, "reduce", "tp", .param = "block.0.attn.k_norm.weight", .nth = 0},
     {"squares", "block.0.attn.k_norm.weight, axis tp", "(of head.norm.grad)"}},
    {LLAMA "parallel.ranks=4 parallel.tp=4 ",
     {ACTION_DROP, "reduce", "tp (2)", .param = "block.0.attn.k.weight", .nth = 0},
     {"squares", "block.0.attn.k.weight, axis tp", "(of linear.dw)"}},
    {LLAMA "parallel.ranks=4 parallel.tp=4 ",
     {ACTION_GROUP, "reduce", "tp (2)", .param = "block.0.attn.k.weight", .nth = 0, .to = "tp"},
     {"reduce", "block.0.attn.k.weight, axis tp", "sharded by rows"}},
    {LLAMA "parallel.ranks=4 parallel.tp=4 ",
     {ACTION_GROUP, "reduce", "tp ", .param = "block.0.attn_norm.weight", .nth = 0, .to = "tp (2)"},
     {"squares", "block.0.attn_norm.weight, axis tp", "never summed"}},
    /* Data parallelism and ZeRO. */
    {LLAMA "parallel.ranks=4 ",
     {ACTION_DROP, "reduce", "gradients[", .param = "block.0.attn.q.weight", .nth = 0},
     {"squares", "axis dp", "is never summed over that axis"}},
    {LLAMA "parallel.ranks=4 ",
     {ACTION_TWICE, "reduce", "gradients[", .param = "block.0.attn.q.weight", .nth = 0},
     {"reduce", "axis dp", "multiplies it by 4"}},
    {LLAMA "parallel.ranks=4 ", {ACTION_COUNT, "reduce", "gradients[", .nth = 0}, {"squares", "axis dp", "is never summed"}},
    {LLAMA TP2, {ACTION_GROUP, "reduce", "dp×cp", .param = "block.0.attn.q.weight", .nth = 0, .to = "tp"}, {"reduce", "axis tp", NULL}},
    {LLAMA "parallel.ranks=4 parallel.zero=1 ", {ACTION_DROP, "reduce_scatter", .nth = 0}, {"squares", "gradient of head", "0 of its"}},
    {LLAMA "parallel.ranks=4 parallel.zero=2 ", {ACTION_TWICE, "reduce_scatter", .nth = 0}, {"reduce_scatter", "overwritten", NULL}},
    {LLAMA "parallel.ranks=4 parallel.zero=2 ",
     {ACTION_PARTS, "reduce_scatter", .nth = 0, .number = 2},
     {"reduce_scatter", "cut into 4 parts", NULL}},
    {LLAMA "parallel.ranks=4 parallel.zero=1 ", {ACTION_DROP, "unpack", .nth = 0}, {"squares", "axis dp", "never summed"}},
    {LLAMA "parallel.ranks=8 train.micro_batch=1 parallel.zero=2 parallel.dp_shard=4 parallel.overlap=false ",
     {ACTION_DROP, "reduce", "apart", .nth = 0},
     {"squares", "axis dp", "never summed"}},
    {LLAMA "parallel.ranks=8 train.micro_batch=1 parallel.zero=1 parallel.dp_shard=4 ",
     {ACTION_GROUP, "reduce", "apart", .nth = 0, .to = "dp×cp"},
     {"reduce", "axis dp", NULL}},
    {LLAMA "parallel.ranks=4 parallel.zero=3 ", {ACTION_DROP, "gather", "block.1", .nth = 0}, {"forward", "block.1", "up to date"}},
    {LLAMA "parallel.ranks=4 parallel.zero=1 ", {ACTION_DROP, "gather", "head", .nth = 0}, {"forward", "head", "up to date"}},
    /* Exchanges that overlap with computation and are not waited for. */
    {LLAMA "parallel.ranks=4 ", {ACTION_WAITS, "squares", "head", .nth = 0}, {"squares", "gradient of", "does not wait for action"}},
    {LLAMA "parallel.ranks=4 ", {ACTION_WAITS, "reduce", "gradients[", .nth = 0}, {"reduce", "gradient of", "does not wait for action"}},
    {LLAMA "parallel.ranks=4 parallel.zero=3 ", {ACTION_WAITS, "forward", "block.1 mb 0", .nth = 0}, {"forward", "gather", "a parameter"}},
    /* Copies of weights for all micro-batches. */
    {LLAMA FP8, {ACTION_DROP, "cast_weights", "block.1", .nth = 0}, {"forward block.1 mb 0", "weights in fp8", "nothing has written"}},
    {LLAMA FP8, {ACTION_TWICE, "cast_weights", "block.0", .nth = 0}, {"cast_weights block.0", "one that has some", NULL}},
    {LLAMA FP8, {ACTION_SWAP, "cast_weights", .nth = 0}, {"forward block.0 mb 0", "weights in fp8", "nothing has written"}},
    {LLAMA FP8 "parallel.ranks=2 parallel.zero=1 ", {ACTION_DROP, "gather", "block.0", .nth = 0}, {"cast_weights", "up to date", NULL}},
    {LLAMA FP8 "parallel.ranks=2 parallel.zero=1 ",
     {ACTION_WAITS, "cast_weights", "block.0", .nth = 0},
     {"cast_weights", "does not wait for action", "a parameter that it reads"}},
    {LLAMA FP8 "train.recompute=full ", {OP_DROP, "cast", "block.0", .nth = 0}, {"(linear)", "fp8", "no op has written it"}},
    {LLAMA "parallel.ranks=2 parallel.pp=2 ", {ACTION_WAITS, "forward", "block.1 mb 0", .nth = 0}, {"forward", "recv", "what it reads"}},
    {LLAMA "parallel.ranks=2 parallel.pp=2 ", {ACTION_WAITS, "send", "mb 1", .nth = 0}, {"send", "backward|forward", "what it sends"}},
    /* Micro-batches: each counts once. */
    {LLAMA "parallel.ranks=2 ",
     {ACTION_OVERWRITE, "backward", "block.0 mb 0", .nth = 0},
     {"backward", "gradient of block.0", "nothing has set it to 0"}},
    {LLAMA "parallel.ranks=2 ",
     {ACTION_OVERWRITE, "backward", "block.0 mb 1", .nth = 0},
     {"backward", "gradient of block.0", "overwrites it"}},
    {LLAMA "parallel.ranks=2 ",
     {OP_OVERWRITES, "linear.dw", "block.0", .nth = 1},
     {"backward", "gradient of block.1", "linear.dw adds to it"}},
    {LLAMA "parallel.ranks=2 ",
     {ACTION_DROP, "zero", "gradients", .nth = 0},
     {"backward", "gradient of embed.tokens.weight", "embed.grad adds to it"}},
    {LLAMA "parallel.ranks=2 ", {ACTION_TWICE, "backward", "block.1 mb 0", .nth = 0}, {"backward", "block.1 mb 0", "count twice"}},
    {LLAMA "parallel.ranks=2 ", {ACTION_DROP, "backward", "block.0 mb 1", .nth = 0}, {"backward", "embed", "nothing has written"}},
    {LLAMA "parallel.ranks=2 ", {ACTION_BATCH, "load", "mb 1", .nth = 0, .number = -1}, {"load", "a second time", NULL}},
    {LLAMA "parallel.ranks=2 train.grad_sync=per_microbatch ", {ACTION_OVERWRITE, "add", .nth = 1}, {"add", "overwrites it", NULL}},
    {LLAMA "parallel.ranks=2 train.grad_sync=per_microbatch ", {ACTION_DROP, "add", .nth = -1}, {"squares", "terms", NULL}},
    {LLAMA "parallel.ranks=2 parallel.split_backward=true ",
     {ACTION_DROP, "backward_weight", "block.0 mb 0", .nth = 0},
     {"gradient of block.0", NULL, NULL}},
    {LLAMA "parallel.ranks=2 train.recompute=full ",
     {ACTION_DROP, "recompute", "block.1 mb 1", .nth = 0},
     {"backward", "not been recomputed", NULL}},
    /* the mean over the tokens of the global batch */
    {LLAMA "parallel.ranks=4 ", {OP_SCALE, "head.loss", "head", .nth = 0, .number = 4}, {"(head.loss)", "tokens", "global batch"}},
    {LLAMA "parallel.ranks=4 parallel.pp=2 ",
     {OP_SCALE, "head.loss", "head", .nth = 0, .number = 2},
     {"(head.loss)", "divided by 32 tokens", NULL}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 ",
     {OP_SCALE, "head.loss", "head", .nth = 0, .number = 0.5},
     {"(head.loss)", "divided by 128 tokens", NULL}},
    {LLAMA TP2, {OP_SCALE, "loss.grad", "head", .nth = 0, .number = 8}, {"(loss.grad)", "divided by 8 tokens", NULL}},
    {LLAMA "parallel.ranks=4 parallel.pp=2 ", {ACTION_COUNT, "norm", .nth = 0}, {"norm", "averaged over 32 tokens", NULL}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 ", {ACTION_DROP, "reduce", "loss", .nth = 0}, {"norm", "axis cp", "the loss is not summed"}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 ", {ACTION_TWICE, "reduce", "loss", .nth = 0}, {"reduce", "axis cp", "multiplies it by 2"}},
    {LLAMA "parallel.ranks=2 parallel.pp=2 ", {ACTION_TWICE, "reduce", "loss", .nth = 0}, {"norm", "summed over pp 2 times", NULL}},
    {LLAMA TP2, {ACTION_GROUP, "reduce", "loss", .nth = 0, .to = "tp"}, {"reduce", "axis tp", "multiplies it by 2"}},
    /* The norm. */
    {LLAMA TP2, {NORM_REPEAT, "block.0.attn_norm.weight", .number = 1}, {"(norm)", "block.0.attn_norm.weight", "count the same elements"}},
    {LLAMA "parallel.ranks=4 parallel.tp=4 ",
     {NORM_REPEAT, "block.1.attn.k.weight", .number = 1},
     {"(norm)", "block.1.attn.k.weight", "count the same elements"}},
    {LLAMA TP2, {NORM_REPEAT, "block.0.attn.q.weight", .number = 2}, {"(norm)", "block.0.attn.q.weight", "elements are counted"}},
    {LLAMA TP2, {NORM_HOLDERS, "head.norm.weight", .number = 0}, {"(norm)", "head.norm.weight", "0 of its 32 elements"}},
    {LLAMA TP2, {ACTION_DROP, "reduce", "sums", .nth = 0}, {"(norm)", "elements are counted", NULL}},
    {LLAMA TP2, {ACTION_GROUP, "reduce", "sums", .nth = 0, .to = "dp×cp"}, {"(norm)", "elements", NULL}},
    {LLAMA "parallel.ranks=4 parallel.pp=2 ", {ACTION_DROP, "reduce", "sums", .nth = 0}, {"(norm), axis pp", "0 times", NULL}},
    {LLAMA "parallel.ranks=4 ", {ACTION_DROP, "squares", "block.1", .nth = 0}, {"sums", "block.1 are missing from the norm", NULL}},
    {LLAMA "parallel.ranks=4 ", {ACTION_TWICE, "squares", "block.1", .nth = 0}, {"squares", "block.1", "a second time"}},
    {LLAMA "parallel.ranks=4 parallel.zero=2 ",
     {ACTION_DROP, "gather", "sums for the gradient norm", .nth = 0},
     {"sums", "gathered 0 times", NULL}},
    {MOE EP2, {NORM_HOLDERS, "block.0.mlp.experts.7.gate.weight", .number = 1}, {"(norm)", "experts.7.gate.weight", "0 of its"}},
    {LLAMA "parallel.ranks=4 ", {ACTION_TWICE, "update", "block.0", .nth = 0}, {"gradient of block.0", "elements are applied", NULL}},
    {LLAMA "parallel.ranks=4 ", {ACTION_DROP, "update", "head", .nth = 0}, {"gradient of head", "0 of its", NULL}},
    /* Pipelines and tied embeddings. */
    {LLAMA "model.tied=true parallel.ranks=2 ", {ACTION_DROP, "add_tied", .nth = 0}, {"gradient of embed.tokens.weight", "terms", NULL}},
    {LLAMA "model.tied=true parallel.ranks=2 parallel.pp=2 ",
     {ACTION_DROP, "add_tied", .nth = 0},
     {"gradient of embed.tokens.weight", "terms", NULL}},
    {LLAMA "model.tied=true parallel.ranks=2 parallel.pp=2 ",
     {ACTION_TWICE, "add_tied", .nth = 0},
     {"gradient of embed.tokens.weight", "terms", NULL}},
    {LLAMA "model.tied=true parallel.ranks=4 parallel.pp=2 ",
     {ACTION_DROP, "send", "tied gradients", .nth = 0},
     {"recv", "no stage sends it", NULL}},
    {LLAMA "model.tied=true parallel.ranks=4 parallel.pp=2 ",
     {ACTION_DROP, "recv", "tied gradients", .nth = 0},
     {"add_tied", "before it is complete", NULL}},
    {LLAMA "parallel.ranks=2 parallel.pp=2 parallel.schedule=gpipe ",
     {ACTION_BATCH, "recv", "mb 1", .nth = 0, .number = -1},
     {"micro-batch", NULL, NULL}},
    /* Context parallelism. */
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.overlap=false ",
     {OP_DROP, "attention.part", "block.0", .nth = 1},
     {"(linear)", "'attended'", "incomplete"}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.overlap=false ",
     {OP_DROP, "context.shift", "block.0", .nth = 0},
     {"(attention.part)", "'kv passed on'", NULL}},
    {LLAMA "parallel.ranks=4 parallel.cp=4 parallel.overlap=false ",
     {OP_ROUND, "attention.part", "block.0", .nth = 1, .number = 1},
     {"(attention.part)", "'kv passed on'", "passed on 1 times"}},
    {LLAMA "parallel.ranks=4 parallel.cp=4 parallel.overlap=false ",
     {OP_DROP, "add", "block.0", .nth = 2},
     {"axis cp|(add)", "d_kv", NULL}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.overlap=false ",
     {OP_DROP, "context.shift", "block.0", .nth = -1},
     {"(columns)", "'d_kv', axis cp", "terms of 1 of 2 ranks"}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather ",
     {OP_DROP, "context.scatter", "block.0", .nth = 0},
     {"(columns)", "'d_kv'", "no op has written"}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather ",
     {OP_DROP, "zero", "block.0", .nth = 1},
     {"(attention.part.grad)", "'d_kv of whole sequences'", NULL}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ",
     {OP_SLOT, "attention", "block.0", .nth = 0, .number = QD_ATTENTION_QKV, .to = "qkv"},
     {"(attention)", "'qkv'", "axis cp"}},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ",
     {OP_DROP, "heads.join", "block.0", .nth = -1},
     {"(rope.grad)", "no op has written", NULL}},
    {LLAMA "parallel.ranks=4 parallel.cp=2 ",
     {ACTION_GROUP, "reduce", "gradients[", .nth = 0, .to = "cp"},
     {"squares", "axis dp", "never summed"}},
    /* Windows: dropped, or another one, in one pass or on some ranks. */
    {LLAMA "model.window=4 ",
     {OP_WINDOW, "attention.grad", "block.0", .nth = 0, .number = 0},
     {"(attention.grad)", "window", "which is 4"}},
    {LLAMA "model.window=4 ", {OP_WINDOW, "attention", "block.1", .nth = 0, .number = 5}, {"(attention)", "window", "which is 4"}},
    {LLAMA "model.window=4 model.full_every=2 ",
     {OP_WINDOW, "attention", "block.1", .nth = 0, .number = 4},
     {"(attention)", "window", "which is 0"}},
    {LLAMA "model.window=4 parallel.ranks=2 parallel.cp=2 ",
     {OP_WINDOW, "attention.part.grad", "block.0", .nth = 1, .number = 0},
     {"(attention.part.grad)", "window", "which is 4"}},
    /* A ring that skips ranks beyond the windows: not the ranks that the windows reach. */
    {LLAMA "model.window=2 data.seq=8 parallel.ranks=4 parallel.cp=4 " PLAIN,
     {OP_DROP, "attention.part", "block.0", .nth = 1},
     {"(attention.part)", "round 3 is added to the sum of 1 rounds", "2 must be before it"}},
    {LLAMA "model.window=2 data.seq=8 parallel.ranks=4 parallel.cp=4 " PLAIN,
     {OP_DROP, "context.shift", "block.0", .nth = 0},
     {"(context.shift)", "'kv passed on'", "no op has written it"}},
    {LLAMA "model.window=2 data.seq=8 parallel.ranks=4 parallel.cp=4 " PLAIN,
     {OP_DROP, "add", "block.0", .nth = -1},
     {"(columns)", "'d_kv passed on'", "it has the terms of 2 of 3 ranks"}},
    /* Sinks: they join the denominator once, after the last round, and their gradients are sums
     * over rows, and in ulysses over heads too. */
    {SINKS CP2, {OP_TWICE, "attention.sink", "block.0", .nth = 0}, {"(attention.sink)", "contains the sinks already", NULL}},
    {SINKS CP2, {OP_DROP, "attention.sink", "block.0", .nth = 0}, {"attn.sinks", "no rank uses it in the forward pass", NULL}},
    {SINKS CP2, {OP_DROP, "attention.sink.grad", "block.0", .nth = 0}, {"attn.sinks", "no op computes its gradient", NULL}},
    {SINKS CP2, {OP_TWICE, "attention.sink.grad", "block.0", .nth = 0}, {"attn.sinks", "overwrites it", NULL}},
    {SINKS CP2 "parallel.cp_mode=ulysses ",
     {OP_FIRST, "attention.sink.grad", "block.0", .nth = 0, .number = 1},
     {"(attention.sink.grad)", "first head", NULL}},
    {SINKS CP2 PLAIN, {PLACE_TP, "block.0.attn.sinks", .number = 0}, {"(attention.sink)", "the sinks are replicated", "axis tp"}},
    {SINKS CP2,
     {ACTION_DROP, "reduce", "gradients[", .param = "block.0.attn.sinks", .nth = 0},
     {"squares", "axis cp", "is never summed over that axis"}},
    {SINKS CP2,
     {ACTION_TWICE, "reduce", "gradients[", .param = "block.0.attn.sinks", .nth = 0},
     {"reduce", "axis cp", "multiplies it by 2"}},
    {SINKS CP2 "parallel.cp_mode=ulysses ",
     {ACTION_DROP, "reduce", "gradients[", .param = "block.0.attn.sinks", .nth = 0},
     {"squares", "axis cp", "is never summed over that axis"}},
    {SINKS "parallel.ranks=2 ",
     {ACTION_DROP, "reduce", "gradients[", .param = "block.1.attn.sinks", .nth = 0},
     {"squares", "axis dp", "is never summed over that axis"}},
    {SINKS CP2, {OP_SLOT, "attention.sink.grad", "block.0", .nth = 0, .number = QD_ATTENTION_SINK_GRAD_DELTA, .to = "lse"},
     {"(attention.sink.grad)", "'lse'", NULL}},
    /* Biases of experts: added once, summed over the ranks with the same experts. */
    {BIASES, {OP_TWICE, "experts.bias", "block.0", .nth = 0}, {"(experts.bias)", "without its bias", NULL}},
    {BIASES, {OP_DROP, "experts.bias", "block.0", .nth = 0}, {"experts.0.down.bias", "no rank uses it", NULL}},
    {BIASES, {OP_DROP, "experts.bias.grad", "block.0", .nth = 0}, {"no op computes its gradient|lacks|term", NULL, NULL}},
    {BIASES, {OP_FIRST, "experts.bias", "block.0", .nth = 0, .number = 3}, {"(experts.bias)", "first column of its bias", NULL}},
    /* Those of gate and up are added by the grouped GEMM. */
    {BIASES,
     {OP_SLOT, "experts", "block.0", .nth = 0, .number = QD_EXPERTS_BIASES, .to = "-"},
     {"experts.0.gate.bias", "no rank uses it", NULL}},
    {BIASES,
     {OP_SLOT, "experts", "block.0", .nth = 1, .number = QD_EXPERTS_BIASES, .to = "mlp.experts.0.down.bias"},
     {"(experts", NULL, NULL}},
    {MOE "model.mlp_bias=true model.activation=swiglu_clamped ",
     {OP_SLOT, "experts.swiglu", "block.0", .nth = 0, .number = QD_EXPERTS_SWIGLU_BIASES, .to = "-"},
     {"experts.0.gate.bias", "no rank uses it", NULL}},
    {BIASES "parallel.expert_rows=1 ",
     {OP_SLOT, "experts.rounds", "block.0", .nth = 0, .number = QD_EXPERT_ROUNDS_DOWN_BIAS, .to = "-"},
     {"(experts.rounds)", NULL, NULL}},
    {BIASES "parallel.expert_rows=1 ",
     {OP_SLOT, "experts.rounds.grad", "block.0", .nth = 0, .number = QD_EXPERT_ROUNDS_GRAD_UP_BIAS_GRAD, .to = "-"},
     {"(experts.bias.grad)", "rows beyond the buffer space of experts are missing", NULL}},
    {MOE EP2 "model.mlp_bias=true ",
     {ACTION_DROP, "reduce", "(2, 2 apart)", .param = "block.0.mlp.experts.0.down.bias", .nth = 0},
     {"squares", "experts.0", "axis edp"}},
    {MOE EP2 "model.mlp_bias=true ",
     {ACTION_TWICE, "reduce", "(2, 2 apart)", .param = "block.0.mlp.experts.0.down.bias", .nth = 0},
     {"reduce", "axis edp", "multiplies it by 2"}},
    /* Experts. */
    {MOE EP2,
     {ACTION_GROUP, "reduce", "(2, 2 apart)", .param = "block.0.mlp.experts.0.gate.weight", .nth = 0, .to = "dp×cp"},
     {"reduce", "experts.0", "not placed in one way|axis ep"}},
    {MOE EP2,
     {ACTION_DROP, "reduce", "(2, 2 apart)", .param = "block.0.mlp.experts.0.gate.weight", .nth = 0},
     {"squares", "experts.0", "axis edp"}},
    {MOE EP2,
     {ACTION_TWICE, "reduce", "(2, 2 apart)", .param = "block.0.mlp.experts.0.gate.weight", .nth = 0},
     {"reduce", "axis edp", "multiplies it by 2"}},
    {MOE EP2 "parallel.overlap=false ", {OP_DROP, "dispatch", "block.0", .nth = 0}, {"(experts)", "'expert_in'", "no op has written"}},
    {MOE EP2 "parallel.overlap=false ", {OP_DROP, "return", "block.0", .nth = 1}, {"'d_rows from experts'", "no op has written", NULL}},
    {MOE EP2 "parallel.overlap=false ",
     {OP_SLOT, "experts", "block.0", .nth = 0, .number = QD_EXPERTS_X, .to = "rows by expert"},
     {"(experts)", "'rows by expert'", "not with their experts"}},
    {MOE EP2, {OP_DROP, "all_gather", "block.0", .nth = 0}, {"(dispatch)", "'expert_rows of all ranks'", NULL}},
    {MOE EP2,
     {OP_SLOT, "combine", "block.0", .nth = 0, .number = QD_COMBINE_WEIGHT, .to = "-"},
     {"(combine)", "'rows from experts'", "without the router's weights"}},
    {MOE EP2,
     {OP_SLOT, "combine", "block.0", .nth = 1, .number = QD_COMBINE_WEIGHT, .to = "expert_weight"},
     {"(combine)", "'expert_weight'", "a second time"}},
    {MOE "parallel.ranks=4 parallel.ep=2 parallel.etp=2 ",
     {OP_ROWS, "combine", "block.0", .nth = 0, .number = 1},
     {"(combine)", "'rows from experts'", "1 terms of each row"}},
    {MOE "parallel.ranks=4 parallel.cp=2 ",
     {OP_DROP, "all_reduce", "block.0", .nth = 0},
     {"(route.grad)", "'expert_load'", "axis cp: it is a partial sum"}},
    {MOE TP2, {OP_DROP, "all_reduce", "block.0", .nth = 0}, {"(route.grad)", "'expert_load'", "axis tp: it is a partial sum"}},
    {MOE TP2, {OP_TWICE, "all_reduce", "block.0", .nth = 0}, {"(all_reduce)", "'expert_load'", "multiplies it by 2"}},
    {MOE "model.balance=batch parallel.ranks=4 ",
     {OP_DROP, "all_reduce", "block.0", .nth = 0},
     {"(route.grad)", "'expert_load'", "axis dp"}},
    {MOE "parallel.ranks=4 ",
     {OP_TOKENS, "route.grad", "block.0", .nth = 0, .number = 2},
     {"(route.grad)", "'expert_load'", "loads are divided by 16 tokens"}},
    {DEEPSEEK TP2, {OP_SCALE, "route.grad", "block.0", .nth = 0, .number = 2}, {"(route.grad)", "auxiliary losses", NULL}},
    /* Router gradients under ep; the norm before the router is in the same reduction. */
    {MOE EP2 "parallel.bucket_mb=0.001 ",
     {ACTION_DROP, "reduce", "dp×cp", .param = "block.0.mlp.router.weight", .nth = 0},
     {"block.0.mlp_norm.weight, axis dp", "never summed", NULL}},
    {MOE EP2 "parallel.bucket_mb=0.001 ",
     {ACTION_TWICE, "reduce", "dp×cp", .param = "block.0.mlp.router.weight", .nth = 0},
     {"block.0.mlp_norm.weight, axis dp", "multiplies it by 4", NULL}},
    {MOE EP2, {OP_DROP, "route.grad", "block.0", .nth = 0}, {"'d_router_logits'", "no op has written", NULL}},
    /* Multi-token prediction: what its losses are normalized by, which tokens it reads, and its
     * part of the shared tables' gradients. */
    {MTP "parallel.ranks=2 ", {OP_SCALE, "head.loss", "head", .nth = 1, .number = 2}, {"(head.loss)", "losses of further tokens", NULL}},
    {MTP TP2, {OP_SCALE, "loss.grad", "head", .nth = -1, .number = 0.5}, {"(loss.grad)", "losses of further tokens", NULL}},
    {MTP "parallel.ranks=2 ", {OP_SCALE, "head.loss", "head", .nth = 0, .number = 0.3}, {"(head.loss)", "losses are divided by", NULL}},
    {MTP "parallel.ranks=2 ", {OP_DROP, "head.loss", "head", .nth = 1}, {"'d_normed_ahead'", "no op has written it", NULL}},
    {MTP "parallel.ranks=2 ", {OP_AHEAD, "head.loss", "head", .nth = 1, .number = -1}, {"(head.loss)", "0 tokens further on", NULL}},
    {MTP "parallel.ranks=2 ", {OP_AHEAD, "head.loss", "head", .nth = 0, .number = 1}, {"(head.loss)", "1 tokens further on", NULL}},
    {MTP "parallel.ranks=2 ", {OP_AHEAD, "embed", "head", .nth = 0, .number = -1}, {"(embed)", "tokens 0 further on", NULL}},
    {MTP "parallel.ranks=2 ", {OP_AHEAD, "embed.grad", "head", .nth = 0, .number = 1}, {"(embed.grad)", NULL, NULL}},
    {MTP "parallel.ranks=2 ", {OP_DROP, "embed.grad", "head", .nth = 0}, {"head.tokens.weight", "no op computes its gradient", NULL}},
    {MTP "train.qk_clip=3 ", {OP_AHEAD, "attention", "head", .nth = 0, .number = 1}, {"(attention)", "prediction module 2, not 1", NULL}},
    {MTP CP2 "train.qk_clip=3 ", {OP_AHEAD, "attention.part", "head", .nth = 0, .number = -1},
     {"(attention.part)", "prediction module 0, not 1", NULL}},
    {MTP "train.qk_clip=3 ", {ACTION_DROP, "clip_heads", NULL, .nth = 2}, {"heads of head", "are not rescaled", NULL}},
    {LLAMA AWAY, {ACTION_WAITS, "update", NULL, .nth = 0}, {"does not wait", "works on its chunk", NULL}},
    {LLAMA AWAY, {ACTION_WAITS, "store", NULL, .nth = 1}, {"does not wait", "works on its chunk", NULL}},
    {LLAMA AWAY, {ACTION_COUNT, "clip_heads", NULL, .nth = 0, .number = 0}, {"does not hold the optimizer state", NULL, NULL}},
    {LLAMA "train.optimizer=muon parallel.ranks=2 ", {ACTION_DROP, "orthogonalize", NULL, .nth = 0},
     {"before its direction is known", NULL, NULL}},
    {MTP "parallel.ranks=2 ", {ACTION_DROP, "add_tied", NULL, .nth = 0}, {"embed.tokens.weight", "of its", NULL}},
    {MTP "parallel.ranks=4 parallel.pp=2 ", {ACTION_DROP, "add_tied", NULL, .nth = 0}, {"embed.tokens.weight", "of its", NULL}},
    {MTP TP2, {ACTION_DROP, "reduce", "tp", .param = "head.mtp.0.hidden_proj.weight", .nth = 0}, {"axis tp", "never summed", NULL}},
    {MOE TP2,
     {ACTION_DROP, "reduce", "tp", .param = "block.0.mlp.router.weight", .nth = 0},
     {"squares", "block.0.mlp_norm.weight, axis tp", "never summed"}},
    {DEEPSEEK TP2,
     {ACTION_DROP, "reduce", "tp", .param = "block.0.mlp.shared.down.weight", .nth = 0},
     {"squares", "mlp.shared.gate.weight, axis tp", "never summed"}},
    {DEEPSEEK "parallel.ranks=4 parallel.tp=2 parallel.zero=1 ",
     {ACTION_TWICE, "reduce", "tp", .param = "block.1.mlp.router.bias", .nth = 0},
     {"reduce", "block.1.mlp_norm.weight, axis tp", "multiplies it by 2"}},
    {MOE "parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node ",
     {OP_DROP, "nodes.return", "block.0", .nth = 0},
     {"(combine)", "'sums by node'", NULL}},
    {MOE "parallel.ranks=2 run.device=cuda ", {OP_TWICE, "experts.dw", "block.0", .nth = 0}, {"backward", "experts", "overwrites it"}},
};
enum { MUTANTS = sizeof mutants / sizeof *mutants };

/* A separate program for every rank. */
static qd_program **build(const char *words, qd_arena *arena, qd_options **options, int *world)
{
    qd_config config;
    *options = layout_options(words);
    ok(qd_config_resolve(*options, 0, &config));
    qd_program **programs = QD_ARENA_NEW(arena, qd_program *, config.world);
    for (int rank = 0; rank < config.world; rank++)
        ok(qd_config_build(&config, rank, arena, &programs[rank]));
    *world = config.world;
    return programs;
}

/* Whether the message contains one of the texts that '|' separates. */
static bool says(const char *message, const char *texts)
{
    char copy[200], *rest = copy;
    snprintf(copy, sizeof copy, "%s", texts);
    for (char *text; (text = strtok_r(rest, "|", &rest)) != NULL;)
        if (strstr(message, text))
            return true;
    return false;
}

static void mutants_are_refused(void **state)
{
    (void)state;
    int wrong = 0;
    for (int i = 0; i < MUTANTS; i++) {
        const mutant *m = &mutants[i];
        qd_arena *arena;
        qd_options *options;
        int world;
        ok(qd_arena_create(&arena));
        qd_program **programs = build(m->words, arena, &options, &world);
        const qd_mesh *mesh = &programs[0]->ledger->mesh;
        ok(qd_prove_programs(mesh, (const qd_program *const *)programs, NULL));
        int changed = mutate(programs, world, &m->m, arena);
        qd_status status = qd_prove_programs(mesh, (const qd_program *const *)programs, NULL);
        const char *message = status == QD_OK ? "" : qd_error_message();
        bool right = changed > 0 && status == QD_MISMATCH;
        for (int k = 0; k < 3 && m->expected[k]; k++)
            right = right && says(message, m->expected[k]);
        if (getenv("QUADRILLE_SHOW") || !right)
            print_message("%s%d: %s, %d programs changed, %s: %s\n", right ? "" : "WRONG ", i, m->m.what, changed, m->words, message);
        wrong += !right;
        qd_options_destroy(options);
        qd_arena_destroy(arena);
    }
    print_message("%d mutants\n", MUTANTS);
    assert_int_equal(wrong, 0);
}

/* Removing any op on all ranks, or any action that computes or communicates on one rank, is refused
 * by the proof (messages between stages: by the communication checker). */
static void everything_is_needed(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        LLAMA "data.format=preferences parallel.ranks=4 parallel.tp=2 parallel.cp=2 ",
        LLAMA TP2,
        LLAMA TP2 PLAIN "parallel.zero=1 model.qk_norm=true ",
        GPT2 TP2 "train.recompute=full ",
        LLAMA "parallel.ranks=4 parallel.cp=2 parallel.zero=3 ",
        LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather train.precision=bf16 ",
        LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ",
        LLAMA "model.tied=true parallel.ranks=2 parallel.pp=2 parallel.schedule=zb_h1 ",
        DEEPSEEK "parallel.ranks=4 parallel.tp=2 parallel.ep=4 parallel.zero=2 ",
        MOE "parallel.ranks=4 parallel.ep=2 parallel.etp=2 train.grad_sync=per_microbatch ",
        MOE "parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node ",
        GPT2 "parallel.ranks=2 run.device=cuda model.dropout=0.1 ",
        OLMO2 "parallel.ranks=4 parallel.tp=4 parallel.sp=false ",
        LLAMA TP2 "train.qk_clip=3 ",
        SINKS CP2,
        SINKS CP2 "parallel.cp_mode=ulysses train.recompute=full ",
        BIASES "parallel.expert_rows=1 ",
        OLMO "parallel.ranks=4 parallel.tp=4 ",
        GEMMA2 TP2,
        GEMMA3 "parallel.ranks=4 parallel.tp=2 parallel.cp=2 ",
        QWEN2_MOE "parallel.ranks=4 parallel.tp=2 parallel.ep=2 ",
        LLAMA TP2 LORA "parallel.zero=3 lora.dropout=0.1 ",
        MTP "parallel.ranks=4 parallel.pp=2 parallel.tp=2 parallel.schedule=zb_h1 ",
        LLAMA TP2 PLAIN LORA,
        MOE "parallel.ranks=4 parallel.ep=4 " LORA,
        LLAMA TP2 FP8,
        LLAMA TP2 "parallel.zero=3 parallel.reshard_after_forward=false train.recompute=full " FP8,
        LLAMA "parallel.ranks=2 parallel.cp=2 fp8.recipe=block train.recompute=selective fp8.weights=use " FP8,
        LLAMA "parallel.ranks=2 fp8.recipe=row fp8.grad=e4m3 " FP8,
        GPT2 "parallel.ranks=2 parallel.tp=2 run.device=cuda " FP8,
        OLMO2 "train.recompute=full " FP8,
        QWEN2_MOE "fp8.keep=attn model.shared_ffn=48 " FP8,
        LLAMA TP2 "train.qk_clip=3 train.precision=bf16 train.offload=optimizer train.offload_chunk_mb=0.001 parallel.zero=1 ",
        LATENT "train.qk_clip=3 train.optimizer=muon parallel.ranks=2 train.precision=bf16 train.offload=optimizer parallel.zero=2 ",
        GPT2 "parallel.ranks=2 train.offload=optimizer parallel.overlap=false ",
    };
    int dropped = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        qd_arena *arena;
        qd_options *options;
        int world;
        ok(qd_arena_create(&arena));
        qd_program **programs = build(layouts[l], arena, &options, &world);
        const qd_mesh *mesh = &programs[0]->ledger->mesh;
        for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
            for (int module = 0; module < programs[0]->ledger->module_count; module++) {
                const qd_module *of = &programs[0]->ledger->modules[module];
                if (module > 1 && of->decl == of[-1].decl)
                    continue;
                for (int nth = 0;; nth++) {
                    qd_program copies[8], *list[8];
                    for (int r = 0; r < world; r++) {
                        copies[r] = *programs[r];
                        list[r] = &copies[r];
                    }
                    if (mutate(list, world, &(mutation){OP_DROP, qd_op_name((qd_op_kind)kind), of->name, .nth = nth}, arena) == 0)
                        break;
                    dropped++;
                    if (qd_prove_programs(mesh, (const qd_program *const *)list, NULL) == QD_OK)
                        fail_msg("%s: accepted without %s number %d of %s", layouts[l], qd_op_name((qd_op_kind)kind), nth, of->name);
                }
            }
        }
        for (int rank = 0; rank < world; rank++)
            for (int i = 0; i < programs[rank]->action_count; i++) {
                qd_program copy = *programs[rank], *list[8];
                memcpy(list, programs, (size_t)world * sizeof *list);
                list[rank] = &copy;
                qd_action_kind kind = (qd_action_kind)copy.actions[i].kind;
                if (kind == QD_ACTION_ALLOC || kind == QD_ACTION_FREE)
                    continue;
                mutate_drop_action(&copy, i, arena);
                dropped++;
                if (qd_prove_programs(mesh, (const qd_program *const *)list, NULL) == QD_OK &&
                    qd_check_programs(mesh, (const qd_program *const *)list) == QD_OK) {
                    char text[200];
                    qd_action_describe(programs[rank], i, text, sizeof text);
                    fail_msg("%s: accepted without action %d of rank %d, %s", layouts[l], i, rank, text);
                }
            }
        qd_options_destroy(options);
        qd_arena_destroy(arena);
    }
    print_message("%d ops and actions left out\n", dropped);
    assert_true(dropped > 1000);
}

/* Whether two names are of the same value, recomputed or sent again. */
static bool same_name(const char *a, const char *b)
{
    char names[2][96];
    for (int k = 0; k < 2; k++) {
        snprintf(names[k], sizeof names[k], "%s", k ? b : a);
        char *again = strstr(names[k], "again");
        if (again)
            again[-1] = '\0';
    }
    return strcmp(names[0], names[1]) == 0;
}

/* Each operand of each op is replaced, on all ranks, by any other value of the same shape: the
 * backward pass then belongs to another forward pass, and is refused. */
static void operands_are_the_right_ones(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        LLAMA "data.format=preferences parallel.ranks=4 parallel.tp=2 parallel.cp=2 ",
        LLAMA TP2,
        GPT2 "parallel.ranks=2 run.device=cuda ",
        LLAMA "parallel.ranks=2 parallel.cp=2 model.qk_norm=true ",
        LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather train.precision=bf16 ",
        GPT2 "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses train.recompute=selective model.dropout=0.1 ",
        DEEPSEEK "parallel.ranks=4 parallel.tp=2 parallel.ep=4 ",
        MOE "parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node ",
        OLMO2 TP2,
        OLMO TP2,
        GEMMA2 TP2,
        GEMMA3 "parallel.ranks=4 parallel.tp=2 parallel.cp=2 ",
        QWEN2_MOE "parallel.ranks=4 parallel.tp=2 parallel.ep=2 ",
        LLAMA TP2 LORA "model.qk_norm=true ",
        MTP TP2,
        MTP "model.mtp_modules=2 model.tied=true ",
        DEEPSEEK "parallel.ranks=2 parallel.ep=2 " LORA,
        SINKS TP2,
        SINKS CP2,
        LLAMA TP2 FP8,
        LLAMA "parallel.ranks=2 parallel.cp=2 fp8.recipe=block train.recompute=selective fp8.weights=use " FP8,
        LLAMA "parallel.ranks=2 fp8.recipe=row fp8.grad=e4m3 " FP8,
        GPT2 "parallel.ranks=2 parallel.tp=2 run.device=cuda " FP8,
        OLMO2 "train.recompute=full " FP8,
        QWEN2_MOE "fp8.keep=attn model.shared_ffn=48 " FP8,
    };
    int tried = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        qd_arena *arena;
        qd_options *options;
        int world;
        ok(qd_arena_create(&arena));
        qd_program **programs = build(layouts[l], arena, &options, &world);
        const qd_mesh *mesh = &programs[0]->ledger->mesh;
        for (int module = 0; module < programs[0]->ledger->module_count; module++) {
            const qd_module *of = &programs[0]->ledger->modules[module];
            const qd_module_class *c = qd_program_class(programs[0], module);
            if (module > 1 && of->decl == of[-1].decl)
                continue;
            for (int i = 0; i < c->op_count; i++)
                for (int j = 0; j < QD_OP_SLOTS; j++) {
                    int kept = c->ops[i].slot[j];
                    if (kept < 0 || qd_op_roles(c->ops[i].kind)[j] != 'r' || c->slots[kept].kind == QD_SLOT_PARAM)
                        continue;
                    for (int s = 0; s < c->slot_count; s++) {
                        const qd_slot *a = &c->slots[kept], *b = &c->slots[s];
                        if (a->rows != b->rows || a->cols != b->cols || a->dtype != b->dtype || b->kind == QD_SLOT_PARAM ||
                            b->kind == QD_SLOT_GRAD || same_name(a->name, b->name))
                            continue;
                        for (int r = 0; r < world; r++)
                            qd_program_class(programs[r], module)->ops[i].slot[j] = (int16_t)s;
                        tried++;
                        if (qd_prove_programs(mesh, (const qd_program *const *)programs, NULL) == QD_OK)
                            fail_msg("%s: %s, op %d (%s): '%s' accepted in place of '%s'", layouts[l], of->name, i,
                                     qd_op_name(c->ops[i].kind), b->name, a->name);
                        for (int r = 0; r < world; r++)
                            qd_program_class(programs[r], module)->ops[i].slot[j] = (int16_t)kept;
                    }
                }
        }
        qd_options_destroy(options);
        qd_arena_destroy(arena);
    }
    print_message("%d operands changed\n", tried);
    assert_true(tried > 1000);
}

/* The scale of gathered rows follows from all of them, not from those of this rank. */
static void scales_are_those_of_all_rows(void **state)
{
    (void)state;
    qd_arena *arena;
    qd_options *options;
    int world, tried = 0;
    ok(qd_arena_create(&arena));
    qd_program **programs = build(LLAMA TP2 FP8, arena, &options, &world);
    const qd_module_class *c = qd_program_class(programs[0], 1);
    for (int i = 0; i < c->op_count; i++)
        for (int g = 0; g < i && c->ops[i].kind == QD_OP_AMAX; g++) {
            const qd_op kept = c->ops[i], *gather = &c->ops[g];
            if (gather->kind != QD_OP_ALL_GATHER || gather->slot[QD_ALL_GATHER_Y] != kept.slot[QD_AMAX_X])
                continue;
            for (int r = 0; r < world; r++) {
                qd_op *op = &qd_program_class(programs[r], 1)->ops[i];
                op->slot[QD_AMAX_X] = gather->slot[QD_ALL_GATHER_X];
                op->m = c->slots[op->slot[QD_AMAX_X]].rows;
            }
            assert_int_not_equal(qd_prove_programs(&programs[0]->ledger->mesh, (const qd_program *const *)programs, NULL), QD_OK);
            assert_non_null(strstr(qd_error_message(), "amax of"));
            for (int r = 0; r < world; r++)
                qd_program_class(programs[r], 1)->ops[i] = kept;
            tried++;
        }
    assert_true(tried > 3);
    qd_options_destroy(options);
    qd_arena_destroy(arena);
}

/* `check` prints what the proof has covered. */
static void check_proves(void **state)
{
    (void)state;
    qd_options *options = layout_options(MOE EP2);
    qd_check_report report = qd_check_report_default();
    ok(qd_check(options, 0, &report));
    assert_true(report.proved_values > 50 && report.proved_ops > 30);
    qd_options_destroy(options);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(mutants_are_refused), cmocka_unit_test(everything_is_needed),
                                       cmocka_unit_test(operands_are_the_right_ones), cmocka_unit_test(scales_are_those_of_all_rows),
                                       cmocka_unit_test(check_proves)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
