/* Context parallelism beyond test_layouts.c: packed documents never see each other, runs with one
 * degree of cp are bit-identical, bytes follow the closed formulas, and a ring skips ranks beyond
 * all windows.
 * ctest: timeout 300 */
#include "support/sample.h"
#include "support/trained.h"

#include "spec/layout/context.h"

#include <quadrille/check.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define RUN "train.lr=1e-3 train.schedule=constant train.steps=50 train.global_batch=4 run.threads=1 "
#define LLAMA "model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=4 model.ffn=80 model.vocab=101 data.seq=24 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=27 "

/* Three documents in each sequence; only the middle one has targets. The tokens of the others are
 * drawn with `other`. */
typedef struct packed {
    qd_random_tokens own, other;
} packed;

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    packed *p = context;
    qd_batch_source others = qd_random_source(&p->other), own = qd_random_source(&p->own);
    int32_t *other_tokens = malloc((size_t)(count * seq) * sizeof *other_tokens);
    if (!other_tokens)
        return QD_FAIL(QD_NO_MEMORY, "no memory");
    qd_status status = others.fill(others.context, first, count, seq, other_tokens, targets, doc_start);
    if (status == QD_OK)
        status = own.fill(own.context, first, count, seq, tokens, targets, doc_start);
    int64_t begin = seq / 3 - 1, end = 2 * seq / 3;
    for (int64_t i = 0; i < count * seq; i++) {
        int64_t at = i % seq;
        bool mine = at >= begin && at < end;
        doc_start[i] = (int32_t)(at < begin ? 0 : at < end ? begin : end);
        tokens[i] = mine ? tokens[i] : other_tokens[i];
        targets[i] = mine ? targets[i] : -1;
    }
    free(other_tokens);
    return status;
}

static trained_first one_step(const char *words, uint64_t other)
{
    qd_config config = layout_config(words);
    packed p = {{.seed = 1, .vocab = config.model.vocab}, {.seed = other, .vocab = config.model.vocab}};
    qd_batch_source source = {.fill = fill, .context = &p, .documents = true};
    return trained_step(&config, &source);
}

/* A document's loss and gradients do not depend, to the bit, on the tokens of its neighbours. */
static void documents_do_not_leak(void **state)
{
    (void)state;
    static const char *const models[] = {LLAMA, GPT2};
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.cp=2",
        "parallel.ranks=4 parallel.cp=4",
        "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather",
        "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=ulysses",
    };
    for (size_t m = 0; m < 2; m++) {
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            char words[640];
            snprintf(words, sizeof words, RUN "%s%s", models[m], layouts[i]);
            trained_first a = one_step(words, 2), b = one_step(words, 3);
            if (a.out.loss != b.out.loss || memcmp(a.gradients, b.gradients, (size_t)a.count * sizeof(float)) != 0)
                fail_msg("%s: other documents change a document's loss (%.17g, %.17g) or gradients", words, a.out.loss, b.out.loss);
            free(a.gradients);
            free(a.weights);
            free(b.gradients);
            free(b.weights);
        }
    }
}

/* For one degree and mode of cp, sharding, recompute, overlap, split backward passes and compute
 * threads change no bit. */
static void one_degree_gives_one_set_of_bits(void **state)
{
    (void)state;
    static const char *const variants[] = {
        "parallel.zero=1",
        "parallel.zero=2 parallel.overlap=false",
        "parallel.zero=3 train.recompute=full",
        "parallel.zero=3 parallel.split_backward=true train.recompute=selective parallel.bucket_mb=0.001",
        "train.recompute=full parallel.overlap=false run.threads=2",
    };
    static const char *const modes[] = {"ring", "gather", "ulysses"};
    for (int i = 0; i < 3; i++) {
        char words[640];
        snprintf(words, sizeof words,
                 RUN LLAMA "parallel.ranks=4 parallel.cp=4 train.micro_batch=2 train.grad_sync=per_step parallel.cp_mode=%s ", modes[i]);
        TRAINED_COMPARE(words, variants, 5, 3, .seed = 4, .documents = 3);
        snprintf(words, sizeof words, RUN GPT2 "model.dropout=0.1 parallel.ranks=4 parallel.cp=2 parallel.cp_mode=%s ", modes[i]);
        TRAINED_COMPARE(words, variants, 5, 3, .seed = 5, .ignored = 7);
    }
}

/* The bytes that the ops of context parallelism send in one step, over all ranks, equal the closed
 * formula, and check prints both. T: tokens of a micro-batch of one group of cp; s: bytes of an
 * activation; gradients of keys and values are fp32. */
