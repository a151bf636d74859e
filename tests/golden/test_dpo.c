/* DPO against trl and PyTorch in float64 (tests/golden/dpo, written by tools/golden_dpo.py): losses
 * and gradients of a step for each kind of loss, and 20 steps, on several layouts. Completions are
 * packed into sequences here, and padded in trl. */
#include "ckpt/safetensors.h"
#include "data/data.h"
#include "support/golden.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define FOLDER QD_TEST_SOURCE_DIR "/tests/golden/dpo/"
#define MODEL                                                                                                                     \
    "model.layers=2 model.hidden=16 model.heads=4 model.kv_heads=2 model.head_dim=4 model.ffn=24 model.vocab=256 "                       \
    "data.format=preferences data.seq=48 "
#define RUN                                                                                                                       \
    "train.lr=3e-3 train.beta1=0.9 train.beta2=0.95 train.eps=1e-5 train.weight_decay=0 train.clip=0.5 train.schedule=constant "    \
    "train.warmup=0 train.steps=20 train.global_batch=4 run.threads=1 "
enum { STEPS = 20, PAIRS = 6, SEQ = 48, WINDOWS = 4, LONG = 1200 };

typedef struct fixture {
    qd_safetensors *file;
    qd_data *data, *one; /* one: all pairs in one sequence, of more rows than a chunk of logits */
    double reference[2 * PAIRS];
} fixture;

static const qd_safetensors_entry *find(const fixture *f, const char *prefix, const char *name)
{
    char key[200];
    snprintf(key, sizeof key, "%s%s", prefix, name);
    const qd_safetensors_entry *e = qd_safetensors_find(f->file, key);
    if (!e)
        fail_msg("the fixture has no %s", key);
    return e;
}

/* Whichever sample is asked for: every step has all windows, in any order. */
static int setup(void **state)
{
    static fixture f;
    qd_data_options o = qd_data_options_default();
    o.path = FOLDER "preferences.jsonl";
    o.seq = SEQ;
    o.examples = o.pairs = true;
    trained_ok(qd_data_open(&o, &f.data));
    o.seq = LONG;
    trained_ok(qd_data_open(&o, &f.one));
    assert_int_equal(qd_data_windows(f.one), 1);
    assert_int_equal(qd_data_windows(f.data), WINDOWS);
    assert_int_equal(qd_data_sequences(f.data), 2 * PAIRS);
    trained_ok(qd_safetensors_load(FOLDER "llama.safetensors", &f.file));
    memcpy(f.reference, find(&f, "", "reference")->data, sizeof f.reference);
    qd_data_set_reference(f.data, f.reference);
    qd_data_set_reference(f.one, f.reference);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    qd_safetensors_close(f->file);
    qd_data_close(f->data);
    qd_data_close(f->one);
    return 0;
}

static qd_team *start(const fixture *f, qd_data *data, const char *words)
{
    char all[900];
    snprintf(all, sizeof all, MODEL RUN "%s", words);
    qd_config config = layout_config(all);
    qd_batch_source source = qd_data_source(data);
    qd_team *team;
    trained_ok(qd_team_create(&config, &source, &team));
    const qd_ledger *l = qd_team_program(team)->ledger;
    for (int i = 0; i < l->param_count; i++) {
        if (l->params[i].tied_to >= 0)
            continue;
        const qd_safetensors_entry *e = find(f, "init.", l->params[i].name);
        float *values = malloc((size_t)e->count * sizeof *values);
        memcpy(values, e->data, (size_t)e->count * sizeof *values);
        trained_ok(qd_team_write(team, l->params[i].name, values, e->count));
        free(values);
    }
    return team;
}

/* Compares a tensor of all parameters that the fixture has, and returns their number. */
static int compare(const fixture *f, qd_team *team, const char *prefix, qd_tensor_kind kind, double factor, double most, const char *what)
{
    const qd_ledger *l = qd_team_program(team)->ledger;
    int compared = 0;
    for (int i = 0; i < l->param_count; i++) {
        char key[200];
        snprintf(key, sizeof key, "%s%s", prefix, l->params[i].name);
        const qd_safetensors_entry *e = l->params[i].tied_to < 0 ? qd_safetensors_find(f->file, key) : NULL;
        if (!e)
            continue;
        float *own = malloc((size_t)e->count * sizeof *own), *theirs = malloc((size_t)e->count * sizeof *theirs);
        memcpy(theirs, e->data, (size_t)e->count * sizeof *theirs);
        trained_ok(qd_team_read(team, l->params[i].name, kind, own, e->count));
        for (int64_t k = 0; k < e->count; k++)
            own[k] *= (float)factor;
        double error = qd_relative_error(own, theirs, e->count, 1.0);
        if (!(error <= most))
            fail_msg("%s: %s differs by %.3g from trl's", what, key, error);
        compared++;
        free(own);
        free(theirs);
    }
    return compared;
}

