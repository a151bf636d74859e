/* Rules of thumb as scenarios: following a rule wins, and where its condition does not hold,
 * breaking it does not lose. */
#include <quadrille/status.h>

#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"
#include "support/simulated.h"

#define L8 "model.preset=llama3.1-8b data.seq=8192 train.precision=bf16 "
#define L70 "model.preset=llama3.1-70b data.seq=8192 train.precision=bf16 "

static void faster(qd_sim_report a, qd_sim_report b, double by)
{
    if (!(a.step_seconds * by < b.step_seconds))
        fail_msg("%s: %.4g s is not faster than %s: %.4g s by %.2f", a.layout, a.step_seconds, b.layout, b.step_seconds, by);
}

static double exposed(const qd_sim_report *r, const char *axis)
{
    for (int i = 0; i < r->exposed_count; i++)
        if (strcmp(r->exposed[i].name, axis) == 0)
            return r->exposed[i].value;
    return 0.0;
}

/* tp inside the fast domain: across nodes the reductions of every layer use the network. */
static void tensor_parallelism_inside_the_node(void **state)
{
    (void)state;
    const char *words =
        L70 "parallel.ranks=16 parallel.zero=1 train.global_batch=16 train.micro_batch=1 parallel.bucket_mb=100 parallel.tp=%d";
    qd_sim_report inside = simulated("h100", words, 8), across = simulated("h100", words, 16);
    faster(inside, across, 1.2);
    assert_true(exposed(&across, "tp") > 2.0 * exposed(&inside, "tp"));
    /* If the fast domain has 72 accelerators, 16 are inside it. */
    qd_sim_report wide = simulated("gb200", words, 16);
    assert_true(exposed(&wide, "tp") < 0.5 * exposed(&across, "tp"));
}

/* GEMMs that are split too finely use the accelerator less well, even if reductions cost
 * nothing. */
static void no_fine_splits(void **state)
{
    (void)state;
    const char *words =
        "model.layers=16 model.hidden=1024 model.heads=16 model.vocab=32000 data.seq=1024 train.precision=bf16 parallel.ranks=8 "
        "train.global_batch=8 train.micro_batch=1 parallel.tp=%d node.bandwidth_gbs=100000 node.latency_us=0";
    qd_sim_report two = simulated("h100", words, 2), eight = simulated("h100", words, 8);
    assert_true(eight.product_seconds > 0.3 * two.product_seconds);                  /* a quarter would be ideal */
    assert_true(eight.memory_seconds + eight.launch_seconds > 0.4 * (two.memory_seconds + two.launch_seconds));
}

/* Model parallelism only until the model fits; data parallelism for the rest. */
static void data_parallelism_for_the_rest(void **state)
{
    (void)state;
    const char *words =
        L8 "parallel.ranks=64 parallel.zero=1 train.global_batch=128 train.micro_batch=1 parallel.bucket_mb=100 parallel.tp=%d";
    qd_sim_report plain = simulated("h100", words, 1), split = simulated("h100", words, 4);
    assert_true(plain.fits && split.fits);
    faster(plain, split, 1.05);
    /* A model that does not fit without it needs it. */
    qd_sim_report large =
        simulated("h100", L70 "parallel.ranks=64 parallel.zero=1 train.global_batch=128 train.micro_batch=1 parallel.tp=1");
    assert_false(large.fits);
    assert_true(simulated("h100", L70 "parallel.ranks=64 parallel.zero=1 train.global_batch=128 train.micro_batch=1 parallel.tp=8").fits);
}

/* The lowest stage that fits: zero 3 gathers what zero 1 keeps, which is visible on slow links; if
 * memory is short it is the one that fits. */
static void lowest_zero_stage(void **state)
{
    (void)state;
    const char *words =
        L8 "parallel.ranks=64 train.global_batch=256 train.micro_batch=1 train.recompute=full parallel.bucket_mb=100 parallel.zero=%d "
           "network.bandwidth_gbs=6";
    qd_sim_report one = simulated("h100", words, 1), three = simulated("h100", words, 3);
    assert_true(one.fits && three.fits);
    faster(one, three, 1.1);
    const char *short_words = L70 "parallel.ranks=64 train.global_batch=64 train.micro_batch=1 train.recompute=full parallel.zero=%d";
    assert_false(simulated("h100", short_words, 1).fits);
    assert_true(simulated("h100", short_words, 3).fits);
}

/* Stages 1 and 2 do not reduce activations: recompute or split them. */
static void activations_are_left(void **state)
{
    (void)state;
    const char *words = L8 "parallel.ranks=64 parallel.zero=%d train.global_batch=256 train.micro_batch=4 train.recompute=%s";
    assert_false(simulated("h100", words, 1, "none").fits);
    assert_false(simulated("h100", words, 2, "none").fits);
    assert_true(simulated("h100", words, 1, "full").fits);
    /* Split over tp with sequence parallelism they fit too. */
    assert_true(simulated("h100", L8 "parallel.ranks=64 parallel.zero=1 train.global_batch=256 train.micro_batch=4 parallel.tp=8").fits);
}

