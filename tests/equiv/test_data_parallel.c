/* Several data-parallel ranks against one, and every setting that must not change a bit.
 * ctest: timeout 400 */
#include "support/sample.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=24 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 "
/* The head has more rows than one chunk of logits. */
#define CHUNKS "model.layers=1 model.hidden=16 model.heads=2 model.kv_heads=2 model.vocab=37 data.seq=1100 "
#define RUN "train.global_batch=8 train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 "

static void expect_close(const trained *a, const trained *b, double tolerance, const char *what)
{
    for (int s = 0; s < a->steps; s++)
        if (!(fabs(a->losses[s] - b->losses[s]) <= tolerance * fabs(b->losses[s])))
            fail_msg("%s: step %d: loss %.9g against %.9g", what, s + 1, a->losses[s], b->losses[s]);
}

static void more_ranks_same_loss(void **state)
{
    (void)state;
    static const char *const models[] = {LLAMA, GPT2, LLAMA "model.tied=true ", GPT2 "model.dropout=0.1 "};
    static const char *const layouts[] = {"parallel.ranks=2 ", "parallel.ranks=4 ", "parallel.ranks=4 train.micro_batch=1 ",
                                          "parallel.ranks=8 ", "train.micro_batch=2 "};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        char words[512];
        snprintf(words, sizeof words, "%s" RUN, models[m]);
        /* ignored targets and packed documents included */
        qd_random_tokens random = {.seed = 7 + m, .ignored = m % 2 ? 5 : 0, .documents = m == 2 ? 3 : 0};
        int steps = sample_count(50, 4);
        trained one = trained_run(words, steps, random);
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
            if (!sample_has(l, m, 3))
                continue;
            snprintf(words, sizeof words, "%s" RUN "%s", models[m], layouts[l]);
            trained many = trained_run(words, steps, random);
            expect_close(&many, &one, 1e-5, words);
            free(many.weights);
        }
        free(one.weights);
    }
}

/* Runs on the same mesh are bit-identical: repeated, with and without overlap, with other buckets,
 * split backward passes and other numbers of threads. */
static void same_mesh_same_bits(void **state)
{
    (void)state;
    static const char *const bases[] = {LLAMA RUN "parallel.ranks=4 train.micro_batch=1 ",
                                        GPT2 RUN "parallel.ranks=3 train.global_batch=6 train.micro_batch=1 model.dropout=0.1 ",
                                        GPT2 RUN "parallel.ranks=2 train.precision=bf16 ",
                                        LLAMA RUN "parallel.ranks=2 train.precision=bf16 train.grad_dtype=fp32 "};
    static const char *const variants[] = {"", "parallel.overlap=false", "parallel.bucket_mb=0.001", "parallel.bucket_mb=0.0301",
                                           "parallel.split_backward=true", "run.threads=2"};
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        int steps = sample_count(10, 4);
        trained first = trained_run(bases[b], steps, (qd_random_tokens){.seed = 3});
        for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
            char words[512];
            if (!sample_has(v, b, 3))
                continue;
            snprintf(words, sizeof words, "%s%s", bases[b], variants[v]);
            trained again = trained_run(words, steps, (qd_random_tokens){.seed = 3});
            trained_same_bits(&again, &first, words);
            free(again.weights);
        }
        free(first.weights);
    }
}

/* Gradients of the head are summed over chunks of rows, inside one op or by several; with half the
 * rows there is one chunk. */
static void head_in_chunks(void **state)
{
    (void)state;
    static const char *const layouts[] = {"", "parallel.ranks=2 parallel.tp=2 "};
    trained whole = trained_run(CHUNKS RUN "train.global_batch=2 train.micro_batch=1 parallel.ranks=2 parallel.cp=2 ", 3,
                                (qd_random_tokens){.seed = 6});
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[512];
        snprintf(words, sizeof words, CHUNKS RUN "train.global_batch=2 train.micro_batch=1 %s", layouts[l]);
        trained chunks = trained_run(words, 3, (qd_random_tokens){.seed = 6});
        expect_close(&chunks, &whole, 1e-5, words);
        for (int s = 0; s < 3; s++)
            if (!(fabs(chunks.norms[s] - whole.norms[s]) <= 1e-5 * whole.norms[s]))
                fail_msg("%s: step %d: norm %.9g against %.9g", words, s + 1, chunks.norms[s], whole.norms[s]);
        free(chunks.weights);
    }
    free(whole.weights);
}

