/* LoRA: every layout trains the same adapters as one rank, frozen parameters do not change and have
 * no gradients or optimizer state, and a run allocates and sends what its program says.
 * ctest: timeout 200 */
#include "support/sample.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define RUN                                                                                                                        \
    "train.optimizer=sgd train.momentum=0.9 train.lr=0.5 train.schedule=constant train.global_batch=8 train.micro_batch=2 "       \
    "run.threads=1 lora.rank=4 lora.alpha=6 "
#define LLAMA RUN "model.layers=2 model.hidden=48 model.heads=4 model.kv_heads=2 model.ffn=64 model.vocab=101 data.seq=16 "
#define EXPERTS LLAMA "model.experts=4 model.experts_per_token=2 model.expert_ffn=40 model.shared_experts=1 model.aux_loss=0 "

/* Losses of all steps, and the adapters afterwards, within 1e-5 of those of one rank. */
static void compare(const char *base, const char *const *layouts, size_t count, qd_random_tokens random)
{
    enum { STEPS = 5 };
    trained one = trained_run(base, STEPS, random);
    double norm = 0.0;
    for (int64_t i = 0; i < one.count; i++)
        norm += (double)one.weights[i] * (double)one.weights[i];
    for (size_t l = 0; l < count; l++) {
        char words[900];
        if (!sample_has(l, 0, 3))
            continue;
        snprintf(words, sizeof words, "%s%s ", base, layouts[l]);
        trained t = trained_run(words, STEPS, random);
        double difference = 0.0;
        assert_int_equal(t.count, one.count);
        for (int s = 0; s < STEPS; s++)
            if (fabs(t.losses[s] - one.losses[s]) > 1e-5)
                fail_msg("%s: the loss of step %d is %.8f, and %.8f on one rank", words, s + 1, t.losses[s], one.losses[s]);
        for (int64_t i = 0; i < one.count; i++)
            difference += pow((double)t.weights[i] - (double)one.weights[i], 2.0);
        if (sqrt(difference / norm) > 1e-5)
            fail_msg("%s: weights differ by %.3g from those of one rank", words, sqrt(difference / norm));
        free(t.weights);
    }
    free(one.weights);
}
#define COMPARE(base, layouts, ...) compare(base, layouts, sizeof(layouts) / sizeof *(layouts), (qd_random_tokens){__VA_ARGS__})

static void layouts_of_dense_models(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.tp=2",
        "parallel.ranks=4 parallel.tp=4 parallel.sp=false",
        "parallel.ranks=2 parallel.pp=2 parallel.schedule=zb_h1",
        "parallel.ranks=2 parallel.cp=2",
        "parallel.ranks=4 parallel.zero=1",
        "parallel.ranks=4 parallel.zero=2 train.grad_sync=per_microbatch",
        "parallel.ranks=4 parallel.zero=3 parallel.dp_shard=2 parallel.tp=2",
        "parallel.ranks=8 parallel.tp=2 parallel.pp=2 parallel.zero=3 train.recompute=full",
        "train.recompute=selective train.swiglu=again",
    };
    COMPARE(LLAMA, layouts, .seed = 1);
    COMPARE(LLAMA "lora.dropout=0.2 lora.targets=q_proj,v_proj,o_proj,down_proj model.qkv_bias=true model.tied=true ", layouts, .seed = 2);
}

static void layouts_of_experts(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "parallel.ranks=2 parallel.ep=2",
        "parallel.ranks=4 parallel.ep=2 parallel.tp=2 parallel.zero=1",
        "parallel.ranks=4 parallel.ep=4 parallel.zero=3",
        "parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node",
        "parallel.ranks=4 parallel.ep=2 parallel.pp=2 parallel.split_backward=true",
    };
    COMPARE(EXPERTS, layouts, .seed = 3);
    COMPARE(EXPERTS "lora.targets=k_proj,router ", layouts, .seed = 4);
}

static void plan_equals_run(void **state)
{
    (void)state;
    trained_plan_equals_run(LLAMA "parallel.ranks=2 parallel.tp=2 ");
    trained_plan_equals_run(LLAMA "parallel.ranks=4 parallel.zero=2 train.precision=bf16 ");
    trained_plan_equals_run(LLAMA "parallel.ranks=2 parallel.zero=3 model.tied=true ");
}

