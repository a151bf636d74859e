/* Layouts against one rank, one row each: losses and gradient norms of five SGD steps, all
 * gradients after the first and all weights after the fifth agree within 1e-5; allocated memory and
 * counted bytes are as planned.
 * ctest: timeout 300 */
#include "spec/config/formulas.h"
#include "support/models/expert_models.h"
#include "support/outcome.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "train/exec/state.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define LLAMA "model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=4 model.ffn=80 model.vocab=101 data.seq=16 "
#define OLMO2 "model.arch=olmo2 model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.vocab=101 data.seq=16 "
#define GPT2 "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=17 "
/* All tokens choose expert 5. */
static void favour(qd_team *team)
{
    outcome_favour(team, (const int[]){5}, 1);
}

#define COMPARE(model, random, layouts) outcome_compare_all(RUN model, random, layouts, sizeof(layouts) / sizeof *(layouts))

static void tensor_parallel(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.tp=2 parallel.sp=false ",
        "parallel.ranks=4 parallel.tp=4 parallel.sp=false ",
        "parallel.ranks=4 parallel.tp=2 parallel.sp=false parallel.zero=2 train.micro_batch=2 ",
        "parallel.ranks=2 parallel.tp=2 parallel.sp=false parallel.overlap=false parallel.split_backward=true ",
    };
    COMPARE(LLAMA, ((qd_random_tokens){.seed = 1, .documents = 3}), layouts);
    COMPARE(GPT2, ((qd_random_tokens){.seed = 2, .ignored = 5}), layouts);
    COMPARE(GPT2 "model.dropout=0.1 ", ((qd_random_tokens){.seed = 3}), layouts);
}

/* Rows that tp does not divide (8 or 2 sequences of 17), more ranks of tp than kv heads. */
static void sequence_parallel(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.tp=2 ",
        "parallel.ranks=4 parallel.tp=4 train.micro_batch=1 ",
        "parallel.ranks=4 parallel.tp=2 parallel.zero=3 train.micro_batch=1 train.recompute=full ",
        "parallel.ranks=2 parallel.tp=2 parallel.overlap=false parallel.split_backward=true train.recompute=selective ",
    };
    COMPARE(LLAMA "model.kv_heads=2 ", ((qd_random_tokens){.seed = 4, .documents = 3}), layouts);
    COMPARE(GPT2 "model.dropout=0.1 model.vocab=1009 ", ((qd_random_tokens){.seed = 5, .ignored = 5}), layouts);
}

/* The reference is one rank without accumulation, so that only rounding may differ. */
static void pipeline_parallel(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=4 parallel.pp=4 train.micro_batch=2 ",
        "parallel.ranks=4 parallel.pp=2 parallel.zero=3 train.micro_batch=1 parallel.schedule=zb_h1 ",
        "parallel.ranks=8 parallel.pp=2 parallel.tp=2 parallel.zero=2 train.micro_batch=1 parallel.schedule=zb_v ",
        "parallel.ranks=4 parallel.pp=2 parallel.tp=2 train.micro_batch=2 parallel.schedule=dualpipe_v train.recompute=full ",
        "parallel.ranks=4 parallel.pp=2 parallel.cp=2 train.micro_batch=2 parallel.layers=2,0 ", /* a stage without blocks */
    };
    COMPARE(LLAMA, ((qd_random_tokens){.seed = 7, .documents = 3}), layouts);
    COMPARE(GPT2 "model.dropout=0.1 ", ((qd_random_tokens){.seed = 8, .ignored = 5}), layouts);
}

/* Ops of blocks that communicate. */
static int count_exchanges(const char *words)
{
    qd_config config = layout_config(words);
    qd_arena *arena;
    qd_program *program;
    int count = 0;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &program));
    const qd_module_class *c = qd_program_class(program, 1);
    for (int i = 0; i < c->op_count; i++)
        count += qd_op_communicates(&c->ops[i]);
    qd_arena_destroy(arena);
    return count;
}

