/* Executes the step program: waits for the dependencies of each action, runs it on its stream, and
 * records times. */
#include "train/exec/interpret.h"

#include "base/clock.h"
#include "base/half.h"
#include "device/copies.h"
#include "parallel/clip.h"
#include "parallel/dispatch.h"
#include "parallel/exchange.h"
#include "parallel/matrices.h"
#include "parallel/shard.h"
#include "train/exec/faults/contribution.h"
#include "train/exec/row_sums.h"
#include "train/exec/update.h"
#include "train/exec/stream_times.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qd_interpreter {
    qd_bound *bound;
    const qd_program *program;
    const qd_kernels *kernels;
    qd_stream *stream;
    qd_work **work;         /* per action: in flight */
    qd_event **copied;      /* per action: its copy is done; NULL: it copies nothing, or on the compute stream */
    qd_event *reached;      /* a point on the compute stream */
    int32_t *input[2];      /* host: (3, rows) of a micro-batch, double-buffered: the device may still read the last one */
    qd_event *input_read[2];
    int32_t *whole;         /* host, with cp: whole sequences of a micro-batch, from which the rank selects its rows */
    int64_t input_first[2]; /* first sample of a buffer that was filled ahead of time; -1: not filled */
    int next_input;
    qd_exchanger *exchanger; /* NULL: no op communicates */
    qd_sum_run *row_runs;   /* of SQUARES, by parameter */
    int64_t run_count;
    double *figures;        /* host copy of LOSS */
    float *scores;          /* host copy of MAXIMA; NULL: the step has none */
    qd_event *known;        /* it has been copied */
    int64_t first_row[QD_FAMILY_COUNT]; /* of this rank's part in SQUARES */
    qd_timeline *timelines[QD_STREAM_COUNT]; /* created when a step is traced or profiled; NULL for communication */
    qd_watch *watch;        /* created when a step is traced; NULL: nothing to watch */
    /* of the current step */
    const qd_step_input *in;
    int at; /* the current action */
    char not_finite[160]; /* "": nothing found */
    bool *torn; /* of the output of the present step */
};

/* The stream on which an action's copies or kernels run. */
static qd_stream *stream_of(const qd_interpreter *it, int stream)
{
    return stream == QD_STREAM_IN    ? qd_device_in_stream(it->bound->device)
           : stream == QD_STREAM_OUT ? qd_device_out_stream(it->bound->device)
                                     : it->stream;
}

static qd_status make_events(qd_interpreter *it)
{
    const qd_program *p = it->program;
    QD_TRY(qd_event_create(it->bound->device, &it->reached));
    for (int i = 0; i < p->action_count; i++)
        if (qd_action_copies(&p->actions[i]) && p->actions[i].stream != QD_STREAM_COMPUTE)
            QD_TRY(qd_event_create(it->bound->device, &it->copied[i]));
    return QD_OK;
}

static qd_status staging(qd_interpreter *it)
{
    qd_device *device = it->bound->device;
    void *memory;
    for (int i = 0; i < 2; i++) {
        QD_TRY(qd_host_alloc(device, qd_program_input(it->program) * (int64_t)sizeof *it->input[i], &memory));
        it->input[i] = memory;
        QD_TRY(qd_event_create(device, &it->input_read[i]));
        it->input_first[i] = -1;
    }
    QD_TRY(qd_host_alloc(device, qd_input_whole(it->program) * (int64_t)sizeof *it->whole, &memory));
    it->whole = memory;
    QD_TRY(qd_host_alloc(device, QD_LOSS_COUNT * (int64_t)sizeof *it->figures, &memory));
    it->figures = memory;
    QD_TRY(qd_clip_host_scores(it->bound, &it->scores));
    QD_TRY(qd_event_create(device, &it->known));
    if (it->program->strategy.training)
        QD_TRY(qd_row_runs(it->program, &it->row_runs, &it->run_count));
    QD_TRY(make_events(it));
    return qd_exchanger_create(it->bound, &it->exchanger);
}

