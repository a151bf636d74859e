/* The proof of gradients has no false alarms: a seeded sample of layouts of all families, each rank
 * with its own program, and every fourth with the shared programs of `check`.
 * QUADRILLE_LAYOUTS=2000 QUADRILLE_FAMILY_LAYOUTS=100 test_proof_sample tries more,
 * QUADRILLE_SEED=2 others.
 * ctest: timeout 300 */
#include "support/layout.h"
#include "support/layout_sample.h"
#include "support/sample.h"

#include "spec/proof/proof.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SIZES "model.layers=5 model.hidden=32 model.heads=4 "
static const layout_model models[] = {
    {SIZES "model.kv_heads=2 model.ffn=56 model.vocab=1009 data.seq=15 ", 4, 0},               /* Llama */
    {SIZES "model.kv_heads=1 model.ffn=56 model.vocab=67 data.seq=16 model.tied=true ", 4, 0}, /* Yi, Gemma's shape */
    {SIZES "model.arch=gpt2 model.vocab=67 data.seq=12 model.dropout=0.1 ", 4, 0},             /* GPT-2 */
    {SIZES "model.arch=gpt2 model.vocab=67 data.seq=12 model.tied=false ", 4, 0},
    {SIZES "model.kv_heads=2 model.ffn=56 model.vocab=67 data.seq=13 model.qk_norm=true model.tied=true ", 4, 0}, /* Qwen3 */
    {SIZES "model.kv_heads=4 model.vocab=67 data.seq=16 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 "
           "model.aux_loss=0.05 model.balance=batch ",
     4, 8}, /* Mixtral */
    {SIZES "model.kv_heads=2 model.vocab=67 data.seq=16 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 "
           "model.aux_loss=0.05 model.qk_norm=true ",
     4, 8}, /* Qwen3-MoE */
    {SIZES "model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=17 model.experts=16 model.experts_per_token=3 model.expert_ffn=16 "
           "model.shared_experts=1 model.first_dense=1 model.router=sigmoid model.router_scale=2.5 model.router_groups=4 "
           "model.router_top_groups=2 model.router_bias_rate=0.01 model.aux_loss=0.02 model.z_loss=0.001 model.dropout=0.1 ",
     4, 16},
    {SIZES "model.kv_heads=4 model.ffn=48 model.vocab=67 data.seq=16 model.experts=8 model.experts_per_token=2 model.expert_ffn=16 "
           "model.shared_experts=2 ",
     4, 8},
};

/* Settings that the sampler does not vary. */
static const char *const extras[] = {
    "",
    "run.device=cuda ",
    "train.precision=bf16 ",
    "train.precision=bf16 run.device=cuda ",
    "parallel.dp_shard=2 ",
    "train.optimizer=muon ",
    "train.offload=optimizer ",
    "train.optimizer=adamw parallel.prefetch=1 ",
    "train.swiglu=again ",
    "train.micro_batch=1 train.global_batch=16 ",
    "train.micro_batch=4 ",
};

static int64_t number(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoll(text, NULL, 10) : otherwise;
}

/* Ranks that share the results of a block run the same ops in the same order, however many rows and
 * heads each of them has. */
static void same_ops(const char *words, const qd_program *a, const qd_program *b)
{
    for (int m = 0; m < a->ledger->module_count; m++) {
        const qd_module_class *x = qd_program_class(a, m), *y = qd_program_class(b, m);
        for (int i = 0; i < x->op_count || i < y->op_count; i++)
            if (i >= x->op_count || i >= y->op_count || x->ops[i].kind != y->ops[i].kind || x->ops[i].again != y->ops[i].again)
                fail_msg("%s: op %d of module %d is not the same on ranks %d and %d", words, i, m, a->rank, b->rank);
    }
}

/* False: the layout is not possible. */
static bool prove(const char *words, bool folded, bool *refused)
{
    qd_option_table table = qd_config_table();
    qd_options *options = NULL;
    qd_config config;
    qd_arena *arena;
    const qd_program **programs = NULL;
    char copy[1600], *rest = copy;
    ok(qd_arena_create(&arena));
    ok(qd_options_create(&table, 1, &options));
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;)
        ok(qd_options_assign(options, word));
    qd_status status = qd_config_resolve(options, 0, &config);
    if (status == QD_OK && folded) {
        status = qd_config_build_all(&config, arena, &programs);
    } else if (status == QD_OK) {
        programs = QD_ARENA_NEW(arena, const qd_program *, config.world);
        for (int rank = 0; rank < config.world && status == QD_OK; rank++) {
            qd_program *program;
            status = qd_config_build(&config, rank, arena, &program);
            programs[rank] = program;
        }
    }
    *refused = status != QD_OK;
    for (int rank = 0; status == QD_OK && !folded && rank < config.world; rank++)
        same_ops(words, programs[rank - rank % programs[0]->ledger->mesh.degree[QD_AXIS_TP]], programs[rank]);
    qd_proof_report report;
    if (status == QD_OK) {
        if (qd_prove_programs(&programs[0]->ledger->mesh, programs, &report) != QD_OK)
            fail_msg("%s: %s", words, qd_error_message());
        assert_true(report.values > 0 && report.ops > 0);
    }
    qd_options_destroy(options);
    qd_arena_destroy(arena);
    return !*refused;
}

