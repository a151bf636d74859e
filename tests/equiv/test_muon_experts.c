/* Muon with experts that have their own layout: results agree with one rank and are bit-identical
 * for one mesh under every stage; every expert matrix is orthogonalized once; bytes follow the
 * formula.
 * ctest: timeout 300 */
#include "spec/layout/experts.h"
#include "spec/program/muon.h"
#include "support/models/expert_models.h"
#include "support/outcome.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define COUNT(list) (sizeof(list) / sizeof *(list))
/* An eps that the gradients of the AdamW parameters do not fall below, which would magnify their
 * rounding. */
#define MUON RUN "train.optimizer=muon train.lr=2e-3 train.eps=1e-3 "

/* Experts whole or sharded by etp, on neighbours or across tp, cp and dp, with copies or
 * without. */
static const char *const meshes[] = {
    "parallel.ranks=2 parallel.ep=2 ",
    "parallel.ranks=4 parallel.ep=2 ",
    "parallel.ranks=4 parallel.ep=4 ",
    "parallel.ranks=4 parallel.etp=2 ",
    "parallel.ranks=8 parallel.ep=2 parallel.etp=2 ",
    "parallel.ranks=4 parallel.tp=2 parallel.ep=2 parallel.etp=2 ",
    "parallel.ranks=8 parallel.tp=2 parallel.ep=2 parallel.etp=2 ",
    "parallel.ranks=4 parallel.tp=2 ",
    "parallel.ranks=8 parallel.tp=2 parallel.cp=2 parallel.ep=4 ",
    "parallel.ranks=8 parallel.pp=2 parallel.ep=2 ",
};
static const char *const stages[] = {
    "parallel.zero=1 ",
    "parallel.zero=2 parallel.bucket_mb=0.01 ",
    "parallel.zero=3 parallel.overlap=false ",
    "parallel.zero=1 parallel.overlap=false parallel.bucket_mb=0.001 ",
    "train.recompute=full parallel.overlap=false ",
};

static void against_one_rank(void **state)
{
    (void)state;
    char layouts[COUNT(meshes)][160];
    const char *list[COUNT(meshes)];
    for (int model = 0; model < 2; model++) {
        size_t count = 0;
        for (size_t i = 0; i < COUNT(meshes); i++) { /* every stage with some mesh */
            if (!sample_has(i, (size_t)model, 2))
                continue;
            snprintf(layouts[i], sizeof layouts[i], "%sparallel.zero=%d train.grad_sync=%s ", meshes[i], (int)(i + (model ? 1 : 3)) % 4,
                     i % 2 ? "per_step" : "per_microbatch");
            list[count++] = layouts[i];
        }
        /* The balance loss of the first is over the concurrent micro-batch, so its micro-batches
         * are as large as possible. */
        outcome_compare_all(model ? MUON DEEPSEEK "train.micro_batch=1 " : MUON MIXTRAL,
                            (qd_random_tokens){.seed = 6, .documents = model ? 0 : 3}, list, count);
    }
}

static void stages_give_the_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(meshes); i++) {
        if (!sample_has(i, 1, 2))
            continue;
        char base[1024];
        snprintf(base, sizeof base, MUON "%s%strain.micro_batch=1 train.grad_sync=%s ", i % 2 ? MIXTRAL : DEEPSEEK, meshes[i],
                 i % 3 ? "per_step" : "per_microbatch");
        TRAINED_COMPARE(base, stages, 3, 2, .seed = 9);
    }
}

/* bf16 weights with master weights, and optimizer state in host memory. */
static void masters_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const variants[] = {"parallel.zero=1 ", "parallel.zero=3 ", "train.offload=optimizer ",
                                           "train.offload=optimizer parallel.zero=2 parallel.overlap=false "};
    TRAINED_COMPARE(MUON DEEPSEEK "parallel.ranks=4 parallel.ep=2 train.precision=bf16 train.grad_dtype=fp32 train.grad_sync=per_step ",
                    variants, 3, 2, .seed = 10);
    TRAINED_COMPARE(MUON MIXTRAL "parallel.ranks=8 parallel.ep=2 parallel.etp=2 train.precision=bf16 train.grad_dtype=fp32 ", variants, 3,
                    2, .seed = 11);
}

/* Replicas of sharded copies, each of which has all experts: once (so they are not sharded), twice,
 * or sharded by etp. With any optimizer. */
