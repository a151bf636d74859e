/* Sharded data parallelism: every stage, bucket, prefetch depth and reshard policy is bit-identical
 * to plain data parallelism, with the planned bytes and memory.
 * ctest: timeout 600 */
#include "support/sample.h"
#include "support/trained.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=3 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=3 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 "
#define RUN "train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 train.clip=0.5 "

#define COMPARE(base, variants, steps, ...) TRAINED_COMPARE(base, variants, steps, 4, __VA_ARGS__)

static const char *const stages[] = {
    "parallel.zero=1",
    "parallel.zero=2",
    "parallel.zero=3",
    "parallel.zero=1 parallel.bucket_mb=0.001",
    "parallel.zero=2 parallel.bucket_mb=0.001 parallel.overlap=false",
    "parallel.zero=3 parallel.bucket_mb=0.02 parallel.prefetch=1",
    "parallel.zero=3 parallel.prefetch=3 parallel.reshard_after_forward=false",
    "parallel.zero=3 parallel.prefetch=100",
    "parallel.zero=3 parallel.overlap=false parallel.split_backward=true train.recompute=full",
    "parallel.zero=2 train.recompute=selective",
};

/* 50 steps, one micro-batch. */
static void stages_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=4 train.global_batch=8 ", stages, 50, .seed = 1);
    COMPARE(GPT2 RUN "parallel.ranks=3 train.global_batch=6 model.dropout=0.1 ", stages, 50, .seed = 2, .ignored = 5);
}

/* Gradient accumulation, with gradients summed once per step or after each micro-batch. */
static void accumulation_gives_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=12 train.micro_batch=2 train.grad_sync=per_step ", stages, 20, .seed = 3,
            .documents = 3);
    COMPARE(GPT2 RUN "parallel.ranks=4 train.global_batch=12 train.micro_batch=1 train.grad_sync=per_microbatch ", stages, 20, .seed = 4);
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=8 train.micro_batch=1 train.grad_sync=per_microbatch model.tied=true ", stages,
            20, .seed = 5);
}

static void bf16_gives_the_same_bits(void **state)
{
    (void)state;
    COMPARE(GPT2 RUN "parallel.ranks=4 train.global_batch=8 train.precision=bf16 ", stages, 50, .seed = 6);
    COMPARE(LLAMA RUN "parallel.ranks=3 train.global_batch=12 train.micro_batch=2 train.precision=bf16 train.grad_sync=per_microbatch ",
            stages, 20, .seed = 7);
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=8 train.micro_batch=2 train.precision=bf16 train.grad_dtype=fp32 "
                      "train.grad_sync=per_step model.tied=true ",
            stages, 20, .seed = 8);
}

/* Replicas of sharded copies, and parameters that small groups keep between the passes. */
static void hybrid_gives_the_same_bits(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.zero=1 parallel.dp_shard=2",
        "parallel.zero=2 parallel.dp_shard=4",
        "parallel.zero=3 parallel.dp_shard=2",
        "parallel.zero=3 parallel.dp_shard=4 parallel.bucket_mb=0.01",
        "parallel.zero=3 parallel.reshard_after_forward=2",
        "parallel.zero=3 parallel.reshard_after_forward=4 parallel.prefetch=1",
        "parallel.zero=3 parallel.dp_shard=4 parallel.reshard_after_forward=2 parallel.overlap=false",
        "parallel.zero=3 parallel.dp_shard=1",
    };
    COMPARE(LLAMA RUN "parallel.ranks=8 train.global_batch=8 ", layouts, 10, .seed = 9);
    COMPARE(GPT2 RUN "parallel.ranks=8 train.global_batch=16 train.micro_batch=1 train.grad_sync=per_microbatch ", layouts, 10, .seed = 10);
    COMPARE(GPT2 RUN "parallel.ranks=8 train.global_batch=16 train.micro_batch=1 train.grad_sync=per_step ", layouts, 10, .seed = 10);
}

/* Other optimizers keep other state. */
static void sgd_gives_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=4 train.optimizer=sgd ", stages, 10, .seed = 11);
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=4 train.optimizer=sgd train.momentum=0.9 train.precision=bf16 ", stages, 10,
            .seed = 12);
}

static void plan_equals_run(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.zero=1 ",
        "parallel.zero=2 parallel.bucket_mb=0.02 ",
        "parallel.zero=3 ",
        "parallel.zero=3 train.micro_batch=1 parallel.prefetch=1 ",
        "parallel.zero=3 train.micro_batch=1 train.grad_sync=per_step parallel.reshard_after_forward=false ",
        "parallel.zero=3 parallel.reshard_after_forward=2 ",
        "parallel.zero=2 parallel.dp_shard=2 parallel.overlap=false model.tied=true ",
        "train.micro_batch=1 train.grad_sync=per_microbatch ",
    };
    for (int ranks = 2, round = 0; ranks <= 8; ranks *= 2, round++)
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
            char words[640];
            if (!sample_has(l, (size_t)round, 3))
                continue;
            snprintf(words, sizeof words, LLAMA RUN "train.global_batch=16 train.precision=bf16 parallel.ranks=%d %s", ranks, layouts[l]);
            trained_plan_equals_run(words);
        }
}

/* Actions that move parameters or gradients, or recompute. */
static bool moves(const qd_action *a)
{
    return qd_action_communicates(a) || a->kind == QD_ACTION_PACK || a->kind == QD_ACTION_UNPACK || a->kind == QD_ACTION_ADD ||
           a->kind == QD_ACTION_RECOMPUTE;
}

/* Every action that moves parameters or gradients matters: without it the run fails or its results
 * differ. */
static void actions_matter(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.zero=1 train.global_batch=4 ",
        "parallel.ranks=2 parallel.zero=3 train.global_batch=4 train.micro_batch=1 train.recompute=full ",
        "parallel.ranks=4 parallel.zero=3 train.global_batch=4 parallel.reshard_after_forward=2 ",
        "parallel.ranks=4 parallel.zero=2 parallel.dp_shard=2 train.global_batch=8 train.micro_batch=1 ",
    };
    int tried = 0;
    size_t met = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[640];
        snprintf(words, sizeof words, GPT2 RUN "run.deadline=20 %s", layouts[l]);
        trained_actions_matter(words, 3, moves, 5, &met, &tried);
    }
    assert_true(met > 60 && tried >= sample_count((int)met, (int)met / 10));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits), cmocka_unit_test(accumulation_gives_the_same_bits),
        cmocka_unit_test(bf16_gives_the_same_bits),  cmocka_unit_test(hybrid_gives_the_same_bits),
        cmocka_unit_test(sgd_gives_the_same_bits),   cmocka_unit_test(plan_equals_run),
        cmocka_unit_test(actions_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
