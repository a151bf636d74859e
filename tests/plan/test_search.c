/* What the search takes into account: reserved memory, host memory, too few sequences, dtypes that
 * a model needs; and that its answer is the same on every machine.
 * ctest: wrap qd_clock_now */
#include <quadrille/plan.h>

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"
#include "support/simulated.h"

#define L8 "model.preset=llama3.1-8b train.precision=bf16 "

static qd_plan_report *report, *other; /* of the last plan, freed by the next */

/* A clock that advances by this many seconds whenever it is read; 0: the real clock. */
static double tick, ticked;
double __real_qd_clock_now(void);
double __wrap_qd_clock_now(void);
double __wrap_qd_clock_now(void)
{
    return tick > 0.0 ? (ticked += tick) : __real_qd_clock_now();
}

static qd_status plan(const char *cluster, const char *words, qd_plan_report **r)
{
    qd_plan_report_destroy(*r);
    qd_options *o = simulated_options(cluster, words);
    qd_status status = qd_plan(o, r);
    qd_options_destroy(o);
    return status;
}

static bool says(const qd_plan_report *r, const char *word)
{
    for (int i = 0; i < r->reason_count; i++)
        if (strstr(r->reasons[i], word))
            return true;
    return false;
}

/* 4 % stay free, or accelerator.reserve; simulate still compares with all of it. */
static void some_memory_is_kept_free(void **state)
{
    (void)state;
    const double limit = 80.0 * 1073741824.0;
    const char *run = L8 "data.seq=8192 parallel.ranks=8 parallel.pp=1 train.global_batch=128 accelerator.reserve=%s";
    static const struct {
        const char *reserve;
        double least, most;
    } cases[] = {{"0.04", 0.80, 0.96}, {"0", 0.96, 1.0}, {"0.5", 0.0, 0.5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[300];
        double fullest = 0.0;
        snprintf(words, sizeof words, run, cases[i].reserve);
        ok(plan("h100", words, &report));
        for (int k = 0; k < report->count; k++)
            fullest = (double)report->choices[k]->memory_bytes > fullest ? (double)report->choices[k]->memory_bytes : fullest;
        assert_true(fullest > cases[i].least * limit && fullest <= cases[i].most * limit);
    }
    assert_int_equal(plan("h100", L8 "data.seq=4096 parallel.ranks=1 train.global_batch=1 train.offload=none", &report), QD_NO_MEMORY);
    assert_non_null(strstr(qd_error_message(), "of 80.0 GiB on each, 3.2 of which are kept free"));
    qd_error_clear();
}

/* Optimizer state in host memory is the last resort, and is reported; settings of the user are not
 * overruled. */
static void offload_where_nothing_else_fits(void **state)
{
    (void)state;
    ok(plan("h100", L8 "data.seq=4096 parallel.ranks=1 train.global_batch=8", &report));
    assert_true(report->choices[0]->offload && report->choices[0]->host_bytes > (int64_t)80 << 30);
    assert_non_null(strstr(report->choices[0]->layout, "offload"));
    assert_true(says(report, "train.offload=optimizer"));
    qd_options *o = simulated_options("h100", L8 "data.seq=4096 parallel.ranks=1 train.global_batch=8");
    ok(qd_plan_apply(report->choices[0], o));
    assert_string_equal(qd_options_string(o, "train.offload"), "optimizer");
    qd_options_destroy(o);
    ok(plan("h100", L8 "data.seq=4096 parallel.ranks=8 parallel.pp=1 train.global_batch=8", &report));
    for (int i = 0; i < report->count; i++)
        assert_false(report->choices[i]->offload);
    assert_int_equal(plan("h100", L8 "data.seq=4096 parallel.ranks=1 train.global_batch=8 train.offload=none", &report), QD_NO_MEMORY);
    qd_error_clear();
    assert_int_equal(plan("h100", "model.preset=llama3.1-405b train.precision=bf16 parallel.ranks=8 data.seq=4096 train.global_batch=8",
                          &report),
                     QD_NO_MEMORY);
    assert_non_null(strstr(qd_error_message(), "train.offload=optimizer nothing fits either"));
    qd_error_clear();
}

/* One sequence on eight accelerators: cp is tried, with each of its modes. */
static void context_parallelism_for_one_sequence(void **state)
{
    (void)state;
    ok(plan("h100", L8 "data.seq=8192 parallel.ranks=8 train.global_batch=1", &report));
    assert_true(report->choices[0]->cp > 1 && says(report, "too few for the accelerators"));
    bool seen[3] = {false};
    static const char *const modes[] = {"ring", "gather", "ulysses"};
    for (int i = 0; i < report->count; i++)
        for (int m = 0; m < 3; m++)
            seen[m] = seen[m] || strcmp(report->choices[i]->cp_mode, modes[m]) == 0;
    assert_true(seen[0] && seen[1] && seen[2]);
    /* A choice simulates to the same result when its keys are set. */
    for (int i = 0; i < report->count; i++) {
        if (strcmp(report->choices[i]->cp_mode, "ulysses") != 0)
            continue;
        qd_options *o = simulated_options("h100", L8 "data.seq=8192 parallel.ranks=8 train.global_batch=1");
        qd_simulation *s;
        ok(qd_plan_apply(report->choices[i], o));
        assert_string_equal(qd_options_string(o, "parallel.cp_mode"), "ulysses");
        ok(qd_simulate(o, &s));
        assert_true(qd_simulation_report(s)->step_seconds == report->choices[i]->step_seconds);
        qd_simulation_destroy(s);
        qd_options_destroy(o);
    }
    /* A mode that the user has set stays; if there are enough sequences, short ones are not
     * split. */
    ok(plan("h100", L8 "data.seq=8192 parallel.ranks=8 train.global_batch=1 parallel.cp_mode=gather", &report));
    for (int i = 0; i < report->count; i++)
        assert_true(report->choices[i]->cp == 1 || strcmp(report->choices[i]->cp_mode, "gather") == 0);
    ok(plan("h100", L8 "data.seq=8192 parallel.ranks=8 train.global_batch=64 parallel.pp=1", &report));
    for (int i = 0; i < report->count; i++)
        assert_int_equal(report->choices[i]->cp, 1);
}

/* The router's bias counts tokens next to the gradients: auto gives it fp32 gradients, and a
 * refusal is not reported as a lack of memory. */
static void gradients_of_a_router_with_a_bias(void **state)
{
    (void)state;
#define DEEPSEEK                                                                                                                        \
    "model.preset=deepseek-v3-gqa parallel.ranks=2048 data.seq=4096 train.global_batch=15360 train.precision=bf16 parallel.tp=4 "      \
    "parallel.pp=16 parallel.ep=32 parallel.zero=1 parallel.schedule=1f1b parallel.tp_overlap=4 train.recompute=full train.micro_batch=1 "
    ok(plan("h800", DEEPSEEK, &report));
    assert_true(report->choices[0]->fits);
    assert_int_equal(plan("h800", DEEPSEEK "train.grad_dtype=bf16", &report), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "model.router_bias_rate"));
    qd_error_clear();
    /* If some do not fit and others are refused, both are reported. */
    assert_int_equal(plan("h800",
                          "model.preset=deepseek-v3-gqa parallel.ranks=2048 data.seq=4096 train.global_batch=2048 train.precision=bf16 "
                          "train.grad_dtype=bf16 parallel.tp=8 parallel.pp=1 parallel.zero=1",
                          &report),
                     QD_NO_MEMORY);
    assert_non_null(strstr(qd_error_message(), "cannot be built: model.router_bias_rate"));
    qd_error_clear();
}

/* A machine on which every reading of the clock takes a second gives the same answer as one that
 * takes no time; an extremely slow one reports it. */
static void the_clock_does_not_decide(void **state)
{
    (void)state;
    const char *run = L8 "data.seq=8192 parallel.ranks=64 train.global_batch=128";
    ok(plan("h100", run, &report));
    assert_false(report->late);
    tick = 0.5;
    ok(plan("h100", run, &other));
    assert_true(other->wall_seconds > 60.0 && !other->late);
    assert_int_equal(report->count, other->count);
    for (int i = 0; i < report->count; i++)
        assert_string_equal(report->choices[i]->layout, other->choices[i]->layout);
    tick = 60.0;
    ok(plan("h100", run, &other));
    assert_true(other->late);
    tick = 1e6;
    assert_int_equal(plan("h100", run, &other), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "the clock ended the search"));
    qd_error_clear();
    tick = 0.0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(some_memory_is_kept_free),
        cmocka_unit_test(offload_where_nothing_else_fits),
        cmocka_unit_test(context_parallelism_for_one_sequence),
        cmocka_unit_test(gradients_of_a_router_with_a_bias),
        cmocka_unit_test(the_clock_does_not_decide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
