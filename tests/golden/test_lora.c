/* LoRA against peft and PyTorch in float64 (tests/golden/lora, written by tools/golden_lora.py):
 * the losses of 20 steps and the adapters after them. */
#include "ckpt/safetensors.h"
#include "support/golden.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define MODEL "model.layers=2 model.hidden=24 model.heads=4 model.kv_heads=2 model.head_dim=6 model.ffn=40 model.vocab=53 data.seq=12 "
#define RUN                                                                                                                     \
    "lora.rank=4 lora.alpha=6 train.lr=1e-2 train.beta1=0.9 train.beta2=0.95 train.eps=1e-8 train.weight_decay=0.1 train.clip=0.5 " \
    "train.schedule=constant train.warmup=0 train.steps=20 train.global_batch=3 train.micro_batch=3 run.threads=1 "
enum { STEPS = 20 };

static const qd_safetensors_entry *find(const qd_safetensors *file, const char *prefix, const char *name)
{
    char key[200];
    snprintf(key, sizeof key, "%s%s", prefix, name);
    const qd_safetensors_entry *e = qd_safetensors_find(file, key);
    if (!e)
        fail_msg("the fixture has no %s", key);
    return e;
}

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    const qd_safetensors *file = context;
    size_t at = (size_t)(first * seq) * sizeof *tokens, bytes = (size_t)(count * seq) * sizeof *tokens;
    memcpy(tokens, (const char *)find(file, "", "tokens")->data + at, bytes);
    memcpy(targets, (const char *)find(file, "", "targets")->data + at, bytes);
    memset(doc_start, 0, bytes);
    return QD_OK;
}

static void compare(const qd_safetensors *file, const char *layout)
{
    char words[900];
    snprintf(words, sizeof words, MODEL RUN "%s", layout);
    qd_config config = layout_config(words);
    qd_batch_source source = {.fill = fill, .context = (void *)(uintptr_t)file};
    qd_team *team;
    trained_ok(qd_team_create(&config, &source, &team));
    const qd_ledger *l = qd_team_program(team)->ledger;
    for (int i = 0; i < l->param_count; i++) {
        const qd_safetensors_entry *e = find(file, "init.", l->params[i].name);
        float *values = malloc((size_t)e->count * sizeof *values);
        memcpy(values, e->data, (size_t)e->count * sizeof *values);
        trained_ok(qd_team_write(team, l->params[i].name, values, e->count));
        free(values);
    }
    double losses[STEPS];
    memcpy(losses, find(file, "", "losses")->data, sizeof losses);
    for (int s = 0; s < STEPS; s++) {
        qd_step_output out;
        trained_ok(qd_team_step(team, &out));
        if (!(fabs(out.loss - losses[s]) <= 1e-5))
            fail_msg("%s: the loss of step %d is %.8f, and %.8f with peft", layout, s + 1, out.loss, losses[s]);
    }
    int compared = 0;
    for (int i = 0; i < l->param_count; i++) {
        if (!l->params[i].adapter)
            continue;
        const qd_safetensors_entry *e = find(file, "after.", l->params[i].name);
        float *own = malloc((size_t)e->count * sizeof *own), *theirs = malloc((size_t)e->count * sizeof *theirs);
        memcpy(theirs, e->data, (size_t)e->count * sizeof *theirs);
        trained_ok(qd_team_read(team, l->params[i].name, QD_TENSOR_VALUE, own, e->count));
        double error = qd_relative_error(own, theirs, e->count, 1.0);
        if (!(error <= 1e-5))
            fail_msg("%s: %s differs by %.3g from peft's after %d steps", layout, l->params[i].name, error, STEPS);
        compared++;
        free(own);
        free(theirs);
    }
    assert_int_equal(compared, 2 * 7 * 2);
    qd_team_destroy(team);
}

static void as_peft(void **state)
{
    (void)state;
    qd_safetensors *file;
    trained_ok(qd_safetensors_load(QD_TEST_SOURCE_DIR "/tests/golden/lora/llama.safetensors", &file));
    compare(file, "");
    compare(file, "parallel.ranks=2 parallel.tp=2 ");
    qd_safetensors_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(as_peft)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