/* Accumulate if communication is slow for the batch: one reduction for many micro-batches. */
static void accumulation(void **state)
{
    (void)state;
    const char *words =
        L8 "parallel.ranks=64 parallel.zero=1 train.micro_batch=1 parallel.bucket_mb=100 network.bandwidth_gbs=3 train.global_batch=%d";
    qd_sim_report small = simulated("h100", words, 64), large = simulated("h100", words, 512);
    assert_true(large.tokens_per_second > 1.5 * small.tokens_per_second);
    /* With fast links there is little to gain. */
    const char *fast = L8 "parallel.ranks=8 parallel.zero=1 train.micro_batch=1 parallel.bucket_mb=100 train.global_batch=%d";
    assert_true(simulated("h200", fast, 64).tokens_per_second < 1.15 * simulated("h200", fast, 8).tokens_per_second);
}

/* The gathers of sharded parameters are hidden by computation if they are started ahead of use. */
static void prefetch_hides_gathers(void **state)
{
    (void)state;
    const char *words = L8 "parallel.ranks=64 parallel.zero=3 train.global_batch=128 train.micro_batch=2 parallel.overlap=%s";
    qd_sim_report ahead = simulated("h100", words, "true"), late = simulated("h100", words, "false");
    assert_true(exposed(&ahead, "dp") < 0.1 * ahead.step_seconds);
    assert_true(exposed(&late, "dp") > 3.0 * exposed(&ahead, "dp"));
    faster(ahead, late, 1.05);
    /* A small batch on a slow network leaves nothing to hide them. */
    qd_sim_report slow =
        simulated("h100", L8 "parallel.ranks=64 parallel.zero=3 train.global_batch=64 train.micro_batch=1 network.bandwidth_gbs=3");
    assert_true(exposed(&slow, "dp") > 0.5 * slow.step_seconds);
}

/* Sequence parallelism costs no time and frees memory. */
static void sequence_parallelism(void **state)
{
    (void)state;
    const char *words = L70 "parallel.ranks=64 parallel.tp=8 parallel.zero=1 train.global_batch=64 train.micro_batch=1 parallel.sp=%s";
    qd_sim_report with = simulated("h100", words, "true"), without = simulated("h100", words, "false");
    assert_true(with.memory_bytes < without.memory_bytes);
    assert_true(with.step_seconds < 1.02 * without.step_seconds);
}

/* A torus is as good as a switch with the same links for exchanges with neighbours, but not for
 * all-to-all. */
static void torus_and_switch(void **state)
{
    (void)state;
    const char *words = L8 "parallel.ranks=512 parallel.zero=3 train.global_batch=512 train.micro_batch=1";
    qd_sim_report torus = simulated("tpu-v5p", "%s", words),
                  pod = simulated("virgo", L8 "parallel.ranks=512 parallel.zero=3 train.global_batch=512 train.micro_batch=1 "
                                              "accelerator.peak_tflops=459 accelerator.product_tflops=427 "
                                              "accelerator.bandwidth_gbs=2765 network.bandwidth_gbs=600");
    assert_true(torus.step_seconds < 1.1 * pod.step_seconds);
}

/* Pipelines across slow links: a stage sends one activation per micro-batch where tp sends several
 * per layer. */
static void pipelines_across_slow_links(void **state)
{
    (void)state;
    const char *words = L70 "parallel.ranks=16 parallel.zero=1 train.global_batch=64 train.micro_batch=1 parallel.tp=%d parallel.pp=%d "
                            "network.bandwidth_gbs=12";
    faster(simulated("h100", words, 8, 2), simulated("h100", words, 16, 1), 1.2);
}

/* The bubble: (p - 1)/(m + p - 1) of the time under 1F1B; many micro-batches, interleaving or the
 * split backward passes of zero-bubble schedules shrink it. */
static void pipelines_need_micro_batches(void **state)
{
    (void)state;
    const char *words = "model.layers=32 model.hidden=4096 model.heads=32 model.vocab=1024 data.seq=4096 train.precision=bf16 "
                        "parallel.ranks=4 parallel.pp=4 "
                        "train.micro_batch=1 train.global_batch=%d parallel.schedule=%s parallel.layers=%s";
    qd_sim_report few = simulated("h100", words, 4, "1f1b", "8,8,8,8"), many = simulated("h100", words, 32, "1f1b", "8,8,8,8");
    double bubble_few = few.bubble_seconds / few.step_seconds, bubble_many = many.bubble_seconds / many.step_seconds;
    assert_true(bubble_few > 0.38 && bubble_few < 0.48);   /* 3/7 */
    assert_true(bubble_many > 0.06 && bubble_many < 0.12); /* 3/35 */
    qd_sim_report interleaved = simulated("h100", words, 8, "interleaved", "4,4,4,4,4,4,4,4"),
                  plain = simulated("h100", words, 8, "1f1b", "8,8,8,8");
    qd_sim_report halves = simulated("h100", words, 8, "zb_h1", "8,8,8,8");
    faster(interleaved, plain, 1.05);
    faster(halves, plain, 1.03);
}