static void replicas_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const variants[] = {
        "parallel.zero=1 parallel.dp_shard=2 ",
        "parallel.zero=2 parallel.dp_shard=4 ",
        "parallel.zero=3 parallel.dp_shard=2 parallel.overlap=false ",
        "parallel.zero=3 parallel.dp_shard=4 parallel.bucket_mb=0.01 ",
        "parallel.zero=1 parallel.dp_shard=4 parallel.overlap=false ",
    };
    static const char *const all[] = {"parallel.ep=2 parallel.zero=2 parallel.dp_shard=2 ",
                                      "parallel.tp=2 parallel.ep=4 parallel.zero=1 parallel.dp_shard=2 ",
                                      "parallel.ep=2 parallel.etp=2 parallel.zero=3 parallel.dp_shard=4 "};
    TRAINED_COMPARE(MUON DEEPSEEK "parallel.ranks=8 parallel.ep=2 train.micro_batch=1 train.grad_sync=per_step ", variants, 3, 2,
                    .seed = 20);
    TRAINED_COMPARE(RUN MIXTRAL "train.optimizer=adamw parallel.ranks=8 parallel.tp=2 parallel.ep=4 ", variants, 3, 2, .seed = 21);
    TRAINED_COMPARE(MUON MIXTRAL "parallel.ranks=8 parallel.etp=2 ", variants, 3, 2, .seed = 22);
    outcome_compare_all(MUON DEEPSEEK "parallel.ranks=8 ", (qd_random_tokens){.seed = 23}, all, COUNT(all));
    outcome_compare_all(RUN DEEPSEEK "parallel.ranks=8 train.micro_batch=1 train.grad_sync=per_microbatch ", (qd_random_tokens){.seed = 24},
                        all, COUNT(all));
}

/* Groups that keep parameters between the passes: they have every expert once (nothing is gathered
 * then), twice, or as often as all ranks. */
static void kept_groups_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const variants[] = {
        "parallel.zero=3 parallel.reshard_after_forward=2 ",
        "parallel.zero=3 parallel.reshard_after_forward=4 parallel.prefetch=1 ",
        "parallel.zero=3 parallel.dp_shard=4 parallel.reshard_after_forward=2 parallel.overlap=false ",
    };
    static const char *const all[] = {"parallel.ep=2 parallel.zero=3 parallel.reshard_after_forward=4 ",
                                      "parallel.tp=2 parallel.ep=4 parallel.zero=3 parallel.reshard_after_forward=2 ",
                                      "parallel.ep=2 parallel.etp=2 parallel.zero=3 parallel.reshard_after_forward=4 ",
                                      "parallel.ep=8 parallel.zero=3 parallel.reshard_after_forward=8 "};
    TRAINED_COMPARE(MUON DEEPSEEK "parallel.ranks=8 parallel.ep=2 train.micro_batch=1 train.grad_sync=per_step ", variants, 3, 2,
                    .seed = 30);
    TRAINED_COMPARE(RUN MIXTRAL "train.optimizer=adamw parallel.ranks=8 parallel.tp=2 parallel.ep=4 train.recompute=full ", variants, 3, 2,
                    .seed = 31);
    outcome_compare_all(RUN DEEPSEEK "parallel.ranks=8 train.micro_batch=1 train.grad_sync=per_microbatch ", (qd_random_tokens){.seed = 32},
                        all, COUNT(all));
}

static double cost_of(const qd_param *x)
{
    return (double)x->shape[0] * (double)x->shape[1] * (double)(x->shape[0] < x->shape[1] ? x->shape[0] : x->shape[1]);
}

/* Over the programs of all ranks: each matrix has one owner, and the work is balanced among the
 * possible owners. */
static void matrices_are_given_out_once_and_evenly(void **state)
{
    (void)state;
    for (size_t m = 0; m < COUNT(meshes); m++) {
        for (int zero = 0; zero < 3; zero += 2) {
            char words[1024];
            snprintf(words, sizeof words, MUON DEEPSEEK "%sparallel.zero=%d ", meshes[m], zero);
            qd_config config = layout_config(words);
            qd_arena *arena;
            int *owners = NULL, expected = 0;
            double least = 1e30, most = 0, largest = 0;
            trained_ok(qd_arena_create(&arena));
            for (int rank = 0; rank < config.world; rank++) {
                qd_program *p;
                double load = 0;
                trained_ok(qd_config_build(&config, rank, arena, &p));
                owners = owners ? owners : calloc((size_t)p->ledger->param_count, sizeof *owners);
                for (int i = 0; i < p->action_count; i++) {
                    int own = p->actions[i].kind == QD_ACTION_ORTHOGONALIZE ? qd_muon_own(p, &p->actions[i], rank) : -1;
                    if (own < 0)
                        continue;
                    const qd_param *x = &p->ledger->params[p->matrices[own].param];
                    owners[p->matrices[own].param]++;
                    if (x->family == 1) { /* the owner of an expert matrix holds a part of it */
                        assert_true(qd_muon_box_of(p, own, rank).count > 0 || zero > 0);
                        assert_true(p->storage.count[p->matrices[own].param] > 0);
                        load += cost_of(x);
                        largest = fmax(largest, cost_of(x));
                    }
                }
                least = fmin(least, load);
                most = fmax(most, load);
                for (int i = 0; i < p->ledger->param_count && rank == config.world - 1; i++) {
                    assert_int_equal(owners[i], qd_muon_takes(p->ledger, i));
                    expected += p->ledger->params[i].family == 1 && qd_muon_takes(p->ledger, i);
                }
            }
            assert_int_equal(expected, 2 * 16 * 3);
            assert_true(config.degrees[QD_AXIS_PP] > 1 || most - least <= largest);
            free(owners);
            qd_arena_destroy(arena);
        }
    }
}

