/* Draws random valid layouts, and small models of the families to draw them for. */
#include "support/layout_sample.h"

#include "base/rng.h"

#include <stdio.h>
#include <string.h>

#define SIZES "model.layers=5 model.hidden=32 model.heads=4 model.ffn=56 model.vocab=307 "
#define LATENT \
    SIZES "model.arch=deepseek model.kv_lora_rank=11 model.qk_nope_head_dim=6 model.qk_rope_head_dim=4 model.v_head_dim=7 "
#define ATTENTION_BIAS "model.qkv_bias=true model.out_bias=true "
#define LINEAR "model.rope_scaling=linear model.rope_factor=2.5 "
/* Norms behind the branches make gradients large at initial weights: smaller steps keep rounding
 * from being magnified. */
#define SLOW "train.lr=0.03 "
const layout_model layout_families[] = {
    {SIZES "model.kv_heads=2 model.qkv_bias=true model.tied=true data.seq=15 ", 4, 0},                         /* Qwen2 */
    {SIZES "model.kv_heads=1 model.head_dim=12 model.hf_type=mistral data.seq=13 " LINEAR, 4, 0},              /* Mistral */
    {SIZES "model.kv_heads=1 data.seq=15 model.tied=true " ATTENTION_BIAS LINEAR, 4, 0},                       /* Llama, attention_bias */
    {SIZES "model.kv_heads=2 model.mlp_bias=true data.seq=13 model.rope_scaling=yarn model.rope_original_seq=8 ", 4,
     0}, /* Llama, mlp_bias */
    {SIZES "model.kv_heads=2 model.head_dim=6 model.qk_norm=true data.seq=15 " ATTENTION_BIAS LINEAR, 4, 0},   /* Qwen3, attention_bias */
    {SIZES "model.kv_heads=4 model.qk_norm=true data.seq=13 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 " ATTENTION_BIAS,
     4, 8}, /* Qwen3-MoE, attention_bias */
    {SIZES "model.kv_heads=1 model.head_dim=12 model.hf_type=mistral data.seq=29 model.window=3 ", 4, 0},     /* Mistral with a window */
    {SIZES "model.kv_heads=2 model.qkv_bias=true data.seq=26 model.window=5 model.window_from=2 " LINEAR, 4,
     0}, /* Qwen2, windows from a layer on */
    {SIZES "model.kv_heads=2 data.seq=23 model.window=4 model.full_every=2 model.score_softcap=2 model.score_scale=0.7 model.tied=true ", 4,
     0}, /* the attention of Gemma 2 */
    {SIZES "model.kv_heads=1 model.head_dim=12 data.seq=22 model.window=6 model.full_every=2 model.rope_local_base=50 "
           "model.rope_fraction=0.5 model.nope_every=3 " LINEAR,
     4, 0}, /* two rotary bases, partial, layers without positions */
    {SIZES "model.kv_heads=2 model.qk_norm=true model.qk_norm_over=width model.clip_qkv=0.5 data.seq=13 model.experts=8 "
           "model.experts_per_token=2 model.expert_ffn=24 model.router_normalised=false ",
     4, 8}, /* OLMoE */
    {SIZES "model.kv_heads=2 model.qkv_bias=true data.seq=15 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 "
           "model.router_normalised=false model.shared_experts=1 model.shared_ffn=40 model.shared_gate=true model.first_dense=1 ",
     4, 8}, /* Qwen2-MoE */
    {SIZES "model.arch=olmo model.kv_heads=2 model.clip_qkv=0.05 model.head_dim=6 model.tied=true data.seq=15 ", 4, 0}, /* OLMo */
    {SIZES "model.arch=gemma2 model.kv_heads=2 model.head_dim=6 model.logit_softcap=3 model.window=4 model.full_every=2 "
           "model.score_softcap=2 data.seq=15 " SLOW,
     4, 0}, /* Gemma 2 */
    {SIZES "model.arch=gemma3 model.kv_heads=1 model.head_dim=6 model.window=4 model.full_every=3 model.rope_local_base=50 "
           "model.score_scale=0.25 data.seq=22 " LINEAR SLOW,
     4, 0}, /* Gemma 3 */
    {SIZES "model.arch=olmo2 model.kv_heads=2 model.head_dim=6 data.seq=26 model.window=5 model.full_every=4 model.rope_local_base=10000 "
           "model.rope_scaling=yarn model.rope_original_seq=8 " SLOW,
     4, 0}, /* OLMo 3 */
    {SIZES "model.arch=olmo2 model.kv_heads=1 model.head_dim=6 model.tied=true data.seq=15 " SLOW, 4, 0}, /* OLMo 2 */
    {SIZES "model.arch=olmo2 model.kv_heads=2 model.qkv_bias=true data.seq=13 model.window=3 model.full_every=2 " LINEAR SLOW, 4,
     0}, /* OLMo 2 with biases, and the windows of OLMo 3 */
    {SIZES "model.kv_heads=2 model.head_dim=6 data.seq=23 model.window=4 model.full_every=2 model.sinks=true model.init_std=0.1 "
           "model.rope_scaling=yarn model.rope_original_seq=8 model.rope_truncate=false model.mlp_bias=true model.experts=8 "
           "model.experts_per_token=2 model.expert_ffn=24 model.router_logit_bias=true model.activation=swiglu_clamped "
           "model.swiglu_limit=0.05 " ATTENTION_BIAS,
     4, 8}, /* GPT-OSS */
    {LATENT "model.q_lora_rank=13 data.seq=15 ", 4, 0}, /* DeepSeek without experts */
    {LATENT "data.seq=13 model.rope_scaling=yarn model.rope_original_seq=8 model.rope_factor=4 model.rope_mscale=1 "
            "model.rope_mscale_all_dim=0.8 model.experts=8 model.experts_per_token=3 model.expert_ffn=24 model.shared_experts=1 "
            "model.first_dense=1 model.router=sigmoid model.router_groups=4 model.router_top_groups=2 model.router_scale=2.5 "
            "model.router_bias_rate=0.001 ",
     4, 8}, /* DeepSeek V2 and V3: queries are not compressed */
    {LATENT "model.q_lora_rank=13 data.seq=17 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 model.first_dense=1 "
            "model.router=sigmoid model.router_bias_rate=0.001 model.aux_loss=0.01 model.mtp_modules=1 model.mtp_weight=0.4 ",
     4, 8}, /* DeepSeek V3 with multi-token prediction */
    {LATENT "data.seq=14 model.tied=true model.mtp_modules=2 ", 4, 0}, /* two prediction modules, one table */
    {LATENT "model.q_lora_rank=13 data.seq=15 model.init_std=0.2 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 "
            "model.first_dense=1 model.router=sigmoid model.mtp_modules=1 train.qk_clip=0.5 ",
     4, 8}, /* Kimi K2 with a prediction module, heads rescaled */
};
_Static_assert(sizeof layout_families / sizeof *layout_families == LAYOUT_FAMILIES, "the header says how many");

