/* Published runs as configurations of ours: the rules by which a row is read, and the scores of the
 * predictions. The rules are the same for all rows; docs/simulator.md lists them. */
#include "sim/simulate_impl.h"
#include "base/sized.h"

#include "base/text/json.h"
#include "base/text/text.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct row {
    const qd_json_node *node, *model, *cluster, *config, *result;
    qd_options *options;
    qd_sim_score *score;
} row;

static const char *text_of(const qd_json_node *object, const char *key)
{
    const char *text = qd_json_as_string(qd_json_member(object, key));
    return text ? text : "";
}

/* A member, or the value computed from others; `otherwise` if both are null. */
static double number_of(const qd_json_node *object, const char *key, double otherwise)
{
    char derived[64];
    double value;
    snprintf(derived, sizeof derived, "derived_%s", key);
    if (qd_json_as_double(qd_json_member(object, key), &value) || qd_json_as_double(qd_json_member(object, derived), &value))
        return value;
    return otherwise;
}

/* Counts of a row with their minimum. Layouts are computed from them. */
static const struct {
    const char *object, *key;
    double least;
} counts[] = {
    {"cluster", "n_gpus", 1},     {"config", "tp", 1},          {"config", "cp", 1},           {"config", "pp", 1},
    {"config", "vpp", 1},         {"config", "ep", 1},          {"config", "etp", 1},          {"config", "zero", 0},
    {"config", "fsdp_group", 1},  {"config", "zero1_group", 1}, {"config", "global_batch", 1}, {"config", "micro_batch", 1},
    {"model", "layers", 1},       {"model", "hidden", 1},       {"model", "heads", 1},         {"model", "kv_heads", 1},
    {"model", "head_dim", 1},     {"model", "ffn", 0},          {"model", "vocab", 1},         {"model", "seq", 1},
    {"model", "experts", 0},      {"model", "topk", 0},         {"model", "moe_ffn", 0},       {"model", "shared_expert_ffn", 0},
    {"model", "dense_layers", 0},
};
static const double MOST_COUNT = 1e9;

static bool has_word(const char *text, const char *word)
{
    return strstr(text, word) != NULL;
}

static bool skip(row *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool skip(row *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->score->reason, sizeof r->score->reason, format, args);
    va_end(args);
    return false;
}

/* Counts that are stated must be whole numbers; null means not stated. */
static bool check_counts(row *r)
{
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        double value = number_of(qd_json_member(r->node, counts[i].object), counts[i].key, counts[i].least);
        if (!(value >= counts[i].least && value <= MOST_COUNT) || value != floor(value))
            return skip(r, "%s.%s is %g: it must be a whole number, at least %.0f, or null if not stated", counts[i].object,
                        counts[i].key, value, counts[i].least);
    }
    return true;
}

