/* Output of a simulated step: JSON, a trace, and a timeline in characters. */
#include "sim/simulate_impl.h"

#include "base/text/json_writer.h"
#include "base/text/strbuf.h"
#include "base/text/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void put_lines(qd_json_writer *w, const char *key, const qd_sim_line *lines, int count)
{
    qd_json_object_begin(w, key);
    for (int i = 0; i < count; i++)
        qd_json_put_double(w, lines[i].name, lines[i].value);
    qd_json_end(w);
}

/* Time of the first stage by op, with the names of `bench step`: ops that compute, apart from the
 * exchanges of their module, and actions that are not made of ops. Waiting is not included. */
static void put_ops(qd_json_writer *w, const qd_simulation *s)
{
    const qd_step_stage *stage = &s->step.stages[0];
    const qd_program *p = stage->program;
    double ops[QD_OP_KIND_COUNT] = {0}, actions[QD_ACTION_KIND_COUNT] = {0};
    qd_span spans[QD_GROUP_LIMIT];
    qd_step_spans(&s->step, stage, spans);
    for (int i = 0; i < stage->item_count; i++) {
        const qd_action *a = &p->actions[stage->action[i]];
        if (qd_action_phases(a))
            qd_cost_ops(s->step.cluster, p, spans, a, ops);
        else
            actions[a->kind] += stage->items[i].seconds;
    }
    qd_json_object_begin(w, "ops");
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        if (ops[kind] > 0.0)
            qd_json_put_double(w, qd_op_name((qd_op_kind)kind), ops[kind]);
    for (int kind = 0; kind < QD_ACTION_KIND_COUNT; kind++)
        if (actions[kind] > 0.0)
            qd_json_put_double(w, qd_action_row_name((qd_action_kind)kind), actions[kind]);
    qd_json_end(w);
}

void qd_simulation_json(const qd_simulation *s, qd_strbuf *out)
{
    const qd_sim_report *r = &s->report;
    const struct {
        const char *key;
        double value;
    } figures[] = {
        {"step_seconds", r->step_seconds},         {"tokens_per_second", r->tokens_per_second},
        {"tokens_per_second_per_gpu", r->tokens_per_gpu_second}, {"flops_per_step", r->flops_per_step},
        {"mfu", r->mfu},                           {"mfu_causal", r->mfu_causal},
        {"hfu", r->hfu},                           {"compute_seconds", r->compute_seconds},
        {"product_seconds", r->product_seconds},   {"attention_seconds", r->attention_seconds},
        {"memory_bound_seconds", r->memory_seconds}, {"optimizer_seconds", r->optimizer_seconds},
        {"launch_seconds", r->launch_seconds},     {"bubble_seconds", r->bubble_seconds},
        {"late_seconds", r->late_seconds},         {"watts", r->watts},
        {"joules_per_step", r->joules_per_step},   {"cost_per_step", r->cost_per_step},
        {"wall_seconds", r->wall_seconds},
    };
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "model", r->model);
    qd_json_put_string(&w, "layout", r->layout);
    qd_json_put_string(&w, "cluster", r->cluster);
    qd_json_put_string(&w, "profile", r->profile);
    qd_json_put_int(&w, "gpus", r->gpus);
    qd_json_put_int(&w, "stages", r->stages);
    qd_json_put_int(&w, "parameters", r->parameters);
    qd_json_put_int(&w, "tokens_per_step", r->tokens_per_step);
    qd_json_put_int(&w, "micro_batch", r->micro_batch);
    qd_json_put_int(&w, "micro_batches", r->micro_batches);
    qd_json_put_int(&w, "actions", r->actions);
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        qd_json_put_double(&w, figures[i].key, figures[i].value);
    put_ops(&w, s);
    put_lines(&w, "exposed_seconds", r->exposed, r->exposed_count);
    put_lines(&w, "hidden_seconds", r->hidden, r->hidden_count);
    qd_json_put_bool(&w, "fits", r->fits);
    qd_json_put_int(&w, "memory_bytes", r->memory_bytes);
    qd_json_put_int(&w, "memory_limit_bytes", r->memory_limit);
    qd_json_put_int(&w, "fullest_stage", r->fullest_stage);
    put_lines(&w, "memory", r->memory, r->memory_count);
    qd_json_list_begin(&w, "stage");
    for (int i = 0; i < r->stages; i++) {
        qd_json_object_begin(&w, NULL);
        qd_json_put_int(&w, "memory_bytes", s->stages[i].memory_bytes);
        qd_json_put_double(&w, "busy_seconds", s->stages[i].busy_seconds);
        qd_json_put_double(&w, "bubble_seconds", s->stages[i].bubble_seconds);
        qd_json_put_double(&w, "exposed_seconds", s->stages[i].exposed_seconds);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_list_begin(&w, "losses");
    for (int i = 0; i < r->loss_count; i++)
        qd_json_put_string(&w, NULL, r->loss[i]);
    qd_json_end(&w);
    qd_json_end(&w);
}