qd_status qd_interpreter_create(qd_bound *bound, qd_interpreter **interpreter)
{
    const qd_program *p = bound->program;
    qd_interpreter *it = calloc(1, sizeof *it);
    if (!it)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the interpreter");
    it->bound = bound;
    it->program = p;
    it->kernels = qd_device_kernels(bound->device);
    it->stream = qd_device_compute_stream(bound->device);
    for (int family = 0; family < QD_FAMILY_COUNT; family++)
        it->first_row[family] = qd_program_square_base(p, family, p->storage.share[family].part);
    it->work = calloc((size_t)p->action_count, sizeof *it->work);
    it->copied = calloc((size_t)p->action_count, sizeof *it->copied);
    qd_status status = it->work && it->copied ? staging(it) : QD_FAIL(QD_NO_MEMORY, "no memory for the interpreter");
    if (status != QD_OK) {
        qd_interpreter_destroy(it);
        return status;
    }
    *interpreter = it;
    return QD_OK;
}

void qd_interpreter_destroy(qd_interpreter *it)
{
    if (!it)
        return;
    for (int i = 0; it->copied && i < it->program->action_count; i++)
        qd_event_destroy(it->copied[i]);
    qd_event_destroy(it->reached);
    free(it->copied);
    free(it->work);
    free(it->row_runs);
    qd_event_destroy(it->known);
    for (int i = 0; i < 2; i++) {
        qd_event_destroy(it->input_read[i]);
        qd_host_free(it->bound->device, it->input[i]);
    }
    qd_host_free(it->bound->device, it->whole);
    qd_host_free(it->bound->device, it->figures);
    qd_host_free(it->bound->device, it->scores);
    qd_watch_destroy(it->watch);
    qd_exchanger_destroy(it->exchanger);
    for (int i = 0; i < QD_STREAM_COUNT; i++)
        qd_timeline_destroy(it->timelines[i]);
    free(it);
}

qd_dispatched qd_interpreter_dispatched(const qd_interpreter *it)
{
    const qd_dispatcher *d = qd_exchanger_dispatcher(it->exchanger);
    return d ? (qd_dispatched){d->sent, d->rounds, d->crossed, d->flat} : (qd_dispatched){0};
}

static qd_status do_alloc(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    it->bound->alive[a->buffer] = true;
    return QD_OK;
}

static qd_status do_free(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    it->bound->alive[a->buffer] = false;
    return QD_OK;
}

/* Index in the global batch of a micro-batch's first sequence on this rank: ranks of dp take
 * contiguous shares. */
static int64_t first_sequence(const qd_interpreter *it, int microbatch)
{
    const qd_program *p = it->program;
    int coord = qd_mesh_group_coord(&p->ledger->mesh, QD_AXIS_BIT(QD_AXIS_DP), qd_comm_rank(it->bound->world));
    return ((int64_t)coord * p->strategy.micro_batches + microbatch) * p->strategy.micro_batch;
}

/* Reads the samples from `first` on into one of the host buffers. */
static qd_status fill_input(qd_interpreter *it, int turn, int64_t first)
{
    it->input_first[turn] = -1;
    QD_TRY(qd_event_wait(it->input_read[turn]));
    return qd_input_fill(it->program, it->in->source, first, it->whole, it->input[turn]);
}

/* While a device runs behind the host, the host reads the first micro-batch of the next step. A
 * failure is ignored here, since this step may be the last one: the next step reads again and
 * reports it. */
static void fill_ahead(qd_interpreter *it)
{
    if (qd_device_get_caps(it->bound->device)->host_memory)
        return;
    int turn = it->next_input;
    int64_t first = it->in->first_sample + it->in->global_batch + first_sequence(it, 0);
    if (fill_input(it, turn, first) == QD_OK)
        it->input_first[turn] = first;
    else
        qd_error_clear();
}

static qd_status do_load(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    void *to;
    QD_TRY(qd_bound_buffer(it->bound, a->buffer, &to));
    int turn = it->next_input;
    it->next_input = 1 - turn;
    int64_t first = it->in->first_sample + first_sequence(it, a->microbatch);
    if (it->input_first[turn] != first)
        QD_TRY(fill_input(it, turn, first));
    it->input_first[turn] = -1;
    QD_TRY(qd_copy(it->stream, to, it->input[turn], qd_program_input(it->program) * (int64_t)sizeof *it->input[turn]));
    return qd_event_record(it->input_read[turn], it->stream);
}