/* GEMMs cut into pieces that overlap with exchanges are bit-identical to whole ones. */
static void pieces_change_no_bit(void **state)
{
    (void)state;
    static const char *const bases[] = {
        GPT2 "parallel.ranks=2 parallel.tp=2 parallel.sp=false ",
        LLAMA "model.kv_heads=2 parallel.ranks=4 parallel.tp=4 train.micro_batch=1 ",
        GPT2 "parallel.ranks=2 parallel.tp=2 train.recompute=full parallel.split_backward=true model.dropout=0.1 ",
    };
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        char words[1024];
        snprintf(words, sizeof words, RUN "%s", bases[b]);
        outcome whole = outcome_run(words, (qd_random_tokens){.seed = 6});
        int exchanges = count_exchanges(words);
        for (int pieces = 2; pieces <= 7; pieces += 5) {
            snprintf(words, sizeof words, RUN "%s parallel.tp_overlap=%d", bases[b], pieces);
            assert_true(count_exchanges(words) >= exchanges + 4 * (pieces - 1)); /* it does cut */
            outcome cut = outcome_run(words, (qd_random_tokens){.seed = 6});
            assert_memory_equal(cut.losses, whole.losses, sizeof cut.losses);
            assert_memory_equal(cut.norms, whole.norms, sizeof cut.norms);
            assert_memory_equal(cut.weights, whole.weights, (size_t)cut.count * sizeof *cut.weights);
            outcome_free(&cut);
        }
        outcome_free(&whole);
    }
}

typedef struct left_out {
    int module, op;
} left_out;

/* Every rank drops one op of a class of modules. */
static qd_status leave_out(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    const left_out *l = argument;
    qd_program *p = qd_trainer_program_mutable(trainer);
    qd_op *op = &p->classes[p->ledger->modules[l->module].decl][qd_strategy_recompute(&p->strategy, p->ledger, l->module)].ops[l->op];
    op->phase = QD_PHASE_COUNT; /* a phase that no action runs */
    op->again = false;
    return QD_OK;
}

/* Every exchange inside a module matters: without it the losses differ, or the run fails. */
static void exchanges_matter(void **state)
{
    (void)state;
    static const char *const layouts[] = {RUN GPT2 "parallel.ranks=2 parallel.tp=2 run.deadline=60 ",
                                          RUN LLAMA "parallel.ranks=2 parallel.tp=2 parallel.sp=false run.deadline=60 "};
    int tried = 0;
    size_t met = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        qd_config config = layout_config(layouts[l]);
        qd_random_tokens random = {.seed = 9, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        trained good = trained_run(layouts[l], 3, (qd_random_tokens){.seed = 9});
        qd_arena *arena;
        qd_program *p;
        trained_ok(qd_arena_create(&arena));
        trained_ok(qd_config_build(&config, 0, arena, &p));
        for (int module = 0; module < p->ledger->module_count; module++) {
            const qd_module_class *c = qd_program_class(p, module);
            for (int op = 0; op < c->op_count && module != 2; op++) { /* the second block has the ops of the first */
                if (!qd_op_communicates(&c->ops[op]) || !sample_has(met++, l, 3))
                    continue;
                qd_team *team;
                bool changed = false;
                left_out out = {module, op};
                trained_ok(qd_team_create(&config, &source, &team));
                trained_ok(qd_team_call(team, leave_out, &out));
                for (int s = 0; s < 3 && !changed; s++) {
                    qd_step_output step;
                    changed = qd_team_step(team, &step) != QD_OK || step.loss != good.losses[s] || step.grad_norm != good.norms[s];
                }
                if (!changed)
                    fail_msg("%s: op %d of %s (%s) was dropped, and nothing changed", layouts[l], op, p->ledger->modules[module].name,
                             qd_op_name(c->ops[op].kind));
                qd_team_destroy(team);
                tried++;
            }
        }
        qd_arena_destroy(arena);
        free(good.weights);
    }
    assert_true(met >= 20 && tried >= sample_count((int)met, (int)met / 7));
}

