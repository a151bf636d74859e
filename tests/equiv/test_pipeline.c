/* Pipeline parallelism: any number of stages, any schedule, recompute setting and ZeRO stage is
 * bit-identical to one stage with the same data parallelism, with the planned bytes and memory.
 * ctest: timeout 600 */
#include "support/sample.h"
#include "support/scratch.h"
#include "support/trained.h"
#include "train/exec/state.h"

#include <quadrille/bench.h>
#include <quadrille/check.h>
#include <quadrille/sim.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=5 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=12 "
#define GPT2 "model.arch=gpt2 model.layers=3 model.hidden=32 model.heads=4 model.vocab=67 data.seq=9 model.dropout=0.1 "
#define RUN "train.lr=1e-2 train.schedule=constant train.steps=50 run.threads=1 train.clip=0.5 "

static const char *const every_schedule[] = {
    "parallel.schedule=gpipe ",        "parallel.schedule=1f1b ",  "parallel.schedule=interleaved ",
    "parallel.schedule=zb_h1 ",        "parallel.schedule=zb_v ",  "parallel.schedule=dualpipe_v ",
};

static void compare(const char *base, int dp, const char *const *variants, size_t count, qd_random_tokens random)
{
    static size_t round;
    const int steps = sample_count(5, 2);
    char words[768];
    snprintf(words, sizeof words, "%sparallel.ranks=%d ", base, dp);
    trained plain = trained_run(words, steps, random);
    for (size_t v = 0; v < count; v++) {
        if (!sample_has(v, round, 3))
            continue;
        int pp = 2;
        const char *given = strstr(variants[v], "parallel.pp=");
        if (given)
            pp = atoi(given + strlen("parallel.pp="));
        snprintf(words, sizeof words, "%sparallel.pp=%d parallel.ranks=%d %s", base, pp, pp * dp, variants[v]);
        trained piped = trained_run(words, steps, random);
        trained_same_bits(&piped, &plain, words);
        free(piped.weights);
    }
    free(plain.weights);
    round++;
}
#define COMPARE(base, dp, variants, ...) \
    compare(base, dp, variants, sizeof(variants) / sizeof *(variants), (qd_random_tokens){__VA_ARGS__})

static void schedules_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "train.global_batch=6 train.micro_batch=1 ", 1, every_schedule, .seed = 1, .documents = 3);
    static const char *const deep[] = {
        "parallel.pp=4 parallel.schedule=gpipe",
        "parallel.pp=4 parallel.schedule=1f1b train.recompute=full",
        "parallel.pp=3 parallel.schedule=interleaved train.recompute=selective",
        "parallel.pp=4 parallel.schedule=zb_h1 train.recompute=full train.recompute_layers=2",
        "parallel.pp=3 parallel.schedule=zb_v train.recompute=full",
        "parallel.pp=3 parallel.schedule=dualpipe_v",
        "parallel.pp=4 parallel.layers=2,1,1,1 parallel.overlap=false",
        "parallel.pp=2 parallel.layers=0,5 parallel.split_backward=true",
        "parallel.pp=7",
    };
    COMPARE(LLAMA RUN "train.global_batch=12 train.micro_batch=2 model.vocab=1009 ", 1, deep, .seed = 2, .ignored = 5);
}

static const char *const sharded[] = {
    "parallel.schedule=1f1b",
    "parallel.schedule=gpipe parallel.zero=1",
    "parallel.schedule=zb_h1 parallel.zero=2",
    "parallel.schedule=interleaved parallel.zero=3",
    "parallel.schedule=zb_v parallel.zero=3 parallel.prefetch=1 parallel.overlap=false",
    "parallel.schedule=zb_v parallel.zero=2 parallel.bucket_mb=0.001",
    "parallel.schedule=dualpipe_v parallel.zero=1 train.recompute=full",
    "parallel.schedule=zb_h1 parallel.zero=3 parallel.reshard_after_forward=false train.recompute=selective",
    "parallel.pp=4 parallel.schedule=1f1b parallel.zero=3 parallel.bucket_mb=0.01",
};

