/* Whole steps: measured ones on an H200, memory by formula, and the simulator's treatment of its
 * settings. */
#include "sim/step.h"

#include <math.h>
#include <quadrille/report.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"
#include "support/simulated.h"

static void near(const char *what, double a, double b, double tolerance)
{
    if (!(fabs(a - b) <= tolerance * fabs(b)))
        fail_msg("%s: %.6g is not within %.1f %% of %.6g", what, a, 100.0 * tolerance, b);
}

/* Measured tokens per second and memory (docs/performance.md). */
static void h200(void **state)
{
    (void)state;
    static const struct {
        const char *words;
        double tokens, gib;
    } cases[] = {
        {"model.arch=gpt2 model.layers=12 model.hidden=768 model.heads=12 model.vocab=50304 data.seq=1024 train.global_batch=64", 631945,
         21.5},
        {"model.arch=gpt2 model.layers=24 model.hidden=1024 model.heads=16 model.vocab=50304 data.seq=1024 train.global_batch=32", 231781,
         30.7},
        {"model.arch=gpt2 model.layers=48 model.hidden=1600 model.heads=25 model.vocab=50304 data.seq=1024 train.global_batch=16", 53966,
         62.1},
        {"model.arch=gpt2 model.layers=24 model.hidden=2048 model.heads=16 model.vocab=50304 data.seq=2048 train.global_batch=16", 69654,
         69.6},
        {"model.layers=16 model.hidden=2048 model.heads=32 model.kv_heads=8 model.ffn=8192 model.vocab=128256 data.seq=2048 "
         "train.global_batch=8",
         70855, 38.5},
        {"model.layers=8 model.hidden=4096 model.heads=32 model.kv_heads=8 model.ffn=14336 model.vocab=32768 data.seq=4096 "
         "train.global_batch=4",
         49211, 46.4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_sim_report r = simulated("h200", "train.precision=bf16 %s", cases[i].words);
        near(cases[i].words, r.tokens_per_second, cases[i].tokens, 0.05);
        near(cases[i].words, (double)r.memory_bytes / 1073741824.0, cases[i].gib, 0.05);
    }
}

/* fp8 as measured on an H200 (docs/performance.md): the share of a step that is saved depends on
 * the rate of GEMMs in fp8 and on what casts cost. Rows and blocks were measured without tuned
 * GEMMs. */
static void h200_in_fp8(void **state)
{
    (void)state;
    static const char llama[] = "model.layers=16 model.hidden=2048 model.heads=32 model.kv_heads=8 model.ffn=8192 model.vocab=128256 "
                                "data.seq=2048 train.global_batch=8";
    static const struct {
        const char *recipe, *words;
        double tokens, tolerance;
    } cases[] = {
        {"tensor", llama, 91031, 0.05},
        {"row", llama, 78088, 0.07},
        {"block", llama, 76884, 0.07},
        {"tensor", "model.arch=gpt2 model.layers=24 model.hidden=2048 model.heads=16 model.vocab=50304 data.seq=2048 train.global_batch=16",
         94204, 0.05},
        {"tensor", "model.layers=8 model.hidden=4096 model.heads=32 model.kv_heads=8 model.ffn=14336 model.vocab=32768 data.seq=4096 "
                   "train.global_batch=4",
         68412, 0.05},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_sim_report r = simulated("h200", "train.precision=fp8 fp8.recipe=%s %s", cases[i].recipe, cases[i].words);
        near(cases[i].recipe, r.tokens_per_second, cases[i].tokens, cases[i].tolerance);
    }
}

/* The ZeRO paper (Rajbhandari et al. 2020, figure 1): 7.5 B parameters, 64 ranks, 16 bytes each:
 * 120, 31.4, 16.6 and 1.9 GB. */
static void zero_memory(void **state)
{
    (void)state;
    static const double paper[] = {120.0, 31.4, 16.6, 1.88};
    for (int zero = 0; zero < 4; zero++) {
        qd_sim_report r = simulated("h200",
                                    "model.layers=36 model.hidden=4096 model.heads=32 model.ffn=10944 model.vocab=32000 data.seq=128 "
                                    "train.global_batch=64 parallel.ranks=64 "
                                    "train.precision=bf16 parallel.zero=%d",
                                    zero);
        double state_bytes = 0.0;
        for (int i = 0; i < r.memory_count; i++)
            if (strcmp(r.memory[i].name, "parameters") == 0 || strcmp(r.memory[i].name, "gradients") == 0 ||
                strstr(r.memory[i].name, "moment") || strcmp(r.memory[i].name, "master weights") == 0)
                state_bytes += r.memory[i].value;
        near("state", state_bytes * 1e-9, paper[zero] * (double)r.parameters / 7.5e9, 0.02);
    }
}

/* Computation and waiting of the compute stream add up to the step. */
static void times_add_up(void **state)
{
    (void)state;
    qd_sim_report r = simulated(
        "h100", "model.preset=llama3.1-8b parallel.ranks=64 parallel.zero=3 data.seq=8192 train.global_batch=128 train.micro_batch=1 "
                "train.precision=bf16");
    double sum = r.compute_seconds + r.bubble_seconds;
    for (int i = 0; i < r.exposed_count; i++)
        sum += r.exposed[i].value;
    near("sum", sum, r.step_seconds, 0.03);
    assert_true(r.mfu > r.mfu_causal && r.hfu > r.mfu_causal);
    assert_true(r.loss_count == QD_SIM_LOSSES);
    /* GEMMs, attention and the rest are part of the compute time. */
    double parts = r.product_seconds + r.attention_seconds + r.memory_seconds + r.optimizer_seconds + r.launch_seconds;
    assert_true(parts <= r.compute_seconds * 1.0001);
}

/* Optimizer state in host memory: 12 bytes per parameter each way over the link, of which the first
 * chunks overlap with the norm and the two directions with each other; and as much less device
 * memory. */
static void offload(void **state)
{
    (void)state;
    const char *words = "model.preset=llama3.2-1b data.seq=2048 train.global_batch=8 train.precision=bf16";
    qd_sim_report plain = simulated("h200", "%s", words), away = simulated("h200", "%s train.offload=optimizer", words);
    qd_sim_report slow = simulated("h200", "%s train.offload=optimizer accelerator.host_gbs=10", words);
    double bytes = 12.0 * (double)plain.parameters;
    near("longer", away.step_seconds - plain.step_seconds, bytes / 49e9, 0.05);
    near("longer over a slow link", slow.step_seconds - plain.step_seconds, bytes / 10e9, 0.05);
    near("host memory", (double)away.host_bytes, bytes, 0.01);
    assert_int_equal(plain.memory_bytes - away.memory_bytes, away.host_bytes);
    double exposed = 0.0;
    for (int i = 0; i < away.exposed_count; i++)
        exposed += strcmp(away.exposed[i].name, "the host link") == 0 ? away.exposed[i].value : 0.0;
    near("exposed", exposed, away.step_seconds - plain.step_seconds, 0.05);
    qd_sim_report waiting = simulated("h200", "%s train.offload=optimizer parallel.overlap=false", words);
    near("one way after the other", waiting.step_seconds - plain.step_seconds, 2.0 * bytes / 49e9, 0.05);
}

/* A layout that does not fit is reported, and the planner finds one that does. */
static void planning(void **state)
{
    (void)state;
    qd_plan_report *plan = NULL;
    const char *words =
        "model.preset=llama3.1-8b parallel.ranks=64 parallel.pp=1 data.seq=8192 train.global_batch=128 train.precision=bf16";
    qd_sim_report plain = simulated(
        "h100", "model.preset=llama3.1-8b parallel.ranks=64 parallel.zero=0 data.seq=8192 train.global_batch=128 train.micro_batch=1 "
                "train.precision=bf16");
    assert_false(plain.fits);
    qd_options *o = simulated_options("h100", words);
    ok(qd_plan(o, &plan));
    assert_true(plan->count > 1 && plan->reason_count > 0 && plan->next[0]);
    for (int i = 0; i < plan->count; i++) {
        assert_true(plan->choices[i]->fits && plan->choices[i]->memory_bytes <= (int64_t)80 << 30);
        assert_true(i == 0 || plan->choices[i]->step_seconds >= plan->choices[i - 1]->step_seconds);
    }
    /* The choice, applied to the configuration, takes the planned time. */
    ok(qd_plan_apply(plan->choices[0], o));
    qd_simulation *s;
    ok(qd_simulate(o, &s));
    near("planned", qd_simulation_report(s)->step_seconds, plan->choices[0]->step_seconds, 0.01);
    qd_simulation_destroy(s);
    qd_plan_report_destroy(plan);
    qd_options_destroy(o);
    o = simulated_options("h100", "model.preset=llama3.1-70b parallel.ranks=8 data.seq=8192 train.global_batch=8 train.precision=bf16 "
                                  "train.offload=none");
    assert_int_equal(qd_plan(o, &plan), QD_NO_MEMORY);
    assert_non_null(strstr(qd_error_message(), "optimizer state alone fill"));
    qd_options_destroy(o);
}

/* The effect of software: attention with the scores in memory takes longer and more memory; expert
 * biases are separate passes; if experts are sharded, libraries send a row across nodes once, our
 * program to every rank that has a part. */
static void software(void **state)
{
    (void)state;
    const char *dense = "model.preset=llama3.1-8b data.seq=4096 train.precision=bf16 parallel.ranks=8 parallel.zero=3 train.global_batch=8 "
                        "train.micro_batch=1 "
                        "software.profile=compiled software.attention=%s";
    qd_sim_report plain = simulated("h100", dense, "plain"), fused = simulated("h100", dense, "profile"),
                  second = simulated("h100", dense, "flash2");
    assert_true(plain.attention_seconds > 3.0 * fused.attention_seconds && plain.memory_bytes > fused.memory_bytes);
    near("the profile's attention", fused.attention_seconds, second.attention_seconds, 1e-9);
    const char *experts = "model.preset=mixtral-8x7b data.seq=4096 train.precision=bf16 parallel.ranks=32 parallel.tp=4 parallel.zero=1 "
                          "train.global_batch=32 "
                          "train.micro_batch=1 parallel.ep=8 parallel.etp=4 software.profile=%s software.expert_biases=%s";
    qd_sim_report without = simulated("h100", experts, "fused", "false"), with = simulated("h100", experts, "fused", "true");
    assert_true(with.memory_seconds > 1.5 * without.memory_seconds);
    near("what does not depend on biases", with.product_seconds, without.product_seconds, 1e-9);
    qd_sim_report ours = simulated("h100", experts, "native", "false");
    double sent[2] = {0.0, 0.0};
    const qd_sim_report *both[] = {&without, &ours};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < both[i]->exposed_count; j++)
            sent[i] += strcmp(both[i]->exposed[j].name, "ep") == 0 ? both[i]->exposed[j].value : 0.0;
    assert_true(sent[0] > 0.0 && sent[1] > 1.5 * sent[0]);
}