/* A drawn rank represents its whole stage: the report weights it accordingly. */
static void put_fold(qd_json_writer *w, int process, int stage, int stages, int ranks)
{
    char text[32] = "";
    if (stages > 1)
        snprintf(text, sizeof text, "pp %d", stage);
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "ph", "M");
    qd_json_put_string(w, "name", "process_labels");
    qd_json_put_int(w, "pid", process);
    qd_json_put_int(w, "tid", 0);
    qd_json_object_begin(w, "args");
    qd_json_put_string(w, "labels", text);
    qd_json_put_int(w, "stands_for", ranks);
    qd_json_end(w);
    qd_json_end(w);
}

/* State for the events of a stage: the placement of its groups, and a buffer for the exchanges of
 * one action. */
typedef struct drawing {
    const qd_step *step;
    const qd_step_stage *stage;
    qd_span spans[QD_GROUP_LIMIT];
    qd_cost_exchange *exchanges;
} drawing;

static qd_status start_drawing(const qd_step *step, const qd_step_stage *stage, drawing *d)
{
    int most = 0;
    *d = (drawing){.step = step, .stage = stage};
    qd_step_spans(step, stage, d->spans);
    for (int i = 0; i < stage->item_count; i++) {
        const qd_action *a = &stage->program->actions[stage->action[i]];
        int ops = qd_action_phases(a) ? qd_program_class(stage->program, a->module)->op_count : 0;
        most = ops > most ? ops : most;
    }
    d->exchanges = calloc((size_t)most + 1, sizeof *d->exchanges);
    return d->exchanges ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for the exchanges inside modules");
}

/* An action and the exchanges inside it, stretched by the slowdown from concurrent work. */
static void put_item(qd_json_writer *w, const drawing *d, int index, const qd_sim_times *t)
{
    const qd_step_stage *stage = d->stage;
    int action = stage->action[index];
    const qd_action *a = &stage->program->actions[action];
    qd_action_trace_event(w, stage->program, stage->rank, action, 1, t->begin, t->end);
    double alone = stage->items[index].seconds, stretch = alone > 0.0 ? (t->end - t->begin) / alone : 1.0;
    int count = qd_cost_exchanges(d->step->cluster, stage->program, d->spans, a, d->exchanges);
    for (int i = 0; i < count; i++) {
        const qd_cost_exchange *x = &d->exchanges[i];
        qd_exchange_trace_event(w, stage->program, stage->rank, action, x->op, 1, t->begin + stretch * x->begin,
                                t->begin + stretch * x->end, t->begin + stretch * x->waited);
    }
}