static void zero_stages_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "train.global_batch=8 train.micro_batch=1 train.grad_sync=per_step ", 2, sharded, .seed = 3);
    COMPARE(LLAMA RUN "train.global_batch=8 train.micro_batch=1 train.grad_sync=per_microbatch ", 2, sharded, .seed = 4);
}

/* The head's gradient is sent to the embedding and the values return, with any sharding. */
static void tied_embeddings_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(GPT2 RUN "train.global_batch=4 train.micro_batch=1 ", 1, every_schedule, .seed = 5);
    COMPARE(GPT2 RUN "train.global_batch=8 train.micro_batch=1 train.grad_sync=per_step ", 2, sharded, .seed = 6);
    COMPARE(GPT2 RUN "train.global_batch=8 train.micro_batch=1 train.grad_sync=per_microbatch train.precision=bf16 ", 2, sharded,
            .seed = 7);
    COMPARE(LLAMA RUN
            "train.global_batch=8 train.micro_batch=1 model.tied=true train.optimizer=sgd train.momentum=0.9 train.grad_sync=per_step ",
            2, sharded, .seed = 8);
}

/* With tensor parallelism inside the stages: bit-identical to the same tp without a pipeline. */
static void tensor_parallel_stages_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const few[] = {
        "parallel.schedule=interleaved parallel.zero=3",
        "parallel.schedule=zb_h1 train.recompute=full",
        "parallel.schedule=zb_v parallel.zero=2 parallel.tp_overlap=1",
    };
    COMPARE(LLAMA RUN "parallel.tp=2 train.global_batch=8 train.micro_batch=1 train.grad_sync=per_step ", 4, few, .seed = 9);
    COMPARE(GPT2 RUN "parallel.tp=2 train.global_batch=8 train.micro_batch=1 train.grad_sync=per_microbatch ", 4, few, .seed = 10);
    COMPARE(LLAMA RUN "parallel.tp=2 parallel.sp=false train.global_batch=4 train.micro_batch=1 model.tied=true ", 2, every_schedule,
            .seed = 11);
}

/* A schedule that is written to a file and read back is unchanged. */
static void files_give_the_same_bits(void **state)
{
    static const char *const base = LLAMA RUN "train.global_batch=6 train.micro_batch=1 ";
    const char *path = scratch_path(state, "schedule.csv");
    char words[512];
    snprintf(words, sizeof words, "%sparallel.pp=3 parallel.ranks=3 parallel.schedule=zb_h1", base);
    qd_options *options = layout_options(words);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    trained_ok(qd_check_schedule(options, 0, QD_DRAWING_CSV, out));
    fclose(out);
    qd_options_destroy(options);
    trained plain = trained_run(base, 3, (qd_random_tokens){.seed = 12});
    snprintf(words, sizeof words, "%sparallel.pp=3 parallel.ranks=3 parallel.schedule_file=%s", base, path);
    trained read = trained_run(words, 3, (qd_random_tokens){.seed = 12});
    trained_same_bits(&read, &plain, words);
    free(read.weights);
    free(plain.weights);
}

/* Replays the measured times of a small pipeline of four ranks. */
static qd_replay_report replayed(const char *more)
{
    char words[512];
    qd_bench_actions actions = qd_bench_actions_default();
    qd_replay_report r = qd_replay_report_default();
    snprintf(words, sizeof words,
             "model.layers=8 model.hidden=64 model.heads=4 model.vocab=16 data.seq=32 train.global_batch=8 train.micro_batch=1 "
             "parallel.ranks=4 parallel.pp=4 %s",
             more);
    qd_options *options = layout_options(words);
    for (int round = 0; round < 2; round++)
        trained_ok(qd_bench_measure_actions(options, 1, 6, &actions));
    assert_int_equal(actions.steps, 12);
    trained_ok(qd_replay_pipeline(options, (const double *const *)actions.pass, &r));
    assert_true(r.seconds > 0.0);
    qd_bench_actions_free(&actions);
    qd_options_destroy(options);
    return r;
}

/* The bubble of a pipeline is close to the textbook's (stages of this size are not quite uniform:
 * embedding and head cost more), that of a zero-bubble schedule is smaller, and the number of
 * micro-batches in flight is as in theory. */