/* Sets a key; a row that needs a key unknown to this version is skipped. */
static bool set(row *r, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool set(row *r, const char *key, const char *format, ...)
{
    char value[96];
    va_list args;
    va_start(args, format);
    vsnprintf(value, sizeof value, format, args);
    va_end(args);
    if (!qd_options_find(r->options, key))
        return skip(r, "the step program has no %s yet", key);
    return qd_options_set(r->options, key, value) == QD_OK || skip(r, "%s", qd_error_message());
}

/* Software by features: the first row whose word occurs in the name of the framework. Gradients are
 * fp32 unless the recipes set something else, as those of Megatron-Bridge and NeMo do
 * (grad_reduce_in_fp32 = False). Attention, if it is not the profile's: PaxML's runs turn the fused
 * kernel off (xla_gpu_enable_cudnn_fmha=false), MaxText's on GPUs name cuDNN's, and Megatron-Core's
 * own tests are deterministic, without most fusions. */
static const struct {
    const char *word, *profile;
    bool fp32_grads;
    const char *attention;
} frameworks[] = {
    {"Megatron-LM 2021", "early", false, NULL}, {"Megatron-LM 2022", "early", false, NULL}, {"Megatron-DeepSpeed", "early", false, NULL},
    {"DeepSpeed ZeRO-3", "early", false, NULL}, {"metaseq", "early", false, NULL},
    {"MaxText", "compiled", false, "tuned"},    {"PaxML", "compiled", false, "plain"},      {"T5X", "compiled", false, NULL},
    {"compile", "compiled", false, NULL},       {"torchtitan", "compiled", false, NULL},    {"lit-gpt", "compiled", false, NULL},
    {"Megatron-Bridge", "fused", false, NULL},  {"NeMo", "fused", false, NULL},             {"Megatron-Core CI", "modern", true, NULL},
    {"Megatron-Core", "fused", true, NULL},     {"Megatron-LM", "fused", true, NULL},       {"MegaScale", "fused", true, NULL},
    {"HAI-LLM", "fused", true, NULL},           {"MindSpeed", "fused", true, NULL},         {"ModelLink", "fused", true, NULL},
    {"mega", "fused", true, NULL},              {"llm.c", "fused", false, NULL},
    {"LLM-Foundry", "eager", false, NULL},      {"InternLM", "eager", false, NULL}, /* 2023: FlashAttention 1 */
    {"nanotron", "modern", true, NULL},         {"picotron", "modern", true, NULL},         {"FA3", "modern", false, "tuned"},
    {"", "modern", false, NULL}, /* PyTorch since then: DeepSpeed, nanotron, AA-Scaling, picotron */
};

static bool read_software(row *r)
{
    const char *framework = text_of(r->config, "framework");
    size_t i = 0;
    while (!has_word(framework, frameworks[i].word))
        i++;
    const qd_profile *profile = qd_profile_find(frameworks[i].profile);
    bool fp32 = frameworks[i].fp32_grads || strcmp(text_of(r->config, "fsdp_mp_mode"), "DEFAULT") == 0;
    /* Reductions of tp in four pieces, overlapped with the GEMMs. */
    bool fused = strcmp(frameworks[i].profile, "fused") == 0;
    bool torus = strncmp(text_of(r->cluster, "gpu"), "TPU", 3) == 0;
    if (frameworks[i].attention && !torus && !set(r, "software.attention", "%s", frameworks[i].attention))
        return false;
    if ((fused || torus) && number_of(r->config, "tp", 1) > 1 && !set(r, "parallel.tp_overlap", "4"))
        return false;
    /* Bucket size: 25 MiB in PyTorch's own data parallelism, everything in one call in nanotron
     * (reduce_scatter_coalesced), about 100 MiB in the others. */
    int bucket = has_word(framework, "nanotron") ? 4096 : strcmp(frameworks[i].profile, "modern") == 0 ? 25 : 100;
    return set(r, "software.profile", "%s", frameworks[i].profile) &&
           set(r, "parallel.overlap", "%s", profile->overlap || number_of(r->config, "zero", 0) < 2 ? "true" : "false") &&
           set(r, "train.grad_dtype", "%s", fp32 ? "fp32" : "bf16") && set(r, "parallel.bucket_mb", "%d", bucket);
}

/* Clusters by accelerator, and by words about the network. nanotron's benchmarks ran on Hugging
 * Face's cluster, which uses Ethernet (EFA). */
static const struct {
    const char *gpu, *network, *cluster;
} machines[] = {
    {"H100-80GB", "nanotron", "h100-ethernet"},
    {"A100-80GB", "Omni-Path", "a100-opa"}, {"A100-80GB", "4 x 100", "a100-roce"}, {"A100-80GB", "", "a100"},
    {"A100-40GB", "", "a100-40gb"},         {"A800", "", "a800"},                  {"H100-96GB-500W", "", "h100-500w"},
    {"H100-80GB", "GCP A3", "h100-a3"},     {"H100-80GB", "", "h100"},             {"H800", "", "h800"},
    {"H200", "", "h200"},                   {"B200", "", "b200"},                  {"B300", "", "b300"},
    {"GB200", "", "gb200"},                 {"GB300", "", "gb300"},                {"TPU-v4", "", "tpu-v4"},
    {"TPU-v5e", "", "tpu-v5e"},             {"TPU-v5p", "", "tpu-v5p"},            {"TPU-v6e", "", "trillium"},
    {"TPU7x", "", "ironwood"},
};

/* Torus slices by their number of chips. */
static const struct {
    const char *gpu;
    int chips;
    const char *dims;
} slices[] = {
    {"TPU-v6e", 8, "2,4"},     {"TPU-v6e", 16, "4,4"},      {"TPU-v6e", 32, "4,8"},       {"TPU-v6e", 64, "8,8"},
    {"TPU-v6e", 128, "8,16"},  {"TPU-v5p", 64, "4,4,4"},    {"TPU-v5p", 128, "4,4,8"},    {"TPU-v5p", 256, "4,8,8"},
    {"TPU-v5p", 512, "8,8,8"}, {"TPU-v5p", 1024, "8,8,16"}, {"TPU-v5p", 2048, "8,16,16"}, {"TPU-v4", 64, "4,4,4"},
    {"TPU-v4", 512, "8,8,8"},  {"TPU-v4", 1024, "8,8,16"},  {"TPU7x", 64, "4,4,4"},       {"TPU7x", 128, "4,4,8"},
    {"TPU7x", 256, "4,8,8"},
};

static bool read_slice(row *r, const char *gpu)
{
    const char *topology = text_of(r->cluster, "topology");
    int count = atoi(topology) > 0 && has_word(topology, "slice") ? atoi(topology) : 1;
    int chips = (int)number_of(r->cluster, "n_gpus", 0) / count;
    for (size_t i = 0; i < sizeof slices / sizeof *slices; i++)
        if (strcmp(slices[i].gpu, gpu) == 0 && slices[i].chips == chips)
            return set(r, "network.dims", "%s", slices[i].dims);
    return true; /* the preset's */
}

static bool read_cluster(row *r)
{
    const char *gpu = text_of(r->cluster, "gpu"), *inter = text_of(r->cluster, "inter_bw"), *topology = text_of(r->cluster, "topology");
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        if (strcmp(machines[i].gpu, gpu) != 0 || (!has_word(inter, machines[i].network) && !has_word(topology, machines[i].network) &&
                                                  !has_word(text_of(r->config, "framework"), machines[i].network)))
            continue;
        if (qd_cluster_load(r->options, machines[i].cluster) != QD_OK)
            return skip(r, "%s", qd_error_message());
        return strncmp(gpu, "TPU", 3) != 0 || read_slice(r, gpu);
    }
    return skip(r, gpu[0] ? "there is no cluster of %s" : "%sthe accelerator is not stated", gpu);
}

