/* Comparison of given layouts with the first choice: published layouts, and the reasons reported
 * for those that are slower. */
#include <quadrille/plan.h>

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"
#include "support/simulated.h"

#define L8 "model.preset=llama3.1-8b data.seq=4096 train.precision=bf16 "

static qd_plan_report *report; /* of the last plan */

/* Where the next one goes. */
static qd_plan_report **fresh(void)
{
    qd_plan_report_destroy(report);
    report = NULL;
    return &report;
}

/* Plans the run and compares "key=value …" with it. */
static const qd_plan_against *beside(const char *cluster, const char *run, const char *layout)
{
    char words[512];
    snprintf(words, sizeof words, "%s %s", run, layout);
    qd_options *options = simulated_options(cluster, run), *other = simulated_options(cluster, words);
    ok(qd_plan_beside(options, other, fresh()));
    qd_options_destroy(options);
    qd_options_destroy(other);
    assert_non_null(report->against);
    return report->against;
}

static bool says(const qd_plan_against *a, const char *word)
{
    for (int i = 0; i < a->why_count; i++)
        if (strstr(a->why[i], word))
            return true;
    return false;
}

/* The first choice compared with itself is not slower and needs no explanation. */
static void itself(void **state)
{
    (void)state;
    qd_options *options = simulated_options("h100", L8 "parallel.ranks=16 train.global_batch=64"), *same;
    ok(qd_plan(options, fresh()));
    assert_null(report->against);
    ok(qd_options_copy(options, &same));
    ok(qd_plan_apply(report->choices[0], same));
    char layout[128];
    snprintf(layout, sizeof layout, "%s", report->choices[0]->layout);
    ok(qd_plan_beside(options, same, fresh()));
    assert_true(report->against->possible && fabs(report->against->behind) < 1e-9);
    assert_int_equal(report->against->why_count, 0);
    assert_string_equal(report->against->choice->layout, layout);
    qd_options_destroy(options);
    qd_options_destroy(same);
}

/* The report names what each slower layout loses: waiting stages, communication of an axis,
 * memory. */
static void why_it_loses(void **state)
{
    (void)state;
    const char *run = L8 "parallel.ranks=16 train.global_batch=64 parallel.tp=1 parallel.pp=1"; /* the layout sets its own */
    const qd_plan_against *a = beside("h100", run, "parallel.pp=8 parallel.zero=1 train.micro_batch=8 train.recompute=full");
    assert_true(a->behind > 0.3 && says(a, "waiting for other stages"));
    a = beside("h100", run, "parallel.tp=16 parallel.zero=1 train.micro_batch=1");
    assert_true(a->behind > 0.3 && says(a, "communication over tp"));
    a = beside("h100", run, "parallel.zero=0 train.micro_batch=4");
    assert_true(!a->choice->fits && says(a, "does not fit") && says(a, "nor does it fit with recompute full"));
    a = beside("h100", run, "parallel.tp=3");
    assert_true(!a->possible && a->refusal[0] != '\0');
    a = beside("h100", run, "train.global_batch=128");
    assert_true(!a->possible && strstr(a->refusal, "another model, batch"));
}

/* Experts are split, and GEMMs of tp are cut into pieces, if requested or if it is faster. */
static void pieces_and_cut_experts(void **state)
{
    (void)state;
    beside("h100",
           "model.preset=mixtral-8x7b data.seq=4096 train.precision=bf16 parallel.ranks=32 train.global_batch=64 parallel.ep=8 "
           "parallel.etp=2 parallel.pp=1 parallel.tp=1 parallel.zero=1",
           "train.micro_batch=1");
    for (int i = 0; i < report->count; i++)
        assert_int_equal(report->choices[i]->etp, 2);
    const qd_plan_against *a =
        beside("h100", L8 "parallel.ranks=8 train.global_batch=16 parallel.tp=8 parallel.pp=1", "parallel.zero=0 train.micro_batch=2");
    assert_true(report->choices[0]->tp_overlap > 1);
    assert_int_equal(a->choice->tp_overlap, 1);
    /* Without tp there is nothing to cut. */
    beside("h100", L8 "parallel.ranks=16 train.global_batch=64 parallel.tp=1 parallel.pp=1", "parallel.zero=1");
    assert_int_equal(report->choices[0]->tp_overlap, 1);
}