qd_status qd_simulation_trace_text(const qd_simulation *s, qd_strbuf *out)
{
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "displayTimeUnit", "ms");
    qd_json_list_begin(&w, "traceEvents");
    qd_status status = QD_OK;
    for (int i = 0; i < s->step.stage_count && status == QD_OK; i++) {
        const qd_step_stage *stage = &s->step.stages[i];
        const qd_sim_times *times = qd_sim_times_of(&s->step.result, i);
        char name[64];
        snprintf(name, sizeof name, "rank %d", stage->rank);
        qd_trace_put_name(&w, "process_name", stage->rank, 0, name);
        put_fold(&w, stage->rank, i, s->step.stage_count, s->config.world / s->step.stage_count);
        qd_trace_put_tracks(&w, stage->program, stage->rank);
        /* Memory that waits for the other stream before it is released is an item of the
         * simulation, but not an event of the trace. */
        drawing d;
        status = start_drawing(&s->step, stage, &d);
        for (int k = 0; k < stage->item_count && status == QD_OK; k++)
            if (qd_step_takes_time(&stage->program->actions[stage->action[k]]))
                put_item(&w, &d, k, &times[k]);
        free(d.exchanges);
    }
    qd_json_end(&w);
    qd_json_end(&w);
    return status == QD_OK && out->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for a trace") : status;
}

qd_status qd_simulation_trace(const qd_simulation *s, const char *path)
{
    qd_strbuf text = {0};
    qd_status status = qd_simulation_trace_text(s, &text);
    if (status == QD_OK)
        status = qd_file_replace(path, text.data, text.length);
    qd_strbuf_free(&text);
    return status;
}

static char letter_of(const qd_action *a)
{
    switch ((qd_action_kind)a->kind) {
    case QD_ACTION_FORWARD: return 'F';
    case QD_ACTION_RECOMPUTE: return 'R';
    case QD_ACTION_BACKWARD:
    case QD_ACTION_BACKWARD_INPUT: return 'B';
    case QD_ACTION_BACKWARD_WEIGHT: return 'W';
    case QD_ACTION_UPDATE:
    case QD_ACTION_MOMENTUM:
    case QD_ACTION_ORTHOGONALIZE:
    case QD_ACTION_UPDATE_MATRICES:
    case QD_ACTION_SQUARES:
    case QD_ACTION_NORM: return 'U';
    default: return qd_action_communicates(a) ? '~' : 'z';
    }
}

/* Each column shows the action that fills most of it. */
static void draw_stage(const qd_step *step, int s, int stream, int width, qd_strbuf *out)
{
    static const char letters[] = ".FRBWU~z";
    enum { KINDS = sizeof letters - 1 };
    const qd_step_stage *stage = &step->stages[s];
    const qd_sim_times *times = qd_sim_times_of(&step->result, s);
    double (*share)[KINDS] = calloc((size_t)width, sizeof *share), column = step->result.seconds / width;
    for (int i = 0; share && i < stage->item_count; i++) {
        if (stage->items[i].stream != stream || times[i].end <= times[i].begin)
            continue;
        int kind = (int)(strchr(letters, letter_of(&stage->program->actions[stage->action[i]])) - letters);
        for (int c = (int)(times[i].begin / column); c < width && c * column < times[i].end; c++)
            share[c][kind] += fmin(times[i].end, (c + 1) * column) - fmax(times[i].begin, c * column);
    }
    for (int c = 0; share && c < width; c++) {
        int best = 0;
        double idle = column;
        for (int k = 1; k < KINDS; k++)
            idle -= share[c][k];
        share[c][0] = idle;
        for (int k = 1; k < KINDS; k++)
            best = share[c][k] > share[c][best] ? k : best;
        qd_strbuf_pad(out, letters[best], 1);
    }
    free(share);
}

void qd_simulation_draw(const qd_simulation *s, int width, qd_strbuf *out)
{
    int columns = width > 30 ? width - 12 : 60;
    for (int i = 0; i < s->step.stage_count; i++) {
        qd_strbuf_printf(out, s->step.stage_count > 1 ? "stage %-4d " : "compute    ", i);
        draw_stage(&s->step, i, QD_STREAM_COMPUTE, columns, out);
        qd_strbuf_puts(out, "\n");
        if (s->step.stage_count == 1) {
            qd_strbuf_puts(out, "network    ");
            draw_stage(&s->step, i, QD_STREAM_COMM, columns, out);
            qd_strbuf_puts(out, "\n");
        }
    }
    qd_strbuf_puts(out, "           ");
    qd_text_wrap("F forward, B backward, W weight gradients, R recompute, U optimizer, ~ collective, . idle", 11, width, out);
}
