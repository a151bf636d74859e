/* The simulator charges for what the step program counts: on links of one byte per second without
 * latency, the seconds of every exchange, inside modules and between them, equal the bytes that a
 * rank sends. tests/equiv checks that runs send the same bytes. */
#include "sim/step.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"
#include "support/simulated.h"

#define MODEL                                                                                                                  \
    "model.layers=4 model.hidden=256 model.heads=8 model.kv_heads=4 model.ffn=512 model.vocab=1024 data.seq=256 "               \
    "train.precision=bf16 "
#define EXPERTS MODEL "model.experts=8 model.experts_per_token=2 model.expert_ffn=128 "

static bool op_seen[QD_OP_KIND_COUNT], action_seen[QD_ACTION_KIND_COUNT];

/* Links of these rates, in bytes per second; nothing else takes time. */
static qd_cluster links(const qd_options *o, double inside, double across)
{
    qd_cluster c;
    ok(qd_cluster_resolve(o, &c));
    c.nvls = false;
    c.node_bandwidth = inside;
    c.network_bandwidth = across;
    c.node_latency = c.network_latency = 0.0;
    return c;
}

/* Bytes of a collective over all ranks: what a ring moves, however small (runs send small sums
 * directly). */
static double counted(qd_coll_kind kind, int64_t count, qd_dtype dtype, int size, int world, int64_t bytes)
{
    int64_t whole = count * (int64_t)qd_dtype_size(dtype);
    bool direct = kind == QD_COLL_ALL_REDUCE && qd_coll_direct(whole, size);
    return direct ? 2.0 * (size - 1) * (double)whole * world / size : (double)bytes;
}

static void compare(const char *words, const char *what, qd_coll_kind kind, double seconds, int size, int world, double expected)
{
    /* The last rank of a broadcast's chain does not send. */
    double sent = seconds * world * (kind == QD_COLL_BROADCAST ? (size - 1.0) / size : 1.0);
    if (!(fabs(sent - expected) <= 0.002 * expected))
        fail_msg("%s: %s over %d ranks: %.0f bytes are simulated, %.0f are counted (%.3f times)", words, what, size, sent, expected,
                 sent / expected);
}

/* Seconds of the collective at `at` among those of an action. */
static double inside_seconds(const qd_step *step, const qd_step_stage *stage, const qd_action *a, int at)
{
    qd_span spans[QD_GROUP_LIMIT];
    qd_cost_exchange *list = calloc((size_t)qd_program_class(stage->program, a->module)->op_count + 1, sizeof *list);
    qd_step_spans(step, stage, spans);
    int count = qd_cost_exchanges(step->cluster, stage->program, spans, a, list);
    assert_true(at < count);
    double seconds = list[at].end - list[at].begin;
    free(list);
    return seconds;
}

/* both: all links at one byte per second; near, far: only those inside nodes or across them, the
 * others infinitely fast. */
static void compare_inside(const char *words, const qd_step *both, const qd_step *near, const qd_step *far, int s, int action)
{
    const qd_program *p = both->stages[s].program;
    const qd_action *a = &p->actions[action];
    const qd_module_class *class_ = qd_program_class(p, a->module);
    int at = 0;
    for (int i = 0; i < class_->op_count; i++) {
        const qd_op *op = &class_->ops[i];
        const qd_op_exchange *x = &op->exchange;
        if (!qd_op_runs(op, qd_action_phases(a)) || !qd_op_communicates(op))
            continue;
        if (x->uneven && x->count == 0) { /* extra dispatch rounds for expert rows, which an even load does not need */
            op_seen[op->kind] = true;
            continue;
        }
        qd_coll_kind kind = qd_op_collective(op->kind);
        /* An all-to-all uses both kinds of links concurrently. */
        double seconds = kind != QD_COLL_ALL_TO_ALL
                             ? inside_seconds(both, &both->stages[s], a, at)
                             : inside_seconds(near, &near->stages[s], a, at) + inside_seconds(far, &far->stages[s], a, at);
        compare(words, qd_op_name(op->kind), kind, seconds, x->group.size, both->config->world,
                counted(kind, x->count, x->dtype, x->group.size, both->config->world, x->bytes));
        op_seen[op->kind] = true;
        at++;
    }
}

