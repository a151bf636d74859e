/* Applies one mutation to copies of step programs. */
#include "support/mutate.h"

#include <stdlib.h>
#include <string.h>

static bool takes_op(const qd_op *op, const mutation *m)
{
    return strcmp(qd_op_name(op->kind), m->what) == 0;
}

static int find_slot(const qd_module_class *c, const char *name)
{
    for (int i = 0; i < c->slot_count; i++) /* a parameter comes before its gradient */
        if (strcmp(c->slots[i].name, name) == 0)
            return i;
    return -1;
}

static int find_group(const qd_program *p, const char *name)
{
    for (int i = 0; i < p->group_count; i++) {
        char text[48];
        qd_group_name(&p->ledger->mesh, p->groups[i], text, sizeof text);
        if (strcmp(text, name) == 0)
            return i;
    }
    return -1;
}

/* Opens or closes a gap at op `at`. */
static void shift_ops(qd_module_class *c, int at, int by, qd_arena *arena)
{
    qd_op *ops = QD_ARENA_NEW(arena, qd_op, c->op_count + 1);
    memcpy(ops, c->ops, (size_t)at * sizeof *ops);
    if (by > 0)
        memcpy(&ops[at + 1], &c->ops[at], (size_t)(c->op_count - at) * sizeof *ops);
    else
        memcpy(&ops[at], &c->ops[at + 1], (size_t)(c->op_count - at - 1) * sizeof *ops);
    c->ops = ops;
    c->op_count += by;
    for (int i = 0; i < c->op_count; i++) {
        ops[i].after += ops[i].after >= at ? by : 0;
        ops[i].exchange.until += ops[i].exchange.until > at ? by : 0;
    }
}

static bool change_op(qd_program *p, qd_module_class *c, int at, const mutation *m, qd_arena *arena)
{
    qd_op *op = &c->ops[at], kept = *op;
    int slot = m->to ? find_slot(c, m->to) : -1, group = m->to ? find_group(p, m->to) : -1;
    switch (m->how) {
    case OP_DROP:
        shift_ops(c, at, -1, arena);
        return true;
    case OP_TWICE:
        kept.exchange.async = false;
        shift_ops(c, at, 1, arena);
        c->ops[at] = kept;
        return true;
    case OP_GROUP:
        if (group < 0)
            return false;
        op->exchange.index = group;
        op->exchange.group = p->groups[group];
        return true;
    case OP_REDUCE:
        op->exchange.reduce = op->exchange.reduce == QD_MAX ? QD_SUM : QD_MAX;
        return true;
    case OP_SLOT:
        if (slot < 0 && strcmp(m->to, "-") != 0)
            return false;
        op->slot[(int)m->number] = (int16_t)slot;
        return true;
    case OP_SCALE:
        op->scale *= m->number;
        return true;
    case OP_AHEAD:
        op->ahead += (int32_t)m->number;
        return true;
    case OP_CAP:
        op->cap *= m->number;
        return true;
    case OP_TOKENS:
        op->load_tokens *= m->number;
        return true;
    case OP_OVERWRITES:
        op->overwrites = !op->overwrites;
        return true;
    case OP_FIRST:
        op->first += (int64_t)m->number;
        return true;
    case OP_TO:
        op->to += (int64_t)m->number;
        return true;
    case OP_ROWS:
        op->k -= (int64_t)m->number;
        return true;
    case OP_WINDOW:
        op->window = (int64_t)m->number;
        return true;
    case OP_ROUND:
        op->round += (int)m->number;
        return true;
    case OP_EARLY:
        if (!op->exchange.async)
            return false;
        op->exchange.until += (int)m->number;
        return true;
    default:
        return false;
    }
}

static bool mutate_op(qd_program *p, const mutation *m, qd_arena *arena)
{
    for (int module = 0; module < p->ledger->module_count; module++) {
        const qd_module *of = &p->ledger->modules[module];
        qd_module_class *c = &p->classes[of->decl][qd_strategy_recompute(&p->strategy, p->ledger, module)];
        int found = 0, last = -1;
        if (!c->ops || (m->where && strcmp(m->where, of->name) != 0))
            continue;
        for (int i = 0; i < c->op_count; i++) {
            if (!takes_op(&c->ops[i], m))
                continue;
            last = i;
            if (found++ == m->nth)
                return change_op(p, c, i, m, arena);
        }
        if (m->nth < 0 && last >= 0)
            return change_op(p, c, last, m, arena);
    }
    return false;
}

static bool touches(const qd_program *p, const qd_action *a, int param)
{
    const qd_storage *s = &p->storage;
    if (a->params > 0)
        return param >= a->param && param < a->param + a->params;
    bool sharded = a->buffer >= 0 && p->buffers[a->buffer].sharded;
    int64_t at = sharded ? s->shard_offset[param] : s->offset[param];
    return a->buffer >= 0 && s->count[param] > 0 && at >= a->first && at < a->first + a->count;
}

