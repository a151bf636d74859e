/* Maps our tensor names to those of transformers. */
#include "ckpt/huggingface_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct rule {
    const char *ours, *theirs; /* in blocks: the part after the block's own name */
} rule;

typedef struct family {
    const char *prefix, *blocks; /* blocks: after the prefix, before the number */
    bool transposed;             /* matrices of blocks are stored as (in, out) */
    const rule *rules, *own; /* own: come before `rules`; NULL: none */
} family;

static const rule gpt2_rules[] = {
    {"embed.tokens.weight", "wte.weight"},
    {"embed.positions.weight", "wpe.weight"},
    {"attn_norm.weight", "ln_1.weight"},
    {"attn_norm.bias", "ln_1.bias"},
    {"attn.q.weight", "attn.c_attn.weight"},
    {"attn.k.weight", "attn.c_attn.weight"},
    {"attn.v.weight", "attn.c_attn.weight"},
    {"attn.q.bias", "attn.c_attn.bias"},
    {"attn.k.bias", "attn.c_attn.bias"},
    {"attn.v.bias", "attn.c_attn.bias"},
    {"attn.out.weight", "attn.c_proj.weight"},
    {"attn.out.bias", "attn.c_proj.bias"},
    {"mlp_norm.weight", "ln_2.weight"},
    {"mlp_norm.bias", "ln_2.bias"},
    {"mlp.up.weight", "mlp.c_fc.weight"},
    {"mlp.up.bias", "mlp.c_fc.bias"},
    {"mlp.down.weight", "mlp.c_proj.weight"},
    {"mlp.down.bias", "mlp.c_proj.bias"},
    {"head.norm.weight", "ln_f.weight"},
    {"head.norm.bias", "ln_f.bias"},
    {NULL, NULL},
};

static const rule llama_rules[] = {
    {"embed.tokens.weight", "embed_tokens.weight"},
    {"attn_norm.weight", "input_layernorm.weight"},
    {"attn.q.weight", "self_attn.q_proj.weight"},
    {"attn.k.weight", "self_attn.k_proj.weight"},
    {"attn.v.weight", "self_attn.v_proj.weight"},
    {"attn.out.weight", "self_attn.o_proj.weight"},
    {"attn.q.bias", "self_attn.q_proj.bias"},
    {"attn.k.bias", "self_attn.k_proj.bias"},
    {"attn.v.bias", "self_attn.v_proj.bias"},
    {"attn.out.bias", "self_attn.o_proj.bias"},
    {"mlp_norm.weight", "post_attention_layernorm.weight"},
    {"mlp.gate.weight", "mlp.gate_proj.weight"},
    {"mlp.up.weight", "mlp.up_proj.weight"},
    {"mlp.down.weight", "mlp.down_proj.weight"},
    {"mlp.gate.bias", "mlp.gate_proj.bias"},
    {"mlp.up.bias", "mlp.up_proj.bias"},
    {"mlp.down.bias", "mlp.down_proj.bias"},
    {"head.norm.weight", "norm.weight"},
    {"attn.q_norm.weight", "self_attn.q_norm.weight"},
    {"attn.k_norm.weight", "self_attn.k_norm.weight"},
    {"attn.sinks", "self_attn.sinks"},
    {NULL, NULL},
};

/* Where they differ from Llama's: norms behind the branches. */
static const rule olmo2_rules[] = {
    {"attn_norm.weight", "post_attention_layernorm.weight"},
    {"mlp_norm.weight", "post_feedforward_layernorm.weight"},
    {NULL, NULL},
};

static const rule gemma2_rules[] = {
    {"attn_post_norm.weight", "post_attention_layernorm.weight"},
    {"mlp_norm.weight", "pre_feedforward_layernorm.weight"},
    {"mlp_post_norm.weight", "post_feedforward_layernorm.weight"},
    {NULL, NULL},
};

/* One matrix for q, k and v, and one for gate and up. */
static const rule phi3_rules[] = {
    {"attn.q.weight", "self_attn.qkv_proj.weight"},
    {"attn.k.weight", "self_attn.qkv_proj.weight"},
    {"attn.v.weight", "self_attn.qkv_proj.weight"},
    {"mlp.gate.weight", "mlp.gate_up_proj.weight"},
    {"mlp.up.weight", "mlp.gate_up_proj.weight"},
    {NULL, NULL},
};