static qd_status do_zero(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    void *to;
    int64_t size = (int64_t)qd_dtype_size(a->dtype);
    QD_TRY(qd_bound_at(it->bound, a->buffer, a->first, a->dtype, &to));
    return qd_fill_zero(it->stream, to, a->count * size);
}

static qd_status do_module(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    const qd_program *p = it->program;
    const qd_bound *b = it->bound;
    double *scores = p->strategy.preference.kind ? qd_bound_kind(b, QD_BUFFER_SCORES) : NULL;
    qd_frame frame = {
        .stream = it->stream,
        .kernels = it->kernels,
        .program = p,
        .module = a->module,
        .scratch = qd_bound_kind(b, QD_BUFFER_SCRATCH),
        .rope = qd_bound_kind(b, QD_BUFFER_TABLE),
        .maxima = qd_clip_scores(b, a->module),
        .loss = qd_bound_kind(b, QD_BUFFER_LOSS),
        .scores = scores ? scores + a->microbatch * qd_program_scores(p) : NULL,
        .cache = qd_bound_kind(b, QD_BUFFER_CACHE),
        .logits = qd_bound_kind(b, QD_BUFFER_LOGITS),
        .past = it->in->past,
        .seed = it->in->seed,
        .step = (uint64_t)it->in->step,
        .first_row = first_sequence(it, a->microbatch) * p->strategy.seq,
        .overwrite = a->overwrite,
        .documents = it->in->source->documents,
        .exchange = qd_exchanger_view(it->exchanger),
        .profile = it->in->profile ? &it->in->profile->ops : NULL,
        .timeline = it->timelines[QD_STREAM_COMPUTE],
        .op_id = p->action_count,
    };
    for (int u = 0; u < QD_USE_COUNT; u++) {
        void *address = NULL;
        if (a->use[u] >= 0)
            QD_TRY(qd_bound_buffer(b, a->use[u], &address));
        frame.use[u] = address;
        frame.first[u] = a->use[u] >= 0 ? p->buffers[a->use[u]].first : 0;
    }
    for (int family = 0; family < QD_FAMILY_COUNT && a->squares; family++)
        frame.squares[family] = (double *)qd_bound_kind(b, QD_BUFFER_SQUARES) + it->first_row[family];
    return qd_nn_run(&frame, qd_action_phases(a));
}

static qd_status do_add_tied(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    const qd_program *p = it->program;
    const qd_module *module = &p->ledger->modules[a->module];
    qd_dtype dtype = p->strategy.grad;
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        int owner = p->ledger->params[i].tied_to;
        void *to, *from;
        if (owner < 0)
            continue;
        QD_TRY(qd_bound_at(it->bound, a->use[QD_USE_GRAD], p->storage.offset[owner], dtype, &to));
        QD_TRY(qd_bound_at(it->bound, a->use[QD_USE_TIED_GRAD], p->storage.offset[i], dtype, &from));
        QD_TRY(it->kernels->add(it->stream, &(qd_add_args){.a = to, .b = from, .y = to, .n = p->storage.count[owner],
                                                           .a_dtype = dtype, .b_dtype = dtype, .y_dtype = dtype}));
    }
    return QD_OK;
}

static qd_work **work_of(qd_interpreter *it, const qd_action *a, int index)
{
    return a->stream == QD_STREAM_COMM ? &it->work[index] : NULL;
}

static qd_status do_reduce(qd_interpreter *it, const qd_action *a, int index)
{
    void *data;
    QD_TRY(qd_bound_at(it->bound, a->buffer, a->first, a->dtype, &data));
    if (a->group < 0 || !it->bound->groups[a->group])
        return QD_FAIL(QD_SYSTEM, "step program: action %d reduces over a group of one rank", index);
    QD_TRY(qd_contribution_reduced(it->bound, it->in, a, index, data));
    return qd_comm_all_reduce(it->bound->groups[a->group], data, data, a->count, a->dtype, QD_SUM, work_of(it, a, index));
}