/* Formats of other software: GEMMs at their rates, casts where they are not joined with other
 * kernels, the head in bf16, experts included. */
static void formats(void **state)
{
    (void)state;
    const char *dense = "model.preset=llama3.1-8b data.seq=4096 train.precision=bf16 parallel.ranks=8 parallel.zero=3 train.global_batch=8 "
                        "train.micro_batch=1 software.profile=%s software.gemms=%s";
    const char *const names[] = {"program", "fp8", "mxfp8", "nvfp4"};
    qd_sim_report r[4];
    for (int i = 0; i < 4; i++)
        r[i] = simulated("b200", dense, "fused", names[i]);
    assert_true(r[1].product_seconds < 0.7 * r[0].product_seconds && r[1].product_seconds > 0.5 * r[0].product_seconds);
    near("MXFP8 multiplies like fp8", r[2].product_seconds, r[1].product_seconds, 1e-9);
    assert_true(r[3].product_seconds < 0.7 * r[2].product_seconds);
    /* One scale of all values needs the largest magnitude first. */
    assert_true(r[1].memory_seconds > r[2].memory_seconds && r[2].memory_seconds > r[0].memory_seconds);
    near("memory is the program's", (double)r[3].memory_bytes, (double)r[0].memory_bytes, 1e-9);
    qd_sim_report apart = simulated("b200", dense, "modern", "mxfp8"), none = simulated("b200", dense, "modern", "program");
    assert_true(apart.memory_seconds - none.memory_seconds > 1.5 * (r[2].memory_seconds - r[0].memory_seconds));
    /* A model that is nearly all head gains next to nothing. */
    const char *head = "model.layers=1 model.hidden=1024 model.heads=8 model.vocab=500000 data.seq=1024 train.precision=bf16 "
                       "train.global_batch=8 software.gemms=%s";
    qd_sim_report plain = simulated("b200", head, "program"), low = simulated("b200", head, "nvfp4");
    near("the head stays in bf16", low.product_seconds, plain.product_seconds, 0.02);
    const char *experts = "model.preset=mixtral-8x7b data.seq=4096 train.precision=bf16 parallel.ranks=32 parallel.zero=1 "
                          "train.global_batch=32 train.micro_batch=1 parallel.ep=8 software.profile=fused software.gemms=%s";
    assert_true(simulated("b200", experts, "mxfp8").product_seconds < 0.7 * simulated("b200", experts, "program").product_seconds);
}

