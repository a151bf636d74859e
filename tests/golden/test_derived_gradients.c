/* Gradients derived from declarations, against finite differences of the declared forward pass in
 * double (support/models/reference_model.h). One row per model; together they use every declared
 * op, in odd shapes, with the op lists of both devices.
 * ctest: timeout 200 */
#include "support/layout.h"
#include "support/models/parallel_family.h"
#include "support/models/reference_model.h"
#include "support/sample.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define RUN "train.optimizer=sgd train.lr=1e-3 train.schedule=constant train.global_batch=3 train.micro_batch=3 run.threads=1 "
#define LLAMA RUN "model.layers=2 model.hidden=21 model.heads=3 model.kv_heads=1 model.head_dim=6 model.ffn=17 model.vocab=29 data.seq=7 "
#define GPT2 RUN "model.arch=gpt2 model.layers=2 model.hidden=18 model.heads=3 model.ffn=23 model.vocab=31 data.seq=5 "
#define OLMO2 \
    RUN "model.arch=olmo2 model.layers=2 model.hidden=22 model.heads=3 model.kv_heads=1 model.head_dim=6 model.ffn=17 model.vocab=29 " \
        "data.seq=7 "
#define EXPERTS \
    RUN "model.layers=2 model.hidden=19 model.heads=4 model.kv_heads=2 model.head_dim=4 model.ffn=13 model.vocab=23 data.seq=9 "

#define LATENT \
    RUN "model.arch=deepseek model.layers=2 model.hidden=19 model.heads=3 model.qk_nope_head_dim=6 model.qk_rope_head_dim=4 " \
        "model.v_head_dim=7 model.kv_lora_rank=11 model.ffn=13 model.vocab=23 model.latent_norm_eps=0.01 data.seq=9 "

/* The MLP reads the layer's input directly, attention a norm of it; both results are normed
 * again. */
static void normed_behind(qd_layer *b, int which)
{
    (void)which;
    qd_val x = qd_input(b);
    qd_val mlp = qd_norm(b, qd_mlp(b, x), "mlp_norm", "mlp_normed");
    qd_val attention = qd_norm(b, qd_attention_gqa(b, qd_norm(b, x, "attn_norm", "attn_normed")), "attn_norm_2", "attn_normed_2");
    x = qd_residual(b, x, attention, "attn_dropped", "residual");
    qd_output(b, qd_residual(b, x, mlp, "mlp_dropped", "out"));
}

static qd_family normed_behind_family;