int layout_sample_below(layout_sample *s, int below)
{
    return (int)qd_rng_below(qd_rng_key(s->seed, "layouts"), s->drawn++, (uint64_t)below);
}

static const char *choose(layout_sample *s, const char *const *list, int count)
{
    return list[layout_sample_below(s, count)];
}
#define CHOOSE(...) choose(s, (const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

int layout_sample_draw(layout_sample *s, const layout_model *models, int count, char *words, size_t size, char *kind, size_t kind_size)
{
    static const int degrees[] = {1, 2, 4};
    int tp, pp, dp, cp;
    do {
        tp = degrees[layout_sample_below(s, 3)];
        pp = degrees[layout_sample_below(s, 3)];
        dp = degrees[layout_sample_below(s, 3)];
        cp = degrees[layout_sample_below(s, 3)];
    } while (tp * pp * dp * cp > 8 || tp * pp * dp * cp == 1);
    int model = layout_sample_below(s, count);
    /* Experts fold the same ranks in their own way, and need the rows of sp. */
    int experts = models[model].experts, ep = experts ? degrees[layout_sample_below(s, 3)] : 1,
        etp = experts ? degrees[layout_sample_below(s, 2)] : 1;
    if (tp * cp * dp % (ep * etp) != 0)
        ep = etp = 1;
    const char *sp = tp > 1 && !experts ? CHOOSE("parallel.sp=true ", "parallel.sp=false ") : "";
    const char *sync = CHOOSE("train.grad_sync=per_step ", "train.grad_sync=per_microbatch ");
    const char *micro = CHOOSE("train.micro_batch=1 ", "train.micro_batch=2 ");
    const char *schedule = pp == 1   ? ""
                           : pp == 2 ? CHOOSE("parallel.schedule=1f1b ", "parallel.schedule=gpipe ", "parallel.schedule=zb_h1 ",
                                              "parallel.schedule=interleaved ", "parallel.schedule=zb_v ",
                                              dp <= 2 ? "parallel.schedule=dualpipe_v " : "parallel.schedule=1f1b ")
                                     : CHOOSE("parallel.schedule=1f1b ", "parallel.schedule=gpipe ", "parallel.schedule=zb_h1 ");
    if (strstr(schedule, "dualpipe")) { /* needs four micro-batches on two ranks */
        micro = "train.micro_batch=1 ";
        schedule = dp > 2 ? "parallel.schedule=zb_v " : schedule;
    }
    /* Ulysses distributes heads: each rank of tp must have one for each rank of cp. */
    const char *mode = cp == 1 ? ""
                       : cp * tp <= models[model].heads
                           ? CHOOSE("parallel.cp_mode=ring ", "parallel.cp_mode=gather ", "parallel.cp_mode=ulysses ")
                           : CHOOSE("parallel.cp_mode=ring ", "parallel.cp_mode=gather ");
    /* Half of the layouts with experts send rows once per node, with the experts on two or four
     * nodes. */
    char nodes[64] = "";
    if (ep > 1 && strstr(sync, "microbatch"))
        snprintf(nodes, sizeof nodes, "parallel.dispatch=node parallel.nodes=%d ",
                 tp * pp * dp * cp / (etp * (ep == 4 && cp == 1 ? 2 : 1)));
    snprintf(kind, kind_size, "%d dp %d cp %d tp %d ep %d etp %d %s%s%s%s%s", model, dp, cp, tp, ep, etp, mode, sp, dp * cp > 1 ? sync : "",
             micro, nodes[0] ? "by node" : "");
    int zero = layout_sample_below(s, 4);
    const char *again = CHOOSE("", "train.recompute=selective ", "train.recompute=full ", "train.recompute=full train.recompute_layers=2 ");
    const char *overlap = CHOOSE("", "parallel.bucket_mb=0.01 ", "parallel.overlap=false ");
    const char *split = CHOOSE("", "parallel.split_backward=true "), *pieces = tp > 1 ? CHOOSE("", "parallel.tp_overlap=3 ") : "";
    /* Groups of two keep parameters between the passes, if they have all experts. */
    const char *kept =
        zero == 3 && overlap[0] == '\0' && dp * cp % 2 == 0 && 2 * tp % (ep * etp) == 0 ? "parallel.reshard_after_forward=2 " : "";
    snprintf(
        words, size,
        LAYOUT_SAMPLE_RUN
        "%sparallel.ranks=%d parallel.tp=%d parallel.pp=%d parallel.dp=%d parallel.cp=%d parallel.ep=%d parallel.etp=%d parallel.zero=%d "
        "%s%s%s%s%s%s%s%s%s%s%s",
        models[model].words, tp * pp * dp * cp, tp, pp, dp, cp, ep, etp, zero, mode, sp, sync, micro, nodes, schedule, again, overlap,
        split, pieces, kept);
    return model;
}
