/* The program as text: one line per action, and trace events. */
#include "base/text/json_writer.h"
#include "base/text/text.h"
#include "spec/program/muon.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *module_name(const qd_program *p, int module)
{
    return module >= 0 ? p->ledger->modules[module].name : "";
}

/* The parameters of a run: "block.3", or "block.3.attn.q.weight .. block.3.mlp.up.weight". */
static const char *run_name(const qd_program *p, const qd_action *a, char *text, size_t size)
{
    const qd_param *first = &p->ledger->params[a->param];
    const qd_module *m = &p->ledger->modules[first->module];
    text[0] = '\0';
    if (a->params == m->param_count && a->param == m->param_begin)
        snprintf(text, size, "%s", m->name);
    else if (a->params == 1)
        snprintf(text, size, "%s", first->name);
    else if (a->params > 1)
        snprintf(text, size, "%s .. %s", first->name, first[a->params - 1].name);
    return text;
}

/* A run of Muon's matrices: "block.3.mlp.up.weight", or "block.3.mlp.up.weight and 3 more". */
static const char *matrices_name(const qd_program *p, const qd_action *a, char *text, size_t size)
{
    int own = a->kind == QD_ACTION_ORTHOGONALIZE ? qd_muon_own(p, a, p->rank) : a->param;
    if (own < 0)
        snprintf(text, size, "nothing");
    else if (a->params == 1 || a->kind == QD_ACTION_ORTHOGONALIZE)
        snprintf(text, size, "%s", p->ledger->params[p->matrices[own].param].name);
    else
        snprintf(text, size, "%s and %d more", p->ledger->params[p->matrices[own].param].name, a->params - 1);
    return text;
}

