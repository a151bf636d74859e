/* The checker: matching programs pass, at any size; broken ones are refused with a
 * counter-example.
 * ctest: timeout 60 */
#include "support/layout.h"
#include "support/sample.h"

#include <quadrille/check.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define SMALL                                                                                                                              \
    "model.layers=4 model.hidden=32 model.heads=4 model.kv_heads=2 model.vocab=97 data.seq=8 train.global_batch=16 train.micro_batch=2 "

static const char *const layouts[] = {
    SMALL "parallel.ranks=4 parallel.zero=2",
    SMALL "parallel.ranks=4 parallel.pp=2 parallel.zero=3",
    SMALL "parallel.ranks=8 parallel.pp=2 parallel.tp=2 parallel.zero=1",
    SMALL "parallel.ranks=4 parallel.pp=4 parallel.schedule=zb_h1",
    SMALL "parallel.ranks=2 parallel.pp=2 parallel.schedule=interleaved",
    SMALL "parallel.ranks=4 parallel.tp=2 train.recompute=full",
    SMALL "parallel.ranks=4 parallel.pp=2 model.arch=gpt2 model.kv_heads=4 train.grad_sync=per_microbatch",
    SMALL "parallel.ranks=3 parallel.pp=3 parallel.schedule=zb_v model.tied=true",
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

typedef struct built {
    qd_arena *arena;
    qd_config config;
    const qd_program **programs;
    const qd_mesh *mesh;
} built;

static built build(const char *words)
{
    built b = {.config = layout_config(words)};
    ok(qd_arena_create(&b.arena));
    ok(qd_config_build_all(&b.config, b.arena, &b.programs));
    b.mesh = &b.programs[0]->ledger->mesh;
    return b;
}

static void sound_programs_pass(void **state)
{
    (void)state;
    for (size_t i = 0; i < LAYOUTS; i++) {
        built b = build(layouts[i]);
        ok(qd_check_programs(b.mesh, b.programs));
        /* The same without folding: a separate program for every rank. */
        const qd_program **single = QD_ARENA_NEW(b.arena, const qd_program *, b.config.world);
        for (int rank = 0; rank < b.config.world; rank++) {
            qd_program *copy = QD_ARENA_NEW(b.arena, qd_program, 1);
            *copy = *b.programs[rank];
            single[rank] = copy;
        }
        ok(qd_check_programs(b.mesh, single));
        qd_arena_destroy(b.arena);
    }
}

typedef enum breakage { MISSING, RESIZED, RETYPED, REGROUPED, SWAPPED, CIRCLE, OP_RESIZED, BREAKAGES } breakage;
static const char *const breakage_names[] = {"missing", "resized", "retyped", "regrouped", "swapped", "circle", "op resized"};

typedef struct dice {
    uint64_t state;
} dice;

static int throw(dice *d, int below)
{
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (int)((d->state >> 33) % (uint64_t)below);
}

static qd_program *copy_program(const built *b, int rank)
{
    const qd_program *p = b->programs[rank];
    qd_program *copy = QD_ARENA_NEW(b->arena, qd_program, 1);
    *copy = *p;
    copy->rank = rank;
    copy->actions = QD_ARENA_NEW(b->arena, qd_action, p->action_count);
    memcpy(copy->actions, p->actions, (size_t)p->action_count * sizeof *p->actions);
    return copy;
}

/* A random action that communicates; SEND and RECV only, if `transfers`. */
static int pick(const qd_program *p, dice *d, bool transfers)
{
    int count = 0, chosen = -1;
    for (int i = 0; i < p->action_count; i++)
        if (transfers ? qd_action_transfers(&p->actions[i]) : qd_action_communicates(&p->actions[i]))
            if (throw(d, ++count) == 0)
                chosen = i;
    return chosen;
}

static bool same_call(const qd_action *a, const qd_action *b)
{
    return a->kind == b->kind && a->count == b->count && a->dtype == b->dtype && a->param == b->param && a->params == b->params &&
           a->parts == b->parts && (!qd_action_transfers(a) || a->microbatch == b->microbatch);
}

static void swap_calls(qd_program *p, int i, int j)
{
    qd_action *a = &p->actions[i], *b = &p->actions[j], kept = *a;
    int32_t deps[2][2] = {{a->dep_first, a->dep_count}, {b->dep_first, b->dep_count}};
    *a = *b;
    *b = kept;
    a->dep_first = deps[0][0];
    a->dep_count = deps[0][1];
    b->dep_first = deps[1][0];
    b->dep_count = deps[1][1];
}

static bool break_circle(qd_program *p)
{
    int send = -1, recv = -1;
    for (int i = 0; i < p->action_count && recv < 0; i++) {
        if (p->actions[i].kind == QD_ACTION_SEND && send < 0)
            send = i;
        if (p->actions[i].kind == QD_ACTION_RECV && send >= 0 && p->buffers[p->actions[i].buffer].kind == QD_BUFFER_PORT_GRAD &&
            p->actions[i].microbatch == p->actions[send].microbatch && p->buffers[p->actions[send].buffer].kind == QD_BUFFER_PORT)
            recv = i;
    }
    if (recv < 0)
        return false;
    swap_calls(p, send, recv); /* waits for what can only arrive after what it has not sent */
    p->actions[send].stream = QD_STREAM_COMPUTE;
    return true;
}

static bool break_op(const built *b, qd_program *p, dice *d)
{
    for (int tries = 0; tries < 100; tries++) {
        const qd_action *a = &p->actions[throw(d, p->action_count)];
        unsigned phases = qd_action_phases(a);
        if (phases == 0)
            continue;
        qd_module_class *c = &p->classes[p->ledger->modules[a->module].decl][qd_strategy_recompute(&p->strategy, p->ledger, a->module)];
        qd_op *ops = QD_ARENA_NEW(b->arena, qd_op, c->op_count);
        memcpy(ops, c->ops, (size_t)c->op_count * sizeof *ops);
        c->ops = ops;
        for (int i = 0; i < c->op_count; i++) {
            if (!qd_op_runs(&ops[i], phases) || !qd_op_communicates(&ops[i]))
                continue;
            ops[i].exchange.count++;
            return true;
        }
    }
    return false;
}

/* Changes one program such that the step can no longer run; false: there is nothing of that kind to
 * change. */
static bool break_program(const built *b, qd_program *p, breakage how, dice *d)
{
    int i = pick(p, d, false);
    if (how == CIRCLE)
        return break_circle(p);
    if (how == OP_RESIZED)
        return break_op(b, p, d);
    if (i < 0)
        return false;
    qd_action *a = &p->actions[i];
    switch (how) {
    case MISSING: a->kind = QD_ACTION_ZERO; return true;
    case RESIZED: a->count++; return true;
    case RETYPED: a->dtype = a->dtype == QD_I64 ? QD_F64 : QD_I64; return true;
    case REGROUPED:
        if (qd_action_transfers(a))
            a->kind = a->kind == QD_ACTION_SEND ? QD_ACTION_RECV : QD_ACTION_SEND;
        else if (p->group_count > 1)
            a->group = (a->group + 1) % p->group_count;
        return p->group_count > 1 || qd_action_transfers(a);
    case SWAPPED:
        for (int j = i + 1; j < p->action_count; j++) {
            const qd_action *o = &p->actions[j];
            if (!qd_action_communicates(o) || o->group != a->group || qd_action_transfers(o) != qd_action_transfers(a))
                continue;
            if (same_call(a, o) || (qd_action_transfers(a) && (a->kind != o->kind || a->peer != o->peer)))
                continue;
            swap_calls(p, i, j);
            return true;
        }
        return false;
    default: return false;
    }
}

/* Buckets smaller than a block's experts: programs represent ranks with other experts, in runs that
 * begin elsewhere. A run of other experts, or a shorter one, is refused. */
static void runs_of_experts(void **state)
{
    (void)state;
    static const char *const meshes[] = {"parallel.ranks=8 parallel.ep=2 parallel.zero=2 ",
                                         "parallel.ranks=16 parallel.tp=4 parallel.ep=2 parallel.zero=3 ",
                                         "parallel.ranks=8 parallel.tp=2 parallel.ep=2 parallel.etp=2 parallel.zero=1 "};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        char words[512];
        snprintf(words, sizeof words, SMALL "model.experts=8 model.expert_ffn=24 parallel.bucket_mb=0.01 %s", meshes[i]);
        built b = build(words);
        ok(qd_check_programs(b.mesh, b.programs));
        int last = b.config.world - 1, tried = 0;
        qd_program *broken = copy_program(&b, last);
        b.programs[last] = broken;
        for (int k = 0; k < broken->action_count; k++) {
            qd_action *a = &broken->actions[k], good = *a;
            if (a->kind != QD_ACTION_REDUCE_SCATTER || broken->ledger->params[a->param].expert < 0)
                continue;
            for (int shorter = 0; shorter < 2; shorter++, *a = good, tried++) {
                int end = a->param + a->params, to = shorter ? a->param : a->param - 1;
                while (broken->storage.count[to] == 0)
                    to += shorter ? 1 : -1;
                for (end--; broken->storage.count[end] == 0;)
                    end--;
                a->param = shorter ? to + 1 : to;
                a->params = (shorter ? good.param + good.params : end) - a->param;
                if (a->params <= 0)
                    continue;
                if (qd_check_programs(b.mesh, b.programs) != QD_MISMATCH)
                    fail_msg("%s: action %d with %s experts passed", words, k, shorter ? "fewer" : "other");
                qd_error_clear();
            }
        }
        assert_true(tried >= 8);
        qd_arena_destroy(b.arena);
    }
}