static qd_status do_reduce_scatter(qd_interpreter *it, const qd_action *a, int index)
{
    QD_TRY(qd_contribution_scattered(it->bound, it->in, a, index));
    return qd_shard_reduce_scatter(it->bound, a, work_of(it, a, index));
}

static qd_status do_gather(qd_interpreter *it, const qd_action *a, int index)
{
    return qd_shard_gather(it->bound, a, work_of(it, a, index));
}

/* Sends and receives between ranks of the pipeline. */
static qd_status do_transfer(qd_interpreter *it, const qd_action *a, int index)
{
    void *data;
    QD_TRY(qd_bound_at(it->bound, a->buffer, a->first, a->dtype, &data));
    qd_comm *group = a->group >= 0 ? it->bound->groups[a->group] : NULL;
    if (!group)
        return QD_FAIL(QD_SYSTEM, "step program: action %d has no other rank to exchange with", index);
    int peer = (qd_comm_rank(group) + a->peer) % qd_comm_size(group);
    return a->kind == QD_ACTION_SEND ? qd_comm_send(group, data, a->count, a->dtype, peer, work_of(it, a, index))
                                     : qd_comm_recv(group, data, a->count, a->dtype, peer, work_of(it, a, index));
}

static qd_status do_pack(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    return qd_shard_pack(it->bound, a, it->stream);
}

static qd_status do_unpack(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    return qd_shard_unpack(it->bound, a, it->stream);
}

static qd_status do_add(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    void *to, *from;
    QD_TRY(qd_bound_at(it->bound, a->buffer, a->first, a->dtype, &to));
    QD_TRY(qd_bound_at(it->bound, a->part, a->first, a->dtype, &from));
    if (a->overwrite)
        return qd_copy(it->stream, to, from, a->count * (int64_t)qd_dtype_size(a->dtype));
    return it->kernels->add(it->stream, &(qd_add_args){.a = to, .b = from, .y = to, .n = a->count, .a_dtype = a->dtype,
                                                       .b_dtype = a->dtype, .y_dtype = a->dtype});
}

/* Sums of squares of the rows that this rank owns. */
static qd_status do_squares(qd_interpreter *it, const qd_action *a, int index)
{
    const qd_program *p = it->program;
    qd_contribution_kept(it->bound, it->in, a, index);
    const qd_module *module = &p->ledger->modules[a->module];
    double *out = (double *)qd_bound_kind(it->bound, QD_BUFFER_SQUARES);
    const char *grad = qd_bound_kind(it->bound, QD_BUFFER_GRAD);
    enum { TOGETHER = 32 };
    qd_row_squares_args list[TOGETHER];
    int count = 0;
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        qd_holding own = qd_program_holding(p, QD_BUFFER_GRAD, i);
        if (p->ledger->params[i].tied_to >= 0 || own.count == 0 || qd_program_squared(p, i))
            continue;
        list[count] = (qd_row_squares_args){
            .x = grad + own.offset * (int64_t)qd_dtype_size(p->strategy.grad),
            .out = out + it->first_row[p->ledger->params[i].family] + p->storage.shard_row[i],
            .rows = own.box.length[0],
            .cols = own.count / own.box.length[0],
            .dtype = p->strategy.grad,
            .next = count ? &list[count - 1] : NULL,
        };
        if (++count == TOGETHER) {
            QD_TRY(it->kernels->row_squares(it->stream, &list[count - 1]));
            count = 0;
        }
    }
    if (count)
        QD_TRY(it->kernels->row_squares(it->stream, &list[count - 1]));
    return QD_OK;
}

/* Sums the rows of each parameter in order, whichever rank has squared them. Parameters that
 * another rank of tp counts are 0 here. */
static qd_status do_sums(qd_interpreter *it, const qd_action *a, int index)
{
    (void)a;
    (void)index;
    double *sums = qd_bound_kind(it->bound, QD_BUFFER_SUMS);
    QD_TRY(qd_fill_zero(it->stream, sums, it->program->ledger->param_count * (int64_t)sizeof *sums));
    return it->kernels->run_sums(it->stream, &(qd_run_sums_args){
        .x = qd_bound_kind(it->bound, QD_BUFFER_SQUARES), .runs = it->row_runs, .run_count = it->run_count, .sums = sums});
}

