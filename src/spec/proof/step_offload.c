/* Follows chunks of optimizer state through a step: an action works on state of host memory only
 * in a chunk that has been fetched, on all that it needs, and what it has changed is stored before
 * the chunk is used again. */
#include "spec/program/muon.h"
#include "spec/proof/step_impl.h"

static bool is_away(const proof_run *r, qd_buffer_kind kind)
{
    int buffer = r->program->persistent[kind];
    return buffer >= 0 && r->program->buffers[buffer].host;
}

/* The kinds of state in host memory that the action works on, as bits. */
static unsigned needed(const proof_run *r)
{
    static const unsigned master = QD_STATE_BIT(QD_BUFFER_MASTER), moment = QD_STATE_BIT(QD_BUFFER_MOMENT1),
                          second = QD_STATE_BIT(QD_BUFFER_MOMENT2);
    const qd_action_kind kind = (qd_action_kind)r->action->kind;
    unsigned states = kind == QD_ACTION_UPDATE     ? master | moment | second
                      : kind == QD_ACTION_MOMENTUM ? moment
                                                   : master;
    for (int k = QD_BUFFER_MASTER; k < QD_BUFFER_MASTER + QD_STATE_KINDS; k++)
        if (!is_away(r, (qd_buffer_kind)k))
            states &= ~QD_STATE_BIT(k);
    return states;
}

/* Whether an action without a chunk would work on elements of this rank. */
static bool has_elements(const proof_run *r)
{
    const qd_action *a = r->action;
    const bool matrices = a->kind != QD_ACTION_UPDATE && a->kind != QD_ACTION_CLIP;
    const qd_module *m = matrices ? NULL : &r->ledger->modules[a->module];
    for (int i = 0; i < (matrices ? a->params : m->param_count); i++) {
        int param = matrices ? r->program->matrices[a->param + i].param : m->param_begin + i;
        const qd_param *p = &r->ledger->params[param];
        bool elsewhere = !matrices && r->program->matrices && qd_muon_takes(r->ledger, param);
        if (!p->frozen && p->tied_to < 0 && !elsewhere && qd_program_holding(r->program, QD_BUFFER_PARAM, param).count > 0)
            return true;
    }
    return false;
}

static bool same_sections(const proof_chunk *c, const qd_section *sections, int count)
{
    bool same = c->count == count;
    for (int i = 0; i < count && same; i++)
        same = c->sections[i].kind == sections[i].kind && c->sections[i].host == sections[i].host &&
               c->sections[i].chunk == sections[i].chunk && c->sections[i].count == sections[i].count;
    return same;
}

static qd_status use(proof_run *r, proof_chunk *c)
{
    const qd_action *a = r->action;
    qd_section sections[QD_STATE_KINDS];
    int count = qd_offload_sections(r->program, a, sections);
    if (!same_sections(c, sections, count))
        return qd_proof_action_fail(r, -1, 0, -1, "its chunk does not hold the optimizer state that it works on");
    if (a->kind != QD_ACTION_STORE && (needed(r) & ~(unsigned)a->states) != 0)
        return qd_proof_action_fail(r, -1, 0, -1, "its chunk lacks a kind of optimizer state that it works on");
    QD_TRY(qd_proof_waits(r, -1, "its chunk", c->by));
    c->changed = a->kind != QD_ACTION_STORE;
    c->by = r->index;
    return QD_OK;
}

static qd_status fetch(proof_run *r, proof_chunk *c)
{
    if (c->changed)
        return qd_proof_action_fail(r, -1, 0, -1, "it overwrites a chunk that has not been stored");
    QD_TRY(qd_proof_waits(r, -1, "its chunk", c->by));
    c->count = qd_offload_sections(r->program, r->action, c->sections);
    c->by = r->index;
    return QD_OK;
}

qd_status qd_proof_chunk_action(proof_run *r)
{
    const qd_action *a = r->action;
    switch ((qd_action_kind)a->kind) {
    case QD_ACTION_ALLOC:
        r->chunks[a->buffer] = (proof_chunk){.by = -1};
        return QD_OK;
    case QD_ACTION_FREE:
        return r->chunks[a->buffer].count > 0 ? qd_proof_waits(r, -1, "its chunk", r->chunks[a->buffer].by) : QD_OK;
    case QD_ACTION_FETCH:
    case QD_ACTION_STORE:
    case QD_ACTION_UPDATE:
    case QD_ACTION_MOMENTUM:
    case QD_ACTION_UPDATE_MATRICES:
    case QD_ACTION_CLIP:
        break;
    default:
        return QD_OK;
    }
    if (a->chunk < 0 && (a->kind == QD_ACTION_FETCH || a->kind == QD_ACTION_STORE || (needed(r) && has_elements(r))))
        return qd_proof_action_fail(r, -1, 0, -1, "it works on optimizer state in host memory");
    if (a->chunk < 0)
        return QD_OK;
    if (a->chunk >= r->program->buffer_count || r->program->buffers[a->chunk].kind != QD_BUFFER_CHUNK)
        return qd_proof_action_fail(r, -1, 0, -1, "its chunk is another buffer");
    return a->kind == QD_ACTION_FETCH ? fetch(r, &r->chunks[a->chunk]) : use(r, &r->chunks[a->chunk]);
}

qd_status qd_proof_chunk_end(const proof_run *r)
{
    for (int b = 0; b < r->program->buffer_count; b++)
        if (r->chunks[b].changed)
            return qd_proof_action_fail(r, -1, 0, -1, "a chunk of optimizer state was changed and not stored");
    return QD_OK;
}