/* 200 programs, each broken in one place. */
static void broken_programs_are_refused(void **state)
{
    (void)state;
    dice d = {20261115};
    int refused = 0, by_kind[BREAKAGES] = {0}, circles = 0;
    while (refused < 200) {
        const char *layout = layouts[throw(&d, LAYOUTS)]; /* until one has what is to be broken */
        built b = build(layout);
        int rank = throw(&d, b.config.world);
        breakage how = (breakage)(refused % BREAKAGES);
        qd_program *broken = copy_program(&b, rank);
        if (!break_program(&b, broken, how, &d)) {
            qd_arena_destroy(b.arena);
            continue;
        }
        b.programs[rank] = broken;
        qd_status status = qd_check_programs(b.mesh, b.programs);
        if (status != QD_MISMATCH)
            fail_msg("%s, rank %d, %s (case %d): status %d", layout, rank, breakage_names[how], refused, status);
        const char *message = qd_error_message();
        if (!strstr(message, "rank ") && !strstr(message, "ranks "))
            fail_msg("no counter-example: %s", message);
        circles += strstr(message, "deadlock: ") != NULL;
        by_kind[how]++;
        refused++;
        qd_arena_destroy(b.arena);
    }
    for (int k = 0; k < BREAKAGES; k++)
        assert_true(by_kind[k] >= 10);
    assert_true(circles >= 5);
}