static const struct {
    const char *words;
    const qd_family *family; /* NULL: the registry's */
    bool documents, defaults; /* defaults: those of the family instead of model.arch */
} rows[] = {
    {LLAMA, NULL, false, false},
    {LLAMA, NULL, true, false},
    {LLAMA "model.hidden=23 model.heads=4 model.kv_heads=2 model.qk_norm=true model.qkv_bias=true model.tied=true ", NULL, false, false},
    {LLAMA "model.rope_scaling=llama3 model.rope_original_seq=8 model.out_bias=true train.swiglu=again ", NULL, false, false},
    {LLAMA "model.activation=gelu model.mlp_bias=true ", NULL, false, false},
    {LLAMA "model.rope_scaling=linear model.rope_factor=3 model.kv_heads=1 model.qkv_bias=true model.tied=true ", NULL, false, false},
    {LLAMA "model.mlp_bias=true model.qkv_bias=true ", NULL, true, false},
    {LLAMA "model.rope_scaling=yarn model.rope_original_seq=8 model.rope_attention_factor=1.5 ", NULL, false, false},
    {LLAMA "model.window=3 ", NULL, true, false},
    {LLAMA "model.layers=3 model.window=2 model.full_every=2 model.score_softcap=0.7 model.score_scale=0.9 ", NULL, false, false},
    {LLAMA "model.layers=3 model.window=3 model.full_every=2 model.rope_local_base=20 model.rope_fraction=0.7 ", NULL, false, false},
    {LLAMA "model.layers=3 model.nope_every=2 model.rope_scaling=dynamic model.rope_original_seq=4 ", NULL, true, false},
    {GPT2, NULL, false, false},
    {GPT2 "model.activation=gelu model.tied=false model.dropout=0.2 ", NULL, true, false},
    {GPT2 "model.activation=swiglu model.qkv_bias=false model.head_dim=10 ", NULL, false, false},
    {EXPERTS "model.experts=5 model.experts_per_token=2 model.expert_ffn=7 model.qkv_bias=true model.out_bias=true ", NULL, false, false},
    {EXPERTS "model.experts=5 model.experts_per_token=2 model.expert_ffn=7 ", NULL, false, false},
    {EXPERTS "model.layers=4 model.experts=5 model.experts_per_token=2 model.expert_ffn=7 model.first_dense=2 model.window=4 "
             "model.window_from=1 model.full_every=3 ",
     NULL, true, false},
    {EXPERTS "model.experts=5 model.experts_per_token=1 model.expert_ffn=7 model.router_normalised=false model.router_scale=1.5 "
             "model.aux_loss=0.1 model.balance=batch model.z_loss=0.01 model.tied=true ",
     NULL, false, false},
    {EXPERTS "model.layers=3 model.experts=8 model.experts_per_token=3 model.expert_ffn=5 model.shared_experts=2 model.first_dense=1 "
             "model.router=sigmoid model.router_scale=2.5 model.router_groups=4 model.router_top_groups=2 model.router_bias_rate=0.01 "
             "model.aux_loss=0.05 model.z_loss=0.001 model.qk_norm=true model.dropout=0.1 ",
     NULL, true, false},
    {EXPERTS "model.experts=6 model.experts_per_token=2 model.expert_ffn=8 model.shared_experts=1 model.router=sigmoid "
             "model.router_normalised=false ",
     NULL, false, false},
    {EXPERTS "model.experts=6 model.experts_per_token=2 model.expert_ffn=8 model.shared_experts=1 model.shared_ffn=11 "
             "model.shared_gate=true model.router_normalised=false model.qkv_bias=true ",
     NULL, true, false},
    {LLAMA "lora.rank=3 lora.alpha=5 lora.dropout=0.2 model.qkv_bias=true ", NULL, true, false},
    {LLAMA "lora.rank=2 lora.targets=q_proj,v_proj,down_proj model.qk_norm=true model.tied=true ", NULL, false, false},
    {GPT2 "lora.rank=4 lora.alpha=6 lora.rslora=true lora.targets=k_proj,up_proj,o_proj model.dropout=0.1 ", NULL, false, false},
    {EXPERTS "model.experts=5 model.experts_per_token=2 model.expert_ffn=7 model.shared_experts=1 lora.rank=2 lora.alpha=3 ", NULL, false,
     false},
    {EXPERTS "model.experts=5 model.experts_per_token=2 model.expert_ffn=7 model.router_bias_rate=0.01 lora.rank=3 "
             "lora.targets=router,up_proj,down_proj ",
     NULL, false, false},
    {OLMO2, NULL, false, false},
    {OLMO2 "lora.rank=2 ", NULL, false, false},
    {OLMO2 "model.heads=2 model.kv_heads=2 model.tied=true model.qkv_bias=true model.dropout=0.1 ", NULL, true, false},
    {LLAMA "model.qk_norm=true model.qk_norm_over=width ", NULL, false, false},
    {LLAMA "model.arch=olmo model.clip_qkv=0.7 model.tied=true ", NULL, false, false},
    {LLAMA "model.arch=gemma2 model.logit_softcap=2 model.embed_scaled=true ", NULL, false, false},
    {LLAMA "model.arch=gemma2 model.tied=false model.activation=geglu_exact model.dropout=0.1 ", NULL, true, false},
    {LLAMA "model.arch=gemma3 model.layers=3 model.window=3 model.full_every=2 model.rope_local_base=20 model.score_scale=0.4 ", NULL, true,
     false},
    {LLAMA "model.activation=geglu model.logit_softcap=3 ", NULL, false, false},
    {LLAMA "model.arch=olmo model.mlp_bias=true model.out_bias=true ", NULL, true, false},
    {LLAMA "model.sinks=true model.init_std=0.5 ", NULL, false, false},
    {LLAMA "model.sinks=true model.window=3 model.full_every=2 model.score_softcap=2 model.qkv_bias=true model.out_bias=true ", NULL, true,
     false},
    {EXPERTS "model.experts=5 model.experts_per_token=2 model.expert_ffn=7 model.mlp_bias=true model.router_logit_bias=true "
             "model.activation=swiglu_clamped model.swiglu_limit=0.4 model.aux_loss=0.1 ",
     NULL, false, false},
    {EXPERTS "model.layers=4 model.experts=4 model.experts_per_token=3 model.expert_ffn=8 model.mlp_bias=true model.first_dense=1 "
             "model.activation=swiglu_clamped model.swiglu_alpha=1.1 model.sinks=true ",
     NULL, true, false},
    {LLAMA "model.activation=swiglu_clamped model.swiglu_limit=0.3 model.mlp_bias=true ", NULL, false, false},
    {LATENT "model.q_lora_rank=13 ", NULL, false, false},
    {LATENT "model.v_head_dim=12 model.rope_interleave=false model.tied=true ", NULL, true, false},
    {LATENT "model.layers=3 model.q_lora_rank=6 model.rope_scaling=yarn model.rope_factor=4 model.rope_original_seq=4 "
            "model.rope_mscale=0.7 model.rope_mscale_all_dim=1.3 model.experts=8 model.experts_per_token=3 model.expert_ffn=5 "
            "model.shared_experts=1 model.first_dense=1 model.router=sigmoid model.router_scale=2.5 model.router_groups=4 "
            "model.router_top_groups=2 model.router_bias=true model.dropout=0.1 ",
     NULL, true, false},
    {LATENT "model.mtp_modules=3 model.tied=true ", NULL, true, false},
    {LATENT "model.q_lora_rank=6 model.mtp_modules=1 model.mtp_weight=0.8 model.experts=6 model.experts_per_token=2 model.expert_ffn=5 "
            "model.router=sigmoid model.aux_loss=0.05 ",
     NULL, false, false},
    {LLAMA "model.kv_heads=3 ", &parallel_family, false, false},
    {GPT2 "model.dropout=0.2 ", &parallel_family, false, false},
    {LLAMA, &parallel_family, false, true},
    {GPT2, &normed_behind_family, false, false},
};
enum { ROWS = sizeof rows / sizeof *rows, SAMPLES = 5 };

