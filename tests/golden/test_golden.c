/* Loss, gradients and 20 steps of AdamW or Muon of small models against PyTorch's float64 values,
 * on several layouts.
 * ctest: timeout 300 */
#include "support/layout.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

static const char *const models[] = {"gpt2-tied", "gpt2-untied-gelu", "llama-mha", "llama-gqa-scaled", "llama-tied",
                                     "llama-packed", "llama-qkv-bias", "llama-muon", "gpt2-muon", "qwen2-tied-linear", "qwen2-untied",
                                     "mistral-linear", "mistral-tied", "llama-attention-bias", "llama-mlp-bias", "llama-biases",
                                     "qwen2-yarn", "llama-yarn", "mistral-window", "mistral-window-packed", "qwen2-windows",
                                     "llama-softcap", "llama-dynamic", "llama-nope", "llama-local-base", "olmo2-untied",
                                     "olmo2-tied-bias", "olmo-clipped", "olmo-tied-bias", "gemma2-tied", "gemma2-untied",
                                     "gemma3-tied", "gemma3-untied-bias", "olmo3-untied", "olmo3-tied-bias",
                                     "mixtral-window", "qwen3-moe-mixed", "olmoe-clipped", "qwen2-moe-untied",
                                     "qwen2-moe-windows", "phi3-partial", "phi3-longrope", "llama-longrope",
                                     "gpt-oss", "gpt-oss-tied", "deepseek-dense", "deepseek-experts",
                                     "deepseek-mtp", "deepseek-mtp-packed", "llama-qk-clip",
                                     "deepseek-muon-qk-clip", "deepseek-mtp-qk-clip"};
enum { CLOSER = 9 }; /* models from there on are held to a tenth of the tolerances of losses */
static const char *const layouts[] = {
    "parallel.ranks=1",
    "parallel.ranks=1 train.micro_batch=1",
    "parallel.ranks=1 parallel.split_backward=true train.micro_batch=2",
    "parallel.ranks=2 train.micro_batch=1 parallel.bucket_mb=0.01",
    "parallel.ranks=4 parallel.overlap=false",
    "parallel.ranks=4 parallel.zero=3",
};

/* Compares each parameter of the ledger with the fixture's tensor of that prefix. */
static void compare_all(qd_team *team, qd_golden *g, const char *prefix, qd_tensor_kind kind, double tolerance)
{
    const qd_ledger *ledger = qd_team_program(team)->ledger;
    double rms = qd_golden_rms_norm(g, prefix);
    int compared = 0;
    for (int i = 0; i < ledger->param_count; i++) {
        const qd_param *param = &ledger->params[i];
        const qd_golden_tensor *expected;
        char name[160];
        if (param->tied_to >= 0)
            continue;
        snprintf(name, sizeof name, "%s%s", prefix, param->name);
        ok(qd_golden_find(g, name, QD_F32, &expected));
        float *values = malloc((size_t)expected->count * sizeof *values);
        ok(qd_team_read(team, param->name, kind, values, expected->count));
        ok(qd_golden_compare(values, expected->count, expected, rms, tolerance));
        free(values);
        compared++;
    }
    assert_true(compared > 5);
}

static void load_weights(qd_team *team, qd_golden *g)
{
    const qd_ledger *ledger = qd_team_program(team)->ledger;
    for (int i = 0; i < ledger->param_count; i++) {
        char name[160];
        const qd_golden_tensor *t;
        if (ledger->params[i].tied_to >= 0)
            continue;
        snprintf(name, sizeof name, "init.%s", ledger->params[i].name);
        ok(qd_golden_find(g, name, QD_F32, &t));
        ok(qd_team_write(team, ledger->params[i].name, t->data, t->count));
    }
}