static void circles_are_told_as_such(void **state)
{
    (void)state;
    built b = build(SMALL "parallel.ranks=2 parallel.pp=2");
    qd_program *broken = copy_program(&b, 0);
    assert_true(break_circle(broken));
    b.programs[0] = broken;
    assert_int_equal(qd_check_programs(b.mesh, b.programs), QD_MISMATCH);
    const char *message = qd_error_message();
    if (!strstr(message, "deadlock: rank ") || !strstr(message, "recv block") || !strstr(message, ", which waits: rank "))
        fail_msg("%s", message);
    qd_arena_destroy(b.arena);
}

/* Llama 3 405B on 16,384 ranks: a program per stage, folded. */
static void thousands_of_ranks_are_checked(void **state)
{
    (void)state;
    const int cp = sample_count(16, 1), ranks = 1024 * cp;
    char words[512];
    snprintf(words, sizeof words,
             "model.preset=llama3.1-405b data.seq=131072 train.global_batch=128 train.micro_batch=1 train.precision=bf16 "
             "parallel.ranks=%d parallel.tp=8 parallel.cp=%d parallel.pp=16 parallel.dp=8 "
             "parallel.schedule=interleaved parallel.virtual_stages=8",
             ranks, cp);
    qd_options *options = layout_options(words);
    qd_check_report report = qd_check_report_default();
    ok(qd_check(options, 0, &report));
    assert_int_equal(report.world, ranks);
    assert_int_equal(report.stage_count, 16);
    assert_true(report.pipeline_bytes == report.pipeline_theory_bytes);
    qd_options_destroy(options);
}