/* Bytes for experts by formula, per element: with copies 4 (edp - 1) bytes of results; sharded into
 * n parts 4 (n - 1) / n there and back. */
static void bytes_follow_the_formula(void **state)
{
    (void)state;
    static const struct {
        const char *layout;
        int parts, copies;
    } rows[] = {
        {"parallel.ranks=4 parallel.ep=2 ", 1, 2},
        {"parallel.ranks=4 parallel.ep=2 parallel.zero=1 ", 2, 1},
        {"parallel.ranks=4 parallel.ep=4 parallel.zero=1 ", 1, 1},
        {"parallel.ranks=8 parallel.ep=2 parallel.etp=2 ", 2, 2},
        {"parallel.ranks=8 parallel.ep=2 parallel.etp=2 parallel.zero=3 ", 4, 1},
        {"parallel.ranks=4 parallel.tp=2 parallel.zero=2 ", 4, 1},
    };
    for (size_t l = 0; l < COUNT(rows); l++) {
        char words[1024];
        snprintf(words, sizeof words, MUON MIXTRAL "%s", rows[l].layout);
        qd_arena *arena;
        qd_program *p = trained_program(words, &arena);
        int64_t elements = 0, planned = 0, n = rows[l].parts;
        for (int i = 0; i < p->ledger->param_count; i++)
            elements += p->ledger->params[i].family == 1 ? p->ledger->params[i].shape[0] * p->ledger->params[i].shape[1] : 0;
        for (int i = 0; i < p->action_count; i++) {
            const qd_action *a = &p->actions[i];
            if ((a->kind == QD_ACTION_COLLECT || a->kind == QD_ACTION_HAND_BACK || a->kind == QD_ACTION_SHARE) &&
                p->ledger->params[p->matrices[a->param].param].family == 1)
                planned += a->bytes;
        }
        assert_true(elements > 0);
        assert_int_equal(planned, 2 * 4 * elements * (n - 1) / n + 4 * elements * (rows[l].copies - 1));
        qd_arena_destroy(arena);
    }
}

/* A run resumed under other layouts follows one that never changes. */
static void checkpoints_change_layouts(void **state)
{
    (void)state;
    static const char *const parts[] = {"parallel.ranks=4 parallel.ep=2 parallel.zero=1 ", "parallel.ranks=1 ",
                                        "parallel.ranks=8 parallel.ep=2 parallel.etp=2 parallel.zero=3 ",
                                        "parallel.ranks=4 parallel.tp=2 parallel.ep=4 "};
    enum { EACH = 2 };
    double losses[COUNT(parts) * EACH];
    outcome_prepare = NULL;
    trained whole = trained_run(MUON MIXTRAL "parallel.ranks=1 ", (int)COUNT(losses), (qd_random_tokens){.seed = 12});
    trained_onward(MUON MIXTRAL, parts, COUNT(parts), EACH, (qd_random_tokens){.seed = 12}, losses);
    for (size_t s = 0; s < COUNT(losses); s++)
        if (!(fabs(losses[s] - whole.losses[s]) <= 1e-5 * whole.losses[s]))
            fail_msg("step %zu: loss %.9g, without changes %.9g", s + 1, losses[s], whole.losses[s]);
    free(whole.weights);
}

static bool is_of_muon(const qd_action *a)
{
    return a->kind >= QD_ACTION_MOMENTUM && a->kind <= QD_ACTION_UPDATE_MATRICES;
}

/* Without any one of its actions the run fails or its results differ. */
static void actions_matter(void **state)
{
    (void)state;
    static const char *const layouts[] = {"parallel.ranks=2 parallel.etp=2 ", "parallel.ranks=4 parallel.ep=2 parallel.zero=1 "};
    int tried = 0;
    size_t met = 0;
    for (size_t l = 0; l < COUNT(layouts); l++) {
        char words[1024];
        snprintf(words, sizeof words,
                 MUON "model.layers=1 model.hidden=16 model.heads=2 model.vocab=31 data.seq=8 model.experts=4 model.experts_per_token=2 "
                      "model.expert_ffn=8 run.deadline=20 %s",
                 layouts[l]);
        trained_actions_matter(words, 2, is_of_muon, 3, &met, &tried);
    }
    assert_true(met > 20 && tried >= sample_count((int)met, (int)met / 6));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matrices_are_given_out_once_and_evenly),
        cmocka_unit_test(bytes_follow_the_formula),
        cmocka_unit_test(against_one_rank),
        cmocka_unit_test(stages_give_the_same_bits),
        cmocka_unit_test(masters_give_the_same_bits),
        cmocka_unit_test(replicas_give_the_same_bits),
        cmocka_unit_test(kept_groups_give_the_same_bits),
        cmocka_unit_test_setup_teardown(checkpoints_change_layouts, scratch_setup, scratch_teardown),
        cmocka_unit_test(actions_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
