/* Muon: every stage, bucket and distribution of the work is bit-identical to plain data
 * parallelism, with the planned bytes and memory; each matrix is orthogonalized once per copy, and
 * the work is balanced.
 * ctest: timeout 300 */
#include "spec/program/muon.h"
#include "support/sample.h"
#include "support/trained.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=3 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=40 model.heads=4 model.vocab=67 data.seq=17 "
#define RUN "train.optimizer=muon train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 train.clip=0.5 "

#define COMPARE(base, variants, steps, ...) TRAINED_COMPARE(base, variants, steps, 3, __VA_ARGS__)

static const char *const stages[] = {
    "parallel.zero=1",
    "parallel.zero=2",
    "parallel.zero=3",
    "parallel.overlap=false",
    "parallel.bucket_mb=0.001",
    "parallel.zero=1 parallel.bucket_mb=0.001 run.threads=2",
    "parallel.zero=2 parallel.bucket_mb=0.02 parallel.overlap=false",
    "parallel.zero=3 parallel.prefetch=1 parallel.reshard_after_forward=false",
};

static void stages_give_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=4 train.global_batch=4 ", stages, 20, .seed = 1);
    COMPARE(GPT2 RUN "parallel.ranks=3 train.global_batch=6 train.muon_scale=original train.muon_lr=0.02 train.muon_nesterov=false ",
            stages, 20, .seed = 2, .ignored = 5);
}

static void accumulation_gives_the_same_bits(void **state)
{
    (void)state;
    COMPARE(LLAMA RUN "parallel.ranks=2 train.global_batch=8 train.micro_batch=2 train.grad_sync=per_step ", stages, 8, .seed = 3);
    COMPARE(GPT2 RUN "parallel.ranks=4 train.global_batch=8 train.micro_batch=1 train.grad_sync=per_microbatch ", stages, 8, .seed = 4);
}

static void bf16_gives_the_same_bits(void **state)
{
    (void)state;
    COMPARE(GPT2 RUN "parallel.ranks=4 train.global_batch=4 train.precision=bf16 ", stages, 10, .seed = 5);
    COMPARE(LLAMA RUN "parallel.ranks=3 train.global_batch=6 train.micro_batch=1 train.precision=bf16 train.grad_dtype=fp32 "
                      "train.grad_sync=per_microbatch ", stages, 8, .seed = 6);
}

/* Replicas of sharded copies: each copy orthogonalizes for itself. More ranks than matrices, and
 * than rows of small ones. */
static void hybrid_gives_the_same_bits(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.zero=1 parallel.dp_shard=2",
        "parallel.zero=2 parallel.dp_shard=4",
        "parallel.zero=3 parallel.dp_shard=2 parallel.bucket_mb=0.01",
        "parallel.zero=3 parallel.dp_shard=4 parallel.reshard_after_forward=2 parallel.overlap=false",
        "parallel.zero=3 parallel.dp_shard=1",
        "parallel.zero=2",
    };
    COMPARE(LLAMA RUN "parallel.ranks=8 train.global_batch=8 ", layouts, 6, .seed = 7);
    COMPARE("model.layers=1 model.hidden=12 model.heads=2 model.kv_heads=1 model.ffn=8 model.vocab=31 data.seq=8 " RUN
            "parallel.ranks=8 train.global_batch=16 train.micro_batch=1 train.grad_sync=per_step ", layouts, 6, .seed = 8);
}