/* With zero 3 shards differ between ranks, so that all ranks of dp are checked. */
static void ranks_with_other_parts_are_checked(void **state)
{
    (void)state;
    const int ranks = sample_count(8192, 256);
    char words[512];
    snprintf(words, sizeof words,
             "model.preset=llama3.1-405b data.seq=8192 train.global_batch=%d train.micro_batch=1 train.precision=bf16 "
             "parallel.ranks=%d parallel.zero=3", ranks, ranks);
    qd_options *options = layout_options(words);
    qd_check_report report = qd_check_report_default();
    ok(qd_check(options, 0, &report));
    assert_int_equal(report.world, ranks);
    assert_true(report.proved_ops > 0);
    qd_options_destroy(options);
}

/* Memory is that of the rank that needs most, FLOPs are the total: of 15 positions the second rank
 * of cp has 8, the first 7. */
static void reports_look_at_all_ranks(void **state)
{
    (void)state;
    static const char *const words[] = {
        SMALL "data.seq=15 parallel.ranks=2 parallel.cp=2",
        SMALL "data.seq=15 parallel.ranks=4 parallel.cp=2 parallel.pp=2",
        SMALL "model.ffn=37 parallel.ranks=3 parallel.zero=3 train.global_batch=6",
        /* Rows for experts: ranks with one row more or less agree about an even load. */
        SMALL "data.seq=15 train.micro_batch=1 model.experts=4 parallel.ranks=4 parallel.cp=2 parallel.ep=4",
        SMALL "data.seq=15 train.micro_batch=1 model.experts=4 parallel.ranks=4 parallel.tp=2 parallel.ep=2 parallel.zero=1",
        SMALL "data.seq=15 train.micro_batch=1 model.experts=4 parallel.ranks=4 parallel.cp=2 parallel.ep=4 parallel.nodes=2 "
              "parallel.dispatch=node",
        SMALL "data.seq=15 train.micro_batch=1 model.experts=4 parallel.ranks=8 parallel.tp=2 parallel.ep=4 parallel.nodes=4 "
              "parallel.dispatch=node",
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        qd_options *options = layout_options(words[i]);
        built b = build(words[i]);
        qd_check_report report = qd_check_report_default();
        int64_t most = 0, first = 0;
        double flops = 0.0;
        ok(qd_check(options, 0, &report));
        for (int rank = 0; rank < b.config.world; rank++) {
            qd_program *program;
            qd_memory_report memory;
            ok(qd_config_build(&b.config, rank, b.arena, &program));
            ok(qd_memory_account(program, &memory));
            most = memory.total > most ? memory.total : most;
            first = rank == 0 ? memory.total : first;
            flops += qd_program_flops(program);
        }
        assert_int_equal(report.memory_bytes, most);
        assert_float_equal(report.flops_per_step / flops, 1.0, 1e-9);
        if (i == 0)
            assert_true(first < most);
        qd_arena_destroy(b.arena);
        qd_options_destroy(options);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sound_programs_pass),
        cmocka_unit_test(runs_of_experts),
        cmocka_unit_test(broken_programs_are_refused),
        cmocka_unit_test(circles_are_told_as_such),
        cmocka_unit_test(thousands_of_ranks_are_checked),
        cmocka_unit_test(ranks_with_other_parts_are_checked),
        cmocka_unit_test(reports_look_at_all_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