/* Copies LOSS and MAXIMA to the host; the copies are complete after event `known`. */
static qd_status copy_figures(qd_interpreter *it)
{
    QD_TRY(qd_copy(it->stream, it->figures, qd_bound_kind(it->bound, QD_BUFFER_LOSS), QD_LOSS_COUNT * (int64_t)sizeof *it->figures));
    QD_TRY(qd_clip_copy_scores(it->bound, it->stream, it->scores));
    return qd_event_record(it->known, it->stream);
}

/* Adds parameters in order: the sum is the same on every rank. The factor stays on the device,
 * where the updates read it. */
static qd_status do_norm(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    double *loss = qd_bound_kind(it->bound, QD_BUFFER_LOSS);
    QD_TRY(it->kernels->grad_norm(it->stream, &(qd_grad_norm_args){
        .sums = qd_bound_kind(it->bound, QD_BUFFER_SUMS), .loss = loss, .count = it->program->ledger->param_count,
        .planned = (double)a->count, .clip = it->in->optim->clip, .most_norm = it->in->limits.norm, .most_loss = it->in->limits.loss,
        .out = loss + QD_LOSS_NORM}));
    return copy_figures(it);
}

/* Waits for the host copy of LOSS and notes what is not finite. The updates may still be
 * running. */
static qd_status take_figures(qd_interpreter *it)
{
    const qd_program *p = it->program;
    const double *f = it->figures;
    QD_TRY(qd_event_wait(it->known));
    if (!isfinite(f[QD_LOSS_SUM]) || (qd_program_ahead(p) > 0 && !isfinite(f[QD_LOSS_AHEAD])))
        snprintf(it->not_finite, sizeof it->not_finite, "the loss is not a finite number");
    else if (p->strategy.training && f[QD_LOSS_BAD] >= 0.0)
        snprintf(it->not_finite, sizeof it->not_finite, "the gradient of %s is not finite", p->ledger->params[(int)f[QD_LOSS_BAD]].name);
    else if (p->strategy.training && !isfinite(f[QD_LOSS_NORM]))
        snprintf(it->not_finite, sizeof it->not_finite, "the norm of the gradients is not a finite number");
    return QD_OK;
}

static qd_update_context update_context(const qd_interpreter *it)
{
    const qd_model *m = &it->program->ledger->model;
    double assignments = (double)it->in->global_batch * (double)it->program->strategy.seq * m->moe.per_token;
    return (qd_update_context){.bound = it->bound, .kernels = it->kernels, .stream = it->stream, .optim = it->in->optim,
                               .step = it->in->step,
                               .grad_scale = (const double *)qd_bound_kind(it->bound, QD_BUFFER_LOSS) + QD_LOSS_FACTOR,
                               .expert_mean = m->moe.experts > 0 ? assignments / m->moe.experts : 0.0};
}

/* Updates do not run while a step is repeated to locate non-finite numbers, and when it runs for
 * the first of two times to compare gradients. In training the kernels themselves skip the update,
 * on all ranks, when the factor is not finite. Notes that one ran. */
static bool updates(const qd_interpreter *it)
{
    return !it->in->look && !(it->in->check && !it->in->check->second) && (*it->torn = true);
}

static qd_status do_update(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    qd_update_context c = update_context(it);
    return updates(it) ? qd_update_module(&c, a) : QD_OK;
}

static qd_status do_copy(qd_interpreter *it, const qd_action *a, int index)
{
    qd_stream *stream = stream_of(it, a->stream);
    QD_TRY(qd_update_copy(it->bound, a, stream));
    return it->copied[index] ? qd_event_record(it->copied[index], stream) : QD_OK;
}

static qd_status do_momentum(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    qd_update_context c = update_context(it);
    return updates(it) ? qd_update_momentum(&c, a) : QD_OK;
}

static qd_status do_orthogonalize(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    qd_update_context c = update_context(it);
    return updates(it) ? qd_update_orthogonalize(&c, a) : QD_OK;
}

static qd_status do_update_matrices(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    qd_update_context c = update_context(it);
    return updates(it) ? qd_update_matrices(&c, a) : QD_OK;
}

static qd_status do_collect(qd_interpreter *it, const qd_action *a, int index)
{
    return qd_matrices_collect(it->bound, a, work_of(it, a, index));
}

