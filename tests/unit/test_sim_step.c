/* Whole steps: measured ones on an H200, memory by the textbook, and how the simulator treats what it is given. */
#include "sim/step.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"
#include "support/simulated.h"

static void near(const char *what, double a, double b, double tolerance)
{
    if (!(fabs(a - b) <= tolerance * fabs(b)))
        fail_msg("%s: %.6g is not within %.1f %% of %.6g", what, a, 100.0 * tolerance, b);
}

/* Tokens per second and memory that were measured (docs/performance.md). */
static void h200(void **state)
{
    (void)state;
    static const struct {
        const char *words;
        double tokens, gib;
    } cases[] = {
        {"model.arch=gpt2 model.layers=12 model.hidden=768 model.heads=12 model.vocab=50304 data.seq=1024 train.global_batch=64", 626003, 21.5},
        {"model.arch=gpt2 model.layers=24 model.hidden=1024 model.heads=16 model.vocab=50304 data.seq=1024 train.global_batch=32", 224578, 30.7},
        {"model.arch=gpt2 model.layers=48 model.hidden=1600 model.heads=25 model.vocab=50304 data.seq=1024 train.global_batch=16", 53393, 62.1},
        {"model.arch=gpt2 model.layers=24 model.hidden=2048 model.heads=16 model.vocab=50304 data.seq=2048 train.global_batch=16", 69654, 69.6},
        {"model.layers=16 model.hidden=2048 model.heads=32 model.kv_heads=8 model.ffn=8192 model.vocab=128256 data.seq=2048 train.global_batch=8", 70650, 38.5},
        {"model.layers=8 model.hidden=4096 model.heads=32 model.kv_heads=8 model.ffn=14336 model.vocab=32768 data.seq=4096 train.global_batch=4", 48482, 46.4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_sim_report r = simulated("h200", "train.precision=bf16 %s", cases[i].words);
        near(cases[i].words, r.tokens_per_second, cases[i].tokens, 0.05);
        near(cases[i].words, (double)r.memory_bytes / 1073741824.0, cases[i].gib, 0.05);
    }
}

/* The ZeRO paper (Rajbhandari et al. 2020, figure 1): 7.5 B parameters, 64 ranks, 16 bytes each: 120, 31.4, 16.6 and 1.9 GB. */
static void zero_memory(void **state)
{
    (void)state;
    static const double paper[] = {120.0, 31.4, 16.6, 1.88};
    for (int zero = 0; zero < 4; zero++) {
        qd_sim_report r = simulated("h200",
                                    "model.layers=36 model.hidden=4096 model.heads=32 model.ffn=10944 model.vocab=32000 data.seq=128 train.global_batch=64 parallel.ranks=64 "
                                    "train.precision=bf16 parallel.zero=%d", zero);
        double state_bytes = 0.0;
        for (int i = 0; i < r.memory_count; i++)
            if (strcmp(r.memory[i].name, "parameters") == 0 || strcmp(r.memory[i].name, "gradients") == 0 || strstr(r.memory[i].name, "moment") ||
                strcmp(r.memory[i].name, "master weights") == 0)
                state_bytes += r.memory[i].value;
        near("state", state_bytes * 1e-9, paper[zero] * (double)r.parameters / 7.5e9, 0.02);
    }
}

/* The sum of what the compute stream does and waits for is the step. */
static void times_add_up(void **state)
{
    (void)state;
    qd_sim_report r = simulated("h100", "model.preset=llama3.1-8b parallel.ranks=64 parallel.zero=3 data.seq=8192 train.global_batch=128 train.micro_batch=1 "
                                       "train.precision=bf16");
    double sum = r.compute_seconds + r.bubble_seconds;
    for (int i = 0; i < r.exposed_count; i++)
        sum += r.exposed[i].value;
    near("sum", sum, r.step_seconds, 0.03);
    assert_true(r.mfu > r.mfu_causal && r.hfu > r.mfu_causal);
    assert_true(r.loss_count == QD_SIM_LOSSES);
    /* Products, attention and the rest lie inside the time that computes. */
    double parts = r.product_seconds + r.attention_seconds + r.memory_seconds + r.optimizer_seconds + r.launch_seconds;
    assert_true(parts <= r.compute_seconds * 1.0001);
}

/* What does not fit is said, and the planner finds what does. */
static void planning(void **state)
{
    (void)state;
    static qd_plan_report plan;
    const char *words = "model.preset=llama3.1-8b parallel.ranks=64 parallel.pp=1 data.seq=8192 train.global_batch=128 train.precision=bf16";
    qd_sim_report plain = simulated("h100", "model.preset=llama3.1-8b parallel.ranks=64 parallel.zero=0 data.seq=8192 train.global_batch=128 train.micro_batch=1 "
                                           "train.precision=bf16");
    assert_false(plain.fits);
    qd_options *o = simulated_options("h100", words);
    ok(qd_plan(o, &plan));
    assert_true(plan.count > 1 && plan.reason_count > 0 && plan.next[0]);
    for (int i = 0; i < plan.count; i++) {
        assert_true(plan.choices[i].fits && plan.choices[i].memory_bytes <= (int64_t)80 << 30);
        assert_true(i == 0 || plan.choices[i].step_seconds >= plan.choices[i - 1].step_seconds);
    }
    /* The choice, put into the configuration, takes the time that the plan says. */
    ok(qd_plan_apply(&plan.choices[0], o));
    qd_simulation *s;
    ok(qd_simulate(o, &s));
    near("planned", qd_simulation_report(s)->step_seconds, plan.choices[0].step_seconds, 0.01);
    qd_simulation_destroy(s);
    qd_options_destroy(o);
    o = simulated_options("h100", "model.preset=llama3.1-70b parallel.ranks=8 data.seq=8192 train.global_batch=8 train.precision=bf16");
    assert_int_equal(qd_plan(o, &plan), QD_NO_MEMORY);
    assert_non_null(strstr(qd_error_message(), "take more of them"));
    qd_options_destroy(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(h200), cmocka_unit_test(zero_memory), cmocka_unit_test(times_add_up), cmocka_unit_test(planning),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