/* Training with bf16 storage follows fp32. */
static void bf16_follows_fp32(void **state)
{
    (void)state;
    int steps = sample_count(30, 4);
    trained exact = trained_run(LLAMA RUN, steps, (qd_random_tokens){.seed = 5});
    trained half = trained_run(LLAMA RUN "train.precision=bf16", steps, (qd_random_tokens){.seed = 5});
    expect_close(&half, &exact, 0.01, "bf16");
    assert_true(half.losses[0] != exact.losses[0]); /* it does round */
    free(exact.weights);
    free(half.weights);
}

/* The trainer allocates and sends exactly the bytes that the program states. */
static void plan_equals_run(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=2 ", "parallel.ranks=4 parallel.bucket_mb=0.01 ",
                                          "parallel.ranks=3 train.global_batch=6 parallel.overlap=false ",
                                          "parallel.ranks=8 train.precision=bf16 "};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[512];
        snprintf(words, sizeof words, LLAMA RUN "%s", layouts[l]);
        trained_plan_equals_run(words);
    }
}

typedef struct mutation {
    int action;
    int how;
} mutation;

static qd_status mutate(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    const mutation *m = argument;
    qd_program *p = qd_trainer_program_mutable(trainer);
    qd_action *a = &p->actions[m->action];
    if (m->how == 0) { /* dropped: its allocation or the operation to wait for is missing */
        a->kind = QD_ACTION_ZERO;
        a->buffer = p->persistent[QD_BUFFER_LOSS];
        a->count = 0;
        a->dtype = QD_F64;
    } else if (m->how == 2) { /* adds to stale gradients, or loses those of other micro-batches */
        a->overwrite = !a->overwrite;
    } else if (a->kind == QD_ACTION_FORWARD || a->kind == QD_ACTION_BACKWARD) {
        a->use[QD_USE_OUT] = a->use[QD_USE_IN];
        a->use[QD_USE_GRAD_IN] = a->use[QD_USE_GRAD_OUT];
    } else {
        a->count /= 2;
    }
    return QD_OK;
}

/* The trainer interprets the list: changing any action changes the run or makes it fail. */
static void mutated_actions_show(void **state)
{
    (void)state;
    const char *words = GPT2 RUN "parallel.ranks=2 train.micro_batch=2 parallel.bucket_mb=0.02 run.deadline=20";
    /* Two steps: buffers start as zeros, so a missing overwrite or zero shows in the second. */
    trained good = trained_run(words, 2, (qd_random_tokens){.seed = 9});
    qd_config config = layout_config(words);
    qd_arena *arena;
    qd_program *p;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &p));
    int tried = 0;
    size_t met = 0;
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        for (int how = 0; how < 3; how++) {
            if (a->kind == QD_ACTION_FREE && how == 0)
                continue; /* memory stays planned: only the accountant notices, and it refuses such programs */
            bool has_variant = a->kind == QD_ACTION_FORWARD || a->kind == QD_ACTION_BACKWARD || a->kind == QD_ACTION_REDUCE;
            if (how == 1 && (!has_variant || (a->use[QD_USE_OUT] < 0 && a->use[QD_USE_GRAD_IN] < 0 && a->kind != QD_ACTION_REDUCE)))
                continue;
            bool adds =
                a->kind == QD_ACTION_BACKWARD ? a->module > 0 : a->kind == QD_ACTION_FORWARD && a->module == p->ledger->module_count - 1;
            if (how == 2 && !a->overwrite && !adds) /* embedding gradients are always added to; the head computes its own in F */
                continue;
            if (!sample_has(met++, 0, 3))
                continue;
            qd_random_tokens random = {.seed = 9, .vocab = config.model.vocab};
            qd_batch_source source = qd_random_source(&random);
            qd_team *team;
            mutation m = {i, how};
            trained_ok(qd_team_create(&config, &source, &team));
            trained_ok(qd_team_call(team, mutate, &m));
            bool changed = false;
            for (int s = 0; s < 2 && !changed; s++) {
                qd_step_output out;
                changed = qd_team_step(team, &out) != QD_OK || out.loss != good.losses[s] || out.grad_norm != good.norms[s];
            }
            if (!changed) {
                float *weights;
                int64_t count;
                trained_read(team, QD_TENSOR_VALUE, &weights, &count);
                changed = memcmp(weights, good.weights, (size_t)count * sizeof *weights) != 0;
                free(weights);
            }
            if (!changed) {
                char text[160];
                qd_action_describe(p, i, text, sizeof text);
                fail_msg("action %d (%s) was changed (%d), and the run did not", i, text, how);
            }
            qd_team_destroy(team);
            tried++;
        }
    }
    assert_true(met > 40 && tried >= sample_count((int)met, (int)met / 6));
    free(good.weights);
    qd_arena_destroy(arena);
}