static void matrices_are_given_out_once_and_evenly(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=1 ", "parallel.ranks=2 ", "parallel.ranks=5 parallel.zero=1 ",
                                          "parallel.ranks=8 parallel.zero=3 parallel.dp_shard=4 ", "parallel.ranks=64 parallel.zero=2 "};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[640];
        snprintf(words, sizeof words,
                 RUN "model.layers=12 model.hidden=64 model.heads=8 model.kv_heads=2 data.seq=8 train.global_batch=320 %s", layouts[l]);
        qd_config config = layout_config(words);
        qd_arena *arena;
        qd_program *p;
        trained_ok(qd_arena_create(&arena));
        trained_ok(qd_config_build(&config, 0, arena, &p));
        int owners = p->matrix_groups[0] < 0 ? 1 : p->groups[p->matrix_groups[0]].size;
        int n = owners * (p->share_groups[0] < 0 ? 1 : p->groups[p->share_groups[0]].size), seen[256] = {0}, wanted = 0, rounds = 0;
        double *load = calloc((size_t)n, sizeof *load), total = 0, largest = 0, most = 0;
        assert_int_equal(n, p->storage.parts > 1 ? p->storage.parts : config.world);
        for (int i = 0; i < p->matrix_count; i++) {
            const qd_param *x = &p->ledger->params[p->matrices[i].param];
            double cost = (double)x->shape[0] * (double)x->shape[1] * (double)(x->shape[0] < x->shape[1] ? x->shape[0] : x->shape[1]);
            seen[p->matrices[i].param]++;
            int worker = p->matrices[i].sharer * owners + p->matrices[i].owner;
            assert_true(p->matrices[i].owner >= 0 && p->matrices[i].owner < owners && worker >= 0 && worker < n);
            load[worker] += cost;
            total += cost;
            largest = cost > largest ? cost : largest;
        }
        for (int i = 0; i < p->ledger->param_count; i++) {
            assert_int_equal(seen[i], qd_muon_takes(p->ledger, i));
            wanted += strncmp(p->ledger->params[i].name, "block.", 6) == 0 && p->ledger->params[i].ndim == 2;
        }
        assert_int_equal(p->matrix_count, wanted);
        assert_int_equal(wanted, 12 * 7);
        for (int r = 0; r < n; r++)
            most = load[r] > most ? load[r] : most;
        assert_true(most <= total / n + largest * (n - 1) / n + 1e-6); /* Graham's bound */
        for (int i = 0; i < p->action_count; i++)
            rounds += p->actions[i].kind == QD_ACTION_ORTHOGONALIZE;
        assert_true(rounds * n >= wanted);
        if (n > 1 && n < 8)
            assert_true(most < 1.1 * total / n);
        free(load);
        qd_arena_destroy(arena);
    }
}

static void plan_equals_run(void **state)
{
    (void)state;
    static const char *const layouts[] = {"", "parallel.zero=1 ", "parallel.zero=3 ", "parallel.zero=2 parallel.dp_shard=2 ",
                                          "parallel.tp=2 model.vocab=102 ", "parallel.tp=2 model.vocab=102 parallel.zero=3 "};
    for (int ranks = 2; ranks <= 8; ranks *= 2)
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
            char words[640];
            if (!sample_has(l, (size_t)ranks / 3, 2))
                continue;
            snprintf(words, sizeof words, LLAMA RUN "train.global_batch=8 train.precision=bf16 parallel.ranks=%d %s", ranks, layouts[l]);
            trained_plan_equals_run(words);
        }
}

/* Bytes by the formula: rows to the owner and back, or the whole result to all others. */
static void bytes_follow_the_formula(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=4 ", "parallel.ranks=4 parallel.zero=3 ",
                                          "parallel.ranks=4 parallel.zero=1 parallel.dp_shard=2 "};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[640];
        snprintf(words, sizeof words, LLAMA RUN "train.global_batch=4 %s", layouts[l]);
        qd_config config = layout_config(words);
        qd_arena *arena;
        qd_program *p;
        trained_ok(qd_arena_create(&arena));
        trained_ok(qd_config_build(&config, 0, arena, &p));
        int64_t elements = 0, planned = 0, n = p->storage.parts;
        for (int i = 0; i < p->ledger->param_count; i++)
            elements += qd_muon_takes(p->ledger, i) ? p->storage.count[i] : 0;
        for (int i = 0; i < p->action_count; i++)
            if (p->actions[i].kind == QD_ACTION_COLLECT || p->actions[i].kind == QD_ACTION_HAND_BACK ||
                p->actions[i].kind == QD_ACTION_SHARE)
                planned += p->actions[i].bytes;
        /* All sizes of this model are divisible by the parts. */
        assert_int_equal(planned, n > 1 ? 4 / n * 2 * elements * 4 * (n - 1) / n : elements * 4 * 3);
        qd_arena_destroy(arena);
    }
}

