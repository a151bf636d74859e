/* The op lists that are written for an accelerator, carried out on the CPU, train like the CPU's own.
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

static const char *const cases[] = {
    "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=24 " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 " RUN,
    "model.arch=gpt2 model.activation=gelu model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 " RUN,
    "model.arch=gpt2 model.dropout=0.1 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.linear_bias=true model.vocab=101 data.seq=24 parallel.split_backward=true " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 train.recompute=selective " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 train.recompute=full " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=24 train.recompute=full parallel.ranks=2 " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 parallel.ranks=2 parallel.tp=2 parallel.sp=false " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 parallel.ranks=2 parallel.tp=2 parallel.tp_overlap=3 " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=24 parallel.ranks=4 parallel.tp=4 " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=25 parallel.ranks=2 parallel.cp=2 " RUN,
    "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather " RUN,
    "model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=24 model.qk_norm=true parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses " RUN,
    "model.preset=mixtral-tiny model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.head_dim=8 model.expert_ffn=24 model.vocab=67 data.seq=17 " RUN,
    "model.preset=mixtral-tiny model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.head_dim=8 model.expert_ffn=24 model.vocab=67 data.seq=17 "
    "parallel.ranks=2 parallel.ep=2 parallel.expert_rows=1 train.recompute=full " RUN,
};

enum { STEPS = 10 };

static void train(const char *words, const char *lists, double *losses)
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
    }
    qd_team_destroy(team);
}

static void train_alike(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double own[STEPS], other[STEPS];
        train(cases[i], "cpu", own);
        train(cases[i], "cuda", other);
        for (int step = 0; step < sample_count(STEPS, 3); step++)
            if (!(fabs(own[step] - other[step]) <= 1e-5 * own[step]))
                fail_msg("%s: step %d: %.9g and %.9g", cases[i], step + 1, own[step], other[step]);
    }
}

/* The lists are not the same, or the comparison says nothing. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(train_alike), cmocka_unit_test(lists_differ)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
