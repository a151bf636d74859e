/* Pipeline stages: assigns modules to stages, balanced by cost or as given, and reads schedule
 * files. */
#include "spec/layout/stages.h"

#include "base/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool qd_ledger_tied_apart(const qd_ledger *l, int param)
{
    int owner = l->params[param].tied_to;
    return owner >= 0 && l->modules[l->params[owner].module].stage_rank != l->modules[l->params[param].module].stage_rank;
}

/* Elements of the matrices of a declared op that one token is multiplied with; of experts, only
 * those that it chooses. */
static double elements_met(const qd_layer *decl, const qd_decl_op *op)
{
    double elements = 0.0;
    for (int i = 0; i < op->weight.count; i++) {
        const qd_decl_param *p = &decl->params[op->weight.param + i];
        elements += (double)p->rows * (double)p->cols;
    }
    return op->kind == QD_DECL_GROUPED_LINEAR ? elements * decl->model->moe.per_token / decl->model->moe.experts : elements;
}

/* FLOPs of a module per token, forward and backward: 6 per matrix element, plus attention over the
 * causal half or the windows, whose scores are recomputed in the backward pass. A lookup and the
 * scatter-add of its gradient are counted by the bytes they move. */
static double cost(const qd_ledger *l, int module, int64_t seq)
{
    const qd_layer *decl = &l->decls[l->modules[module].decl];
    double flops = 0.0;
    for (int i = 0; i < decl->op_count; i++) {
        const qd_decl_op *op = &decl->ops[i];
        switch (op->kind) {
        case QD_DECL_EMBED: flops += 100.0 * (double)l->model.hidden; break;
        case QD_DECL_ATTENTION: flops += 7.0 * qd_window_keys(op->window, seq) * (double)decl->values[op->out].cols; break;
        case QD_DECL_LINEAR:
        case QD_DECL_GROUPED_LINEAR:
        case QD_DECL_LOSS: flops += 6.0 * elements_met(decl, op); break;
        default: break;
        }
    }
    return flops;
}

/* Dynamic programming table: best[s, i] is the least sum of squared costs of modules i.. on stages
 * s.., with no stage above `most`; next[s, i] is the first module after stage s. */
typedef struct cutting {
    int modules, stages;
    const double *before; /* prefix sums: cost of the modules before each */
    double *best;         /* (stages + 1) × (modules + 1) */
    int *next;
} cutting;

/* Whether `stages` stages suffice with none above `most`, filling them greedily. Leftover stages
 * can split others. */
static bool enough(const cutting *c, double most)
{
    int stages = 1;
    for (int i = 0, first = 0; i < c->modules; i++) {
        if (c->before[i + 1] - c->before[i] > most)
            return false;
        if (c->before[i + 1] - c->before[first] > most) {
            stages++;
            first = i;
        }
    }
    return stages <= c->stages;
}

static void cut(cutting *c, double most)
{
    int width = c->modules + 1;
    for (int i = 0; i <= c->modules; i++)
        c->best[c->stages * width + i] = i == c->modules ? 0.0 : -1.0;
    for (int s = c->stages - 1; s >= 0; s--) {
        for (int i = 0; i < width; i++) {
            double *best = &c->best[s * width + i];
            *best = -1.0;
            for (int j = i + 1; j <= c->modules; j++) {
                double own = c->before[j] - c->before[i], rest = c->best[(s + 1) * width + j];
                if (own > most)
                    break;
                /* On a tie prefer the first, which has fewer modules: early ranks hold more
                 * micro-batches in flight. */
                if (rest >= 0.0 && (*best < 0.0 || own * own + rest < *best * (1.0 - 1e-12))) {
                    *best = own * own + rest;
                    c->next[s * width + i] = j;
                }
            }
        }
    }
}

static qd_status share_out(qd_ledger *l, int64_t seq, int stages, qd_arena *arena)
{
    int modules = l->module_count;
    if (modules < stages)
        return QD_FAIL(QD_USAGE,
                       "a pipeline of %d stages needs at least as many modules, but the model has %d (%d blocks, embedding and head): "
                       "lower parallel.pp or parallel.virtual_stages",
                       stages, modules, l->model.layers);
    double *before = QD_ARENA_NEW(arena, double, modules + 1), low = 0.0, high;
    cutting c = {.modules = modules, .stages = stages, .before = before};
    c.best = QD_ARENA_NEW(arena, double, (size_t)(stages + 1) * (size_t)(modules + 1));
    c.next = QD_ARENA_NEW(arena, int, (size_t)(stages + 1) * (size_t)(modules + 1));
    if (!before || !c.best || !c.next)
        return QD_NO_MEMORY;
    for (int i = 0; i < modules; i++)
        before[i + 1] = before[i] + cost(l, i, seq);
    high = before[modules];
    for (int i = 0; i < 40 && high - low > 1e-6 * high; i++) {
        double middle = 0.5 * (low + high);
        if (enough(&c, middle))
            high = middle;
        else
            low = middle;
    }
    cut(&c, high);
    for (int s = 0, i = 0; s < stages; s++) {
        int end = c.next[s * (modules + 1) + i];
        for (; i < end; i++)
            l->modules[i].stage = s;
    }
    return QD_OK;
}