static bool is_of_muon(const qd_action *a)
{
    return a->kind >= QD_ACTION_MOMENTUM && a->kind <= QD_ACTION_UPDATE_MATRICES;
}

/* Every action of Muon matters: without it the run fails or its results differ. */
static void actions_matter(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=2 train.global_batch=2 ",
                                          "parallel.ranks=2 parallel.zero=3 train.global_batch=2 ",
                                          "parallel.ranks=1 train.global_batch=1 "};
    int tried = 0;
    size_t met = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        char words[640];
        snprintf(words, sizeof words, "model.layers=1 model.hidden=24 model.heads=2 model.vocab=31 data.seq=8 " RUN "run.deadline=20 %s",
                 layouts[l]);
        trained_actions_matter(words, 2, is_of_muon, 3, &met, &tried);
    }
    assert_true(met > 30 && tried >= sample_count((int)met, (int)met / 6));
}

/* Matrices that tp shards by rows, by columns, or not at all (kv heads that neighbours share): all
 * stages of one mesh are bit-identical, and across meshes losses agree. */
static void tensor_parallel(void **state)
{
    (void)state;
    static const char *const variants[] = {"parallel.zero=1", "parallel.zero=2", "parallel.zero=3 parallel.bucket_mb=0.01",
                                           "parallel.overlap=false", "parallel.zero=1 parallel.overlap=false"};
    static const struct {
        const char *model, *layout;
    } rows[] = {
        {LLAMA, "parallel.tp=2 parallel.ranks=2 "},
        {LLAMA, "parallel.tp=2 parallel.ranks=4 "},
        {LLAMA, "parallel.tp=4 parallel.ranks=8 parallel.sp=true train.micro_batch=1 train.grad_sync=per_step "},
        {GPT2, "parallel.tp=2 parallel.ranks=6 train.precision=bf16 train.grad_dtype=fp32 "},
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        char base[640], one[640];
        bool exact = strstr(rows[r].layout, "bf16") == NULL;
        if (!sample_has(r, 1, 1))
            continue;
        snprintf(base, sizeof base, "%s" RUN "train.global_batch=12 %s", rows[r].model, rows[r].layout);
        snprintf(one, sizeof one, "%s" RUN "train.global_batch=12 parallel.ranks=1", rows[r].model);
        COMPARE(base, variants, 5, .seed = 21);
        trained alone = trained_run(one, 5, (qd_random_tokens){.seed = 21}),
                together = trained_run(base, 5, (qd_random_tokens){.seed = 21});
        for (int s = 0; s < 5; s++) {
            double difference = alone.losses[s] - together.losses[s], most = (exact ? 1e-5 : 1e-2) * alone.losses[s];
            if (!(difference <= most && -difference <= most))
                fail_msg("%s: step %d: loss %.9g, on one rank %.9g", base, s + 1, together.losses[s], alone.losses[s]);
        }
        free(alone.weights);
        free(together.weights);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_give_the_same_bits), cmocka_unit_test(accumulation_gives_the_same_bits),
        cmocka_unit_test(bf16_gives_the_same_bits),  cmocka_unit_test(hybrid_gives_the_same_bits),
        cmocka_unit_test(matrices_are_given_out_once_and_evenly), cmocka_unit_test(plan_equals_run),
        cmocka_unit_test(bytes_follow_the_formula),  cmocka_unit_test(actions_matter),
        cmocka_unit_test(tensor_parallel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