static int describe_head(const qd_program *p, const qd_action *a, char *text, size_t size)
{
    char amount[32], group[48] = "";
    if (a->group >= 0)
        qd_group_name(&p->ledger->mesh, p->groups[a->group], group, sizeof group);
    char run[96];
    const char *name = qd_action_name((qd_action_kind)a->kind);
    const qd_buffer *b = a->buffer >= 0 && a->buffer < p->buffer_count ? &p->buffers[a->buffer] : NULL;
    switch ((qd_action_kind)a->kind) {
    case QD_ACTION_ALLOC:
    case QD_ACTION_FREE:
        if (!b)
            break;
        qd_text_bytes(b->bytes, amount, sizeof amount);
        if (a->microbatch < 0)
            return snprintf(text, size, "%s %s%s%s %s%s", name, module_name(p, b->module), b->module >= 0 ? "  " : "",
                            qd_buffer_kind_name(b->kind), a->kind == QD_ACTION_ALLOC ? "+" : "-", amount);
        return snprintf(text, size, "%s %s mb %d  %s %s%s", name, module_name(p, b->module), b->microbatch,
                        qd_buffer_kind_name(b->kind), a->kind == QD_ACTION_ALLOC ? "+" : "-", amount);
    case QD_ACTION_ZERO:
        if (!b)
            break;
        qd_text_bytes(a->count * (int64_t)qd_dtype_size(a->dtype), amount, sizeof amount);
        return snprintf(text, size, "%s %s %s", name, qd_buffer_kind_name(b->kind), amount);
    case QD_ACTION_MAXIMA:
    case QD_ACTION_REDUCE:
        if (!b)
            break;
        qd_text_bytes(a->count * (int64_t)qd_dtype_size(a->dtype), amount, sizeof amount);
        return snprintf(text, size, "%s %s[%lld, %lld)  %s  %s  %s", name, qd_buffer_kind_name(b->kind),
                        (long long)a->first, (long long)(a->first + a->count), group, amount,
                        a->stream == QD_STREAM_COMM ? "comm stream" : "compute stream");
    case QD_ACTION_SEND:
    case QD_ACTION_RECV: {
        if (!b)
            break;
        qd_text_bytes(a->count * (int64_t)qd_dtype_size(a->dtype), amount, sizeof amount);
        int ranks = p->ledger->mesh.degree[QD_AXIS_PP], self = qd_mesh_group_coord(&p->ledger->mesh, QD_AXIS_BIT(QD_AXIS_PP), p->rank);
        int used = snprintf(text, size, "%s %s", name, module_name(p, a->module));
        if (a->microbatch >= 0 && used < (int)size)
            used += snprintf(text + used, size - (size_t)used, " mb %d", a->microbatch);
        return used < (int)size ? used + snprintf(text + used, size - (size_t)used, "  %s  %s pp %d  %s  %s", qd_buffer_kind_name(b->kind),
                                                  a->kind == QD_ACTION_SEND ? "to" : "from", (self + a->peer) % ranks, amount,
                                                  a->stream == QD_STREAM_COMM ? "comm stream" : "compute stream")
                                : used;
    }
    case QD_ACTION_REDUCE_SCATTER:
    case QD_ACTION_GATHER:
        if (!b)
            break;
        qd_text_bytes(a->count * (int64_t)qd_dtype_size(a->dtype), amount, sizeof amount);
        run_name(p, a, run, sizeof run);
        return snprintf(text, size, "%s %s%s%s  %s  %s  %s", name, run, run[0] ? "  " : "",
                        qd_buffer_kind_name(b->kind), group, amount, a->stream == QD_STREAM_COMM ? "comm stream" : "compute stream");
    case QD_ACTION_PACK:
    case QD_ACTION_UNPACK:
        return snprintf(text, size, "%s %s", name, run_name(p, a, run, sizeof run));
    case QD_ACTION_ADD:
        if (!b)
            break;
        qd_text_bytes(a->count * (int64_t)qd_dtype_size(a->dtype), amount, sizeof amount);
        return snprintf(text, size, "%s %s[%lld, %lld)  %s%s", name, qd_buffer_kind_name(b->kind), (long long)a->first,
                        (long long)(a->first + a->count), amount, a->overwrite ? "  overwrites" : "");
    case QD_ACTION_FORWARD:
    case QD_ACTION_RECOMPUTE:
    case QD_ACTION_BACKWARD:
    case QD_ACTION_BACKWARD_INPUT:
    case QD_ACTION_BACKWARD_WEIGHT:
        return snprintf(text, size, "%s %s mb %d  %.3g GFLOP%s%s", name, module_name(p, a->module), a->microbatch,
                        a->flops * 1e-9, a->overwrite ? "  overwrites gradients" : "", a->squares ? "  sums squares" : "");
    case QD_ACTION_MOMENTUM:
    case QD_ACTION_ORTHOGONALIZE:
    case QD_ACTION_UPDATE_MATRICES: return snprintf(text, size, "%s %s", name, matrices_name(p, a, run, sizeof run));
    case QD_ACTION_COLLECT:
    case QD_ACTION_HAND_BACK:
    case QD_ACTION_SHARE:
        qd_text_bytes(a->count * (int64_t)qd_dtype_size(a->dtype), amount, sizeof amount);
        return snprintf(text, size, "%s %s  %s  %s  %s", name, matrices_name(p, a, run, sizeof run), group, amount,
                        a->stream == QD_STREAM_COMM ? "comm stream" : "compute stream");
    case QD_ACTION_FETCH:
    case QD_ACTION_STORE:
    case QD_ACTION_UPDATE: {
        static const char *const streams[QD_STREAM_COUNT] = {"compute stream", "comm stream", "copies in", "copies out"};
        if (a->chunk < 0)
            break;
        qd_text_bytes(a->count * 4 * __builtin_popcount(a->states), amount, sizeof amount);
        return snprintf(text, size, "%s %s  state[%lld, %lld)  %s  %s", name,
                        a->module >= 0 ? module_name(p, a->module) : p->ledger->params[a->param].name, (long long)a->first,
                        (long long)(a->first + a->count), amount, streams[a->stream]);
    }
    case QD_ACTION_CAST_WEIGHTS:
        if (a->use[QD_USE_CAST] < 0)
            break;
        qd_text_bytes(p->buffers[a->use[QD_USE_CAST]].bytes, amount, sizeof amount);
        return snprintf(text, size, "%s %s  %s", name, module_name(p, a->module), amount);
    case QD_ACTION_LOAD: return snprintf(text, size, "%s mb %d", name, a->microbatch);
    default: return snprintf(text, size, "%s%s%s", name, a->module >= 0 ? " " : "", module_name(p, a->module));
    }
    if (a->kind == QD_ACTION_UPDATE)
        return snprintf(text, size, "%s %s", name, module_name(p, a->module));
    return snprintf(text, size, "%s buffer %d", name, a->buffer);
}

void qd_action_describe(const qd_program *p, int action, char *text, size_t size)
{
    const qd_action *a = &p->actions[action];
    int used = describe_head(p, a, text, size);
    for (int i = 0; i < a->dep_count && used >= 0 && (size_t)used < size; i++)
        used += snprintf(text + used, size - (size_t)used, "%s#%d", i == 0 ? "  after " : ", ", p->deps[a->dep_first + i]);
}

