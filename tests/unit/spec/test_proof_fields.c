/* Every number of an op, and every buffer and type of an action, that a run reads and that decides
 * about gradients is held by the proof: changed on all ranks alike, so that communication still
 * matches, each is refused. `reads` says what a run reads of each kind of op (src/nn,
 * src/parallel). */
#include "support/layout.h"

#include "spec/proof/proof.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SIZES "model.layers=2 model.hidden=32 model.heads=4 model.vocab=97 data.seq=8 train.global_batch=8 train.micro_batch=2 "
#define LLAMA SIZES "model.kv_heads=2 model.tied=false "
#define GPT2 SIZES "model.arch=gpt2 "
#define MOE SIZES "model.kv_heads=4 model.experts=8 model.experts_per_token=2 model.expert_ffn=24 model.aux_loss=0.05 "
#define LATENT \
    SIZES "model.arch=deepseek model.q_lora_rank=24 model.kv_lora_rank=16 model.qk_nope_head_dim=8 model.qk_rope_head_dim=4 " \
          "model.v_head_dim=6 "
#define DEEPSEEK MOE "model.shared_experts=1 model.router=sigmoid model.router_bias_rate=0.01 model.z_loss=0.001 "

static const char *const layouts[] = {
    LLAMA "parallel.ranks=4 parallel.tp=2 ",
    LLAMA "parallel.ranks=4 parallel.tp=4 parallel.sp=false parallel.zero=1 model.qk_norm=true ",
    GPT2 "parallel.ranks=4 parallel.tp=2 train.recompute=full model.dropout=0.1 ",
    GPT2 "parallel.ranks=2 parallel.tp=2 train.recompute=selective model.dropout=0.1 ",
    LLAMA "parallel.ranks=4 parallel.cp=2 parallel.zero=3 ",
    LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=gather train.precision=bf16 ",
    LLAMA "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ",
    LLAMA "model.tied=true parallel.ranks=2 parallel.pp=2 parallel.schedule=zb_h1 ",
    DEEPSEEK "parallel.ranks=4 parallel.tp=2 parallel.ep=4 parallel.zero=2 ",
    MOE "parallel.ranks=4 parallel.ep=2 parallel.etp=2 train.grad_sync=per_microbatch parallel.expert_rows=1 ",
    MOE "parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node parallel.expert_rows=1 ",
    GPT2 "parallel.ranks=2 run.device=cuda model.dropout=0.1 ",
    MOE "parallel.ranks=1 run.device=cuda ",
    LLAMA "parallel.ranks=2 parallel.split_backward=true train.swiglu=again ",
    LLAMA "parallel.ranks=2 parallel.tp=2 model.window=4 model.full_every=2 ",
    LLAMA "parallel.ranks=2 parallel.cp=2 model.window=4 model.window_from=1 ",
    LLAMA "parallel.ranks=4 parallel.cp=4 model.window=2 ", /* round 2 of the ring is left out */
    LLAMA "parallel.ranks=2 parallel.cp=2 model.window=1 ",
    LATENT "parallel.ranks=2 parallel.tp=2 ",
    LLAMA "parallel.ranks=2 parallel.tp=2 model.ffn=64 train.precision=fp8 ",
    LATENT "parallel.ranks=4 parallel.tp=2 parallel.sp=false parallel.cp=2 ",
    LATENT "parallel.ranks=2 parallel.cp=2 parallel.cp_mode=ulysses ",
    LLAMA "model.arch=olmo2 parallel.ranks=4 parallel.tp=4 ",
    LLAMA "model.arch=olmo model.clip_qkv=0.5 parallel.ranks=4 parallel.tp=4 ",
    MOE "model.shared_experts=1 model.shared_gate=true parallel.ranks=2 parallel.tp=2 ",
    LLAMA "model.arch=gemma2 model.logit_softcap=5 parallel.ranks=2 parallel.tp=2 ",
    LLAMA "model.arch=gemma2 model.logit_softcap=5 parallel.ranks=2 ",
    LLAMA "parallel.ranks=4 parallel.tp=4 lora.rank=2 lora.alpha=6 lora.dropout=0.1 parallel.zero=2 ",
    LLAMA "parallel.ranks=2 parallel.tp=2 parallel.sp=false lora.rank=2 lora.targets=q_proj,v_proj,down_proj lora.dropout=0.1 ",
    DEEPSEEK "parallel.ranks=2 parallel.ep=2 lora.rank=2 lora.alpha=6 ",
    LLAMA "model.sinks=true parallel.ranks=4 parallel.tp=2 parallel.cp=2 ",
    MOE "model.mlp_bias=true model.router_logit_bias=true parallel.ranks=4 parallel.ep=2 parallel.etp=2 parallel.expert_rows=1 ",
    MOE "model.mlp_bias=true parallel.ranks=4 parallel.ep=4 parallel.nodes=2 parallel.dispatch=node parallel.expert_rows=1 ",
    LLAMA "model.sinks=true parallel.ranks=4 parallel.tp=2 parallel.cp=2 parallel.cp_mode=ulysses ",
    SIZES "model.arch=deepseek model.mtp_modules=2 model.tied=true parallel.ranks=2 parallel.tp=2 ",
    SIZES "model.arch=deepseek model.mtp_modules=1 ",
    LLAMA "data.format=preferences parallel.ranks=8 parallel.tp=2 parallel.cp=2 ",
};