static void no_false_alarm(void **state)
{
    (void)state;
    int64_t count = number("QUADRILLE_LAYOUTS", sample_count(200, 40)), proved = 0, refused = 0;
    layout_sample sample = {.seed = (uint64_t)number("QUADRILLE_SEED", 1)};
    while (proved < count && refused < 10 * count) {
        char words[1600], kind[160];
        bool cannot;
        layout_sample_draw(&sample, models, sizeof models / sizeof *models, words, sizeof words, kind, sizeof kind);
        size_t used = strlen(words);
        snprintf(words + used, sizeof words - used, " %s", extras[layout_sample_below(&sample, sizeof extras / sizeof *extras)]);
        if (getenv("QUADRILLE_SHOW"))
            print_message("%s\n", words);
        if (!prove(words, false, &cannot)) {
            refused++;
            continue;
        }
        if (++proved % 4 == 0)
            prove(words, true, &cannot);
    }
    print_message("%lld layouts proved, %lld refused before they were built\n", (long long)proved, (long long)refused);
    assert_int_equal(proved, count);
}

/* Every family of layout_sample.c, with the settings that its models need. */
static void families_are_proved(void **state)
{
    (void)state;
    int count = (int)number("QUADRILLE_FAMILY_LAYOUTS", sample_count(12, 2)), all = 0;
    for (int f = 0; f < LAYOUT_FAMILIES; f++) {
        layout_sample sample = {.seed = (uint64_t)(f + number("QUADRILLE_SEED", 1))};
        int proved = 0;
        for (int l = 0; l < 2 * count && proved < count; l++) {
            char words[1600], kind[160];
            bool cannot;
            layout_sample_draw(&sample, &layout_families[f], 1, words, sizeof words, kind, sizeof kind);
            size_t used = strlen(words);
            snprintf(words + used, sizeof words - used, " %s", extras[layout_sample_below(&sample, sizeof extras / sizeof *extras)]);
            proved += prove(words, false, &cannot);
        }
        assert_true(proved >= count / 2);
        all += proved;
    }
    print_message("%d layouts of %d families proved\n", all, LAYOUT_FAMILIES);
}

/* Layouts that were refused by mistake, or that the sampler does not draw. */
static void chosen_layouts(void **state)
{
    (void)state;
#define EXPERTS SIZES "model.vocab=67 data.seq=16 model.experts=8 model.expert_ffn=24 train.global_batch=16 train.micro_batch=1 "
    static const char *const chosen[] = {
        /* stages of the pipeline that have no experts, whose state is cut on those that have */
        EXPERTS "model.first_dense=3 parallel.ranks=16 parallel.pp=4 parallel.dp=4 parallel.ep=2 parallel.zero=1 ",
        EXPERTS "model.first_dense=3 parallel.ranks=16 parallel.pp=4 parallel.dp=4 parallel.ep=2 parallel.zero=3 ",
        /* ranks of tp with one row and with none, on different nodes */
        EXPERTS "data.seq=13 model.kv_heads=2 model.qk_norm=true model.qk_norm_over=width train.recompute=selective parallel.ranks=8 "
                "parallel.tp=4 parallel.cp=2 parallel.ep=4 parallel.dispatch=node parallel.nodes=8 ",
    };
    for (size_t i = 0; i < 2 * sizeof chosen / sizeof *chosen; i++) {
        bool refused;
        prove(chosen[i / 2], i % 2 == 1, &refused);
        assert_false(refused);
    }
}

static void every_op_has_a_rule(void **state)
{
    (void)state;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        if (!qd_proof_knows((qd_op_kind)kind))
            fail_msg("the proof of gradients has no rule for '%s'", qd_op_name((qd_op_kind)kind));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_op_has_a_rule), cmocka_unit_test(chosen_layouts),
                                       cmocka_unit_test(no_false_alarm), cmocka_unit_test(families_are_proved)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