static void formulas(void **state)
{
    (void)state;
    static const char *const modes[] = {"ring", "gather", "ulysses"};
    static const int degrees[] = {2, 8}; /* more ranks than the 4 kv heads of 6 columns */
    for (int i = 0; i < 3 * 2 * 2 * 2; i++) {
        char words[640];
        int mode = i % 3, n = degrees[i / 3 % 2];
        bool full = i / 6 % 2, half = i / 12;
        snprintf(words, sizeof words, RUN LLAMA "data.seq=25 parallel.ranks=%d parallel.dp=2 parallel.cp=%d train.micro_batch=1 "
                                      "parallel.cp_mode=%s train.recompute=%s train.precision=%s", 2 * n, n, modes[mode],
                 full ? "full" : "none", half ? "bf16" : "fp32");
        int64_t T = 25, q = 48, kv = 24, s = half ? 2 : 4, layers = 2, micro_batches = 2, groups = 2, planned = 0;
        int64_t forward = mode == QD_CP_ULYSSES ? T * (2 * q + 2 * (kv > 6 * n ? kv : 6 * n)) * s / n * (n - 1) : (n - 1) * T * 2 * kv * s;
        int64_t backward = forward + (mode == QD_CP_RING ? n * T * 2 * kv * 4 : mode == QD_CP_GATHER ? (n - 1) * T * 2 * kv * 4 : 0);
        int64_t formula = groups * micro_batches * layers * (forward * (full ? 2 : 1) + backward);
        qd_options *options = layout_options(words);
        qd_check_report report = qd_check_report_default();
        trained_ok(qd_check(options, 0, &report));
        for (int line = 0; line < report.traffic_count; line++)
            planned += strncmp(report.traffic[line].name, "cp: ", 4) == 0 ? report.traffic[line].bytes : 0;
        assert_int_equal(report.formula_count, 1);
        if (planned != formula || report.formulas[0].planned != formula || report.formulas[0].bytes != formula)
            fail_msg("%s: the program says %lld bytes, %s %lld, the formula %lld", words, (long long)planned, report.formulas[0].text,
                     (long long)report.formulas[0].bytes, (long long)formula);
        qd_options_destroy(options);
    }
}

/* Whether a query of any rank has a key of the rank `round` back in its window, position by
 * position. */
static bool reaches(int64_t seq, int cp, int64_t window, int round)
{
    int owner[64];
    for (int r = 0; r < cp; r++) {
        qd_row_run runs[QD_CONTEXT_RUNS];
        for (int i = qd_context_runs(seq, cp, r, runs) - 1; i >= 0; i--)
            for (int64_t k = 0; k < runs[i].count; k++)
                owner[runs[i].position + k] = r;
    }
    for (int64_t q = 0; q < seq; q++)
        for (int64_t k = q; k >= 0 && q - k < window; k--)
            if ((owner[q] + cp - owner[k]) % cp == round)
                return true;
    return false;
}

static void rounds_are_those_that_windows_reach(void **state)
{
    (void)state;
    for (int cp = 2; cp <= 9; cp++)
        for (int64_t seq = 2 * cp; seq <= 5 * cp; seq++)
            for (int64_t window = 1; window <= seq; window++) {
                int next = 0, count = 0;
                for (int round = 0; round < cp; round++) {
                    bool wanted = reaches(seq, cp, window, round);
                    if (wanted != (next == round))
                        fail_msg("seq %d, cp %d, window %d: round %d is %s", (int)seq, cp, (int)window, round,
                                 wanted ? "missing" : "not needed");
                    assert_int_equal(qd_context_rounds(seq, cp, window, round), count);
                    count += wanted;
                    next = wanted ? qd_context_next_round(seq, cp, window, round) : next;
                }
                assert_int_equal(next, cp);
            }
}

/* Eight ranks with chunks of 3 positions. Windows of 1 to 4 reach no other chunk, the next one, and
 * the one behind it: 1, 3 and 5 of 8 rounds. Results are those of one rank and of the other modes,
 * with packed documents too, and the bytes sent are those of the rounds. */