/* m n k: sizes; f first, t to; h heads, v kv heads; w window; e experts, x first expert; r round, H
 * hop; c chunk; s site; a ahead; o scale; p soft-cap; z epsilon; l load_tokens; P parts, A column
 * of the last part, C columns of the first part. Exchanges: g group, i its index, d type, q
 * count. */
static const char *const reads[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = "mnkfa",
    [QD_OP_EMBED_GRAD] = "mnkfa",
    [QD_OP_NORM] = "mnz",
    [QD_OP_NORM_GRAD] = "mn",
    [QD_OP_LINEAR] = "mnkft",
    [QD_OP_LINEAR_ADD] = "mnk",
    [QD_OP_LINEAR_GELU] = "mnkft",
    [QD_OP_LINEAR_DX] = "mnkft",
    [QD_OP_LINEAR_DX_GELU] = "mnkft",
    [QD_OP_LINEAR_DW] = "mnkft",
    [QD_OP_ADAPT] = "mnkexPAC",
    [QD_OP_ADAPT_DX] = "mnkexPAC",
    [QD_OP_ADAPT_DW] = "mnkexPAC",
    [QD_OP_BIAS_GRAD] = "mn",
    [QD_OP_AMAX] = "mn",
    [QD_OP_CAST] = "mn",
    [QD_OP_ACTIVATION_AMAX] = "mn",
    [QD_OP_ACTIVATION_CAST] = "mn",
    [QD_OP_ACTIVATION_GRAD_AMAX] = "mn",
    [QD_OP_ACTIVATION_GRAD_CAST] = "mn",
    [QD_OP_ROPE] = "mhv",
    [QD_OP_ROPE_INVERSE] = "mhv",
    [QD_OP_SCALE] = "mno",
    [QD_OP_CLIP] = "mn",
    [QD_OP_CLIP_GRAD] = "mn",
    [QD_OP_GATE] = "mn",
    [QD_OP_GATE_GRAD] = "mn",
    [QD_OP_QK_SQUARES] = "mnkhv",
    [QD_OP_QK_NORM] = "mnhv",
    [QD_OP_QK_DOTS] = "mnhv",
    [QD_OP_QK_NORM_GRAD] = "mnkhv",
    [QD_OP_LATENT_QKV] = "mh",
    [QD_OP_LATENT_QKV_GRAD] = "mh",
    [QD_OP_ATTENTION] = "hvw",
    [QD_OP_ATTENTION_CACHED] = "",
    [QD_OP_ATTENTION_LATENT] = "",
    [QD_OP_ATTENTION_GRAD] = "hvw",
    [QD_OP_ATTENTION_SINK] = "mhf",
    [QD_OP_ATTENTION_SINK_GRAD] = "mhf",
    [QD_OP_ACTIVATION] = "mn",
    [QD_OP_ACTIVATION_GRAD] = "mn",
    [QD_OP_ACTIVATION_GRAD_Y] = "mn",
    [QD_OP_ADD] = "mn",
    [QD_OP_DROPOUT] = "mnfs",
    [QD_OP_HEAD_LOSS] = "mnkcopa",
    [QD_OP_HEAD_LOGITS] = "",
    [QD_OP_HEAD_NORM] = "mnhv",
    [QD_OP_HEAD_NORM_GRAD] = "mnhv",
    [QD_OP_ROUTE] = "mfk",
    [QD_OP_ROUTE_PLAN] = "m",
    [QD_OP_ROUTE_GRAD] = "mfkol",
    [QD_OP_ROUTE_LOAD] = "m",
    [QD_OP_PERMUTE] = "mn",
    [QD_OP_COMBINE] = "mnk",
    [QD_OP_COMBINE_GRAD] = "mnk",
    [QD_OP_EXPERTS] = "mnkex",
    [QD_OP_EXPERTS_DX] = "mnkex",
    [QD_OP_EXPERTS_DW] = "mnkex",
    [QD_OP_EXPERTS_BIAS] = "mnfex",
    [QD_OP_EXPERTS_BIAS_GRAD] = "mnfex",
    [QD_OP_EXPERTS_SWIGLU] = "mnkex",
    [QD_OP_EXPERTS_DX_SWIGLU] = "mnkex",
    [QD_OP_EXPERT_ACTIVATION] = "mnex",
    [QD_OP_EXPERT_ACTIVATION_GRAD] = "mnex",
    [QD_OP_DISPATCH] = "mnkegid",
    [QD_OP_RETURN] = "mnkegid",
    [QD_OP_EXPERT_ROUNDS] = "mnkexgid",
    [QD_OP_EXPERT_ROUNDS_GRAD] = "mnkexgid",
    [QD_OP_NODE_PLAN] = "mn",
    [QD_OP_NODE_DISPATCH] = "mnkgid",
    [QD_OP_NODE_RETURN] = "mnkgid",
    [QD_OP_NODE_WEIGHTS] = "mn",
    [QD_OP_NODE_RESEND] = "mnkfgid",
    [QD_OP_RELAY_PLAN] = "mkfex",
    [QD_OP_RELAY_ROUNDS] = "mnkfexgid",
    [QD_OP_RELAY_ROUNDS_GRAD] = "mnkfexgid",
    [QD_OP_LOSS_MAX] = "mnfp",
    [QD_OP_LOSS_PART] = "mnftpa",
    [QD_OP_LOSS_GRAD] = "mnftopa",
    [QD_OP_LOSS_SUM] = "ma",
    [QD_OP_LOSS_ROWS] = "mnftpa",
    [QD_OP_PAIR_SUMS] = "m",
    [QD_OP_PAIR_LOSS] = "m",
    [QD_OP_ALL_REDUCE] = "mnfgidq",
    [QD_OP_ALL_GATHER] = "mngid",
    [QD_OP_REDUCE_SCATTER] = "mngid",
    [QD_OP_ZERO] = "mn",
    [QD_OP_COLUMNS] = "mnft",
    [QD_OP_ATTENTION_PART] = "hvrw",
    [QD_OP_ATTENTION_DELTA] = "hv",
    [QD_OP_ATTENTION_PART_GRAD] = "hvrw",
    [QD_OP_HEADS_SPLIT] = "mnk",
    [QD_OP_HEADS_JOIN] = "mnk",
    [QD_OP_ROWS_SPLIT] = "",
    [QD_OP_ROWS_JOIN] = "",
    [QD_OP_CONTEXT_SHIFT] = "nrgidH",
    [QD_OP_CONTEXT_GATHER] = "ngid",
    [QD_OP_CONTEXT_SCATTER] = "ngid",
    [QD_OP_CONTEXT_SWAP] = "ngid",
};

