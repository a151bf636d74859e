/* Every declared op and every kind of op has all its rules: lowering, gradient, placement, proof,
 * runner, cost. An op that lacks one of them, or that no program of this test contains, fails here
 * by name. */
#include "nn/nn.h"
#include "sim/cost.h"
#include "spec/proof/proof.h"
#include "support/layout.h"
#include "support/simulated.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

/* The pass that writes an op, which determines the rules it needs. */
typedef enum origin {
    NOWHERE,
    FORWARD,    /* lowered from a declaration: gradient and placement */
    GENERATION, /* lowered from a declaration, in generation only: placement */
    GRADIENT,   /* the gradient of an op: placement */
    PLACEMENT,  /* written by placement rules, local to this rank */
    EXCHANGES,  /* written by placement rules, moves values between ranks */
    FUSION,     /* several ops in one */
    QUANTIZING, /* before GEMMs in fp8 */
} origin;

static const origin origins[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = FORWARD,
    [QD_OP_EMBED_GRAD] = GRADIENT,
    [QD_OP_NORM] = FORWARD,
    [QD_OP_NORM_GRAD] = GRADIENT,
    [QD_OP_LINEAR] = FORWARD,
    [QD_OP_LINEAR_ADD] = FUSION,
    [QD_OP_LINEAR_GELU] = FUSION,
    [QD_OP_LINEAR_DX] = GRADIENT,
    [QD_OP_LINEAR_DX_GELU] = FUSION,
    [QD_OP_LINEAR_DW] = GRADIENT,
    [QD_OP_ADAPT] = FORWARD,
    [QD_OP_ADAPT_DX] = GRADIENT,
    [QD_OP_ADAPT_DW] = GRADIENT,
    [QD_OP_BIAS_GRAD] = GRADIENT,
    [QD_OP_ROPE] = FORWARD,
    [QD_OP_ROPE_INVERSE] = GRADIENT,
    [QD_OP_LATENT_QKV] = FORWARD,
    [QD_OP_LATENT_QKV_GRAD] = GRADIENT,
    [QD_OP_ATTENTION] = FORWARD,
    [QD_OP_ATTENTION_CACHED] = GENERATION,
    [QD_OP_ATTENTION_LATENT] = GENERATION,
    [QD_OP_ATTENTION_GRAD] = GRADIENT,
    [QD_OP_ATTENTION_SINK] = FORWARD,
    [QD_OP_ATTENTION_SINK_GRAD] = GRADIENT,
    [QD_OP_ACTIVATION] = FORWARD,
    [QD_OP_ACTIVATION_GRAD] = GRADIENT,
    [QD_OP_ACTIVATION_GRAD_Y] = FUSION,
    [QD_OP_CLIP] = FORWARD,
    [QD_OP_CLIP_GRAD] = GRADIENT,
    [QD_OP_ADD] = FORWARD,
    [QD_OP_SCALE] = FORWARD,
    [QD_OP_GATE] = FORWARD,
    [QD_OP_GATE_GRAD] = GRADIENT,
    [QD_OP_DROPOUT] = FORWARD,
    [QD_OP_HEAD_LOSS] = FORWARD,
    [QD_OP_HEAD_LOGITS] = GENERATION,
    [QD_OP_HEAD_NORM] = FORWARD,
    [QD_OP_HEAD_NORM_GRAD] = GRADIENT,
    [QD_OP_QK_SQUARES] = FORWARD,
    [QD_OP_QK_NORM] = FORWARD,
    [QD_OP_QK_DOTS] = GRADIENT,
    [QD_OP_QK_NORM_GRAD] = GRADIENT,
    [QD_OP_ROUTE] = FORWARD,
    [QD_OP_ROUTE_PLAN] = FORWARD,
    [QD_OP_ROUTE_GRAD] = GRADIENT,
    [QD_OP_ROUTE_LOAD] = GRADIENT,
    [QD_OP_PERMUTE] = FORWARD,
    [QD_OP_COMBINE] = FORWARD,
    [QD_OP_COMBINE_GRAD] = GRADIENT,
    [QD_OP_EXPERTS] = FORWARD,
    [QD_OP_EXPERTS_DX] = GRADIENT,
    [QD_OP_EXPERTS_DW] = GRADIENT,
    [QD_OP_EXPERTS_BIAS] = FORWARD,
    [QD_OP_EXPERTS_BIAS_GRAD] = GRADIENT,
    [QD_OP_EXPERTS_SWIGLU] = FUSION,
    [QD_OP_AMAX] = QUANTIZING,
    [QD_OP_CAST] = QUANTIZING,
    [QD_OP_ACTIVATION_AMAX] = QUANTIZING,
    [QD_OP_ACTIVATION_CAST] = QUANTIZING,
    [QD_OP_ACTIVATION_GRAD_AMAX] = QUANTIZING,
    [QD_OP_ACTIVATION_GRAD_CAST] = QUANTIZING,
    [QD_OP_EXPERTS_DX_SWIGLU] = FUSION,
    [QD_OP_EXPERT_ACTIVATION] = FORWARD,
    [QD_OP_EXPERT_ACTIVATION_GRAD] = GRADIENT,
    [QD_OP_DISPATCH] = EXCHANGES,
    [QD_OP_RETURN] = EXCHANGES,
    [QD_OP_EXPERT_ROUNDS] = EXCHANGES,
    [QD_OP_EXPERT_ROUNDS_GRAD] = EXCHANGES,
    [QD_OP_NODE_PLAN] = PLACEMENT,
    [QD_OP_NODE_DISPATCH] = EXCHANGES,
    [QD_OP_NODE_RETURN] = EXCHANGES,
    [QD_OP_NODE_WEIGHTS] = PLACEMENT,
    [QD_OP_NODE_RESEND] = EXCHANGES,
    [QD_OP_RELAY_PLAN] = PLACEMENT,
    [QD_OP_RELAY_ROUNDS] = EXCHANGES,
    [QD_OP_RELAY_ROUNDS_GRAD] = EXCHANGES,
    [QD_OP_LOSS_MAX] = PLACEMENT,
    [QD_OP_LOSS_PART] = PLACEMENT,
    [QD_OP_LOSS_GRAD] = PLACEMENT,
    [QD_OP_LOSS_SUM] = PLACEMENT,
    [QD_OP_LOSS_ROWS] = PLACEMENT,
    [QD_OP_PAIR_SUMS] = PLACEMENT,
    [QD_OP_PAIR_LOSS] = PLACEMENT,
    [QD_OP_ALL_REDUCE] = EXCHANGES,
    [QD_OP_ALL_GATHER] = EXCHANGES,
    [QD_OP_REDUCE_SCATTER] = EXCHANGES,
    [QD_OP_ZERO] = PLACEMENT,
    [QD_OP_COLUMNS] = PLACEMENT,
    [QD_OP_ATTENTION_PART] = PLACEMENT,
    [QD_OP_ATTENTION_DELTA] = PLACEMENT,
    [QD_OP_ATTENTION_PART_GRAD] = PLACEMENT,
    [QD_OP_HEADS_SPLIT] = PLACEMENT,
    [QD_OP_HEADS_JOIN] = PLACEMENT,
    [QD_OP_ROWS_SPLIT] = PLACEMENT,
    [QD_OP_ROWS_JOIN] = PLACEMENT,
    [QD_OP_CONTEXT_SHIFT] = EXCHANGES,
    [QD_OP_CONTEXT_GATHER] = EXCHANGES,
    [QD_OP_CONTEXT_SCATTER] = EXCHANGES,
    [QD_OP_CONTEXT_SWAP] = EXCHANGES,
};