/* Experts; shared experts are counted in units of one expert's width. Dense layers come first. */
static bool read_experts(row *r)
{
    const qd_json_node *m = r->model;
    double width = number_of(m, "moe_ffn", number_of(m, "ffn", 0));
    /* The only published model whose experts have biases (models.json). */
    if (has_word(text_of(m, "name"), "gpt-oss") && !set(r, "software.expert_biases", "true"))
        return false;
    return set(r, "model.experts", "%.0f", number_of(m, "experts", 0)) &&
           set(r, "model.experts_per_token", "%.0f", number_of(m, "topk", 2)) && set(r, "model.expert_ffn", "%.0f", width) &&
           set(r, "model.shared_experts", "%.0f", round(number_of(m, "shared_expert_ffn", 0) / width)) &&
           set(r, "model.first_dense", "%.0f", number_of(m, "dense_layers", 0));
}

/* The sizes of latent attention are not stated with a run: they are those of the preset. */
static bool is_latent(const row *r, qd_model *preset)
{
    const char *name = text_of(r->model, "models_json_key");
    return name[0] != '\0' && qd_preset_find(name, preset) == QD_OK && qd_model_is_latent(preset);
}

static bool read_heads(row *r, int heads)
{
    qd_model p;
    if (is_latent(r, &p))
        return set(r, "model.arch", "deepseek") && set(r, "model.kv_heads", "%d", heads) &&
               set(r, "model.q_lora_rank", "%d", p.q_lora_rank) && set(r, "model.kv_lora_rank", "%d", p.kv_lora_rank) &&
               set(r, "model.qk_nope_head_dim", "%d", p.qk_nope_head_dim) &&
               set(r, "model.qk_rope_head_dim", "%d", p.qk_rope_head_dim) && set(r, "model.v_head_dim", "%d", p.v_head_dim);
    return set(r, "model.kv_heads", "%.0f", number_of(r->model, "kv_heads", heads)) &&
           set(r, "model.head_dim", "%.0f", number_of(r->model, "head_dim", 128));
}