static bool takes_action(const qd_program *p, int at, const mutation *m)
{
    const qd_action *a = &p->actions[at];
    char text[200];
    if (strcmp(qd_action_name((qd_action_kind)a->kind), m->what) != 0)
        return false;
    qd_action_describe(p, at, text, sizeof text);
    if (m->where && !strstr(text, m->where))
        return false;
    int param = m->param ? qd_ledger_find(p->ledger, m->param) : -1;
    return !m->param || (param >= 0 && touches(p, a, param));
}

/* Copies the arrays that a program shares with its original. Dependencies are action numbers: those
 * from `at` on are shifted by `by`. */
static void own_actions(qd_program *p, int at, int by, qd_arena *arena)
{
    qd_action *actions = QD_ARENA_NEW(arena, qd_action, p->action_count + 1);
    int32_t *deps = QD_ARENA_NEW(arena, int32_t, p->dep_count + 1);
    memcpy(actions, p->actions, (size_t)p->action_count * sizeof *actions);
    for (int i = 0; i < p->dep_count; i++)
        deps[i] = p->deps[i] + (p->deps[i] >= at ? by : 0);
    p->actions = actions;
    p->deps = deps;
}

void mutate_drop_action(qd_program *p, int at, qd_arena *arena)
{
    own_actions(p, at, -1, arena); /* what waited for it waits for the previous one */
    for (int i = 0; i < p->dep_count; i++)
        p->deps[i] = p->deps[i] < 0 ? 0 : p->deps[i];
    memmove(&p->actions[at], &p->actions[at + 1], (size_t)(p->action_count - at - 1) * sizeof *p->actions);
    p->action_count--;
}

static bool change_action(qd_program *p, int at, const mutation *m, qd_arena *arena)
{
    qd_action *a = &p->actions[at];
    int group = m->to ? find_group(p, m->to) : -1, other = at + 1;
    switch (m->how) {
    case ACTION_DROP:
        mutate_drop_action(p, at, arena);
        return true;
    case ACTION_TWICE:
        own_actions(p, at, 1, arena);
        memmove(&p->actions[at + 1], &p->actions[at], (size_t)(p->action_count - at) * sizeof *p->actions);
        p->action_count++;
        return true;
    case ACTION_WAITS:
        own_actions(p, 0, 0, arena);
        if (a->dep_count == 0)
            return false;
        p->actions[at].dep_count = 0;
        return true;
    case ACTION_GROUP:
        if (group < 0)
            return false;
        a->group = group;
        return true;
    case ACTION_OVERWRITE:
        a->overwrite = !a->overwrite;
        return true;
    case ACTION_SQUARES:
        a->squares = !a->squares;
        return true;
    case ACTION_BATCH:
        a->microbatch += (int)m->number;
        return true;
    case ACTION_COUNT:
        a->count = m->number > 0 ? (int64_t)((double)a->count * m->number) : a->count / 2;
        return true;
    case ACTION_PARTS:
        a->parts *= (int)m->number;
        return true;
    case ACTION_SWAP:
        while (other < p->action_count && !takes_action(p, other, m))
            other++;
        if (other == p->action_count)
            return false;
        qd_action kept = *a;
        *a = p->actions[other];
        p->actions[other] = kept;
        return true;
    default:
        return false;
    }
}

static bool mutate_action(qd_program *p, const mutation *m, qd_arena *arena)
{
    int found = 0, last = -1;
    for (int i = 0; i < p->action_count; i++) {
        if (!takes_action(p, i, m))
            continue;
        last = i;
        if (found++ == m->nth)
            return change_action(p, i, m, arena);
    }
    return m->nth < 0 && last >= 0 && change_action(p, last, m, arena);
}

static bool mutate_param(qd_program *p, const mutation *m)
{
    int param = qd_ledger_find(p->ledger, m->what);
    if (param < 0)
        return false;
    qd_place *place = (qd_place *)&p->ledger->params[param].value[QD_AXIS_TP]; /* the test's own copy */
    switch (m->how) {
    case NORM_REPEAT:
        p->norm[param].repeat = (int)m->number;
        return true;
    case NORM_HOLDERS:
        p->norm[param].holders = (int)m->number;
        return true;
    case PLACE_TP:
        *place = m->number == 0 ? (qd_place){QD_REPLICATE, 0, 0}
                                : (qd_place){QD_SHARD, (int8_t)(m->number - 1), 0};
        return true;
    case FROZEN:
        p->ledger->params[param].frozen = m->number != 0;
        return true;
    default:
        return false;
    }
}

int mutate(qd_program **programs, int count, const mutation *m, qd_arena *arena)
{
    int changed = 0;
    for (int i = 0; i < count; i++)
        changed += m->how < ACTION_DROP   ? mutate_op(programs[i], m, arena)
                   : m->how < NORM_REPEAT ? mutate_action(programs[i], m, arena)
                                          : mutate_param(programs[i], m);
    return changed;
}