/* One more, or half as much. False: there is nothing to change. */
static bool change(qd_op *op, char field, bool more)
{
    qd_op_exchange *x = &op->exchange;
    int64_t *wide = field == 'm' ? &op->m : field == 'n' ? &op->n : field == 'k' ? &op->k : field == 'f' ? &op->first
                    : field == 't' ? &op->to : field == 'w' ? &op->window : field == 'c' ? &op->chunk : field == 'q' ? &x->count : NULL;
    int32_t *narrow = field == 'h' ? &op->heads : field == 'v' ? &op->kv_heads : field == 'e' ? &op->experts : field == 'x' ? &op->expert
                      : field == 'P' ? &op->parts : field == 'A' ? &op->part_at[op->parts - 1] : field == 'C' ? &op->part_cols[0]
                      : field == 'r' ? &op->round : field == 'H' ? &op->hop : field == 's' ? &op->site : field == 'i' ? &x->index
                      : field == 'a' ? &op->ahead : NULL;
    double *real = field == 'o' ? &op->scale : field == 'p' ? &op->cap : field == 'l' ? &op->load_tokens : field == 'z' ? &op->eps : NULL;
    if ((strchr("gidq", field) && x->group.size <= 1) || (field == 'p' && op->cap == 0.0) || (field == 'z' && op->eps == 0.0))
        return false;
    if (field == 'g')
        x->group.size = more ? x->group.size * 2 : x->group.size / 2;
    else if (field == 'd')
        x->dtype = x->dtype == QD_F32 ? QD_BF16 : QD_F32;
    else if (real)
        *real *= more ? 2.0 : 0.5;
    else if (!more && (wide ? *wide : *narrow) < 2)
        return false;
    else if (wide)
        *wide = more ? *wide + 1 : *wide / 2;
    else
        *narrow = more ? *narrow + 1 : *narrow / 2;
    return true;
}