static double uniform(uint64_t *state) /* -1 to 1 */
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 4503599627370496.0 - 1.0;
}

/* No value stays at 0 or 1, where a wrong gradient may look right. Both sides get exactly the same
 * values. */
static void draw_values(qd_team *team, reference_model *r, uint64_t *state)
{
    const qd_ledger *l = r->ledger;
    for (int i = 0; i < l->param_count; i++) {
        const qd_param *p = &l->params[i];
        int64_t n = p->shape[0] * p->shape[1];
        if (p->tied_to >= 0)
            continue;
        float *values = malloc((size_t)n * sizeof *values);
        double size = p->counts ? 0.05 : p->ndim == 1 ? 0.3 : 1.5 / sqrt((double)p->shape[1]);
        for (int64_t k = 0; k < n; k++) {
            values[k] = (float)((p->init == QD_INIT_ONE ? 1.0 : 0.0) + size * uniform(state));
            r->params[i][k] = (double)values[k];
        }
        trained_ok(qd_team_write(team, p->name, values, n));
        free(values);
    }
}

typedef struct batch {
    int32_t *tokens, *targets, *doc_start;
    bool documents;
} batch;

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    const batch *b = context;
    size_t bytes = (size_t)(count * seq) * sizeof *tokens;
    memcpy(tokens, b->tokens + first * seq, bytes);
    memcpy(targets, b->targets + first * seq, bytes);
    memcpy(doc_start, b->doc_start + first * seq, bytes);
    return QD_OK;
}

static batch draw_batch(const qd_config *config, bool documents, uint64_t *state)
{
    int64_t seq = config->strategy.seq, n = config->global_batch * seq;
    batch b = {calloc((size_t)n, sizeof(int32_t)), calloc((size_t)n, sizeof(int32_t)), calloc((size_t)n, sizeof(int32_t)), documents};
    for (int64_t i = 0; i < n; i++) {
        b.tokens[i] = (int32_t)((uniform(state) + 1.0) * 0.5 * (double)config->model.vocab);
        b.targets[i] = (int32_t)((uniform(state) + 1.0) * 0.5 * (double)config->model.vocab);
        b.doc_start[i] = documents && i % seq >= 3 ? 3 : 0;
    }
    return b;
}

typedef struct sampled {
    float own[SAMPLES + 1], difference[SAMPLES + 1]; /* the derived gradient, and the difference quotient */
    int count;
} sampled;

static double loss_at(reference_model *r, int param, int64_t element, double value)
{
    double auxiliary;
    r->params[param][element] = value;
    double loss = reference_loss(r, &auxiliary);
    return loss + auxiliary;
}