static qd_status do_hand_back(qd_interpreter *it, const qd_action *a, int index)
{
    return qd_matrices_hand_back(it->bound, a, work_of(it, a, index));
}

static qd_status do_share(qd_interpreter *it, const qd_action *a, int index)
{
    return qd_matrices_share(it->bound, a, work_of(it, a, index));
}

static qd_status do_clip(qd_interpreter *it, const qd_action *a, int index)
{
    (void)index;
    qd_update_context c = update_context(it);
    return a->kind == QD_ACTION_MAXIMA ? qd_clip_exchange_scores(it->bound, a) : updates(it) ? qd_update_heads(&c, a) : QD_OK;
}

typedef qd_status (*action_fn)(qd_interpreter *it, const qd_action *a, int index);
static const action_fn action_table[QD_ACTION_KIND_COUNT] = {
    [QD_ACTION_ALLOC] = do_alloc,
    [QD_ACTION_FREE] = do_free,
    [QD_ACTION_LOAD] = do_load,
    [QD_ACTION_ZERO] = do_zero,
    [QD_ACTION_CAST_WEIGHTS] = do_module,
    [QD_ACTION_FORWARD] = do_module,
    [QD_ACTION_RECOMPUTE] = do_module,
    [QD_ACTION_BACKWARD] = do_module,
    [QD_ACTION_BACKWARD_INPUT] = do_module,
    [QD_ACTION_BACKWARD_WEIGHT] = do_module,
    [QD_ACTION_ADD_TIED] = do_add_tied,
    [QD_ACTION_REDUCE] = do_reduce,
    [QD_ACTION_REDUCE_SCATTER] = do_reduce_scatter,
    [QD_ACTION_GATHER] = do_gather,
    [QD_ACTION_SEND] = do_transfer,
    [QD_ACTION_RECV] = do_transfer,
    [QD_ACTION_PACK] = do_pack,
    [QD_ACTION_UNPACK] = do_unpack,
    [QD_ACTION_ADD] = do_add,
    [QD_ACTION_SQUARES] = do_squares,
    [QD_ACTION_SUMS] = do_sums,
    [QD_ACTION_NORM] = do_norm,
    [QD_ACTION_FETCH] = do_copy,
    [QD_ACTION_STORE] = do_copy,
    [QD_ACTION_UPDATE] = do_update,
    [QD_ACTION_MOMENTUM] = do_momentum,
    [QD_ACTION_COLLECT] = do_collect,
    [QD_ACTION_ORTHOGONALIZE] = do_orthogonalize,
    [QD_ACTION_HAND_BACK] = do_hand_back,
    [QD_ACTION_SHARE] = do_share,
    [QD_ACTION_UPDATE_MATRICES] = do_update_matrices,
    [QD_ACTION_MAXIMA] = do_clip,
    [QD_ACTION_CLIP] = do_clip,
};

static qd_status wait_for(qd_interpreter *it, int index)
{
    qd_work *work = it->work[index];
    if (!work)
        return QD_OK;
    it->work[index] = NULL;
    double begin = 0, end = 0;
    qd_status status = qd_work_wait_timed(work, &begin, &end);
    if (!it->watch)
        qd_trace_add(it->in->trace, it->in->step, index, begin, end);
    return status;
}

/* Makes an action's stream wait for its dependencies. The host itself waits only for communication
 * in host memory. */
static qd_status wait_before(qd_interpreter *it, const qd_action *a)
{
    const qd_program *p = it->program;
    qd_stream *stream = stream_of(it, a->stream);
    for (int d = 0; d < a->dep_count; d++) {
        int on = p->deps[a->dep_first + d];
        if (it->copied[on]) {
            QD_TRY(qd_stream_wait_event(stream, it->copied[on]));
        } else if (stream != it->stream && p->actions[on].stream == QD_STREAM_COMPUTE) {
            QD_TRY(qd_event_record(it->reached, it->stream));
            QD_TRY(qd_stream_wait_event(stream, it->reached));
        } else {
            QD_TRY(wait_for(it, on));
        }
    }
    return QD_OK;
}