/* In schedules that split only some backward passes, the whole ones overlap the exchanges of tp
 * with GEMMs, as 1F1B's do. */
static void whole_passes_hide_tensor_parallelism(void **state)
{
    (void)state;
    const char *words = L8 "parallel.ranks=16 parallel.pp=2 parallel.tp=8 parallel.zero=1 train.global_batch=64 train.micro_batch=1 "
                           "parallel.schedule=%s";
    qd_sim_report plain = simulated("h100", words, "1f1b"), pairs = simulated("h100", words, "dualpipe_v");
    assert_true(exposed(&pairs, "tp") < 1.05 * exposed(&plain, "tp"));
    /* Split halves still overlap the gather of rows for one weight gradient with another. */
    qd_sim_report halves = simulated("h100", words, "zb_h1");
    assert_true(exposed(&halves, "tp") < 1.3 * exposed(&plain, "tp"));
}

/* Context parallelism for long sequences: their activations do not fit, and tp cannot extend beyond
 * the node. */
static void context_parallelism_for_long_sequences(void **state)
{
    (void)state;
    const char *words = "model.preset=llama3.1-70b data.seq=131072 train.precision=bf16 parallel.ranks=128 train.recompute=selective "
                        "parallel.tp=8 parallel.zero=1 train.global_batch=16 "
                        "train.micro_batch=1 parallel.cp=%d";
    assert_false(simulated("h100", words, 1).fits);
    assert_true(simulated("h100", words, 16).fits);
    /* Short sequences gain nothing from it. */
    const char *brief = L8 "parallel.ranks=64 parallel.zero=1 train.global_batch=128 train.micro_batch=1 parallel.cp=%d";
    faster(simulated("h100", brief, 1), simulated("h100", brief, 4), 1.02);
}

/* Experts: ep keeps them whole, tp splits each; inside the node, because dispatch across nodes
 * costs more. */
static void experts_before_tensors(void **state)
{
    (void)state;
    const char *words = "model.preset=mixtral-8x7b data.seq=4096 train.precision=bf16 parallel.ranks=64 parallel.zero=1 "
                        "train.global_batch=128 train.micro_batch=1 "
                        "parallel.bucket_mb=100 parallel.tp=%d parallel.ep=%d";
    qd_sim_report whole = simulated("h100", words, 1, 8), cut = simulated("h100", words, 8, 1);
    faster(whole, cut, 1.1);
    assert_true(exposed(&whole, "ep") < 0.2 * whole.step_seconds);
    /* With nodes of two, eight experts are spread over four nodes. */
    qd_sim_report apart = simulated(
        "h100", "model.preset=mixtral-8x7b data.seq=4096 train.precision=bf16 parallel.ranks=64 parallel.zero=1 train.global_batch=128 "
                "train.micro_batch=1 parallel.bucket_mb=100 parallel.tp=1 parallel.ep=8 node.size=2");
    assert_true(exposed(&apart, "ep") > 2.0 * exposed(&whole, "ep"));
}

/* Eight choices on four nodes: sending rows to each node once reduces network traffic; inside a
 * node there is nothing to save. */
static void experts_once_per_node(void **state)
{
    (void)state;
    const char *words =
        "model.preset=qwen3-30b-a3b data.seq=4096 train.precision=bf16 parallel.ranks=64 parallel.zero=1 train.global_batch=128 "
        "train.micro_batch=1 parallel.ep=%d parallel.dispatch=%s";
    qd_sim_report flat = simulated("h100", words, 32, "flat"), once = simulated("h100", words, 32, "node");
    faster(once, flat, 1.1);
    assert_true(exposed(&once, "ep") < 0.7 * exposed(&flat, "ep"));
    assert_true(simulated("h100", words, 8, "flat").step_seconds == simulated("h100", words, 8, "node").step_seconds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_parallelism_inside_the_node),
        cmocka_unit_test(no_fine_splits),
        cmocka_unit_test(data_parallelism_for_the_rest),
        cmocka_unit_test(lowest_zero_stage),
        cmocka_unit_test(activations_are_left),
        cmocka_unit_test(accumulation),
        cmocka_unit_test(prefetch_hides_gathers),
        cmocka_unit_test(sequence_parallelism),
        cmocka_unit_test(torus_and_switch),
        cmocka_unit_test(pipelines_across_slow_links),
        cmocka_unit_test(pipelines_need_micro_batches),
        cmocka_unit_test(whole_passes_hide_tensor_parallelism),
        cmocka_unit_test(context_parallelism_for_long_sequences),
        cmocka_unit_test(experts_before_tensors),
        cmocka_unit_test(experts_once_per_node),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