/* Parses "3,2,2,1". */
static qd_status take_layers(qd_ledger *l, const char *text, int stages)
{
    int module = 1, stage = 0;
    const char *at = text;
    for (; stage < stages; stage++) {
        char *end;
        errno = 0;
        long count = strtol(at, &end, 10);
        if (end == at || errno != 0 || count < 0 || count > l->model.layers)
            return QD_FAIL(QD_USAGE, "parallel.layers is '%s': expected %d block counts, one per stage, such as 2,1,1", text,
                           stages);
        if (count == 0 && stage > 0 && stage < stages - 1)
            return QD_FAIL(QD_USAGE, "parallel.layers is '%s': stage %d would hold nothing", text, stage);
        for (; count > 0 && module <= l->model.layers; count--)
            l->modules[module++].stage = stage;
        if (count > 0)
            break;
        at = end + (*end == ',' && stage < stages - 1);
    }
    if (stage < stages || *at != '\0' || module != l->model.layers + 1)
        return QD_FAIL(
            QD_USAGE,
            "parallel.layers is '%s': it must have one number for each of the %d stages, and they must add up to the model's %d blocks",
            text, stages, l->model.layers);
    l->modules[0].stage = 0;
    l->modules[l->module_count - 1].stage = stages - 1;
    return QD_OK;
}

/* micro_batches: that the file must have; 0: any number. */
static qd_status read_file(const char *path, int ranks, int micro_batches, qd_arena *arena, qd_schedule **schedule)
{
    int fd;
    int64_t bytes;
    qd_status opened = qd_file_open(path, &fd, &bytes);
    if (opened != QD_OK)
        return qd_error_prefix(opened, "parallel.schedule_file: ");
    FILE *in = fdopen(fd, "r");
    if (!in) {
        close(fd);
        return QD_FAIL(QD_NO_MEMORY, "parallel.schedule_file: %s: no memory to read it", path);
    }
    qd_status status = qd_schedule_read_csv(in, path, arena, schedule);
    fclose(in);
    if (status != QD_OK)
        return status;
    const qd_schedule *s = *schedule;
    if (s->ranks != ranks)
        return QD_FAIL(QD_USAGE, "%s: has lines for %d pipeline ranks, but parallel.pp is %d", path, s->ranks, ranks);
    if (micro_batches > 0 && s->micro_batches != micro_batches)
        return QD_FAIL(QD_USAGE, "%s: is for %d micro-batches, but the step has %d (global batch / dp / micro-batch)", path,
                       s->micro_batches, micro_batches);
    for (int rank = 0; rank < ranks; rank++)
        if (s->begin[rank] == s->begin[rank + 1])
            return QD_FAIL(QD_USAGE, "%s: rank %d has no stage", path, rank);
    return s->training ? QD_OK : QD_FAIL(QD_USAGE, "%s: has no backward passes", path);
}

qd_status qd_pipeline_place(qd_ledger *l, const qd_pipeline *pipeline, int64_t seq, int micro_batches, bool training, qd_arena *arena,
                            const qd_schedule **schedule)
{
    int ranks = l->mesh.degree[QD_AXIS_PP];
    bool fixed, from_file = pipeline->file && pipeline->file[0] != '\0';
    qd_schedule *made = NULL, *read = NULL;
    if (from_file)
        QD_TRY(read_file(pipeline->file, ranks, training ? micro_batches : 0, arena, &read));
    if (from_file && training) {
        made = read;
    } else {
        int each = pipeline->virtual_stages > 0 ? pipeline->virtual_stages : qd_schedule_stages(pipeline->kind, &fixed);
        QD_TRY(read ? qd_schedule_forward(read, micro_batches, arena, &made)
                    : qd_schedule_create(pipeline->kind, ranks, ranks * each, micro_batches, training, arena, &made));
    }
    QD_TRY(pipeline->layers[0] != '\0' ? take_layers(l, pipeline->layers, made->stages)
                                       : share_out(l, pipeline->seq > 0 ? pipeline->seq : seq, made->stages, arena));
    for (int i = 0; i < l->module_count; i++)
        l->modules[i].stage_rank = made->rank_of[l->modules[i].stage];
    *schedule = made;
    return QD_OK;
}