static void refuse(const char *words, const char *part)
{
    qd_options *o = simulated_options("h100", words);
    qd_simulation *s = NULL;
    assert_int_equal(qd_simulate(o, &s), QD_USAGE);
    if (!strstr(qd_error_message(), part))
        fail_msg("'%s' does not say '%s'", qd_error_message(), part);
    qd_options_destroy(o);
}

/* Settings without effect are refused: nodes that ranks do not fill, biases that no software
 * adds. */
static void nothing_is_passed_over(void **state)
{
    (void)state;
#define EXPERTS "model.preset=mixtral-tiny data.seq=16 train.global_batch=24 train.micro_batch=1 parallel.ep=4 parallel.dispatch=node "
    refuse(EXPERTS "parallel.ranks=12", "node.size");
    refuse("model.preset=mixtral-tiny data.seq=16 software.expert_biases=true", "software.profile");
    simulated("h100", EXPERTS "parallel.ranks=12 parallel.nodes=6");
    simulated("h100", EXPERTS "parallel.ranks=4");
#undef EXPERTS
}

/* A machine of two cores with round figures, except for parts of attention and lateness. */
static qd_sim_report on_machine(const char *parts, const char *late, const char *words)
{
    char text[640];
    int length =
        snprintf(text, sizeof text,
                 "accelerator:\n  peak_tflops: 0.3\n  product_tflops: 0.2\n  bandwidth_gbs: 20\n  memory_gib: 16\n"
                 "node:\n  size: 4096\n  bandwidth_gbs: 10\n"
                 "processor:\n  cores: 2\n  forward: 100 0 0 0\n  inputs: 100 64 0 0\n  weights: 100 0 0 0\n  attention: 50 50\n"
                 "  parts: %s\n  bytes: 10 20\n  together: 0.8 0.8 0.8\n  sum: 1 10\n  gather: 1 10\n  scatter: 1 10\n  send: 1 10\n"
                 "  meeting: 1000 0\n  late: %s\n",
                 parts, late);
    char path[] = "/tmp/quadrille-processors-XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0 && length < (int)sizeof text && write(file, text, (size_t)length) == length);
    close(file);
    qd_sim_report r = simulated(path, "model.arch=gpt2 model.layers=4 model.hidden=256 model.heads=4 model.vocab=512 data.seq=128 "
                                      "train.global_batch=8 train.micro_batch=1 %s", words);
    unlink(path);
    return r;
}

