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
    int *calls = calloc(QD_STEP_KEYS, sizeof *calls);
    const qd_action **of = calloc(QD_STEP_KEYS, sizeof *of);
    for (int i = 0; i < stage->item_count; i++) {
        const qd_action *a = &p->actions[stage->action[i]];
        int key = qd_step_key(p, a);
        if (key < 0)
            actions[a->kind] += stage->items[i].seconds;
        else if (calls && of && calls[key]++ == 0)
            of[key] = a;
    }
    for (int key = 0; key < QD_STEP_KEYS && calls && of; key++) {
        double once[QD_OP_KIND_COUNT] = {0};
        if (calls[key] == 0)
            continue;
        qd_cost_ops(s->step.cluster, p, spans, of[key], once);
        for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
            ops[kind] += calls[key] * once[kind];
    }
    w->out->failed = w->out->failed || !calls || !of;
    free(calls);
    free(of);
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

typedef struct trace_output {
    const qd_simulation *simulation;
    qd_json_writer writer;
} trace_output;

static qd_status put_event(void *context, const qd_sim_event *e)
{
    trace_output *out = context;
    const qd_step_stage *stage = &out->simulation->step.stages[e->stage];
    qd_trace_put_event(&out->writer, stage->program, stage->rank, e->action, e->op, 1, e->begin, e->end, e->waited);
    return QD_OK;
}

qd_status qd_simulation_trace_text(const qd_simulation *s, qd_strbuf *out)
{
    trace_output output = {.simulation = s, .writer = qd_json_writer_on(out)};
    qd_json_writer *w = &output.writer;
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "displayTimeUnit", "ms");
    qd_json_list_begin(w, "traceEvents");
    for (int i = 0; i < s->step.stage_count; i++) {
        const qd_step_stage *stage = &s->step.stages[i];
        char name[64];
        snprintf(name, sizeof name, "rank %d", stage->rank);
        qd_trace_put_name(w, "process_name", stage->rank, 0, name);
        put_fold(w, stage->rank, i, s->step.stage_count, s->config.world / s->step.stage_count);
        qd_trace_put_tracks(w, stage->program, stage->rank);
    }
    qd_status status = qd_simulation_events(s, put_event, &output);
    qd_json_end(w);
    qd_json_end(w);
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
    case QD_ACTION_CAST_WEIGHTS: /* before the first of them */
    case QD_ACTION_FORWARD: return 'F';
    case QD_ACTION_RECOMPUTE: return 'R';
    case QD_ACTION_BACKWARD:
    case QD_ACTION_BACKWARD_INPUT: return 'B';
    case QD_ACTION_BACKWARD_WEIGHT: return 'W';
    case QD_ACTION_UPDATE:
    case QD_ACTION_MOMENTUM:
    case QD_ACTION_ORTHOGONALIZE:
    case QD_ACTION_UPDATE_MATRICES:
    case QD_ACTION_CLIP:
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