/* Whether an action is recorded on the timeline of its stream: all except communication. */
static bool timed(const qd_interpreter *it, const qd_action *a)
{
    return (it->in->trace || it->in->profile) && a->stream != QD_STREAM_COMM && a->kind != QD_ACTION_ALLOC &&
           a->kind != QD_ACTION_FREE;
}

/* Records an exchange inside a module. */
static void take_exchange(void *context, int op, double begin, double end, double waited)
{
    qd_interpreter *it = context;
    qd_trace_add_exchange(it->in->trace, it->in->step, it->at, op, begin, end, waited);
}

static qd_status run_action(qd_interpreter *it, int index)
{
    const qd_action *a = &it->program->actions[index];
    it->at = index;
    if (it->in->trace)
        qd_watch_action(it->watch, index);
    double arrived = qd_clock_now();
    QD_TRY(wait_before(it, a));
    if (it->in->profile)
        it->in->profile->wait_seconds += qd_clock_now() - arrived;
    if (it->in->cpu_seconds && qd_action_phases(a) != 0) {
        double begin = qd_clock_thread_cpu();
        QD_TRY(action_table[a->kind](it, a, index));
        it->in->cpu_seconds[index] = qd_clock_thread_cpu() - begin;
        return QD_OK;
    }
    if (!timed(it, a))
        return action_table[a->kind](it, a, index);
    int piece;
    QD_TRY(qd_timeline_begin(it->timelines[a->stream], index, &piece));
    QD_TRY(action_table[a->kind](it, a, index));
    return qd_timeline_end(it->timelines[a->stream], piece);
}

/* A piece of the timeline is an action, an op (numbered after the actions), or a wait for an
 * exchange. */
static void take_piece(void *context, int id, double begin, double end)
{
    qd_interpreter *it = context;
    qd_step_profile *profile = it->in->profile;
    int actions = it->program->action_count;
    if (id >= actions + QD_OP_KIND_COUNT) {
        qd_watch_stood(it->watch, id, begin);
        return;
    }
    if (id >= actions) {
        profile->ops.seconds[id - actions] += end - begin;
        return;
    }
    if (!it->watch || !qd_action_communicates(&it->program->actions[id])) /* else the communication stream's times are used */
        qd_trace_add(it->in->trace, it->in->step, id, begin, end);
    if (profile) {
        profile->action_seconds[it->program->actions[id].kind] += end - begin;
        profile->action_calls[it->program->actions[id].kind]++;
    }
}

/* Publishes what this rank is doing, for the messages of all ranks. */
static void announce(qd_interpreter *it, int index)
{
    const qd_action *a = &it->program->actions[index];
    if (a->kind == QD_ACTION_ALLOC || a->kind == QD_ACTION_FREE)
        return;
    char place[64];
    const char *module = a->module >= 0 ? it->program->ledger->modules[a->module].name : "";
    snprintf(place, sizeof place, "step %lld, %s%s%s", (long long)it->in->step, qd_action_name((qd_action_kind)a->kind),
             module[0] ? " " : "", module);
    qd_comm_at(it->bound->world, place);
}

/* Aborts the other ranks, waits for pending operations (which fail too), and keeps the first error
 * message. */
static qd_status fail_step(qd_interpreter *it, int index, qd_status status)
{
    char place[128], message[1024];
    qd_action_describe(it->program, index, place, sizeof place);
    qd_error_prefix(status, "rank %d, action %d (%s): ", qd_comm_rank(it->bound->world), index, place);
    snprintf(message, sizeof message, "%s", qd_error_message());
    qd_comm_abort(it->bound->world, message);
    for (int i = 0; i < it->program->action_count; i++)
        wait_for(it, i);
    qd_stream_wait(qd_device_in_stream(it->bound->device)); /* copies: their memory may be freed after this */
    qd_stream_wait(qd_device_out_stream(it->bound->device));
    qd_exchanger_drain(it->exchanger);
    return QD_FAIL(status, "%s", message);
}