static void replayed_bubbles_are_about_right(void **state)
{
    (void)state;
    static const char *const kinds[] = {"1f1b", "gpipe", "zb_h1"};
    double bubbles[3];
    if (QD_TEST_SANITIZED)
        skip(); /* times mean nothing there */
    for (int k = 0; k < 3; k++) {
        char words[64];
        snprintf(words, sizeof words, "parallel.schedule=%s", kinds[k]);
        qd_replay_report r = replayed(words);
        bubbles[k] = r.bubble;
        for (int rank = 0; rank < 4; rank++)
            assert_int_equal(r.in_flight[rank], k == 0 ? 4 - rank : k == 1 ? 8 : 4);
        if (k < 2 && !(r.bubble > r.theory - 0.05 && r.bubble < r.theory + 0.15))
            fail_msg("%s: bubble %.3f, textbook %.3f", kinds[k], r.bubble, r.theory);
    }
    assert_true(bubbles[2] < bubbles[0]);
}

/* A stage with more work than the others shows, however times are summarized: five of eight blocks
 * on one of four ranks are 2.5 times the mean, and 3 of 4 ranks wait for it most of the time. */
static void stages_that_are_uneven_show(void **state)
{
    (void)state;
    if (QD_TEST_SANITIZED)
        skip();
    qd_replay_report r = replayed("parallel.schedule=1f1b parallel.layers=1,5,1,1");
    if (!(r.uneven > 0.8 && r.uneven < 1.8 && r.bubble > r.theory + 0.15))
        fail_msg("uneven %.3f, bubble %.3f, textbook %.3f", r.uneven, r.bubble, r.theory);
}

/* Saved on one layout and resumed on another of the same dp: bit-identical to a run without a
 * stop. */
static void checkpoints_travel_between_pipelines(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 ",
        "parallel.ranks=4 parallel.pp=2 parallel.schedule=1f1b ",
        "parallel.ranks=4 parallel.pp=2 parallel.schedule=zb_v parallel.zero=3 ",
        "parallel.ranks=6 parallel.pp=3 parallel.schedule=zb_h1 parallel.zero=1 ",
    };
    static const char *const models[] = {
        GPT2 RUN "train.global_batch=8 train.micro_batch=1 train.grad_sync=per_step ",
        LLAMA RUN "train.global_batch=8 train.micro_batch=1 train.grad_sync=per_step train.precision=bf16 model.tied=true "};
    for (size_t m = 0; m < 2; m++) {
        double whole[5], part[5];
        for (size_t from = 0; from < 4; from++) {
            size_t to = (from + 1 + m) % 4;
            char words[2][640];
            qd_random_tokens random = {.seed = 11};
            snprintf(words[0], sizeof words[0], "%s%s", models[m], layouts[from]);
            snprintf(words[1], sizeof words[1], "%s%s", models[m], layouts[to]);
            qd_team *team = trained_team(words[0], &random);
            trained_steps(team, 2, whole);
            trained_ok(qd_team_call(team, trained_save, NULL));
            trained_steps(team, 3, whole + 2);
            qd_team_destroy(team);
            team = trained_team(words[1], &random);
            trained_ok(qd_team_call(team, trained_load, NULL));
            trained_steps(team, 3, part + 2);
            qd_team_destroy(team);
            for (int s = 2; s < 5; s++)
                if (whole[s] != part[s])
                    fail_msg("%s: step %d: %.17g, saved by %s: %.17g", words[1], s + 1, part[s], words[0], whole[s]);
        }
    }
}

/* A gradient of the second stage that is not finite is found there. */
static qd_status spoil(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)argument;
    qd_program *p = qd_trainer_program_mutable(trainer);
    int param = qd_ledger_find(p->ledger, "block.4.mlp_norm.weight");
    if (qd_comm_rank(world) != 1)
        return QD_OK;
    for (int i = 0; i < p->action_count; i++)
        p->actions[i].overwrite = false;
    ((float *)qd_bound_kind(qd_trainer_bound(trainer), QD_BUFFER_GRAD))[p->storage.offset[param] + 5] = NAN;
    return QD_OK;
}