/* Elements of a persistent buffer, without padding of more than one alignment per tensor. */
static void state_is_that_of_adapters(void **state)
{
    (void)state;
    qd_arena *arena;
    qd_program *p = trained_program(LLAMA "train.precision=bf16 train.optimizer=adamw train.momentum=0 ", &arena);
    int64_t adapters = 0, frozen = 0, most = 0;
    for (int i = 0; i < p->ledger->param_count; i++) {
        const qd_param *param = &p->ledger->params[i];
        assert_int_equal(param->frozen, !param->adapter);
        *(param->frozen ? &frozen : &adapters) += param->shape[0] * param->shape[1];
        most += QD_STORAGE_ALIGN;
    }
    assert_true(adapters > 0 && frozen > 5 * adapters);
    static const struct {
        qd_buffer_kind kind;
        int64_t size;
        bool all;
    } buffers[] = {{QD_BUFFER_PARAM, 2, true}, {QD_BUFFER_GRAD, 2, false}, {QD_BUFFER_MASTER, 4, false},
                   {QD_BUFFER_MOMENT1, 4, false}, {QD_BUFFER_MOMENT2, 4, false}};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        int64_t bytes = p->buffers[p->persistent[buffers[i].kind]].bytes, count = adapters + (buffers[i].all ? frozen : 0);
        int64_t wanted = count * buffers[i].size;
        if (bytes < wanted || bytes > wanted + most * buffers[i].size)
            fail_msg("%s: %lld bytes, %lld of tensors", qd_buffer_kind_name(buffers[i].kind), (long long)bytes, (long long)wanted);
    }
    for (int m = 0; m < p->ledger->module_count; m++) {
        const qd_module_class *c = qd_program_class(p, m);
        for (int i = 0; i < c->op_count; i++)
            for (int j = 0; j < QD_OP_SLOTS; j++) {
                const qd_slot *slot = c->ops[i].slot[j] >= 0 ? &c->slots[c->ops[i].slot[j]] : NULL;
                if (slot && slot->kind == QD_SLOT_GRAD)
                    assert_true(p->ledger->params[p->ledger->modules[m].param_begin + slot->param].adapter);
            }
    }
    qd_arena_destroy(arena);
}

static void frozen_parameters_stay(void **state)
{
    (void)state;
    qd_random_tokens random = {.seed = 5};
    qd_team *team = trained_team(LLAMA "parallel.ranks=2 parallel.zero=1 train.optimizer=muon train.momentum=0 ", &random);
    const qd_ledger *l = qd_team_program(team)->ledger;
    for (int i = 0; i < l->param_count; i += 5) {
        const qd_param *p = &l->params[i];
        int64_t n = p->shape[0] * p->shape[1];
        float *before = malloc((size_t)n * sizeof *before), *after = malloc((size_t)n * sizeof *after);
        trained_ok(qd_team_read(team, p->name, QD_TENSOR_VALUE, before, n));
        trained_steps(team, 1, NULL);
        trained_ok(qd_team_read(team, p->name, QD_TENSOR_VALUE, after, n));
        bool same = memcmp(before, after, (size_t)n * sizeof *before) == 0;
        if (same != p->frozen)
            fail_msg("%s %s", p->name, same ? "is not trained" : "has changed");
        free(before);
        free(after);
    }
    qd_team_destroy(team);
}

/* Words of lora.targets add up: routers have adapters next to those of all-linear. */
static void targets_add_up(void **state)
{
    (void)state;
    static const char *const targets[] = {"lora.targets=all-linear ", "lora.targets=router ", "lora.targets=all-linear,router "};
    int adapters[3] = {0};
    for (int i = 0; i < 3; i++) {
        qd_arena *arena;
        char words[512];
        snprintf(words, sizeof words, EXPERTS "%s", targets[i]);
        const qd_program *p = trained_program(words, &arena);
        for (int k = 0; k < p->ledger->param_count; k++)
            adapters[i] += p->ledger->params[k].adapter;
        qd_arena_destroy(arena);
    }
    assert_true(adapters[1] > 0);
    assert_int_equal(adapters[2], adapters[0] + adapters[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_of_dense_models), cmocka_unit_test(layouts_of_experts),     cmocka_unit_test(plan_equals_run),
        cmocka_unit_test(state_is_that_of_adapters), cmocka_unit_test(frozen_parameters_stay),
        cmocka_unit_test(targets_add_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