static void compare_step(const char *words, const qd_step *both, const qd_step *near, const qd_step *far)
{
    for (int s = 0; s < both->stage_count; s++)
        for (int i = 0; i < both->stages[s].item_count; i++) {
            const qd_program *p = both->stages[s].program;
            int action = both->stages[s].action[i];
            const qd_action *a = &p->actions[action];
            if (qd_action_phases(a) != 0)
                compare_inside(words, both, near, far, s, action);
            if (!qd_action_communicates(a) && a->kind != QD_ACTION_SEND)
                continue;
            qd_coll_kind kind = qd_action_collective((qd_action_kind)a->kind);
            int size = p->groups[a->group].size;
            double seconds = kind == QD_COLL_ALL_TO_ALL ? near->stages[s].items[i].seconds + far->stages[s].items[i].seconds
                                                        : both->stages[s].items[i].seconds;
            compare(words, qd_action_name((qd_action_kind)a->kind), kind, seconds, size, both->config->world,
                    counted(kind, a->count, a->dtype, size, both->config->world, a->bytes));
            action_seen[a->kind] = true;
        }
}

static void check(const char *words)
{
    qd_options *o = simulated_options("h100", words);
    const double endless = 1e30;
    qd_cluster clusters[] = {links(o, 1.0, 1.0), links(o, 1.0, endless), links(o, endless, 1.0)};
    qd_config config[3];
    qd_step steps[3] = {0};
    for (int i = 0; i < 3; i++) {
        ok(qd_cluster_config(o, &clusters[i], &config[i]));
        ok(qd_step_create(&config[i], &clusters[i], &steps[i]));
        ok(qd_step_run(&steps[i]));
    }
    compare_step(words, &steps[0], &steps[1], &steps[2]);
    for (int i = 0; i < 3; i++)
        qd_step_free(&steps[i]);
    qd_options_destroy(o);
}

static void every_exchange(void **state)
{
    (void)state;
    static const char *const cases[] = {
        MODEL "parallel.ranks=8 parallel.tp=4 train.global_batch=8",
        MODEL "parallel.ranks=4 parallel.tp=4 parallel.sp=false train.global_batch=4",
        MODEL "parallel.ranks=4 parallel.tp=4 parallel.tp_overlap=4 train.global_batch=4",
        MODEL "parallel.ranks=4 parallel.cp=4 train.global_batch=1",
        MODEL "parallel.ranks=8 parallel.cp=8 train.global_batch=2 train.recompute=full",
        MODEL "parallel.ranks=16 parallel.cp=16 train.global_batch=1", /* two nodes */
        MODEL "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=gather train.global_batch=1",
        MODEL "parallel.ranks=4 parallel.cp=4 parallel.cp_mode=ulysses train.global_batch=1",
        EXPERTS "parallel.ranks=8 parallel.ep=8 train.global_batch=8",
        EXPERTS "parallel.ranks=16 parallel.ep=8 parallel.etp=2 train.global_batch=16",
        EXPERTS "parallel.ranks=8 parallel.ep=8 parallel.dispatch=node node.size=4 train.global_batch=8",
        EXPERTS "parallel.ranks=8 parallel.ep=8 parallel.dispatch=node node.size=2 train.global_batch=8",
        MODEL "parallel.ranks=8 train.global_batch=8",
        MODEL "parallel.ranks=8 parallel.zero=1 train.global_batch=8",
        MODEL "parallel.ranks=8 parallel.zero=3 train.global_batch=8",
        MODEL "parallel.ranks=8 parallel.zero=2 parallel.dp_shard=4 train.global_batch=8",
        MODEL "parallel.ranks=4 parallel.pp=4 train.global_batch=8 train.micro_batch=1",
        MODEL "parallel.ranks=8 parallel.pp=2 parallel.schedule=interleaved parallel.virtual_stages=2 parallel.tp=2 parallel.cp=2 "
              "train.global_batch=8 train.micro_batch=1",
        MODEL "parallel.ranks=4 parallel.pp=2 parallel.schedule=zb_v parallel.tp=2 train.global_batch=8 train.micro_batch=1",
        MODEL "parallel.ranks=4 parallel.zero=1 train.optimizer=muon train.global_batch=8",
        MODEL "parallel.ranks=4 train.optimizer=muon train.global_batch=8",
        MODEL "parallel.ranks=4 parallel.tp=2 train.qk_clip=100 train.global_batch=8",
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(cases[i]);
}

/* No kind of exchange is missing above. An op that sends is one whose name is in the table of
 * collectives, or all-reduce. */
static void none_is_left_out(void **state)
{
    (void)state;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        if ((kind == QD_OP_ALL_REDUCE || qd_op_collective((qd_op_kind)kind) != QD_COLL_ALL_REDUCE) && !op_seen[kind])
            fail_msg("no layout has %s", qd_op_name((qd_op_kind)kind));
    for (int kind = 0; kind < QD_ACTION_KIND_COUNT; kind++)
        if (qd_action_collective((qd_action_kind)kind) != QD_COLL_KIND_COUNT && kind != QD_ACTION_RECV && !action_seen[kind])
            fail_msg("no layout has %s", qd_action_name((qd_action_kind)kind));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_exchange),
        cmocka_unit_test(none_is_left_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
