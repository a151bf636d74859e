/* Recompute changes memory and work, and no bit of the results.
 * ctest: timeout 300 */
#include "support/sample.h"
#include "support/trained.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=3 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=24 "
#define GPT2 "model.arch=gpt2 model.layers=3 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 "
#define RUN "train.global_batch=8 train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 "

static const char *const modes[] = {"train.recompute=selective",
                                    "train.recompute=full",
                                    "train.recompute=selective parallel.split_backward=true",
                                    "train.recompute=full parallel.split_backward=true",
                                    "train.recompute=full train.recompute_layers=1",
                                    "train.recompute=selective train.recompute_layers=2"};

static void same_bits(void **state)
{
    (void)state;
    static const char *const bases[] = {LLAMA RUN "parallel.ranks=2 train.micro_batch=2 ",
                                        GPT2 RUN "parallel.ranks=2 train.micro_batch=1 model.dropout=0.1 ",
                                        LLAMA RUN "train.precision=bf16 model.dropout=0.2 model.tied=true ",
                                        GPT2 RUN "train.precision=bf16 train.micro_batch=4 "};
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        qd_random_tokens random = {.seed = 11 + b, .documents = b == 0 ? 3 : 0, .ignored = b == 1 ? 5 : 0};
        int steps = sample_count(12, 4);
        trained none = trained_run(bases[b], steps, random);
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
            char words[512];
            if (!sample_has(m, b, 3))
                continue;
            snprintf(words, sizeof words, "%s%s", bases[b], modes[m]);
            trained again = trained_run(words, steps, random);
            trained_same_bits(&again, &none, words);
            free(again.weights);
        }
        free(none.weights);
    }
}

#define MOE                                                                                                                            \
    "model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=67 data.seq=16 model.experts=4 model.experts_per_token=2 " \
    "model.expert_ffn=24 model.shared_experts=1 model.first_dense=1 "

/* SwiGLU's results, kept or recomputed, in dense blocks, routed and shared experts; also in extra
 * dispatch rounds and together with recompute. */
static void swiglu_has_the_same_bits(void **state)
{
    (void)state;
    static const char *const bases[] = {LLAMA RUN "parallel.ranks=2 train.micro_batch=2 ", MOE RUN "train.micro_batch=4 ",
                                        MOE RUN "parallel.ranks=2 parallel.ep=2 parallel.expert_rows=0.5 train.micro_batch=2 ",
                                        MOE RUN "train.precision=bf16 train.micro_batch=2 parallel.split_backward=true "};
    static const char *const ways[] = {"train.swiglu=keep", "train.swiglu=again", "train.swiglu=keep train.recompute=selective",
                                       "train.swiglu=again train.recompute=selective", "train.swiglu=keep train.recompute=full"};
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        qd_random_tokens random = {.seed = 31 + b};
        trained by_itself = trained_run(bases[b], 3, random);
        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
            char words[512];
            snprintf(words, sizeof words, "%s%s", bases[b], ways[i]);
            trained other = trained_run(words, 3, random);
            trained_same_bits(&other, &by_itself, words);
            free(other.weights);
        }
        free(by_itself.weights);
    }
}

static qd_status compare_memory(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    (void)argument;
    const qd_program *p = qd_trainer_program(trainer);
    int64_t planned = p->persistent_bytes + p->dynamic_bytes, held = qd_trainer_allocated(trainer);
    return planned == held ? QD_OK : QD_FAIL(QD_DIFFERENT, "planned %lld bytes, allocated %lld", (long long)planned, (long long)held);
}

static void planned_is_allocated(void **state)
{
    (void)state;
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
        char words[512];
        snprintf(words, sizeof words, LLAMA RUN "parallel.ranks=2 train.micro_batch=2 %s", modes[m]);
        qd_config config = layout_config(words);
        qd_random_tokens random = {.seed = 1, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        qd_team *team;
        qd_step_output out;
        trained_ok(qd_team_create(&config, &source, &team));
        trained_ok(qd_team_step(team, &out));
        trained_ok(qd_team_call(team, compare_memory, NULL));
        qd_team_destroy(team);
    }
}

