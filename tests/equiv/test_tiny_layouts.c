/* Every layout that `check` accepts also trains: a seeded sample of layouts with minimal sizes (one
 * row, one token more than ranks, one layer, one head per rank), each checked as the command does
 * and then run for two steps. QUADRILLE_LAYOUTS=5000 test_tiny_layouts draws more, QUADRILLE_SEED=2
 * others.
 * ctest: timeout 300
 * ctest: processors 2 */
#include "base/rng.h"
#include "support/sample.h"
#include "support/trained.h"

#include <quadrille/check.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

static uint64_t seed, drawn;

static int draw(int below)
{
    return (int)qd_rng_below(qd_rng_key(seed, "tiny layouts"), drawn++, (uint64_t)below);
}

#define CHOOSE(...) \
    ((const char *const[]){__VA_ARGS__})[draw((int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)))]

static void draw_layout(char *words, size_t size)
{
    static const int degrees[] = {1, 2, 3, 4};
    int tp, pp, dp, cp;
    do {
        tp = degrees[draw(4)];
        pp = degrees[draw(4)];
        dp = degrees[draw(4)];
        cp = degrees[draw(4)];
    } while (tp * pp * dp * cp > 4);
    int heads = tp * (1 + draw(2)), experts = draw(3) ? 0 : 1 + draw(4), ep = experts && draw(2) ? tp * dp * cp : 1;
    int used = snprintf(words, size,
                        "%smodel.layers=%d model.hidden=%d model.heads=%d model.head_dim=%d model.ffn=%d model.vocab=%d data.seq=%d "
                        "train.micro_batch=%d train.global_batch=%d parallel.ranks=%d parallel.tp=%d parallel.pp=%d parallel.dp=%d "
                        "parallel.cp=%d parallel.zero=%d run.threads=1 train.steps=2 %s%s%s%s%s%s%s",
                        CHOOSE("", "model.arch=gpt2 "), 1 + draw(3), 4 * (1 + draw(3)), heads, 2 * (1 + draw(2)), 1 + draw(6), 1 + draw(7),
                        1 + draw(6), 1 + draw(2), dp * (1 + draw(4)), tp * pp * dp * cp, tp, pp, dp, cp, draw(4),
                        tp > 1 ? CHOOSE("", "parallel.sp=false ", "parallel.tp_overlap=3 ") : "",
                        cp > 1 ? CHOOSE("", "parallel.cp_mode=gather ", "parallel.cp_mode=ulysses ") : "",
                        CHOOSE("", "train.recompute=selective ", "train.recompute=full "),
                        CHOOSE("", "train.optimizer=sgd ", "train.optimizer=muon "),
                        CHOOSE("", "train.grad_sync=per_microbatch "), CHOOSE("", "train.precision=bf16 "),
                        CHOOSE("", "parallel.overlap=false ", "parallel.split_backward=true "));
    if (experts)
        snprintf(words + used, size - (size_t)used, "model.experts=%d model.experts_per_token=%d model.expert_ffn=%d parallel.ep=%d ",
                 experts, 1 + draw(experts), 1 + draw(4), ep);
}

static int64_t number(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoll(text, NULL, 10) : otherwise;
}

/* Single options may be refused too (a size below the table's limit): then so is the layout. */
static bool accepted(const char *words)
{
    static qd_check_report report = {.size = sizeof report};
    qd_options *options = layout_options(words);
    qd_status status = qd_check(options, 0, &report);
    qd_options_destroy(options);
    if (status != QD_OK && status != QD_USAGE && status != QD_UNSUPPORTED)
        fail_msg("%s: check ends with status %d: %s", words, (int)status, qd_error_message());
    qd_error_clear();
    return status == QD_OK;
}

static void train(const char *words)
{
    qd_config config = layout_config(words);
    qd_random_tokens random = {.seed = 5, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team = NULL;
    qd_step_output out;
    qd_status status = qd_team_create(&config, &source, &team);
    for (int step = 0; step < 2 && status == QD_OK; step++)
        status = qd_team_step(team, &out);
    if (status != QD_OK)
        fail_msg("check accepts what training refuses: %s\n%s", words, qd_error_message());
    qd_team_destroy(team);
}

static void what_check_accepts_trains(void **state)
{
    (void)state;
    int64_t count = number("QUADRILLE_LAYOUTS", sample_count(600, 40)), ran = 0;
    seed = (uint64_t)number("QUADRILLE_SEED", 1);
    for (int64_t i = 0; i < count; i++) {
        char words[2048];
        draw_layout(words, sizeof words);
        if (!accepted(words))
            continue;
        train(words);
        ran++;
    }
    print_message("%lld of %lld layouts accepted and trained\n", (long long)ran, (long long)count);
    assert_true(ran * 10 >= count);
}

/* Under sp every rank of tp needs a row: check refuses others, and names keys and values that
 * work. */
static void fewer_rows_than_ranks_are_refused(void **state)
{
    (void)state;
    static const char base[] = "model.layers=1 model.hidden=32 model.heads=4 parallel.ranks=2 parallel.tp=2 train.global_batch=1 ";
    static qd_check_report report = {.size = sizeof report};
    char words[512];
    snprintf(words, sizeof words, "%sdata.seq=1 ", base);
    qd_options *options = layout_options(words);
    assert_int_equal(qd_check(options, 0, &report), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "parallel.sp=false, or make data.seq at least 2"));
    qd_error_clear();
    qd_options_destroy(options);
    static const char *const remedies[] = {"data.seq=1 parallel.sp=false ", "data.seq=2 "};
    for (int i = 0; i < 2; i++) {
        snprintf(words, sizeof words, "%s%s", base, remedies[i]);
        assert_true(accepted(words));
        train(words);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(fewer_rows_than_ranks_are_refused), cmocka_unit_test(what_check_accepts_trains)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