/* Bytes that the communicators over tp moved, minus those of gradients and of the norm: the
 * exchanges of modules. */
static qd_status count_activations(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const qd_program *p = qd_trainer_program(trainer);
    int64_t mine = 0, sum;
    for (int g = 0; g < p->group_count; g++) {
        qd_comm_stats stats = qd_comm_stats_default();
        qd_comm_get_stats(qd_trainer_bound(trainer)->groups[g], &stats);
        for (int k = 0; k < QD_COLL_KIND_COUNT && p->groups[g].axes == QD_AXIS_BIT(QD_AXIS_TP); k++)
            mine += stats.bytes[k];
    }
    QD_TRY(qd_comm_all_reduce(world, &mine, &sum, 1, QD_I64, QD_SUM, NULL));
    for (int i = 0; i < p->action_count; i++)
        if (qd_action_communicates(&p->actions[i]) && p->groups[p->actions[i].group].axes == QD_AXIS_BIT(QD_AXIS_TP))
            sum -= p->actions[i].bytes;
    if (qd_comm_rank(world) == 0)
        *(int64_t *)argument = sum;
    return QD_OK;
}

/* The bytes exchanged between ranks of tp equal the closed formula. */
static void bytes_follow_the_formula(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.tp=2 parallel.sp=false ",
        "parallel.ranks=4 parallel.tp=4 train.micro_batch=2 ",
        "parallel.ranks=4 parallel.tp=2 train.micro_batch=1 train.recompute=full parallel.zero=3 ",
        "parallel.ranks=2 parallel.tp=2 train.recompute=selective train.precision=bf16 ",
        "parallel.ranks=4 parallel.tp=4 parallel.sp=false train.recompute=full train.recompute_layers=1 parallel.tp_overlap=3 ",
        "parallel.ranks=2 parallel.tp=2 parallel.tp_overlap=4 parallel.split_backward=true ",
    };
    for (size_t l = 0; l < 2 * (sizeof layouts / sizeof *layouts); l++) {
        char words[640];
        snprintf(words, sizeof words, RUN "%s %s", l % 2 ? OLMO2 : GPT2 "model.hidden=128 model.dropout=0.1 ", layouts[l / 2]);
        qd_config config = layout_config(words);
        qd_random_tokens random = {.seed = 8, .vocab = config.model.vocab};
        qd_batch_source source = qd_random_source(&random);
        qd_team *team;
        qd_step_output out;
        qd_check_formula formula;
        int64_t counted_bytes;
        trained_ok(qd_team_create(&config, &source, &team));
        trained_ok(qd_team_step(team, &out));
        trained_ok(qd_team_call(team, count_activations, &counted_bytes));
        assert_true(qd_formula_tensor(qd_team_program(team), &formula));
        if (formula.bytes != formula.planned || formula.bytes != counted_bytes)
            fail_msg("%s: %s: %lld bytes by the formula, %lld planned, %lld counted", words, formula.text, (long long)formula.bytes,
                     (long long)formula.planned, (long long)counted_bytes);
        qd_team_destroy(team);
    }
}

/* A run that moves to the next layout every two steps, with its optimizer state, has the losses of
 * one that stays on one rank. */