static const rule deepseek_rules[] = {
    {"attn.q_a.weight", "self_attn.q_a_proj.weight"},
    {"attn.q_a_norm.weight", "self_attn.q_a_layernorm.weight"},
    {"attn.q_b.weight", "self_attn.q_b_proj.weight"},
    {"attn.kv_a.weight", "self_attn.kv_a_proj_with_mqa.weight"}, /* one tensor with the next */
    {"attn.k_rope.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    {"attn.kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"},
    {"attn.kv_b.weight", "self_attn.kv_b_proj.weight"},
    {"mlp.router.bias", "mlp.gate.e_score_correction_bias"},
    {NULL, NULL},
};

/* Of prediction modules, which are numbered as blocks after the last one; the rest is that of a
 * block. */
static const rule ahead_rules[] = {
    {"embed_norm.weight", "enorm.weight"},
    {"hidden_norm.weight", "hnorm.weight"},
    {"embed_proj.weight", "eh_proj.weight"}, /* one tensor with the next, side by side */
    {"hidden_proj.weight", "eh_proj.weight"},
    {"norm.weight", "shared_head.norm.weight"},
    {NULL, NULL},
};
static const family ahead_family = {"", "", false, ahead_rules, NULL};

/* Names of experts by model type: the router, and the parts before and after an expert's number; of
 * shared experts the part before, and their gate; of stacked experts, the name of all of them
 * together. */
typedef struct expert_names {
    const char *router, *before, *gate, *up, *down, *shared, *shared_gate;
    bool stacked;
} expert_names;
static const expert_names mixtral_names = {"block_sparse_moe.gate.weight", "block_sparse_moe.experts.", "w1.weight", "w3.weight",
                                           "w2.weight", NULL, NULL, false};
static const expert_names qwen_names = {"mlp.gate.weight",  "mlp.experts.",     "gate_proj.weight",  "up_proj.weight",
                                        "down_proj.weight", "mlp.shared_expert.", "mlp.shared_expert_gate.weight", false};
static const expert_names gpt_oss_names = {"mlp.router.weight", "mlp.experts.", "gate_up_proj", "gate_up_proj", "down_proj",
                                           NULL, NULL, true};
static const expert_names deepseek_names = {"mlp.gate.weight",  "mlp.experts.",      "gate_proj.weight", "up_proj.weight",
                                            "down_proj.weight", "mlp.shared_experts.", NULL, false};

static const family families[] = {
    [QD_ARCH_GPT2] = {"transformer.", "h.", true, gpt2_rules, NULL},
    [QD_ARCH_LLAMA] = {"model.", "layers.", false, llama_rules, NULL},
    [QD_ARCH_OLMO] = {"model.", "layers.", false, llama_rules, NULL},
    [QD_ARCH_OLMO2] = {"model.", "layers.", false, llama_rules, olmo2_rules},
    [QD_ARCH_GEMMA2] = {"model.", "layers.", false, llama_rules, gemma2_rules},
    [QD_ARCH_GEMMA3] = {"model.", "layers.", false, llama_rules, gemma2_rules},
    [QD_ARCH_DEEPSEEK] = {"model.", "layers.", false, llama_rules, deepseek_rules},
};

static const family phi3_family = {"model.", "layers.", false, llama_rules, phi3_rules};

static const family *family_of(const qd_model *m)
{
    return m->hf_type == QD_HF_PHI3 ? &phi3_family : &families[m->arch];
}

/* The rule of a tensor; NULL: transformers' model does not have it. */
static const rule *rule_of(const family *f, const char *ours)
{
    for (int own = f->own ? 1 : 0; own >= 0; own--)
        for (const rule *r = own ? f->own : f->rules; r->ours; r++)
            if (strcmp(r->ours, ours) == 0)
                return r;
    return NULL;
}

const char *qd_hf_prefix(qd_arch arch)
{
    return families[arch].prefix;
}

static const expert_names *names_of(const qd_model *m)
{
    if (qd_model_is_latent(m))
        return &deepseek_names;
    return m->sinks ? &gpt_oss_names : m->qk_norm || m->moe.shared_gate ? &qwen_names : &mixtral_names;
}

void qd_hf_block_tensor(const qd_model *m, int layer, char *name, size_t size)
{
    const family *f = family_of(m);
    const char *ours = qd_model_is_latent(m) ? "attn.out.weight" : "attn.q.weight";
    snprintf(name, size, "%s%s%d.%s", f->prefix, f->blocks, layer, rule_of(f, ours)->theirs);
}

void qd_hf_ahead_tensor(const qd_model *m, int module, char *name, size_t size)
{
    const family *f = family_of(m);
    snprintf(name, size, "%s%s%d.%s", f->prefix, f->blocks, m->layers + module, rule_of(&ahead_family, "embed_norm.weight")->theirs);
}

void qd_hf_expert_tensor(const qd_model *m, int layer, int expert, char *name, size_t size)
{
    const family *f = &families[m->arch];
    const expert_names *names = names_of(m);
    if (names->stacked) {
        snprintf(name, size, "%s%s%d.%s%s", f->prefix, f->blocks, layer, names->before, names->gate);
        return;
    }
    snprintf(name, size, "%s%s%d.%s%d.%s", f->prefix, f->blocks, layer, names->before, expert, names->gate);
}

/* The part after the block's own name for a parameter of experts; false if transformers' models do
 * not have it. */
static bool expert_name(const qd_model *m, const qd_param *p, const char *ours, char *theirs, size_t size)
{
    const expert_names *names = names_of(m);
    if (strcmp(ours, "mlp.router.weight") == 0) {
        snprintf(theirs, size, "%s", names->router);
        return true;
    }
    if (names->stacked && strcmp(ours, "mlp.router.bias") == 0) {
        snprintf(theirs, size, "mlp.router.bias");
        return true;
    }
    if (strcmp(ours, "mlp.shared_gate.weight") == 0 && names->shared_gate) {
        snprintf(theirs, size, "%s", names->shared_gate);
        return true;
    }
    const bool shared = strncmp(ours, "mlp.shared.", 11) == 0 && names->shared;
    if (p->expert < 0 && !shared)
        return false;
    const char *kind = strrchr(ours, '.'), *matrix = kind - 2; /* "…gate.weight", "…up.weight", "…down.weight" */
    const char *end = matrix[0] == 't' ? names->gate : matrix[0] == 'w' ? names->down : names->up;
    if (names->stacked)
        snprintf(theirs, size, "%s%s%s", names->before, end, strcmp(kind, ".bias") == 0 ? "_bias" : "");
    else if (shared)
        snprintf(theirs, size, "%s%s", names->shared, end);
    else
        snprintf(theirs, size, "%s%d.%s", names->before, p->expert, end);
    return true;
}

static qd_status their_name(const family *f, const qd_ledger *ledger, const qd_param *p, char *name, size_t size)
{
    const qd_module *module = &ledger->modules[p->module];
    bool block = module->layer >= 0 || p->ahead;
    const char *ours = block ? p->name + strlen(module->name) + 1 : p->name;
    int layer = module->layer;
    if (p->ahead) { /* "mtp.0.attn.q_a.weight" */
        char *rest;
        layer = ledger->model.layers + (int)strtol(ours + sizeof "mtp." - 1, &rest, 10);
        ours = rest + 1;
    }
    if (strcmp(ours, "head.weight") == 0) {
        snprintf(name, size, "lm_head.weight");
        return QD_OK;
    }
    char experts[64];
    if (block && expert_name(&ledger->model, p, ours, experts, sizeof experts)) {
        snprintf(name, size, "%s%s%d.%s", f->prefix, f->blocks, layer, experts);
        return QD_OK;
    }
    const rule *r = p->ahead ? rule_of(&ahead_family, ours) : NULL;
    r = r ? r : rule_of(f, ours);
    if (!r)
        return QD_FAIL(QD_UNSUPPORTED, "transformers' %s model has no tensor for '%s'", qd_arch_name(ledger->model.arch), p->name);
    if (block)
        snprintf(name, size, "%s%s%d.%s", f->prefix, f->blocks, layer, r->theirs);
    else
        snprintf(name, size, "%s%s", f->prefix, r->theirs);
    return QD_OK;
}

static void start_tensor(qd_hf_tensor *t, const qd_param *p, bool transposed)
{
    t->dims = p->ndim;
    t->transposed = transposed && p->ndim == 2;
    t->shape[0] = t->transposed ? p->shape[1] : 0;
    t->shape[1] = t->transposed ? 0 : p->shape[1];
    t->shape[2] = 1;
}

/* The shape of stacked experts, once all of ours are known. */
static void stack_tensor(qd_hf_tensor *t, const qd_param *p, int experts)
{
    int64_t outputs = p->shape[0] * (t->param_count / experts);
    t->experts = experts;
    t->dims = p->ndim + 1;
    t->shape[0] = experts;
    t->shape[1] = p->ndim > 1 ? p->shape[1] : outputs;
    t->shape[2] = p->ndim > 1 ? outputs : 1;
}

/* In transformers, Llama and Qwen3 have biases on q, k, v and the output, or on none of them, and
 * every router of DeepSeek has them. */
static void add_zeros(const family *f, const qd_model *m, qd_hf_tensor *tensors, int *count)
{
    const struct {
        const char *theirs;
        bool ours;
        int64_t size;
    } biases[] = {
        {"self_attn.q_proj.bias", m->qkv_bias, (int64_t)m->heads * m->head_dim},
        {"self_attn.k_proj.bias", m->qkv_bias, (int64_t)m->kv_heads * m->head_dim},
        {"self_attn.v_proj.bias", m->qkv_bias, (int64_t)m->kv_heads * m->head_dim},
        {"self_attn.o_proj.bias", m->out_bias, m->hidden},
    };
    const bool unbiased = qd_model_is_latent(m) && m->moe.experts > 0 && m->moe.router == QD_ROUTER_SIGMOID && !m->moe.bias;
    for (int layer = m->moe.first_dense; unbiased && layer < m->layers + qd_model_ahead(m); layer++) {
        qd_hf_tensor *t = &tensors[(*count)++];
        *t = (qd_hf_tensor){.dims = 1, .shape = {m->moe.experts, 1, 1}};
        snprintf(t->name, sizeof t->name, "%s%s%d.%s", f->prefix, f->blocks, layer, rule_of(f, "mlp.router.bias")->theirs);
    }
    const qd_hf_family *theirs = qd_hf_family_of(m);
    if (!theirs || !theirs->attention_bias || m->qkv_bias == m->out_bias)
        return;
    for (int layer = 0; layer < m->layers; layer++)
        for (size_t i = 0; i < sizeof biases / sizeof *biases; i++) {
            if (biases[i].ours)
                continue;
            qd_hf_tensor *t = &tensors[(*count)++];
            *t = (qd_hf_tensor){.dims = 1, .shape = {biases[i].size, 1, 1}};
            snprintf(t->name, sizeof t->name, "%s%s%d.%s", f->prefix, f->blocks, layer, biases[i].theirs);
        }
}

/* Published folders repeat the token table and the head's matrix in each prediction module. */
static void add_copies(const family *f, const qd_ledger *ledger, qd_hf_tensor *tensors, int *count)
{
    const int head = qd_ledger_find(ledger, "head.weight");
    const struct {
        const char *theirs;
        int ours;
    } tables[] = {{"embed_tokens.weight", 0}, {"shared_head.head.weight", ledger->model.tied ? 0 : head}};
    for (int k = 0; k < qd_model_ahead(&ledger->model); k++)
        for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
            qd_hf_tensor *t = &tensors[(*count)++];
            const qd_param *p = &ledger->params[tables[i].ours];
            *t = (qd_hf_tensor){.first = tables[i].ours, .param_count = 1, .copy = true};
            start_tensor(t, p, false);
            t->shape[0] = p->shape[0];
            snprintf(t->name, sizeof t->name, "%s%s%d.%s", f->prefix, f->blocks, ledger->model.layers + k, tables[i].theirs);
        }
}