static void what_is_not_finite_is_named(void **state)
{
    (void)state;
    float bad[32];
    qd_step_output out;
    qd_random_tokens random = {.seed = 11};
    for (int i = 0; i < 32; i++)
        bad[i] = i == 7 ? NAN : 1.0f;
    qd_team *team = trained_team(LLAMA RUN "train.global_batch=4 train.micro_batch=1 parallel.ranks=2 parallel.pp=2 ", &random);
    trained_ok(qd_team_write(team, "block.4.mlp_norm.weight", bad, 32));
    assert_int_equal(qd_team_step(team, &out), QD_NOT_FINITE);
    assert_non_null(strstr(qd_error_message(), "rank 1: its weight block.4.mlp_norm.weight is not finite"));
    qd_team_destroy(team);
    team = trained_team(LLAMA RUN "train.global_batch=4 train.micro_batch=1 parallel.ranks=2 parallel.pp=2 ", &random);
    trained_ok(qd_team_call(team, spoil, NULL));
    assert_int_equal(qd_team_step(team, &out), QD_NOT_FINITE);
    if (!strstr(qd_error_message(), "rank 1: its gradient of block.4.mlp_norm.weight is not finite"))
        fail_msg("%s", qd_error_message());
    qd_team_destroy(team);
}

static void plan_equals_run(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        LLAMA "parallel.ranks=2 parallel.pp=2 train.global_batch=4 train.micro_batch=1 ",
        LLAMA "parallel.ranks=4 parallel.pp=4 train.global_batch=4 train.micro_batch=1 parallel.schedule=zb_h1 train.recompute=full ",
        LLAMA "parallel.ranks=4 parallel.pp=2 train.global_batch=8 train.micro_batch=1 parallel.schedule=zb_v parallel.zero=3 ",
        GPT2 "parallel.ranks=4 parallel.pp=2 train.global_batch=8 train.micro_batch=1 parallel.schedule=interleaved parallel.zero=2 ",
        GPT2
        "parallel.ranks=4 parallel.pp=2 train.global_batch=8 train.micro_batch=1 parallel.schedule=gpipe train.grad_sync=per_microbatch ",
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        qd_config config = layout_config(layouts[i]);
        qd_random_tokens random = {.seed = 1, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        qd_team *team;
        qd_step_output out;
        trained_counts c;
        trained_ok(qd_team_create(&config, &source, &team));
        for (int s = 0; s < 2; s++)
            trained_ok(qd_team_step(team, &out));
        trained_ok(qd_team_call(team, trained_count, &c));
        assert_int_equal(c.sent, 2 * c.planned / config.world);
        qd_team_destroy(team);
    }
}

/* Forward passes only: the loss of a step without an update. */
static void evaluation_runs_through_the_pipeline(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof every_schedule / sizeof *every_schedule; i++) {
        double losses[2];
        for (int k = 0; k < 2; k++) {
            char words[512];
            snprintf(words, sizeof words, LLAMA "train.global_batch=5 train.micro_batch=1 parallel.pp=%d parallel.ranks=%d %s", k ? 3 : 1,
                     k ? 3 : 1, k ? every_schedule[i] : "");
            qd_config config = layout_config(words);
            config.strategy.training = false;
            qd_random_tokens random = {.seed = 1, .vocab = config.model.vocab};
            qd_batch_source source = qd_random_source(&random);
            qd_team *team;
            qd_step_output out;
            trained_ok(qd_team_create(&config, &source, &team));
            trained_ok(qd_team_step(team, &out));
            losses[k] = out.loss;
            qd_team_destroy(team);
        }
        assert_true(losses[0] == losses[1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_give_the_same_bits),
        cmocka_unit_test(zero_stages_give_the_same_bits),
        cmocka_unit_test(tied_embeddings_give_the_same_bits),
        cmocka_unit_test(tensor_parallel_stages_give_the_same_bits),
        cmocka_unit_test_setup_teardown(checkpoints_travel_between_pipelines, scratch_setup, scratch_teardown),
        cmocka_unit_test(what_is_not_finite_is_named),
        cmocka_unit_test(replayed_bubbles_are_about_right),
        cmocka_unit_test(stages_that_are_uneven_show),
        cmocka_unit_test_setup_teardown(files_give_the_same_bits, scratch_setup, scratch_teardown),
        cmocka_unit_test(plan_equals_run),
        cmocka_unit_test(evaluation_runs_through_the_pipeline),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