static void checkpoints_travel(void **state)
{
    (void)state;
    static const char *const dense_layouts[] = {
        "parallel.ranks=1 ",
        "parallel.ranks=2 parallel.tp=2 ",
        "parallel.ranks=8 parallel.tp=4 parallel.zero=3 ",
        "parallel.ranks=4 parallel.tp=2 parallel.sp=false parallel.zero=1 ",
        "parallel.ranks=4 parallel.zero=2 ",
        "parallel.ranks=4 parallel.cp=4 parallel.zero=3 ",
        "parallel.ranks=8 parallel.cp=2 parallel.tp=2 parallel.zero=1 parallel.cp_mode=gather ",
        "parallel.ranks=4 parallel.tp=4 ",
    };
    static const char *const expert_layouts[] = {
        "parallel.ranks=2 parallel.ep=2 ",
        "parallel.ranks=8 parallel.ep=4 parallel.zero=3 ",
        "parallel.ranks=1 ",
        "parallel.ranks=8 parallel.tp=2 parallel.ep=2 parallel.etp=2 parallel.zero=1 ",
        "parallel.ranks=4 parallel.pp=2 parallel.ep=2 ",
        "parallel.ranks=4 parallel.cp=2 parallel.ep=4 parallel.zero=2 ",
    };
    static const char *const models[] = {LLAMA "model.kv_heads=2 ", GPT2, DEEPSEEK};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        char words[1024];
        double losses[2 * (sizeof dense_layouts + sizeof expert_layouts) / sizeof *dense_layouts];
        const char *const *layouts = m < 2 ? dense_layouts : expert_layouts;
        const int all = m < 2 ? sizeof dense_layouts / sizeof *dense_layouts : sizeof expert_layouts / sizeof *expert_layouts;
        const int count = sample_count(all, 4);
        snprintf(words, sizeof words, "train.global_batch=8 train.lr=1e-3 train.schedule=constant run.threads=1 %s", models[m]);
        trained one = trained_run(words, 2 * count, (qd_random_tokens){.seed = 7});
        trained_onward(words, layouts, (size_t)count, 2, (qd_random_tokens){.seed = 7}, losses);
        for (int s = 0; s < 2 * count; s++)
            if (!(fabs(losses[s] - one.losses[s]) <= OUTCOME_TOLERANCE * one.losses[s]))
                fail_msg("%s%s: step %d: loss %.9g against %.9g", words, layouts[s / 2], s + 1, losses[s], one.losses[s]);
        free(one.weights);
    }
}

/* Experts over ep, folded with tp and sharded by etp. Loads (the gradients of biases) must agree
 * exactly, which shows that choices do. */
static void expert_parallel(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=4 ",
        "parallel.ranks=2 parallel.ep=2 ",
        "parallel.ranks=4 parallel.ep=4 train.recompute=full ",
        "parallel.ranks=8 parallel.ep=8 parallel.overlap=false ",
        "parallel.ranks=8 parallel.ep=2 train.recompute=selective ",
        "parallel.ranks=4 parallel.ep=2 parallel.etp=2 parallel.split_backward=true ",
        "parallel.ranks=2 parallel.tp=2 ",
        "parallel.ranks=4 parallel.tp=2 parallel.ep=4 ",
        "parallel.ranks=8 parallel.tp=2 parallel.ep=2 parallel.etp=2 ",
        "parallel.ranks=8 parallel.tp=4 parallel.ep=2 ",
        "parallel.ranks=4 parallel.ep=4 parallel.expert_rows=0.3 ",
        "parallel.ranks=8 parallel.ep=4 parallel.zero=3 ",
        "parallel.ranks=4 parallel.ep=4 parallel.zero=2 ",
        "parallel.ranks=4 parallel.tp=2 parallel.ep=2 parallel.zero=1 ",
        "parallel.ranks=8 parallel.pp=2 parallel.ep=4 parallel.zero=1 ",
        "parallel.ranks=2 parallel.cp=2 ",
        "parallel.ranks=8 parallel.cp=2 parallel.tp=2 parallel.ep=4 parallel.zero=1 ",
        "parallel.ranks=4 parallel.cp=4 parallel.ep=2 parallel.cp_mode=gather ",
        "parallel.ranks=4 parallel.ep=2 parallel.etp=2 parallel.expert_rows=0.2 parallel.split_backward=true ",
        "parallel.ranks=4 parallel.tp=2 parallel.ep=4 parallel.expert_rows=0.1 train.recompute=full ",
    };
    COMPARE(MIXTRAL, ((qd_random_tokens){.seed = 6, .documents = 3}), layouts);
    COMPARE(DEEPSEEK, ((qd_random_tokens){.seed = 7}), layouts);
}