typedef struct plan {
    int64_t kept; /* peak bytes of activations that wait for a backward pass */
    int64_t dynamic;
    double flops, again;
    int recomputes;
} plan;

static plan make_plan(const char *mode)
{
    char words[512];
    snprintf(words, sizeof words, "model.layers=8 model.hidden=256 model.heads=4 model.vocab=101 data.seq=64 train.global_batch=8 %s",
             mode);
    qd_config config = layout_config(words);
    qd_arena *arena;
    qd_program *p;
    plan made = {0};
    int64_t kept = 0;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &p));
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        made.recomputes += a->kind == QD_ACTION_RECOMPUTE;
        if (a->kind != QD_ACTION_ALLOC && a->kind != QD_ACTION_FREE)
            continue;
        qd_buffer_kind kind = p->buffers[a->buffer].kind;
        if (kind == QD_BUFFER_STASH_I || kind == QD_BUFFER_STASH_W)
            kept += (a->kind == QD_ACTION_ALLOC ? 1 : -1) * p->buffers[a->buffer].bytes;
        made.kept = kept > made.kept ? kept : made.kept;
    }
    made.dynamic = p->dynamic_bytes;
    made.flops = qd_program_flops(p);
    made.again = qd_program_recompute_flops(p);
    qd_arena_destroy(arena);
    return made;
}

/* Full keeps the activations of one block instead of eight; selective about two thirds. Recomputed
 * work is counted separately. */
static void memory_and_work(void **state)
{
    (void)state;
    plan none = make_plan(""), selective = make_plan("train.recompute=selective"), full = make_plan("train.recompute=full"),
         half = make_plan("train.recompute=full train.recompute_layers=4");
    assert_true(none.recomputes == 0 && selective.recomputes == 0 && full.recomputes == 8 && half.recomputes == 4);
    assert_true(selective.kept < none.kept * 3 / 4 && selective.dynamic < none.dynamic);
    assert_true(full.kept < none.kept / 7 && full.dynamic < none.dynamic / 2);
    assert_true(half.kept > full.kept && half.kept < none.kept * 5 / 8 + 1);
    assert_true(none.flops == full.flops && none.flops == selective.flops);
    assert_true(none.again == 0.0 && selective.again == 0.0 && full.again > 0.2 * full.flops && full.again < full.flops / 3);
    assert_true(half.again * 2 == full.again);
    /* Latent attention is expanded again from compressed vectors. */
    plan latent = make_plan("model.arch=deepseek model.q_lora_rank=64"),
         expanded = make_plan("model.arch=deepseek model.q_lora_rank=64 train.recompute=selective");
    assert_true(expanded.kept < latent.kept * 3 / 5 && expanded.flops == latent.flops);
    assert_true(latent.again == 0.0 && expanded.again > 0.0 && expanded.again < 0.1 * latent.flops);
}

/* Recomputed results are not kept: (rows, ffn) of each block, of routed experts for each choice.
 * With auto, dense blocks keep them on the CPU, experts do not. */
static void swiglu_memory(void **state)
{
    (void)state;
    const char *const models[] = {"model.ffn=512 ", "model.experts=4 model.experts_per_token=2 model.expert_ffn=96 "};
    const int64_t widths[] = {512, 2 * 96};
    for (int experts = 0; experts < 2; experts++) {
        char words[3][256];
        plan plans[3];
        for (int i = 0; i < 3; i++) {
            snprintf(words[i], sizeof words[i], "%s%s", models[experts],
                     (const char *const[]){"", "train.swiglu=keep", "train.swiglu=again"}[i]);
            plans[i] = make_plan(words[i]);
        }
        int64_t difference = 8 * 64 * widths[experts] * 8 * 4; /* 8 blocks, 64 x 8 rows, fp32 */
        assert_int_equal(plans[1].kept - plans[2].kept, difference);
        assert_int_equal(plans[0].kept, plans[experts ? 2 : 1].kept);
        assert_true(plans[1].flops == plans[2].flops);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(swiglu_has_the_same_bits),
        cmocka_unit_test(planned_is_allocated),
        cmocka_unit_test(memory_and_work),
        cmocka_unit_test(swiglu_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