/* The element with the largest gradient, and some random ones. */
static sampled compare_elements(qd_team *team, reference_model *r, int param, uint64_t *state)
{
    const double h = 1e-5;
    const qd_param *p = &r->ledger->params[param];
    int64_t n = p->shape[0] * p->shape[1], largest = 0;
    float *gradient = malloc((size_t)n * sizeof *gradient);
    sampled s = {.count = n <= SAMPLES ? (int)n : SAMPLES + 1};
    trained_ok(qd_team_read(team, p->name, QD_TENSOR_GRADIENT, gradient, n));
    for (int64_t i = 0; i < n; i++)
        largest = fabsf(gradient[i]) > fabsf(gradient[largest]) ? i : largest;
    for (int k = 0; k < s.count; k++) {
        int64_t at = n <= SAMPLES ? k : k == 0 ? largest : (int64_t)((uniform(state) + 1.0) * 0.5 * (double)n);
        double kept = r->params[param][at], up = loss_at(r, param, at, kept + h), down = loss_at(r, param, at, kept - h);
        r->params[param][at] = kept;
        s.own[k] = gradient[at];
        s.difference[k] = (float)((up - down) / (2 * h));
    }
    free(gradient);
    return s;
}

static void compare_gradients(const char *words, qd_team *team, reference_model *r, uint64_t *state)
{
    const qd_ledger *l = r->ledger;
    sampled *all = calloc((size_t)l->param_count, sizeof *all);
    double squares = 0.0;
    int tensors = 0;
    for (int i = 0; i < l->param_count; i++) {
        if (l->params[i].tied_to >= 0 || l->params[i].frozen || l->params[i].counts) /* a count of choices is not a gradient */
            continue;
        all[i] = compare_elements(team, r, i, state);
        squares += pow(qd_norm_of(all[i].difference, all[i].count), 2.0);
        tensors++;
    }
    for (int i = 0; i < l->param_count; i++) {
        double error = all[i].count ? qd_relative_error(all[i].own, all[i].difference, all[i].count, sqrt(squares / tensors)) : 0.0;
        if (!(error <= 1e-4))
            fail_msg("%s: the gradient of %s differs by %.3g from finite differences (%.6g and %.6g first)", words, l->params[i].name,
                     error, (double)all[i].own[0], (double)all[i].difference[0]);
    }
    free(all);
}

/* lists: those of which device; both are executed here. */
static void compare_row(const char *words, const qd_family *family, bool documents, bool defaults, const char *lists, bool *used)
{
    uint64_t state = 11;
    qd_config config = layout_config(words);
    config.family = family;
    if (defaults)
        family->defaults(&config.model);
    config.strategy.traits = qd_device_traits_find(lists);
    batch b = draw_batch(&config, documents, &state);
    qd_batch_source source = {.fill = fill, .context = &b, .documents = documents};
    qd_team *team;
    reference_model r;
    qd_step_output out;
    double auxiliary;
    trained_ok(qd_team_create(&config, &source, &team));
    reference_create(&r, qd_team_program(team)->ledger);
    r.batch = config.global_batch;
    r.seq = config.strategy.seq;
    r.tokens = b.tokens;
    r.targets = b.targets;
    r.doc_start = documents ? b.doc_start : NULL;
    r.seed = config.seed;
    r.step = 1;
    draw_values(team, &r, &state);
    trained_ok(qd_team_step(team, &out));
    double loss = reference_loss(&r, &auxiliary);
    if (!(fabs(out.loss - loss) <= 1e-5 * loss))
        fail_msg("%s (%s): the loss is %.9g, %.9g as declared", words, lists, out.loss, loss);
    compare_gradients(words, team, &r, &state);
    for (int i = 0; i < r.ledger->module_count; i++) {
        const qd_layer *decl = &r.ledger->decls[r.ledger->modules[i].decl];
        for (int k = 0; k < decl->op_count; k++)
            used[decl->ops[k].kind] = true;
    }
    reference_destroy(&r);
    qd_team_destroy(team);
    free(b.tokens);
    free(b.targets);
    free(b.doc_start);
}

static void gradients_of_every_op(void **state)
{
    (void)state;
    static const char *const names[] = {
#define NAME(kind) #kind,
        QD_DECL_TABLE(NAME)
#undef NAME
    };
    bool used[QD_DECL_KIND_COUNT] = {0};
    normed_behind_family = parallel_family;
    normed_behind_family.layer = normed_behind;
    for (size_t i = 0; i < 2 * ROWS; i++) {
        if (!sample_has(i, 0, 3))
            continue;
        size_t r = i % ROWS;
        compare_row(rows[r].words, rows[r].family, rows[r].documents, rows[r].defaults, i < ROWS ? "cpu" : "cuda", used);
    }
    for (int kind = 0; kind < QD_DECL_KIND_COUNT; kind++)
        if (!used[kind] && !QD_TEST_SANITIZED)
            fail_msg("no row uses the declared op %s", names[kind]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(gradients_of_every_op)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