qd_status qd_hf_tensors(const qd_ledger *ledger, qd_arena *arena, qd_hf_tensor **tensors, int *count)
{
    const family *f = family_of(&ledger->model);
    const int most = ledger->param_count + 3 * (ledger->model.layers + qd_model_ahead(&ledger->model));
    qd_hf_tensor *list = QD_ARENA_NEW(arena, qd_hf_tensor, most);
    int n = 0;
    if (!list)
        return QD_NO_MEMORY;
    for (int i = 0; i < ledger->param_count; i++) {
        const qd_param *p = &ledger->params[i];
        char name[sizeof list->name];
        if (p->tied_to >= 0 || p->adapter) /* adapters are in files of their own */
            continue;
        QD_TRY(their_name(f, ledger, p, name, sizeof name));
        qd_hf_tensor *t = n > 0 && strcmp(list[n - 1].name, name) == 0 ? &list[n - 1] : &list[n++];
        if (t->param_count == 0) {
            memcpy(t->name, name, sizeof name);
            t->first = i;
            start_tensor(t, p, f->transposed && ledger->modules[p->module].layer >= 0);
            t->columns = p->ahead && strstr(name, ".eh_proj.");
            if (t->columns) {
                t->shape[0] = p->shape[0];
                t->shape[1] = 0;
            }
        }
        t->param_count++;
        if (t->columns)
            t->shape[1] += p->shape[1];
        else
            t->shape[t->transposed ? 1 : 0] += p->shape[0];
    }
    for (int i = 0; i < n && names_of(&ledger->model)->stacked; i++)
        if (ledger->params[list[i].first].expert >= 0)
            stack_tensor(&list[i], &ledger->params[list[i].first], ledger->model.moe.experts);
    add_zeros(f, &ledger->model, list, &n);
    add_copies(f, ledger, list, &n);
    *tensors = list;
    *count = n;
    return QD_OK;
}