/* Starts the timelines of a step that is traced or profiled. */
static qd_status start_timelines(qd_interpreter *it)
{
    const qd_program *p = it->program;
    if (!it->in->trace && !it->in->profile)
        return QD_OK;
    for (int i = 0; i < QD_STREAM_COUNT; i++) {
        bool used = i == QD_STREAM_COMPUTE || (i != QD_STREAM_COMM && p->strategy.offload);
        if (used && !it->timelines[i])
            QD_TRY(qd_timeline_create(stream_of(it, i), &it->timelines[i]));
        if (used)
            QD_TRY(qd_timeline_start(it->timelines[i], i == QD_STREAM_COMPUTE ? NULL : it->timelines[QD_STREAM_COMPUTE]));
    }
    if (it->in->trace && !it->watch)
        QD_TRY(qd_watch_create(it->bound, it->exchanger, it->timelines[QD_STREAM_COMPUTE], p->action_count + QD_OP_KIND_COUNT, &it->watch));
    return qd_watch_start(it->watch);
}

/* The mean over pairs of one of their figures; 0 without pairs. */
static double pair_mean(const qd_interpreter *it, int figure)
{
    const double pairs = it->program->strategy.preference.kind ? it->figures[QD_LOSS_TOKENS] : 0.0;
    return pairs > 0.0 ? it->figures[figure] / pairs : 0.0;
}

qd_status qd_interpret(qd_interpreter *it, const qd_step_input *input, qd_step_output *output)
{
    it->in = input;
    it->not_finite[0] = '\0';
    it->torn = &output->torn;
    output->torn = false;
    qd_status status = QD_OK;
    int index = 0;
    QD_TRY(start_timelines(it));
    bool watched = input->trace && qd_device_get_caps(it->bound->device)->host_memory;
    qd_exchanger_observe(it->exchanger, watched ? take_exchange : NULL, it);
    for (; index < it->program->action_count && status == QD_OK; index++) {
        announce(it, index);
        status = run_action(it, index);
    }
    if (status != QD_OK)
        return fail_step(it, index - 1, status);
    /* Operations that no later action waited for. */
    for (int i = 0; i < it->program->action_count; i++) {
        status = wait_for(it, i);
        if (status != QD_OK)
            return fail_step(it, i, status);
    }
    const bool training = it->program->strategy.training;
    if (training)
        fill_ahead(it);
    else
        QD_TRY(copy_figures(it));
    QD_TRY(take_figures(it));
    if (!training && it->not_finite[0] != '\0')
        return QD_FAIL(QD_NOT_FINITE, "%s: a weight of the model may not be finite", it->not_finite);
    if (input->trace || input->profile)
        QD_TRY(qd_watch_collect(it->watch));
    for (int i = 0; i < QD_STREAM_COUNT && (input->trace || input->profile); i++)
        if (it->timelines[i])
            QD_TRY(qd_timeline_collect(it->timelines[i], take_piece, it));
    if (input->trace) {
        qd_watch_tell(it->watch, input->trace, input->step);
        qd_watch_stop(it->watch);
    }
    *output = (qd_step_output){
        .loss = it->figures[QD_LOSS_TOKENS] > 0.0 ? it->figures[QD_LOSS_SUM] / it->figures[QD_LOSS_TOKENS] : 0.0,
        .mtp_loss = it->figures[QD_LOSS_TOKENS] > 0.0 && qd_program_ahead(it->program) > 0
                        ? it->figures[QD_LOSS_AHEAD] / it->figures[QD_LOSS_TOKENS] / qd_program_ahead(it->program)
                        : 0.0,
        .tokens = it->figures[QD_LOSS_TOKENS],
        .margin = pair_mean(it, QD_LOSS_MARGIN),
        .chosen_reward = pair_mean(it, QD_LOSS_CHOSEN),
        .accuracy = pair_mean(it, QD_LOSS_RIGHT),
        .grad_norm = training ? it->figures[QD_LOSS_NORM] : 0.0,
        .lr = qd_optim_lr(input->optim, input->step),
        .max_score = qd_clip_largest(it->program, it->scores),
        .spike = training && it->not_finite[0] == '\0' && !isfinite(it->figures[QD_LOSS_FACTOR]),
    };
    output->skipped = output->spike || it->not_finite[0] != '\0';
    snprintf(output->not_finite, sizeof output->not_finite, "%s", it->not_finite);
    return QD_OK;
}