typedef struct world {
    qd_arena *arena;
    qd_options *options;
    qd_program **programs;
    int size;
} world;

static world build(const char *words)
{
    world w;
    qd_config config;
    ok(qd_arena_create(&w.arena));
    w.options = layout_options(words);
    ok(qd_config_resolve(w.options, 0, &config));
    w.size = config.world;
    w.programs = QD_ARENA_NEW(w.arena, qd_program *, config.world);
    for (int rank = 0; rank < config.world; rank++)
        ok(qd_config_build(&config, rank, w.arena, &w.programs[rank]));
    return w;
}

static void destroy(world *w)
{
    qd_options_destroy(w->options);
    qd_arena_destroy(w->arena);
}

static bool proved(const world *w)
{
    return qd_prove_programs(&w->programs[0]->ledger->mesh, (const qd_program *const *)w->programs, NULL) == QD_OK;
}

/* The lists of a module on a rank; NULL: another stage has it. */
static qd_op *ops_of(const world *w, int rank, int module, int *count)
{
    const qd_module_class *c = qd_program_class(w->programs[rank], module);
    *count = c->op_count;
    return c->ops;
}

static int change_op(const world *w, const char *words, int module, int index, char field, bool more)
{
    qd_op kept[8];
    const char *name = NULL;
    bool changed = true;
    int count;
    for (int r = 0; r < w->size; r++) {
        qd_op *ops = ops_of(w, r, module, &count);
        if (!ops)
            continue;
        kept[r] = ops[index];
        changed = change(&ops[index], field, more) && changed;
        name = qd_op_name(ops[index].kind);
    }
    if (changed && proved(w))
        fail_msg("%s: %s, op %d (%s): proved with another '%c'", words, w->programs[0]->ledger->modules[module].name, index, name, field);
    for (int r = 0; r < w->size; r++) {
        qd_op *ops = ops_of(w, r, module, &count);
        if (ops)
            ops[index] = kept[r];
    }
    return changed;
}