static void declared_ops_are_lowered(void **state)
{
    (void)state;
    static const char *const names[] = {
#define NAME(kind) #kind,
        QD_DECL_TABLE(NAME)
#undef NAME
    };
    for (int kind = 0; kind < QD_DECL_KIND_COUNT; kind++)
        if (!qd_decl_has_lowering((qd_decl_kind)kind))
            fail_msg("the declared op %s has no rule in spec/passes/forward.c", names[kind]);
}

static void ops_have_all_rules(void **state)
{
    (void)state;
    for (int k = 0; k < QD_OP_KIND_COUNT; k++) {
        qd_op_kind kind = (qd_op_kind)k;
        const char *name = qd_op_name(kind);
        origin from = origins[k];
        bool placed = from == FORWARD || from == GENERATION || from == GRADIENT;
        if (from == NOWHERE)
            fail_msg("%s: say in tests/unit/spec/test_op_rules.c which pass writes it", name);
        if (strlen(qd_op_roles(kind)) > QD_OP_SLOTS || strspn(qd_op_roles(kind), "rwag") != strlen(qd_op_roles(kind)))
            fail_msg("%s has roles '%s'", name, qd_op_roles(kind));
        if (qd_op_has_gradient(kind) != (from == FORWARD))
            fail_msg("%s %s a rule in spec/passes/gradient.c", name, from == FORWARD ? "needs" : "needs no place among forward ops, or");
        if (qd_op_has_placement(kind) != placed)
            fail_msg("%s %s a rule in spec/passes/place.c", name, placed ? "needs" : "is written by placement, and has");
        if (!qd_nn_has_runner(kind))
            fail_msg("%s needs a runner in nn/run.c", name);
        if (!qd_op_has_cost(kind))
            fail_msg("%s needs a rule in sim/cost.c", name);
        if (from != GENERATION && !qd_proof_knows(kind))
            fail_msg("%s needs a rule in spec/proof", name);
    }
}