static void train(const char *model, const char *layout, double scale)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s.safetensors", QD_GOLDEN_DIR, model);
    qd_golden *g;
    qd_team *team;
    ok(qd_golden_open(path, &g));
    qd_config config = golden_layout(g, layout);
    config.threads = 1;
    if (qd_golden_lookup(g, "max_scores") && strcmp(config.device, "cpu") != 0) { /* refused there */
        qd_golden_close(g);
        return;
    }
    qd_batch_source source = golden_source(g);
    ok(qd_team_create(&config, &source, &team));
    load_weights(team, g);
    const qd_golden_tensor *losses, *norms, *further = qd_golden_lookup(g, "mtp_losses"),
                                              *scores = qd_golden_lookup(g, "max_scores");
    ok(qd_golden_find(g, "losses", QD_F64, &losses));
    ok(qd_golden_find(g, "grad_norms", QD_F64, &norms));
    for (int64_t step = 0; step < config.steps; step++) {
        qd_step_output out;
        ok(qd_team_step(team, &out));
        double expected = ((const double *)losses->data)[step], norm = ((const double *)norms->data)[step];
        double tolerance = scale * (step == 0 ? 1e-5 : 1e-4);
        if (!(out.loss - expected <= tolerance * expected && expected - out.loss <= tolerance * expected))
            fail_msg("%s, %s, step %d: loss %.9g, PyTorch %.9g", model, layout, (int)step + 1, out.loss, expected);
        double ahead = further ? ((const double *)further->data)[step] : 0.0;
        if (!(out.mtp_loss - ahead <= tolerance * ahead && ahead - out.mtp_loss <= tolerance * ahead))
            fail_msg("%s, %s, step %d: loss of further tokens %.9g, PyTorch %.9g", model, layout, (int)step + 1, out.mtp_loss, ahead);
        if (!(out.grad_norm - norm <= 1e-3 * norm && norm - out.grad_norm <= 1e-3 * norm))
            fail_msg("%s, %s, step %d: gradient norm %.9g, PyTorch %.9g", model, layout, (int)step + 1, out.grad_norm, norm);
        if (step == 0)
            compare_all(team, g, "grad.", QD_TENSOR_GRADIENT, 1e-5);
        double score = scores ? ((const double *)scores->data)[step] : 0.0;
        if (!(out.max_score - score <= tolerance * score && score - out.max_score <= tolerance * score))
            fail_msg("%s, %s, step %d: largest score %.9g, PyTorch %.9g", model, layout, (int)step + 1, out.max_score, score);
        if (step == 4 && (strstr(model, "muon") || scores))
            compare_all(team, g, "after.", QD_TENSOR_VALUE, 1e-4);
    }
    qd_team_destroy(team);
    qd_golden_close(g);
}

static void follows_pytorch(void **state)
{
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++)
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++)
            train(models[m], layouts[l], m < CLOSER ? 1.0 : 0.1);
}

/* A test that cannot fail is a defect: a changed weight must be detected. */
static void sees_a_changed_weight(void **state)
{
    (void)state;
    qd_golden *g;
    qd_team *team;
    ok(qd_golden_open(QD_GOLDEN_DIR "/llama-mha.safetensors", &g));
    qd_config config = golden_layout(g, "parallel.ranks=1");
    qd_batch_source source = golden_source(g);
    ok(qd_team_create(&config, &source, &team));
    load_weights(team, g);
    const qd_golden_tensor *t, *losses;
    ok(qd_golden_find(g, "init.block.0.attn.q.weight", QD_F32, &t));
    ok(qd_golden_find(g, "losses", QD_F64, &losses));
    float *changed = malloc((size_t)t->count * sizeof *changed);
    memcpy(changed, t->data, (size_t)t->count * sizeof *changed);
    changed[3] += 1.0f;
    ok(qd_team_write(team, "block.0.attn.q.weight", changed, t->count));
    qd_step_output out;
    ok(qd_team_step(team, &out));
    double expected = *(const double *)losses->data;
    assert_true(out.loss - expected > 1e-5 * expected || expected - out.loss > 1e-5 * expected);
    free(changed);
    qd_team_destroy(team);
    qd_golden_close(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(follows_pytorch), cmocka_unit_test(sees_a_changed_weight)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