static void as_trl(void **state)
{
    const fixture *f = *state;
    static const char *const layouts[] = {
        "",
        "parallel.ranks=2 parallel.tp=2 parallel.sp=true ",
        "parallel.ranks=2 parallel.cp=2 ",
        "parallel.ranks=2 parallel.pp=2 train.micro_batch=1 ",
        "parallel.ranks=2 parallel.zero=3 ",
        "data.seq=1200 train.global_batch=1 ",
    };
    double losses[STEPS], margins[STEPS];
    memcpy(losses, find(f, "", "losses")->data, sizeof losses);
    memcpy(margins, find(f, "", "margins")->data, sizeof margins);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        char words[200];
        snprintf(words, sizeof words, "dpo.beta=0.3 %s", layouts[i]);
        const int64_t seq = strstr(words, "data.seq") ? LONG : SEQ, tokens = seq == LONG ? LONG : WINDOWS * SEQ;
        qd_team *team = start(f, seq == LONG ? f->one : f->data, words);
        for (int s = 0; s < STEPS; s++) {
            qd_step_output out;
            trained_ok(qd_team_step(team, &out));
            const double most = s == 0 ? 1e-6 : 1e-5;
            if (!(fabs(out.loss - losses[s]) <= most) || !(fabs(out.margin - margins[s]) <= 2e-5 * (1.0 + fabs(margins[s]))))
                fail_msg("%s: step %d has loss %.8f and margin %.8f; %.8f and %.8f with trl", words, s + 1, out.loss, out.margin, losses[s],
                         margins[s]);
            assert_int_equal((int)out.tokens, PAIRS);
            if (s == 0) /* gradients are divided by the tokens of the batch until they are applied */
                assert_int_equal(compare(f, team, "sigmoid.gradient.", QD_TENSOR_GRADIENT, (double)tokens / PAIRS, 1e-5, words), 21);
        }
        assert_int_equal(compare(f, team, "after.", QD_TENSOR_VALUE, 1.0, 1e-5, words), 21);
        qd_team_destroy(team);
    }
}

static void other_losses(void **state)
{
    const fixture *f = *state;
    static const struct {
        const char *name, *words;
    } kinds[] = {{"hinge", "dpo.loss=hinge dpo.beta=0.01 "}, {"ipo", "dpo.loss=ipo dpo.beta=0.4 "},
                 {"robust", "dpo.loss=robust dpo.beta=0.3 dpo.label_smoothing=0.2 "}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char prefix[64];
        double wanted;
        qd_step_output out;
        qd_team *team = start(f, f->data, kinds[i].words);
        trained_ok(qd_team_step(team, &out));
        memcpy(&wanted, find(f, kinds[i].name, ".loss")->data, sizeof wanted);
        if (!(fabs(out.loss - wanted) <= 1e-6 * (1.0 + fabs(wanted))))
            fail_msg("%s: the loss is %.8f, and %.8f with trl", kinds[i].name, out.loss, wanted);
        snprintf(prefix, sizeof prefix, "%s.gradient.", kinds[i].name);
        assert_int_equal(compare(f, team, prefix, QD_TENSOR_GRADIENT, (double)WINDOWS * SEQ / PAIRS, 1e-5, kinds[i].name), 2);
        qd_team_destroy(team);
    }
}

/* cDPO mixes the losses of both orders of a pair: with 0.25, three quarters of one and a quarter of
 * the other. */
static void label_smoothing(void **state)
{
    const fixture *f = *state;
    qd_step_output plain, smooth;
    qd_team *team = start(f, f->data, "dpo.beta=0.3 ");
    trained_ok(qd_team_step(team, &plain));
    qd_team_destroy(team);
    team = start(f, f->data, "dpo.beta=0.3 dpo.label_smoothing=0.25 ");
    trained_ok(qd_team_step(team, &smooth));
    qd_team_destroy(team);
    /* -log sigmoid(-z) = z - log sigmoid(z), so the mean moves by a quarter of the mean margin. */
    assert_true(fabs(smooth.loss - (plain.loss + 0.25 * plain.margin)) < 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(as_trl), cmocka_unit_test(other_losses), cmocka_unit_test(label_smoothing)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