static qd_sim_report on_processors(const char *words)
{
    return on_machine("0 0", "0 0 0", words);
}

static double computing(const qd_sim_report *r)
{
    return r->product_seconds + r->attention_seconds + r->memory_seconds + r->optimizer_seconds;
}

/* Ranks on CPUs: threads of one rank are slower together, ranks that outnumber the cores are
 * time-sliced and fill each other's bubbles, GEMMs are slower with few rows, and synchronization
 * inside blocks costs time. */
static void processors(void **state)
{
    (void)state;
    qd_sim_report one = on_processors("parallel.ranks=1"), two = on_processors("parallel.ranks=2"),
                  four = on_processors("parallel.ranks=4");
    near("GEMMs of two ranks", two.product_seconds, 0.8 * one.product_seconds, 1e-6);
    near("two ranks", two.step_seconds, computing(&two), 0.05);
    near("four ranks", four.step_seconds, 2.0 * computing(&four), 0.05);
    qd_sim_report pp = on_processors("parallel.ranks=2 parallel.pp=2"), both = on_processors("parallel.ranks=4 parallel.pp=2");
    assert_true(pp.bubble_seconds > 0.08 * pp.step_seconds);
    assert_true(both.step_seconds < 0.97 * pp.step_seconds);
    qd_sim_report tp = on_processors("parallel.ranks=2 parallel.tp=2");
    /* In each micro-batch every block synchronizes at least four times. */
    assert_true(tp.step_seconds > computing(&tp) + 8 * 4 * 4 * 1e-3);
    qd_sim_report longer = on_processors("parallel.ranks=2 train.micro_batch=4");
    assert_true(longer.product_seconds < 0.95 * two.product_seconds);
}

