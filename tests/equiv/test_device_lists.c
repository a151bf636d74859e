/* Op lists written for an accelerator, executed on the CPU, train like the CPU's own lists.
 * ctest: timeout 120 */
#include "support/sample.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define RUN "train.global_batch=4 train.micro_batch=2 train.lr=1e-3 train.schedule=constant train.steps=50 run.threads=1 "

#define MOE                                                                                                                            \
    "model.preset=mixtral-tiny model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.head_dim=8 model.expert_ffn=24 "     \
    "model.vocab=67 data.seq=17 "

static const char *const cases[] = {
    "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=24 " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 " RUN,
    "model.arch=gpt2 model.activation=gelu model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 " RUN,
    "model.arch=gpt2 model.dropout=0.1 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.out_bias=true model.vocab=101 data.seq=24 parallel.split_backward=true " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.mlp_bias=true model.vocab=101 data.seq=24 parallel.split_backward=true " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 train.recompute=selective " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 train.recompute=full " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=24 train.recompute=full parallel.ranks=2 " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 parallel.ranks=2 parallel.tp=2 "
    "parallel.sp=false " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 parallel.ranks=2 parallel.tp=2 "
    "parallel.tp_overlap=3 " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=24 parallel.ranks=4 parallel.tp=4 " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=25 parallel.ranks=2 parallel.cp=2 " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 parallel.ranks=2 parallel.cp=2 "
    "parallel.cp_mode=gather " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=24 model.qk_norm=true parallel.ranks=2 parallel.cp=2 "
    "parallel.cp_mode=ulysses " RUN,
    MOE RUN,
    MOE "parallel.ranks=2 parallel.ep=2 parallel.expert_rows=1 train.recompute=full " RUN,
    MOE "parallel.ranks=2 " RUN,
    MOE "parallel.ranks=2 parallel.tp=2 " RUN,
    MOE "parallel.ranks=2 parallel.pp=2 parallel.schedule=zb_h1 train.micro_batch=1 train.recompute=full " RUN,
};

enum { STEPS = 10 };

static void train(const char *words, const char *lists, double *losses, double *norms)
{
    qd_config config = layout_config(words);
    config.strategy.traits = qd_device_traits_find(lists);
    qd_random_tokens random = {.seed = 5, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    trained_ok(qd_team_create(&config, &source, &team));
    for (int i = 0; i < sample_count(STEPS, 3); i++) {
        qd_step_output out;
        trained_ok(qd_team_step(team, &out));
        losses[i] = out.loss;
        norms[i] = out.grad_norm;
    }
    qd_team_destroy(team);
}

static void train_alike(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double own[2][STEPS], other[2][STEPS];
        train(cases[i], "cpu", own[0], own[1]);
        train(cases[i], "cuda", other[0], other[1]);
        for (int step = 0; step < sample_count(STEPS, 3); step++)
            for (int what = 0; what < 2; what++)
                if (!(fabs(own[what][step] - other[what][step]) <= (what ? 1e-4 : 1e-5) * own[what][step]))
                    fail_msg("%s: step %d: %s %.9g and %.9g", cases[i], step + 1, what ? "norm" : "loss", own[what][step],
                             other[what][step]);
    }
}

/* The lists must differ, or the comparison shows nothing. */
static void lists_differ(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        qd_config config = layout_config(cases[i]);
        int ops[2];
        for (int j = 0; j < 2; j++) {
            qd_arena *arena;
            qd_program *p;
            config.strategy.traits = qd_device_traits_find(j ? "cuda" : "cpu");
            trained_ok(qd_arena_create(&arena));
            trained_ok(qd_config_build(&config, 0, arena, &p));
            ops[j] = qd_program_class(p, 1)->op_count;
            qd_arena_destroy(arena);
        }
        assert_true(ops[1] < ops[0]);
    }
}

static qd_status forget_squares(qd_trainer *trainer, qd_comm *world, void *action)
{
    (void)world;
    qd_trainer_program_mutable(trainer)->actions[*(int *)action].squares = false;
    return QD_OK;
}