void qd_program_print(const qd_program *p, FILE *out)
{
    char text[256];
    for (int i = 0; i < p->action_count; i++) {
        qd_action_describe(p, i, text, sizeof text);
        size_t name = strcspn(text, " "); /* in its own column */
        fprintf(out, "%5d  %-15.*s%s\n", i, (int)name, text, text + name);
    }
}

/* Traces, measured and simulated. */

/* The track names of streams. */
static const char *const tracks[QD_STREAM_COUNT] = {"compute", "communication", "copies in", "copies out"};

int qd_trace_tracks(const qd_program *p, const char *const **names)
{
    *names = tracks;
    return p->strategy.offload ? QD_STREAM_COUNT : QD_STREAM_IN;
}

static qd_trace_event describe_action(const qd_program *p, const qd_action *a)
{
    bool talks = qd_action_communicates(a);
    return (qd_trace_event){
        .what = qd_action_name((qd_action_kind)a->kind),
        .of = a->module >= 0   ? p->ledger->modules[a->module].name
              : a->buffer >= 0 ? qd_buffer_kind_name(p->buffers[a->buffer].kind)
                               : "",
        .group = talks ? &p->groups[a->group] : NULL,
        .track = talks ? QD_STREAM_COMM : (int)a->stream,
        .elements = a->count,
        .bytes = a->bytes,
        .flops = a->flops,
    };
}

static qd_trace_event describe_exchange(const qd_program *p, const qd_action *a, int op)
{
    const qd_op *o = &qd_program_class(p, a->module)->ops[op];
    return (qd_trace_event){.what = qd_op_name(o->kind), .of = p->ledger->modules[a->module].name, .group = &o->exchange.group,
                            .track = QD_STREAM_COMM, .elements = o->exchange.count, .bytes = o->exchange.bytes};
}

qd_trace_event qd_trace_describe(const qd_program *p, int action, int op)
{
    const qd_action *a = &p->actions[action];
    qd_trace_event e = op < 0 ? describe_action(p, a) : describe_exchange(p, a, op);
    e.module = a->module >= 0 ? p->ledger->modules[a->module].name : NULL;
    e.microbatch = a->microbatch;
    return e;
}

void qd_trace_put_name(qd_json_writer *w, const char *what, int rank, int track, const char *name)
{
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "ph", "M");
    qd_json_put_string(w, "name", what);
    qd_json_put_int(w, "pid", rank);
    qd_json_put_int(w, "tid", track);
    qd_json_object_begin(w, "args");
    qd_json_put_string(w, "name", name);
    qd_json_end(w);
    qd_json_end(w);
}

void qd_trace_put_tracks(qd_json_writer *w, const qd_program *p, int rank)
{
    const char *const *names;
    int count = qd_trace_tracks(p, &names);
    for (int track = 0; track < count; track++)
        qd_trace_put_name(w, "thread_name", rank, track, names[track]);
}

/* Microseconds, to the nanosecond. */
static double microseconds(double seconds)
{
    return round(seconds * 1e9) / 1e3;
}

void qd_trace_put_event(qd_json_writer *w, const qd_program *p, int rank, int action, int op, int64_t step, double begin, double end,
                        double waited)
{
    qd_trace_event e = qd_trace_describe(p, action, op);
    char name[128], group[48];
    snprintf(name, sizeof name, "%s%s%s", e.what, e.of[0] ? " " : "", e.of);
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "ph", "X");
    qd_json_put_string(w, "name", name);
    qd_json_put_string(w, "cat", e.what);
    qd_json_put_int(w, "pid", rank);
    qd_json_put_int(w, "tid", e.track);
    qd_json_put_double(w, "ts", microseconds(begin));
    qd_json_put_double(w, "dur", microseconds(end - begin));
    qd_json_object_begin(w, "args");
    qd_json_put_int(w, "step", step);
    qd_json_put_int(w, "action", action);
    if (e.module)
        qd_json_put_string(w, "module", e.module);
    if (e.microbatch >= 0)
        qd_json_put_int(w, "microbatch", e.microbatch);
    if (op >= 0)
        qd_json_put_int(w, "op", op);
    if (e.group) {
        qd_group_name(&p->ledger->mesh, *e.group, group, sizeof group);
        qd_json_put_string(w, "axes", group);
        qd_json_put_int(w, "elements", e.elements);
    }
    if (e.bytes > 0)
        qd_json_put_int(w, "bytes", e.bytes);
    if (e.flops > 0)
        qd_json_put_double(w, "flops", e.flops);
    if (op >= 0)
        qd_json_put_double(w, "waited", microseconds(qd_trace_waited(begin, end, waited)));
    qd_json_end(w);
    qd_json_end(w);
}