/* Parts of attention over 64 keys take as much longer as the file says; all ranks wait for the
 * slowest core, but stages of a pipeline have different work, and ranks that outnumber the cores
 * are time-sliced. */
static void processors_are_uneven(void **state)
{
    (void)state;
    qd_sim_report whole = on_processors("parallel.ranks=2 parallel.cp=2"),
                  parts = on_machine("64 32", "0 0 0", "parallel.ranks=2 parallel.cp=2");
    near("parts", parts.attention_seconds, whole.attention_seconds * (2.0 + 2.5 * 1.5) / 3.5, 1e-6);
    static const struct {
        const char *words;
        double longer;
    } cases[] = {{"parallel.ranks=1", 1.1},
                 {"parallel.ranks=2", 1.2},
                 {"parallel.ranks=2 parallel.tp=2", 1.2},
                 {"parallel.ranks=2 parallel.pp=2", 1.0},
                 {"parallel.ranks=4", 1.4},
                 {"parallel.ranks=4 parallel.pp=2", 1.4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_sim_report even = on_processors(cases[i].words), uneven = on_machine("0 0", "0.1 0.2 0.4", cases[i].words);
        near(cases[i].words, uneven.step_seconds, even.step_seconds * cases[i].longer, 1e-6);
    }
}

/* Computation that overlaps with an exchange inside a module is slower by up to 19 % of its rate,
 * as with one between modules. */
static void exchanges_slow_computation(void **state)
{
    (void)state;
    const char *words = "model.preset=llama3.1-8b parallel.ranks=8 parallel.cp=8 data.seq=32768 train.global_batch=1 train.precision=bf16";
    qd_sim_report beside = simulated("h100", "%s", words), waiting = simulated("h100", "%s parallel.overlap=false", words);
    assert_true(beside.attention_seconds > 1.02 * waiting.attention_seconds);
    assert_true(beside.attention_seconds < waiting.attention_seconds / 0.81 * 1.0001);
    assert_true(beside.step_seconds < waiting.step_seconds);
    near("GEMMs, which do not overlap", beside.product_seconds, waiting.product_seconds, 0.01);
}

/* A machine file with a missing figure is refused, and the key is named. */
static void processors_need_all_figures(void **state)
{
    (void)state;
    qd_options *o = simulated_options("h100", "processor.cores=2");
    qd_simulation *s = NULL;
    assert_int_equal(qd_simulate(o, &s), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "processor.forward"));
    qd_options_destroy(o);
}