static void numbers_of_ops(void **state)
{
    (void)state;
    int changed = 0;
    bool seen[QD_OP_KIND_COUNT] = {0};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        world w = build(layouts[l]);
        assert_true(proved(&w));
        const qd_ledger *ledger = w.programs[0]->ledger;
        for (int module = 0; module < ledger->module_count; module++) {
            int count = 0;
            const qd_op *ops = NULL;
            if (module > 1 && ledger->modules[module].decl == ledger->modules[module - 1].decl)
                continue;
            for (int r = 0; r < w.size && !ops; r++)
                ops = ops_of(&w, r, module, &count);
            for (int i = 0; i < count; i++) {
                seen[ops[i].kind] = true;
                for (const char *field = reads[ops[i].kind]; *field; field++)
                    changed += change_op(&w, layouts[l], module, i, *field, true) + change_op(&w, layouts[l], module, i, *field, false);
            }
        }
        destroy(&w);
    }
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        if (!seen[kind] && reads[kind] && reads[kind][0])
            fail_msg("no layout has %s", qd_op_name((qd_op_kind)kind));
    print_message("%d numbers of ops changed\n", changed);
    assert_true(changed > 1000);
}

static void every_kind_is_listed(void **state)
{
    (void)state;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        if (!reads[kind])
            fail_msg("say in `reads` which numbers of %s a run reads", qd_op_name((qd_op_kind)kind));
}

/* Buffers that hold something else, of the same module and micro-batch; elements of another type; a
 * range that ends behind the buffer. */
static void buffers_of_actions(void **state)
{
    (void)state;
    int changed = 0;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        world w = build(layouts[l]);
        qd_program *p = w.programs[w.size - 1];
        for (int i = 0; i < p->action_count; i++) {
            qd_action *a = &p->actions[i], kept = *a;
            char text[200];
            qd_action_describe(p, i, text, sizeof text);
            for (int use = 0; use < QD_USE_COUNT && qd_action_phases(a) != 0; use++)
                for (int b = 0; b < p->buffer_count && kept.use[use] >= 0; b++) {
                    const qd_buffer *is = &p->buffers[kept.use[use]], *other = &p->buffers[b];
                    if (other->kind == is->kind || other->module != is->module || other->microbatch != is->microbatch)
                        continue;
                    a->use[use] = b;
                    changed++;
                    if (proved(&w) && qd_check_programs(&p->ledger->mesh, (const qd_program *const *)w.programs) == QD_OK)
                        fail_msg("%s: %s: proved with %s instead of %s", layouts[l], text, qd_buffer_kind_name(other->kind),
                                 qd_buffer_kind_name(is->kind));
                    *a = kept;
                }
            bool range = kept.kind == QD_ACTION_ZERO || kept.kind == QD_ACTION_REDUCE || kept.kind == QD_ACTION_ADD;
            if (!range && kept.kind != QD_ACTION_REDUCE_SCATTER && kept.kind != QD_ACTION_GATHER && kept.kind != QD_ACTION_PACK)
                continue;
            a->dtype = kept.dtype == QD_BF16 ? QD_F32 : QD_BF16;
            changed++;
            if (proved(&w))
                fail_msg("%s: %s: proved with elements of another type", layouts[l], text);
            *a = kept;
            if (!range)
                continue;
            a->count = p->buffers[kept.buffer].bytes + 1;
            changed++;
            if (proved(&w))
                fail_msg("%s: %s: proved with elements behind the end of its buffer", layouts[l], text);
            *a = kept;
        }
        destroy(&w);
    }
    print_message("%d buffers, types and ranges of actions changed\n", changed);
    assert_true(changed > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_kind_is_listed), cmocka_unit_test(numbers_of_ops),
                                       cmocka_unit_test(buffers_of_actions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