static void a_ring_skips_what_windows_do_not_reach(void **state)
{
    (void)state;
    static const struct {
        const char *window;
        int rounds[2]; /* per layer */
    } rows[] = {{"model.window=1 ", {1, 1}},
                {"model.window=4 ", {3, 3}},
                {"model.window=5 model.full_every=2 ", {5, 8}},
                {"model.window=4 train.precision=bf16 ", {3, 3}}};
    static const char *const variants[] = {"parallel.zero=3 train.recompute=full", "parallel.overlap=false parallel.split_backward=true"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char words[800], one_words[640];
        const bool half = strstr(rows[i].window, "bf16") != NULL;
        snprintf(one_words, sizeof one_words, RUN LLAMA "data.seq=48 %s", rows[i].window);
        snprintf(words, sizeof words, "%sparallel.ranks=8 parallel.cp=8 ", one_words);
        const qd_random_tokens tokens = {.seed = 9, .documents = 3};
        trained one = trained_run(one_words, 3, tokens), many = trained_run(words, 3, tokens);
        for (int s = 0; s < 3; s++)
            if (!(fabs(one.losses[s] - many.losses[s]) <= (half ? 2e-3 : 1e-5) * one.losses[s]))
                fail_msg("%s: step %d: loss %.9g against %.9g", words, s + 1, many.losses[s], one.losses[s]);
        free(one.weights);
        free(many.weights);
        TRAINED_COMPARE(words, variants, 2, 2, .seed = 10, .documents = i % 2 ? 4 : 0);
        trained_plan_equals_run(words);

        int64_t kv = 48 * 2 * 24, formula = 0, planned = 0;
        for (int layer = 0; layer < 2; layer++) {
            int64_t r = rows[i].rounds[layer];
            formula += 4 * kv * (2 * (r - 1) * (half ? 2 : 4) + (r > 1 ? r : 0) * 4); /* 4 sequences */
        }
        qd_options *options = layout_options(words);
        qd_check_report report = qd_check_report_default();
        trained_ok(qd_check(options, 0, &report));
        for (int line = 0; line < report.traffic_count; line++)
            planned += strncmp(report.traffic[line].name, "cp: ", 4) == 0 ? report.traffic[line].bytes : 0;
        if (planned != formula || report.formulas[0].bytes != formula)
            fail_msg("%s: the program says %lld bytes, check's formula %lld, the formula %lld", words, (long long)planned,
                     (long long)report.formulas[0].bytes, (long long)formula);
        qd_options_destroy(options);
    }
}

/* With bf16 storage the running results are fp32, so merging parts adds no rounding. */
static void bf16_stays_close(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.cp_mode=ring", "parallel.cp_mode=gather", "parallel.cp_mode=ulysses"};
    trained one = trained_run(RUN LLAMA "train.precision=bf16", 5, (qd_random_tokens){.seed = 6, .documents = 2});
    for (int i = 0; i < 3; i++) {
        char words[640];
        snprintf(words, sizeof words, RUN LLAMA "train.precision=bf16 parallel.ranks=2 parallel.cp=2 %s", layouts[i]);
        trained two = trained_run(words, 5, (qd_random_tokens){.seed = 6, .documents = 2});
        for (int s = 0; s < 5; s++)
            if (!(fabs(one.losses[s] - two.losses[s]) < 5e-3))
                fail_msg("%s: step %d: loss %.9g against %.9g", words, s + 1, two.losses[s], one.losses[s]);
        free(two.weights);
    }
    free(one.weights);
}

/* Evaluation: forward passes only. */
static double forward_loss(const char *words)
{
    qd_config config = layout_config(words);
    config.strategy.training = false;
    qd_random_tokens random = {.seed = 8, .documents = 2, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    trained_ok(qd_team_create(&config, &source, &team));
    trained_ok(qd_team_step(team, &out));
    qd_team_destroy(team);
    return out.loss;
}

static void forward_passes_alone(void **state)
{
    (void)state;
    static const char *const modes[] = {"ring", "gather", "ulysses"};
    double one = forward_loss(RUN LLAMA);
    for (int i = 0; i < 3; i++) {
        char words[640];
        snprintf(words, sizeof words, RUN LLAMA "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=%s", modes[i]);
        double many = forward_loss(words);
        if (!(fabs(many - one) <= 1e-6 * one))
            fail_msg("%s: loss %.9g against %.9g", words, many, one);
    }
}

static void refused(const char *words, const char *message)
{
    qd_options *options = layout_options(words);
    qd_check_report report = qd_check_report_default();
    if (qd_check(options, 0, &report) == QD_OK || !strstr(qd_error_message(), message))
        fail_msg("%s: '%s' instead of '%s'", words, qd_error_message(), message);
    qd_error_clear();
    qd_options_destroy(options);
}

static void what_cannot_work_is_refused(void **state)
{
    (void)state;
    refused(RUN LLAMA "parallel.ranks=4 parallel.cp=4 data.seq=7", "needs at least 8 positions");
    refused(RUN LLAMA "model.heads=6 model.kv_heads=3 parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses",
            "its 3 kv heads a multiple or a divisor");
    refused(RUN GPT2 "parallel.ranks=3 parallel.cp=3 parallel.cp_mode=ulysses", "ring and gather take any");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(documents_do_not_leak),
                                       cmocka_unit_test(one_degree_gives_one_set_of_bits),
                                       cmocka_unit_test(formulas),
                                       cmocka_unit_test(rounds_are_those_that_windows_reach),
                                       cmocka_unit_test(a_ring_skips_what_windows_do_not_reach),
                                       cmocka_unit_test(bf16_stays_close),
                                       cmocka_unit_test(forward_passes_alone),
                                       cmocka_unit_test(what_cannot_work_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