/* Experts sharded over edp, alone or with others, are bit-identical to zero 0 on the same mesh;
 * with gradients reduced per micro-batch, to the same without ZeRO. */
static void sharded_experts(void **state)
{
    (void)state;
    static const char *const meshes[] = {"parallel.ranks=4 parallel.ep=2 ", "parallel.ranks=4 parallel.ep=4 ",
                                         "parallel.ranks=8 parallel.tp=2 parallel.ep=4 ",
                                         "parallel.ranks=8 parallel.tp=2 parallel.ep=2 parallel.etp=2 ",
                                         "parallel.ranks=8 parallel.pp=2 parallel.ep=2 parallel.schedule=zb_h1 "};
    static const char *const stages[] = {"parallel.zero=1 ", "parallel.zero=2 ", "parallel.zero=3 train.recompute=full ",
                                         "parallel.zero=3 parallel.overlap=false "};
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++)
        for (int each = 0; each < 2; each++) {
            char words[1024];
            if (!sample_has(m + (size_t)each, 0, 1))
                continue;
            const char *sync = each ? "train.grad_sync=per_microbatch " : "train.grad_sync=per_step ";
            snprintf(words, sizeof words, RUN DEEPSEEK "train.micro_batch=1 %s%s", sync, meshes[m]);
            outcome plain = outcome_run(words, (qd_random_tokens){.seed = 9});
            for (size_t s = 0; s < sizeof stages / sizeof *stages; s++) {
                if (!sample_has(s, m + (size_t)each, 3))
                    continue;
                snprintf(words, sizeof words, RUN DEEPSEEK "train.micro_batch=1 %s%s%s", sync, meshes[m], stages[s]);
                outcome sharded = outcome_run(words, (qd_random_tokens){.seed = 9});
                if (memcmp(sharded.losses, plain.losses, sizeof plain.losses) != 0 ||
                    memcmp(sharded.norms, plain.norms, sizeof plain.norms) != 0 ||
                    memcmp(sharded.weights, plain.weights, (size_t)plain.count * sizeof *plain.weights) != 0)
                    fail_msg("%s: not bit-identical to the run without ZeRO", words);
                outcome_free(&sharded);
            }
            outcome_free(&plain);
        }
}

/* One expert gets all rows, the ranks of the others none: extra dispatch rounds, no additional
 * memory, all numbers finite. */
static void one_expert_has_all(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=4 parallel.ep=4 ",
        "parallel.ranks=4 parallel.ep=4 parallel.expert_rows=0.7 ",
        "parallel.ranks=8 parallel.ep=8 parallel.expert_rows=1 parallel.overlap=false ",
        "parallel.ranks=8 parallel.ep=4 parallel.etp=2 parallel.expert_rows=0.05 parallel.split_backward=true ",
        "parallel.ranks=8 parallel.tp=2 parallel.ep=8 parallel.expert_rows=1.5 train.recompute=full ",
    };
    outcome_prepare = favour;
    COMPARE(DEEPSEEK "model.experts_per_token=1 model.router_groups=1 model.router_top_groups=1 ", ((qd_random_tokens){.seed = 8}),
            layouts);
    outcome r = outcome_run(RUN DEEPSEEK
                            "model.experts_per_token=1 model.router_top_groups=1 parallel.ranks=4 parallel.ep=4 parallel.expert_rows=1 ",
                            (qd_random_tokens){.seed = 8});
    /* Four ranks, two blocks with experts, rows there and back in the forward and backward pass,
     * and once more for the backward pass: three extra rounds. */
    assert_int_equal(r.rounds, OUTCOME_STEPS * 4 * 2 * 5 * 3);
    outcome_prepare = NULL;
    outcome_free(&r);
}