/* The timeline of a report has the events of the trace. */
static void timeline_is_the_trace(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "model.preset=llama-small parallel.ranks=8 parallel.tp=2 parallel.pp=2 data.seq=128 train.global_batch=8 train.micro_batch=1",
        "model.preset=llama-small parallel.ranks=4 parallel.zero=3 train.offload=optimizer data.seq=128 train.global_batch=8",
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        qd_options *o = simulated_options("h100", cases[c]);
        qd_simulation *s;
        qd_simulation_view *view;
        qd_report_trace *trace;
        qd_strbuf text = {0};
        ok(qd_simulate(o, &s));
        ok(qd_simulation_describe(s, true, &view));
        ok(qd_simulation_trace_text(s, &text));
        ok(qd_report_trace_load_text("trace", text.data, "simulated", &trace));
        const qd_report_timeline *a = qd_simulation_view_report(view)->simulated, *b = qd_report_trace_timeline(trace);
        assert_int_equal(a->rank_count, b->rank_count);
        assert_int_equal(a->stream_count, b->stream_count);
        for (int i = 0; i < a->stream_count; i++)
            assert_string_equal(a->streams[i], b->streams[i]);
        for (int i = 0; i < a->rank_count; i++) {
            assert_int_equal(a->ranks[i].rank, b->ranks[i].rank);
            assert_int_equal(a->ranks[i].stands_for, b->ranks[i].stands_for);
            assert_string_equal(a->ranks[i].label, b->ranks[i].label);
            assert_string_equal(a->ranks[i].place, b->ranks[i].place);
        }
        assert_true(a->event_count > 100);
        assert_int_equal(a->event_count, b->event_count);
        for (int64_t i = 0; i < a->event_count; i++) {
            const qd_report_event *x = &a->events[i], *y = &b->events[i];
            assert_string_equal(x->name, y->name);
            assert_string_equal(x->kind, y->kind);
            assert_string_equal(x->module ? x->module : "-", y->module ? y->module : "-");
            assert_string_equal(x->group ? x->group : "-", y->group ? y->group : "-");
            assert_true(x->rank == y->rank && x->stream == y->stream && x->step == y->step && x->microbatch == y->microbatch &&
                        x->bytes == y->bytes && x->flops == y->flops);
            assert_true(fabs(x->begin - y->begin) < 1e-9 && fabs(x->end - y->end) < 2e-9 && fabs(x->waited - y->waited) < 1e-9);
        }
        qd_strbuf_free(&text);
        qd_report_trace_destroy(trace);
        qd_simulation_view_destroy(view);
        qd_simulation_destroy(s);
        qd_options_destroy(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(h200),
        cmocka_unit_test(h200_in_fp8),
        cmocka_unit_test(timeline_is_the_trace),
        cmocka_unit_test(processors),
        cmocka_unit_test(processors_are_uneven),
        cmocka_unit_test(exchanges_slow_computation),
        cmocka_unit_test(processors_need_all_figures),
        cmocka_unit_test(zero_memory),
        cmocka_unit_test(times_add_up),
        cmocka_unit_test(offload),
        cmocka_unit_test(planning),
        cmocka_unit_test(software),
        cmocka_unit_test(formats),
        cmocka_unit_test(nothing_is_passed_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