static bool read_model(row *r)
{
    const qd_json_node *m = r->model;
    static const char *const needed[] = {"layers", "hidden", "heads", "ffn", "vocab", "seq"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (number_of(m, needed[i], 0) <= 0)
            return skip(r, "the model's %s is not stated", needed[i]);
    const char *mlp = text_of(m, "mlp");
    bool gated = has_word(mlp, "glu"), tied = false;
    int tp = (int)number_of(r->config, "tp", 1), heads = (int)number_of(m, "heads", 1);
    /* Vocabularies are padded to a multiple of 128 per tensor-parallel rank. */
    int64_t step = 128 * tp, vocab = ((int64_t)number_of(m, "vocab", 0) + step - 1) / step * step;
    qd_json_as_bool(qd_json_member(m, "tied"), &tied);
    if (number_of(m, "experts", 0) > 0 && !read_experts(r))
        return false;
    return set(r, "model.arch", gated ? "llama" : "gpt2") && set(r, "model.layers", "%.0f", number_of(m, "layers", 0)) &&
           set(r, "model.hidden", "%.0f", number_of(m, "hidden", 0)) && set(r, "model.heads", "%d", heads) &&
           read_heads(r, heads) && set(r, "model.ffn", "%.0f", number_of(m, "ffn", 0)) &&
           set(r, "model.vocab", "%lld", (long long)vocab) && set(r, "model.tied", tied ? "true" : "false") &&
           set(r, "data.seq", "%.0f", number_of(m, "seq", 0));
}

/* Stages with equal numbers of layers if these divide; otherwise balanced by cost. */
static bool read_stages(row *r)
{
    int pp = (int)number_of(r->config, "pp", 1), vpp = (int)number_of(r->config, "vpp", 1), layers = (int)number_of(r->model, "layers", 1);
    int stages = pp * (vpp > 1 ? vpp : 1);
    char text[1024] = "";
    if (pp < 2 || layers % stages != 0 || stages > 256)
        return true;
    for (int i = 0; i < stages; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%d", i ? "," : "", layers / stages);
    return qd_options_set(r->options, "parallel.layers", text) == QD_OK || skip(r, "%s", qd_error_message());
}

/* Each expert is sharded over tp like everything else, if that divides the ranks and the row does
 * not state otherwise: Megatron's default, and the meaning of tp elsewhere. Benchmarks balance
 * tokens over experts, so a rank's capacity is the mean load. */
static bool read_expert_axes(row *r, double ep)
{
    if (number_of(r->model, "experts", 0) <= 0)
        return true;
    double tp = number_of(r->config, "tp", 1), ranks = number_of(r->cluster, "n_gpus", 1) / number_of(r->config, "pp", 1);
    double etp = number_of(r->config, "etp", fmod(ranks, ep * tp) == 0.0 ? tp : 1.0);
    return (ep <= 1 || set(r, "parallel.ep", "%.0f", ep)) && (etp <= 1 || set(r, "parallel.etp", "%.0f", etp)) &&
           set(r, "parallel.expert_rows", "1");
}

/* The first word that occurs in the stated precision. "fp8-cs (fp8-mx)" heads columns of two
 * figures, of which the first is in the row. */
static bool read_precision(row *r)
{
    static const struct {
        const char *word, *gemms;
    } precisions[] = {
        {"not stated", NULL},   {"mixed (2+2", NULL}, {"nvfp4", "nvfp4"}, {"fp8-cs", "fp8"},   {"fp8-mx", "mxfp8"},
        {"mxfp8", "mxfp8"},     {"fp8", "fp8"},       {"float8", "fp8"},  {"bf16", "program"}, {"fp16", "program"},
    };
    const char *precision = text_of(r->config, "precision");
    for (size_t i = 0; i < sizeof precisions / sizeof *precisions; i++)
        if (has_word(precision, precisions[i].word) && precisions[i].gemms)
            return set(r, "software.gemms", "%s", precisions[i].gemms);
        else if (has_word(precision, precisions[i].word))
            break;
    return skip(r, "precision: %s", precision[0] ? precision : "not stated");
}

static bool read_layout(row *r)
{
    const qd_json_node *c = r->config;
    double gpus = number_of(r->cluster, "n_gpus", 0), batch = number_of(c, "global_batch", 0), micro = number_of(c, "micro_batch", 0);
    double shard = number_of(c, "fsdp_group", number_of(c, "zero1_group", 0));
    bool sp = false;
    if (gpus < 1 || batch < 1 || micro < 1)
        return skip(r, "%s not stated",
                    gpus < 1    ? "the number of accelerators is"
                    : batch < 1 ? "the global batch is"
                                : "the micro-batch is");
    /* MaxText and PaxML state sequences per accelerator and do not accumulate. */
    if (has_word(text_of(c, "framework"), "MaxText") || has_word(text_of(c, "framework"), "PaxML"))
        micro = batch / (gpus / (number_of(c, "tp", 1) * number_of(c, "cp", 1) * number_of(c, "pp", 1)));
    if (!read_precision(r))
        return false;
    bool stated = qd_json_as_bool(qd_json_member(c, "sp"), &sp);
    double vpp = number_of(c, "vpp", 1), ep = number_of(c, "ep", 1);
    if (stated && !set(r, "parallel.sp", "%s", sp ? "true" : "false"))
        return false;
    if (number_of(c, "pp", 1) > 1 && !set(r, "parallel.schedule", vpp > 1 ? "interleaved" : "1f1b"))
        return false;
    if (vpp > 1 && number_of(c, "pp", 1) > 1 && !set(r, "parallel.virtual_stages", "%.0f", vpp))
        return false;
    if (!read_stages(r))
        return false;
    if (!read_expert_axes(r, ep))
        return false;
    if (shard > 0 && !set(r, "parallel.dp_shard", "%.0f", shard))
        return false;
    return set(r, "parallel.ranks", "%.0f", gpus) && set(r, "parallel.dp", "-1") && set(r, "parallel.tp", "%.0f", number_of(c, "tp", 1)) &&
           set(r, "parallel.cp", "%.0f", number_of(c, "cp", 1)) && set(r, "parallel.pp", "%.0f", number_of(c, "pp", 1)) &&
           set(r, "parallel.zero", "%.0f", number_of(c, "zero", 0)) && set(r, "train.global_batch", "%.0f", batch) &&
           set(r, "train.micro_batch", "%.0f", micro) && set(r, "train.precision", "bf16");
}

/* The stated recompute mode. */
static const char *stated_recompute(const char *text)
{
    if (text[0] == '\0')
        return NULL;
    /* MaxText's custom policies keep or offload what they name, and recompute everything else. */
    if (has_word(text, "full") || has_word(text, "custom") || has_word(text, "offloaded"))
        return "full";
    if (has_word(text, "none"))
        return "none";
    return "selective"; /* of some kind: core attention, per op, minimal */
}

static bool simulate_with(row *r, const char *recompute, int blocks, qd_step_extent extent, qd_sim_report *report)
{
    qd_cluster cluster;
    qd_config config;
    if (!set(r, "train.recompute", "%s", recompute) || !set(r, "train.recompute_layers", "%d", blocks))
        return false;
    qd_status status = qd_cluster_resolve(r->options, &cluster);
    if (status == QD_OK)
        status = qd_cluster_config(r->options, &cluster, &config);
    if (status == QD_OK)
        status = qd_step_report(&config, &cluster, extent, report);
    return status == QD_OK || skip(r, "%s", qd_error_message());
}

/* Full recompute in the fewest blocks with which the run fits; in all of them if it never does. */
static bool simulate_fewest(row *r, qd_sim_report *report)
{
    int none = 0, all = (int)number_of(r->model, "layers", 1);
    while (all - none > 1) {
        int blocks = none + (all - none) / 2;
        if (!simulate_with(r, "full", blocks, QD_STEP_MEMORY, report))
            return false;
        if (report->fits)
            all = blocks;
        else
            none = blocks;
    }
    return simulate_with(r, "full", all, QD_STEP_TIMES, report);
}

/* If nothing is stated: no recompute if that fits, else selective, else full in as many blocks as
 * necessary. Recipes of Megatron-Core and its derivatives stop at selective: they name modules
 * (layernorm, moe_act, core_attn), never whole blocks. */
static bool simulate_row(row *r, qd_sim_report *report)
{
    static const char *const choices[] = {"none", "selective"};
    const char *stated = stated_recompute(text_of(r->config, "recompute"));
    bool modules = strcmp(qd_options_string(r->options, "software.profile"), "fused") == 0;
    if (stated)
        return simulate_with(r, stated, -1, QD_STEP_TIMES, report);
    for (int i = 0; i < 2; i++) {
        if (!simulate_with(r, choices[i], -1, QD_STEP_MEMORY, report))
            return false;
        if (report->fits || (modules && i == 1))
            return simulate_with(r, choices[i], -1, QD_STEP_TIMES, report);
    }
    return simulate_fewest(r, report);
}

/* Tokens per second and accelerator: as stated, from the step time, or from FLOPs in the row's
 * convention. */
static double published_rate(const row *r)
{
    double rate = number_of(r->result, "tokens_per_sec_per_gpu", 0);
    double tokens = number_of(r->config, "global_batch", 0) * number_of(r->model, "seq", 0) / number_of(r->cluster, "n_gpus", 1);
    double seconds = number_of(r->result, "step_time_s", 0);
    if (rate > 0)
        return rate;
    if (seconds > 0)
        return tokens / seconds;
    const char *convention = text_of(r->node, "flop_convention");
    double full = number_of(r->model, "flops_per_token_noncausal", 0), causal = number_of(r->model, "flops_per_token_causal", 0);
    bool hardware =
        has_word(convention, "INCLUDES full") || has_word(convention, "recompute included") || has_word(convention, "recompute counted");
    bool half = has_word(convention, "causal") && !has_word(convention, "non-causal") && !has_word(convention, "noncausal");
    double per_token = half ? causal : hardware ? full * 4.0 / 3.0 : full;
    double tflops = number_of(r->result, "tflops_per_gpu", 0), peak = number_of(r->cluster, "peak_tflops_bf16", 0);
    double share = number_of(r->result, "mfu", 0);
    if (per_token <= 0)
        return 0;
    return tflops > 0 ? tflops * 1e12 / per_token : share * peak * 1e12 / (half ? causal : full);
}

/* A third of the rows, selected by name, is held out from the calibration. */
static bool is_held_out(const char *id)
{
    uint32_t hash = 2166136261u;
    for (; *id; id++)
        hash = (hash ^ (unsigned char)*id) * 16777619u;
    return hash % 3 == 0;
}

static void score_row(row *r)
{
    qd_sim_score *s = r->score;
    qd_sim_report report;
    s->published = published_rate(r);
    s->published_memory = number_of(r->result, "mem_GB", 0) * 1e9;
    s->outcome = strcmp(text_of(r->node, "kind"), "memory-oom") == 0;
    if (!(check_counts(r) && read_software(r) && read_cluster(r) && read_model(r) && read_layout(r) && simulate_row(r, &report)))
        return;
    s->predicted = report.tokens_per_gpu_second;
    s->predicted_memory = (double)report.memory_bytes;
    /* Memory offloaded to the host is not in the plan: such rows are not used for memory. */
    const qd_json_node *tags = qd_json_member(r->node, "tags");
    bool offloads = has_word(text_of(r->config, "recompute"), "offload");
    for (size_t i = 0; i < qd_json_count(tags); i++)
        offloads = offloads ||
                   strcmp(qd_json_as_string(qd_json_item(tags, i)) ? qd_json_as_string(qd_json_item(tags, i)) : "", "cpu-offload") == 0;
    s->predicted_oom = !report.fits;
    s->offloads = offloads;
    if (offloads)
        s->published_memory = 0.0;
    s->error = s->published > 0 ? s->published / s->predicted - 1.0 : 0.0; /* of the step time */
    s->memory_error = s->published_memory > 0 ? s->predicted_memory / s->published_memory - 1.0 : 0.0;
    if (s->published <= 0 && s->published_memory <= 0 && !s->outcome)
        skip(r, "no rate, step time or memory is published");
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double quantile(double *values, int count, double q)
{
    if (count == 0)
        return NAN;
    qsort(values, (size_t)count, sizeof *values, ascending);
    int at = (int)ceil(q * count) - 1;
    if (q == 0.5 && count % 2 == 0)
        return 0.5 * (values[count / 2 - 1] + values[count / 2]);
    return values[at < 0 ? 0 : at];
}

enum { SEEN = 1, HELD_OUT = 2 };
static int collect(const qd_sim_scores *s, int which, double *values)
{
    int count = 0;
    for (int i = 0; i < s->count; i++) {
        const qd_sim_score *r = &s->rows[i];
        if (r->core && r->reason[0] == '\0' && r->published > 0 && (which & (r->held_out ? HELD_OUT : SEEN)))
            values[count++] = fabs(r->error);
    }
    return count;
}

static qd_status sum_up(qd_sim_scores *s)
{
    double *values = calloc((size_t)s->count + 1, sizeof *values);
    if (!values)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d rows", s->count);
    int count = collect(s, SEEN | HELD_OUT, values);
    s->median = quantile(values, count, 0.5);
    s->p90 = quantile(values, count, 0.9);
    count = collect(s, SEEN, values);
    s->median_seen = quantile(values, count, 0.5);
    s->p90_seen = quantile(values, count, 0.9);
    count = collect(s, HELD_OUT, values);
    s->median_held_out = quantile(values, count, 0.5);
    s->p90_held_out = quantile(values, count, 0.9);
    int right = 0;
    for (int i = 0; i < s->count; i++) {
        const qd_sim_score *r = &s->rows[i];
        bool scored = r->reason[0] == '\0';
        s->scored += scored;
        s->skipped += !scored;
        if (scored && r->published_memory > 0)
            values[s->memory_count++] = fabs(r->memory_error);
        /* A run with a published rate did fit. */
        if (scored && !r->offloads && (r->outcome || r->published > 0)) {
            s->oom_count++;
            right += r->predicted_oom == (r->outcome == 1);
        }
    }
    s->memory_median = quantile(values, s->memory_count, 0.5);
    s->oom_accuracy = s->oom_count > 0 ? (double)right / s->oom_count : NAN;
    free(values);
    return QD_OK;
}

static qd_status score_all(const qd_json *document, bool core_only, qd_sim_scores *s)
{
    const qd_json_node *root = qd_json_root(document);
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    size_t total = qd_json_count(root);
    if (qd_json_kind_of(root) != QD_JSON_LIST)
        return QD_FAIL(QD_USAGE, "%s: it must be a list of runs, as data/published/runs.json is", qd_json_name(document));
    s->rows = calloc(total + 1, sizeof *s->rows);
    if (!s->rows)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %zu rows", total);
    for (size_t i = 0; i < total; i++) {
        const qd_json_node *node = qd_json_item(root, i);
        row r = {.node = node, .model = qd_json_member(node, "model"), .cluster = qd_json_member(node, "cluster"),
                 .config = qd_json_member(node, "config"), .result = qd_json_member(node, "result"), .score = &s->rows[s->count]};
        bool core = false;
        qd_json_as_bool(qd_json_member(node, "core"), &core);
        if (core_only && !core)
            continue;
        if (!r.model || !r.cluster || !r.config || !r.result || text_of(node, "id")[0] == '\0')
            return QD_FAIL(QD_USAGE, "%s: row %zu needs id, model, cluster, config and result", qd_json_name(document), i);
        r.score->core = core;
        r.score->held_out = is_held_out(text_of(node, "id"));
        r.score->id = strdup(text_of(node, "id"));
        r.score->source = strdup(text_of(qd_json_member(node, "source"), "title"));
        s->count++;
        if (!r.score->id || !r.score->source)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the names of %zu rows", total);
        QD_TRY(qd_options_create(tables, 2, &r.options));
        score_row(&r);
        qd_options_destroy(r.options);
        qd_error_clear();
    }
    return sum_up(s);
}

qd_status qd_simulate_published(const char *path, bool core_only, qd_sim_scores *scores)
{
    qd_json *document = NULL;
    qd_sim_scores s = qd_sim_scores_default();
    QD_TRY(QD_SIZED_CHECK(scores, qd_sim_scores));
    QD_SIZED_WRITE(scores, &s);
    QD_TRY(qd_json_load(path, &document));
    qd_status status = score_all(document, core_only, &s);
    QD_SIZED_WRITE(scores, &s);
    qd_json_destroy(document);
    return status;
}

void qd_sim_scores_free(qd_sim_scores *scores)
{
    for (int i = 0; i < scores->count; i++) {
        free(scores->rows[i].id);
        free(scores->rows[i].source);
    }
    free(scores->rows);
    QD_SIZED_WRITE(scores, &(qd_sim_scores){0});
}