/* Published layouts that are quick to plan (`quadrille bench plans` runs all): close to the first
 * choice, or with reasons. */
static void published(void **state)
{
    (void)state;
    qd_plan_row *rows;
    int count, done = 0;
    ok(qd_plan_rows(QD_TEST_SOURCE_DIR "/data/published/layouts.json", &rows, &count));
    assert_int_equal(count, 10);
    for (int i = 0; i < count; i++) {
        if (!strstr(rows[i].name, "OLMo") && !strstr(rows[i].name, "Gemma"))
            continue;
        ok(qd_plan_row_run(&rows[i], fresh()));
        const qd_plan_against *a = report->against;
        print_message("%s: %+.1f %% (%.1f s)\n", rows[i].name, 100.0 * a->behind, report->wall_seconds);
        assert_true(a->possible && report->wall_seconds < 60.0);
        assert_true(a->behind > -0.005 && (a->behind <= 0.05 || a->why_count > 0));
        done++;
    }
    assert_int_equal(done, 2);
    free(rows);
}

static bool is_same(const qd_plan_choice *a, const qd_plan_choice *b)
{
    return a->dp == b->dp && a->tp == b->tp && a->cp == b->cp && a->pp == b->pp && a->vpp == b->vpp && a->ep == b->ep && a->etp == b->etp &&
           a->zero == b->zero && a->tp_overlap == b->tp_overlap && a->micro_batch == b->micro_batch &&
           strcmp(a->recompute, b->recompute) == 0 && strcmp(a->schedule, b->schedule) == 0;
}

/* An estimate of the coarse pass is not listed in addition to the same layout, and the first ten
 * are exact: seconds times MFU is the same work. */
static void choices_are_exact_and_distinct(void **state)
{
    (void)state;
    qd_options *options = simulated_options("h100", "model.preset=mixtral-8x22b data.seq=4096 train.precision=bf16 parallel.ranks=128 "
                                                    "train.global_batch=1024 parallel.tp=2 parallel.pp=8 parallel.ep=8");
    ok(qd_plan(options, fresh()));
    qd_options_destroy(options);
    assert_true(report->count > 4 && !report->stopped);
    const qd_plan_choice *first = report->choices[0];
    for (int i = 1; i < report->count; i++) {
        const qd_plan_choice *c = report->choices[i];
        for (int k = 0; k < i; k++)
            assert_false(is_same(c, report->choices[k]));
        assert_true(c->step_seconds >= report->choices[i - 1]->step_seconds);
        if (i < 10)
            assert_true(fabs(c->step_seconds * c->mfu / (first->step_seconds * first->mfu) - 1.0) < 1e-9);
    }
}

static const qd_plan_choice *listed(const char *schedule)
{
    for (int i = 0; i < report->count; i++)
        if (strcmp(report->choices[i]->schedule, schedule) == 0)
            return report->choices[i];
    return NULL;
}

/* zb_v and dualpipe_v have almost no bubble, dualpipe_v with less memory: it comes first if zb_v
 * must recompute activations and dualpipe_v need not. With fewer than two micro-batches per stage
 * it is skipped, which is not an error. */
static void schedules_by_memory(void **state)
{
    (void)state;
    const char *words = "model.preset=llama3.1-8b data.seq=12288 train.precision=bf16 parallel.ranks=8 parallel.pp=8 train.global_batch=";
    for (int batch = 8; batch <= 16; batch *= 2) {
        char run[256];
        snprintf(run, sizeof run, "%s%d", words, batch);
        qd_options *options = simulated_options("h100", run);
        ok(qd_plan(options, fresh()));
        qd_options_destroy(options);
        assert_int_equal(report->refused, 0);
        assert_non_null(listed("zb_v"));
        if (batch == 8)
            assert_null(listed("dualpipe_v"));
    }
    assert_ptr_equal(listed("dualpipe_v"), report->choices[0]);
    assert_string_equal(report->choices[0]->recompute, "none");
    assert_string_not_equal(listed("zb_v")->recompute, "none");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(itself), cmocka_unit_test(why_it_loses), cmocka_unit_test(pieces_and_cut_experts), cmocka_unit_test(published),
        cmocka_unit_test(choices_are_exact_and_distinct), cmocka_unit_test(schedules_by_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