/* Grouped GEMMs sum the squares of the gradients that they write last, SQUARES those of all others:
 * without either the norm differs. Where other ranks add to the gradients, SQUARES sums all. */
static void products_sum_squares(void **state)
{
    (void)state;
    qd_config config = layout_config(MOE RUN);
    config.strategy.traits = qd_device_traits_find("cuda");
    qd_random_tokens random = {.seed = 5, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    double own, losses[STEPS], norms[STEPS];
    train(MOE RUN, "cuda", losses, norms);
    own = norms[0];
    qd_arena *arena;
    qd_program *p;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &p));
    int met = 0;
    for (int i = 0; i < p->action_count; i++) {
        if (!p->actions[i].squares)
            continue;
        qd_team *team;
        qd_step_output out;
        assert_int_equal(p->actions[i].microbatch, 1);
        trained_ok(qd_team_create(&config, &source, &team));
        trained_ok(qd_team_call(team, forget_squares, &i));
        trained_ok(qd_team_step(team, &out));
        assert_true(out.grad_norm < own);
        qd_team_destroy(team);
        met++;
    }
    assert_int_equal(met, 2); /* blocks */
    qd_config apart = layout_config(MOE "parallel.ranks=2 " RUN);
    apart.strategy.traits = config.strategy.traits;
    trained_ok(qd_config_build(&apart, 0, arena, &p));
    for (int i = 0; i < p->action_count; i++)
        assert_false(p->actions[i].squares);
    for (int i = 0; i < p->ledger->param_count; i++)
        assert_false(qd_program_squared(p, i));
    qd_arena_destroy(arena);
}

static void count_fused(const char *words, unsigned phases, int fused[2])
{
    qd_config config = layout_config(words);
    config.strategy.traits = qd_device_traits_find("cuda");
    qd_arena *arena;
    qd_program *p;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &p));
    const qd_module_class *block = qd_program_class(p, 1);
    fused[0] = fused[1] = 0;
    for (int i = 0; i < block->op_count; i++)
        if (qd_op_runs(&block->ops[i], phases) &&
            (block->ops[i].kind == QD_OP_EXPERTS_SWIGLU || block->ops[i].kind == QD_OP_EXPERTS_DX_SWIGLU))
            fused[block->ops[i].kind == QD_OP_EXPERTS_DX_SWIGLU]++;
    qd_arena_destroy(arena);
}

/* SwiGLU and its gradient are fused into the preceding grouped GEMMs, unless rows come from several
 * ranks or selective recompute runs SwiGLU as an op of its own. */
static void swiglu_goes_with_products(void **state)
{
    (void)state;
    enum { FORWARD = 1 << QD_PHASE_FORWARD, BACKWARD = 1 << QD_PHASE_INPUT };
    static const struct {
        const char *words;
        unsigned phases;
        int forward, gradient;
    } rows[] = {
        {MOE RUN, FORWARD, 1, 0},
        {MOE RUN, BACKWARD, 0, 1},
        {MOE "train.swiglu=again " RUN, FORWARD | BACKWARD, 1, 1},
        {MOE "train.recompute=full " RUN, QD_PHASES_AGAIN, 1, 0},
        {MOE "train.recompute=selective " RUN, FORWARD, 1, 0},
        {MOE "train.recompute=selective train.swiglu=keep " RUN, FORWARD, 0, 0},
        {MOE "parallel.ranks=2 parallel.ep=2 " RUN, FORWARD | BACKWARD, 0, 0},
        {"model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=24 " RUN, FORWARD | BACKWARD, 0, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int fused[2];
        count_fused(rows[i].words, rows[i].phases, fused);
        if (fused[0] != rows[i].forward || fused[1] != rows[i].gradient)
            fail_msg("%s, phases %u: %d and %d GEMMs with SwiGLU, not %d and %d", rows[i].words, rows[i].phases, fused[0], fused[1],
                     rows[i].forward, rows[i].gradient);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(train_alike), cmocka_unit_test(lists_differ),
                                       cmocka_unit_test(products_sum_squares), cmocka_unit_test(swiglu_goes_with_products)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