/* Programs that together contain every kind of op. */

#define RUN "train.global_batch=16 train.micro_batch=2 run.threads=1 "
#define LLAMA RUN "model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=4 model.ffn=80 model.vocab=101 data.seq=16 "
#define GPT2 RUN "model.arch=gpt2 model.layers=2 model.hidden=32 model.heads=4 model.vocab=67 data.seq=16 model.dropout=0.1 "
#define EXPERTS                                                                                                                   \
    LLAMA "model.experts=8 model.experts_per_token=2 model.expert_ffn=24 model.shared_experts=1 model.router=sigmoid "           \
          "model.router_bias_rate=0.01 model.aux_loss=0.01 model.qk_norm=true "

#define OLMO2 RUN "model.arch=olmo2 model.layers=2 model.hidden=48 model.heads=8 model.kv_heads=2 model.vocab=101 data.seq=16 "

#define LATENT \
    RUN "model.arch=deepseek model.layers=2 model.hidden=48 model.heads=8 model.q_lora_rank=24 model.kv_lora_rank=16 " \
        "model.qk_nope_head_dim=8 model.qk_rope_head_dim=4 model.v_head_dim=10 model.vocab=101 data.seq=16 "

static const struct {
    const char *words, *device;
    bool one_rank; /* training on the CPU without exchanges: forward lists contain only lowered or fused ops */
    bool generation;
} programs[] = {
    {LLAMA, "cpu", true, false},
    {GPT2, "cpu", true, false},
    {EXPERTS, "cpu", true, false},
    {LLAMA, "cuda", false, false},
    {GPT2, "cuda", false, false},
    {EXPERTS, "cuda", false, false},
    {EXPERTS "train.recompute=selective train.swiglu=keep ", "cuda", false, false},
    {LLAMA "train.swiglu=again ", "cpu", false, false},
    {LLAMA "parallel.ranks=2 parallel.tp=2 parallel.sp=false ", "cpu", false, false},
    {GPT2 "parallel.ranks=2 parallel.tp=2 parallel.tp_overlap=2 ", "cuda", false, false},
    {LLAMA "parallel.ranks=2 parallel.cp=2 ", "cpu", false, false},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather ", "cpu", false, false},
    {LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ", "cpu", false, false},
    {EXPERTS "parallel.ranks=2 parallel.ep=2 parallel.expert_rows=1 ", "cpu", false, false},
    {EXPERTS "parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node parallel.expert_rows=1 ", "cpu", false, false},
    {LLAMA, "cpu", false, true},
    {LATENT, "cpu", true, false},
    {LATENT, "cpu", false, true},
    {OLMO2, "cpu", true, false},
    {LLAMA "model.sinks=true model.experts=4 model.mlp_bias=true model.router_logit_bias=true ", "cpu", true, false},
    {LLAMA "model.experts=4 model.mlp_bias=true parallel.ranks=2 parallel.etp=2 ", "cpu", false, false}, /* biases of partial sums */
    {LLAMA "model.sinks=true ", "cpu", false, true},
    {LLAMA "model.arch=gemma2 model.logit_softcap=5 ", "cpu", true, false},
    {LLAMA "model.arch=olmo model.clip_qkv=0.5 ", "cpu", true, false},
    {LLAMA "model.experts=8 model.experts_per_token=2 model.expert_ffn=24 model.shared_experts=1 model.shared_gate=true ", "cpu", true,
     false},
    {OLMO2 "parallel.ranks=4 parallel.tp=4 ", "cpu", false, false},
    {LLAMA "lora.rank=4 lora.alpha=6 lora.dropout=0.1 ", "cpu", true, false},
    {LLAMA "train.precision=fp8 ", "cuda", false, false},
    {EXPERTS "lora.rank=4 lora.alpha=6 ", "cpu", true, false},
    {LLAMA "data.format=preferences ", "cpu", false, false},
};

static void check_op(const char *words, bool one_rank, const qd_cluster *cluster, const qd_model *model, const qd_module_class *c,
                     const qd_op *op)
{
    const char *name = qd_op_name(op->kind);
    if (one_rank && op->phase == QD_PHASE_FORWARD && origins[op->kind] != FORWARD && origins[op->kind] != FUSION)
        fail_msg("%s: %s is in a forward list, and so needs a gradient", words, name);
    if (qd_op_communicates(op) != (origins[op->kind] == EXCHANGES))
        fail_msg("%s: %s %s", words, name, qd_op_communicates(op) ? "communicates" : "does not communicate");
    if (qd_op_communicates(op))
        return; /* priced by the network */
    qd_cost cost = qd_cost_op(cluster, model, c, op);
    double seconds = qd_cost_total(&cost);
    if (!(isfinite(seconds) && seconds > 0.0))
        fail_msg("%s: %s costs %g seconds", words, name, seconds);
}

static void programs_hold_every_op(void **state)
{
    (void)state;
    bool seen[QD_OP_KIND_COUNT] = {0};
    qd_cluster cluster;
    qd_options *options = simulated_options("h200", LLAMA);
    ok(qd_cluster_resolve(options, &cluster));
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        qd_config config = layout_config(programs[i].words);
        config.strategy.traits = qd_device_traits_find(programs[i].device);
        if (programs[i].generation) {
            config.strategy.training = false;
            config.strategy.context = 64;
            config.strategy.seq = config.strategy.micro_batch = config.global_batch = 1;
        }
        qd_arena *arena;
        qd_program *p;
        ok(qd_arena_create(&arena));
        ok(qd_config_build(&config, config.world - 1, arena, &p));
        for (int m = 0; m < p->ledger->module_count; m++) {
            const qd_module_class *c = qd_program_class(p, m);
            for (int k = 0; k < c->op_count; k++) {
                check_op(programs[i].words, programs[i].one_rank, &cluster, &config.model, c, &c->ops[k]);
                seen[c->ops[k].kind] = true;
            }
        }
        qd_arena_destroy(arena);
    }
    qd_options_destroy(options);
    for (int k = 0; k < QD_OP_KIND_COUNT; k++)
        if (!seen[k])
            fail_msg("no program of this test contains %s: add one", qd_op_name((qd_op_kind)k));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(declared_ops_are_lowered),
        cmocka_unit_test(ops_have_all_rules),
        cmocka_unit_test(programs_hold_every_op),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