/* Sequences sharded over ranks: 16 and 17 positions, in even and uneven chunks. */
static void context_parallel(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.cp=2 ",
        "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather ",
        "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ",
        "parallel.ranks=4 parallel.cp=4 parallel.zero=3 train.micro_batch=2 ",
        "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=gather train.recompute=full parallel.overlap=false ",
        "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=ulysses train.recompute=selective parallel.split_backward=true ",
        "parallel.ranks=4 parallel.cp=2 parallel.zero=2 train.micro_batch=1 train.recompute=full ",
        "parallel.ranks=3 parallel.cp=3 ",
    };
    COMPARE(LLAMA, ((qd_random_tokens){.seed = 6, .documents = 3}), layouts);
    /* fewer kv heads than ranks */
    outcome_compare_all(RUN LLAMA "model.kv_heads=2 ", (qd_random_tokens){.seed = 6, .documents = 3}, &layouts[5], 1);
    COMPARE(GPT2 "model.dropout=0.1 ", ((qd_random_tokens){.seed = 7, .ignored = 5}), layouts);
    COMPARE(GPT2, ((qd_random_tokens){.seed = 7, .documents = 2}), layouts);
}

/* Together with the other axes. */
static void context_with_other_axes(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=4 parallel.cp=2 parallel.tp=2 parallel.sp=false ",
        "parallel.ranks=4 parallel.cp=2 parallel.tp=2 parallel.cp_mode=gather ",
        "parallel.ranks=4 parallel.cp=2 parallel.tp=2 parallel.cp_mode=ulysses train.recompute=full ",
        "parallel.ranks=8 parallel.cp=2 parallel.tp=2 parallel.zero=3 train.micro_batch=1 ",
        "parallel.ranks=4 parallel.cp=2 parallel.pp=2 train.micro_batch=2 ",
        "parallel.ranks=8 parallel.cp=2 parallel.tp=2 parallel.pp=2 train.micro_batch=2 parallel.schedule=zb_h1 parallel.cp_mode=gather ",
        "parallel.ranks=8 parallel.cp=2 parallel.pp=2 parallel.zero=2 train.micro_batch=1 parallel.cp_mode=ulysses train.recompute=full ",
    };
    COMPARE(LLAMA, ((qd_random_tokens){.seed = 8, .documents = 3}), layouts);
    COMPARE(GPT2 "model.dropout=0.1 ", ((qd_random_tokens){.seed = 9, .ignored = 5}), layouts);
    static const char *const with_experts[] = {
        "parallel.ranks=2 parallel.cp=2 ",
        "parallel.ranks=4 parallel.cp=2 parallel.ep=2 parallel.cp_mode=gather ",
        "parallel.ranks=4 parallel.cp=2 parallel.tp=2 parallel.ep=4 parallel.cp_mode=ulysses ",
    };
    COMPARE(MIXTRAL, ((qd_random_tokens){.seed = 10, .documents = 3}), with_experts);
    COMPARE(DEEPSEEK, ((qd_random_tokens){.seed = 11}), with_experts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(context_parallel),  cmocka_unit_test(context_with_other_axes),
        cmocka_unit_test(tensor_parallel),   cmocka_unit_test(sequence_parallel),
        cmocka_unit_test(pipeline_parallel), cmocka_unit_test(pieces_change_no_bit),
        cmocka_unit_test(expert_parallel),   cmocka_unit_test(bytes_follow_the_formula),
        cmocka_unit_test(exchanges_matter),  cmocka_unit_test(one_expert_has_all),
        cmocka_unit_test(sharded_experts),   cmocka_unit_test_setup_teardown(checkpoints_travel, scratch_setup, scratch_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