/* Poison that a step must not read: gradients of the previous step, and memory that dynamic buffers
 * share. */
static qd_status poison(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    (void)argument;
    const qd_bound *b = qd_trainer_bound(trainer);
    const qd_program *p = b->program;
    for (int kind = QD_BUFFER_GRAD; kind <= QD_BUFFER_TIED_GRAD; kind++)
        if (p->persistent[kind] >= 0)
            memset(qd_bound_kind(b, (qd_buffer_kind)kind), 0xff, (size_t)p->buffers[p->persistent[kind]].bytes);
    memset(b->dynamic, 0xff, (size_t)p->dynamic_bytes);
    return QD_OK;
}

/* The first micro-batch overwrites gradients, or they are zeroed: stale values never enter them,
 * wherever they are collected. */
static void gradients_begin_anew(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        GPT2 RUN "train.micro_batch=2 ",
        LLAMA RUN "parallel.ranks=2 parallel.tp=2 parallel.sp=true model.tied=true train.micro_batch=4 ",
        GPT2 RUN "parallel.ranks=2 train.micro_batch=2 parallel.zero=1 ",
        LLAMA RUN "parallel.ranks=2 train.micro_batch=2 parallel.zero=2 train.grad_sync=per_step ",
        GPT2 RUN "parallel.ranks=2 train.micro_batch=1 parallel.zero=3 train.grad_sync=per_microbatch ",
        LLAMA RUN "parallel.ranks=2 train.micro_batch=2 train.grad_sync=per_microbatch ",
        GPT2 RUN "parallel.ranks=2 parallel.pp=2 train.micro_batch=2 parallel.schedule=zb_h1 ",
        LLAMA RUN "train.micro_batch=4 model.experts=4 model.experts_per_token=2 model.expert_ffn=24 model.qk_norm=true "
                  "model.router_bias_rate=0.001 ",
        LLAMA RUN "parallel.ranks=2 parallel.ep=2 train.micro_batch=2 model.experts=4 model.experts_per_token=2 model.expert_ffn=24 ",
        LLAMA RUN "parallel.ranks=2 parallel.ep=2 train.micro_batch=2 model.experts=4 model.experts_per_token=2 model.expert_ffn=24 "
                  "parallel.expert_rows=1 parallel.split_backward=true train.recompute=full ",
        CHUNKS RUN "train.global_batch=2 train.micro_batch=1 parallel.ranks=2 parallel.tp=2 ",
    };
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        trained good = trained_run(layouts[l], 2, (qd_random_tokens){.seed = 21});
        qd_config config = layout_config(layouts[l]);
        qd_random_tokens random = {.seed = 21, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        qd_team *team;
        trained_ok(qd_team_create(&config, &source, &team));
        for (int s = 0; s < 2; s++) {
            qd_step_output out;
            trained_ok(qd_team_call(team, poison, NULL));
            trained_ok(qd_team_step(team, &out));
            if (out.loss != good.losses[s] || out.grad_norm != good.norms[s])
                fail_msg("%s: step %d: loss %.17g, norm %.17g against %.17g, %.17g", layouts[l], s + 1, out.loss, out.grad_norm,
                         good.losses[s], good.norms[s]);
        }
        qd_team_destroy(team);
        free(good.weights);
    }
}

/* A gradient that is not finite never reaches the weights, and the message says where it arose. */
static void not_a_number_stops(void **state)
{
    (void)state;
    qd_config config = layout_config(LLAMA RUN "parallel.ranks=2");
    qd_random_tokens random = {.seed = 2, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    trained_ok(qd_team_create(&config, &source, &team));
    trained_ok(qd_team_step(team, &out));
    float bad[48];
    for (int i = 0; i < 48; i++)
        bad[i] = NAN;
    trained_ok(qd_team_write(team, "block.1.mlp_norm.weight", bad, 48));
    assert_int_equal(qd_team_step(team, &out), QD_NOT_FINITE);
    assert_non_null(strstr(qd_error_message(), "step 2"));
    qd_team_destroy(team);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_ranks_same_loss), cmocka_unit_test(same_mesh_same_bits), cmocka_unit_test(bf16_follows_fp32),
        cmocka_unit_test(gradients_begin_anew), cmocka_unit_test(head_in_chunks),      cmocka_unit_test(plan_equals_run),
        cmocka_unit_test(mutated_actions_show), cmocka_unit_test(not_a_number_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
