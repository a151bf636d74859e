/* Builds one rank's trainer (program, device, buffers, initial values), runs steps, and reads and
 * writes parameters. */
#include "train/exec/trainer.h"

#include "base/half.h"
#include "base/thread.h"
#include "comm/device.h"
#include "spec/config/fit.h"
#include "spec/layout/pieces.h"
#include "train/exec/faults/gradients.h"
#include "train/exec/faults/nonfinite.h"
#include "train/exec/initial.h"
#include "train/exec/tuning.h"
#include "train/ranks/topology.h"

#include <quadrille/machine.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct qd_trainer {
    qd_config config;
    qd_batch_source source;
    qd_comm *world;
    qd_comm *data; /* the world for device buffers; NULL: host memory */
    qd_arena *arena;
    qd_program *program;
    qd_device *device;
    qd_bound *bound;
    qd_interpreter *interpreter;
    qd_bound *evaluation_bound; /* validation; NULL: the run has none */
    qd_interpreter *evaluator;
    qd_initial_ahead *ahead; /* initial values drawn before there is device memory; NULL: none */
    qd_trace *trace;
    qd_step_profile *profile;
    double *cpu_seconds;
    qd_position position;
    qd_step_limits limits;
    qd_cores_set cores; /* of the calling thread before its rank stayed on one NUMA node; empty: it does not */
};

static int threads_per_rank(const qd_trainer *t, int local_ranks)
{
    const bool together = strcmp(qd_comm_backend(t->world), "local") == 0;
    return t->config.threads > 0 ? t->config.threads
                                 : qd_topology_threads(qd_cores(), qd_cores_allowed(), local_ranks, together);
}

static bool in_host(const qd_trainer *t, qd_buffer_kind kind)
{
    int buffer = t->program->persistent[kind];
    return buffer >= 0 && t->program->buffers[buffer].host;
}

/* State in host memory may be accessed here once the step's copies are done: the compute stream
 * waits for the last one. */
static qd_status write_host(qd_trainer *t, void *to, const float *values, int64_t count)
{
    QD_TRY(qd_stream_wait(qd_device_compute_stream(t->device)));
    memcpy(to, values, (size_t)count * sizeof *values);
    return QD_OK;
}

/* fp32 values in two halves, for copies between host and device. */
enum { PIECE = 1 << 18 }; /* elements per copy: smaller copies are dominated by latency */
typedef struct piece {
    uint16_t *halves;
    int16_t *rests;
} piece;

static qd_status piece_create(int64_t count, piece *out)
{
    size_t n = (size_t)(count < PIECE ? count : PIECE);
    out->halves = malloc(n * (sizeof *out->halves + sizeof *out->rests));
    if (!out->halves)
        return QD_FAIL(QD_NO_MEMORY, "no memory to copy %zu weights between host and device", n);
    out->rests = (int16_t *)(out->halves + n);
    return QD_OK;
}

static qd_status store_pieces(qd_stream *stream, const piece *by, uint16_t *to, int16_t *rest, const float *values, int64_t count)
{
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t n = count - done < PIECE ? count - done : PIECE;
        for (int64_t i = 0; i < n; i++)
            by->halves[i] = qd_f32_to_bf16(values[done + i]);
        for (int64_t i = 0; i < n && rest; i++)
            by->rests[i] = qd_f32_rest(values[done + i], by->halves[i]);
        QD_TRY(qd_copy(stream, to + done, by->halves, n * 2));
        if (rest)
            QD_TRY(qd_copy(stream, rest + done, by->rests, n * 2));
        QD_TRY(qd_stream_wait(stream));
    }
    return QD_OK;
}

/* Rounds on the host, piece by piece: the memory plan has no space for fp32 values on the device.
 * The low 16 bits go to `rest`, if it is not NULL. */
static qd_status store_rounded(qd_stream *stream, uint16_t *to, int16_t *rest, const float *values, int64_t count)
{
    piece by = {NULL, NULL};
    QD_TRY(piece_create(count, &by));
    qd_status status = store_pieces(stream, &by, to, rest, values, count);
    free(by.halves);
    return status;
}

static qd_status read_pieces(qd_stream *stream, const piece *by, const uint16_t *from, const int16_t *rest, float *out, int64_t count)
{
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t n = count - done < PIECE ? count - done : PIECE;
        QD_TRY(qd_copy(stream, by->halves, from + done, n * 2));
        QD_TRY(qd_copy(stream, by->rests, rest + done, n * 2));
        QD_TRY(qd_stream_wait(stream));
        for (int64_t i = 0; i < n; i++)
            out[done + i] = qd_f32_join(by->halves[i], by->rests[i]);
    }
    return QD_OK;
}

/* Reads fp32 values that are stored in two halves on the device. */
static qd_status read_parts(qd_stream *stream, const uint16_t *from, const int16_t *rest, float *out, int64_t count)
{
    piece by = {NULL, NULL};
    QD_TRY(piece_create(count, &by));
    qd_status status = read_pieces(stream, &by, from, rest, out, count);
    free(by.halves);
    return status;
}

/* Copies fp32 values to elements first .. first + count - 1 of this rank's shard of a parameter,
 * and of its master copy. */
static qd_status store_param(qd_trainer *t, int param, int64_t first, int64_t count, const float *values)
{
    const qd_program *p = t->program;
    qd_stream *stream = qd_device_compute_stream(t->device);
    int64_t offset = qd_program_holding(p, QD_BUFFER_PARAM, param).offset + first;
    char *to = (char *)qd_bound_kind(t->bound, QD_BUFFER_PARAM) + offset * (int64_t)qd_dtype_size(p->strategy.param);
    bool updated = param != p->storage.copied && !p->ledger->params[param].frozen; /* a tied copy is never updated */
    char *master = updated ? qd_bound_kind(t->bound, QD_BUFFER_MASTER) : NULL;
    if (count == 0)
        return QD_OK;
    if (p->strategy.param == QD_F32) {
        QD_TRY(qd_copy(stream, to, values, count * 4));
        return qd_stream_wait(stream);
    }
    void *wide = master ? master + (qd_program_holding(p, QD_BUFFER_MASTER, param).offset + first) * qd_master_bytes(&p->strategy) : NULL;
    if (qd_master_is_split(&p->strategy))
        return store_rounded(stream, (uint16_t *)to, wide, values, count);
    bool there = wide && !in_host(t, QD_BUFFER_MASTER); /* fp32 values are on the device */
    if (wide && !there)
        QD_TRY(write_host(t, wide, values, count));
    if (!there)
        return store_rounded(stream, (uint16_t *)to, NULL, values, count);
    QD_TRY(qd_copy(stream, wide, values, count * 4));
    QD_TRY(qd_device_kernels(t->device)->cast(stream, &(qd_cast_args){
        .from = wide, .to = to, .n = count, .from_dtype = QD_F32, .to_dtype = p->strategy.param,
    }));
    return qd_stream_wait(stream);
}

static qd_status store_initial(void *context, int param, int64_t first, int64_t count, const float *values)
{
    return store_param(context, param, first, count, values);
}

qd_status qd_rope_fill(const qd_bound *bound, int64_t length)
{
    const qd_model *m = &bound->program->ledger->model;
    const qd_strategy *s = &bound->program->strategy;
    int64_t seq = qd_positions(s->seq, s->context), size = seq * qd_rope_dims(m);
    int64_t bytes = qd_rope_tables(m) * size * 4;
    if (m->position != QD_POSITION_ROPE)
        return QD_OK;
    float *table = malloc((size_t)bytes);
    if (!table)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rotary table");
    for (int i = 0; i < qd_rope_tables(m); i++)
        qd_rope_table(m, seq, length > 0 ? length : seq, i == 1, table + i * size);
    qd_stream *stream = qd_device_compute_stream(bound->device);
    qd_status status = qd_copy(stream, qd_bound_kind(bound, QD_BUFFER_TABLE), table, bytes);
    if (status == QD_OK)
        status = qd_stream_wait(stream);
    free(table);
    return status;
}

/* The op lists use the fused kernels of the device kind they were written for. */
static qd_status check_traits(const qd_trainer *t)
{
    const qd_device_caps *caps = qd_device_get_caps(t->device);
    const qd_device_traits *traits = t->program->strategy.traits;
    if ((traits->fused_residual && !caps->fused_residual) || (traits->fused_gelu && !caps->fused_gelu) ||
        (traits->fused_bias_grad && !caps->fused_bias_grad))
        return QD_FAIL(QD_SYSTEM, "the step program uses fused GEMMs that device %s does not offer", caps->name);
    if (t->program->strategy.fp8.on && !caps->fp8)
        return QD_FAIL(QD_UNSUPPORTED, "train.precision=fp8: device %s (%s) has no GEMMs of fp8 operands: use train.precision=bf16",
                       caps->name, caps->isa);
    if (t->program->strategy.fp8.on && t->program->strategy.fp8.recipe != QD_FP8_RECIPE_TENSOR && !caps->fp8_recipes)
        return QD_FAIL(QD_UNSUPPORTED, "fp8.recipe: device %s (%s) has GEMMs in fp8 with one scale per tensor only: use fp8.recipe=tensor",
                       caps->name, caps->isa);
    return QD_OK;
}

/* A run that does not fit on an accelerator reports what would fit. */
static qd_status explain_fit(qd_trainer *t, int64_t left)
{
    qd_strbuf text = {0};
    qd_status status = qd_fit_explain(&t->config, qd_comm_rank(t->world), left, false, &text);
    if (status == QD_OK)
        status = QD_FAIL(QD_NO_MEMORY, "rank %d does not fit on its GPU: %s", qd_comm_rank(t->world), text.data ? text.data : "");
    qd_strbuf_free(&text);
    return status;
}

/* Creates the communicator for device memory, which the host cannot read. Host data still goes
 * through `world`. */
static qd_status reach_peers(qd_trainer *t)
{
    bool nccl = strcmp(t->config.backend, "nccl") == 0;
    if ((qd_device_get_caps(t->device)->host_memory && !t->config.device_comm) || (qd_comm_size(t->world) == 1 && !nccl))
        return QD_OK;
    return qd_comm_on_device(t->world, t->device, nccl ? "nccl" : NULL, &t->data);
}

/* Called before memory is allocated, and before tuning, which takes seconds. */
static qd_status check_memory(qd_trainer *t, int64_t *left)
{
    int64_t needed = t->program->persistent_bytes + t->program->dynamic_bytes + t->program->sample_bytes, total = 0;
    *left = 0;
    if (qd_device_get_caps(t->device)->host_memory)
        return QD_OK;
    QD_TRY(qd_device_memory(t->device, left, &total));
    return needed > *left ? explain_fit(t, *left) : QD_OK;
}

/* Checks again: ranks that share a GPU may have allocated memory in between. */
static qd_status take_memory(qd_trainer *t)
{
    int64_t left;
    bool own = !qd_device_get_caps(t->device)->host_memory;
    QD_TRY(check_memory(t, &left));
    qd_status status = qd_bind(t->program, t->device, t->world, t->data, NULL, &t->bound);
    return own && status == QD_NO_MEMORY ? explain_fit(t, left) : status;
}

/* Page-locked memory cannot be reclaimed: without this check, a machine with too little of it would
 * kill the run or other processes. */
static qd_status check_host(const qd_trainer *t, int ranks)
{
    const double gib = 1024.0 * 1024.0 * 1024.0;
    /* the copy for checkpoints */
    int64_t copy = t->program->host_bytes > 0 && qd_config_snapshot(&t->config) ? qd_pieces_bytes(t->program) : 0;
    double wanted = (double)(t->program->host_bytes + copy) * ranks,
           there = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (wanted <= there)
        return QD_OK;
    return QD_FAIL(
        QD_NO_MEMORY,
        "train.offload=optimizer needs %.2f GiB of host memory for the state of this machine's %d rank%s (including the copy that "
        "checkpoints are written from), but the machine has %.2f GiB: parallel.zero=1 shards the state over the ranks of dp, "
        "train.offload=none keeps it on the device",
        wanted / gib, ranks, ranks == 1 ? "" : "s", there / gib);
}

/* Creating a GPU context, loading libraries and tuning take seconds in which the host's cores are
 * idle, and drawing billions of values takes about as long: use a part of the free host memory for
 * values drawn ahead. */
static void draw_ahead(qd_trainer *t, int threads, int ranks)
{
    if (strcmp(t->config.device, "cpu") != 0)
        t->ahead = qd_initial_begin(t->program, t->config.seed, threads > 1 ? threads - 1 : 1, qd_machine_free_memory(NULL) / 4 / ranks);
}

/* The program of evaluations, in the memory of the step program. */
static qd_status build_evaluator(qd_trainer *t)
{
    const qd_program *evaluation = t->program->evaluation;
    if (!evaluation)
        return QD_OK;
    QD_TRY(qd_tune_products(&t->config, evaluation, t->device, t->world));
    QD_TRY(qd_bind(evaluation, t->device, t->world, t->data, t->bound, &t->evaluation_bound));
    return qd_interpreter_create(t->evaluation_bound, &t->evaluator);
}

static qd_status build(qd_trainer *t, bool drawn)
{
    qd_device_config device = qd_device_config_default();
    int rank = qd_comm_rank(t->world);
    qd_comm_where where = qd_comm_locate(t->world);
    device.threads = threads_per_rank(t, where.local_ranks);
    if (strcmp(t->config.device, "cpu") == 0)
        QD_TRY(qd_topology_bind(QD_TOPOLOGY_FOLDER, where.local_rank, where.local_ranks, &t->cores));
    device.ordinal = t->config.gpu >= 0 ? t->config.gpu : where.local_rank;
    device.share = t->config.gpu < 0;
    device.deterministic = t->config.deterministic;
    device.isa = t->config.kernels;
    QD_TRY(qd_arena_create(&t->arena));
    QD_TRY(qd_config_build(&t->config, rank, t->arena, &t->program));
    QD_TRY(check_host(t, where.local_ranks));
    if (drawn)
        draw_ahead(t, device.threads, where.local_ranks);
    QD_TRY(qd_device_create(t->config.device, &device, &t->device));
    QD_TRY(check_traits(t));
    int64_t left;
    QD_TRY(check_memory(t, &left));
    QD_TRY(qd_tune_products(&t->config, t->program, t->device, t->world));
    QD_TRY(reach_peers(t));
    QD_TRY(take_memory(t));
    QD_TRY(qd_interpreter_create(t->bound, &t->interpreter));
    QD_TRY(build_evaluator(t));
    QD_TRY(qd_rope_fill(t->bound, 0));
    if (drawn)
        QD_TRY(qd_initial_values(t->program, t->config.seed, device.threads, t->ahead, store_initial, t));
    else if (t->config.model.lora.rank > 0 && t->config.strategy.training)
        QD_TRY(qd_initial_adapters(t->program, t->config.seed, store_initial, t));
    qd_initial_end(t->ahead);
    t->ahead = NULL;
    return QD_OK;
}

static qd_status create(const qd_config *config, qd_comm *world, const qd_batch_source *source, bool drawn, qd_trainer **trainer)
{
    qd_trainer *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a trainer");
    t->config = *config;
    t->source = *source;
    t->world = world;
    qd_status status = build(t, drawn);
    if (status != QD_OK) {
        qd_trainer_destroy(t);
        return status;
    }
    *trainer = t;
    return QD_OK;
}

qd_status qd_trainer_create(const qd_config *config, qd_comm *world, const qd_batch_source *source, qd_trainer **trainer)
{
    return create(config, world, source, true, trainer);
}

qd_status qd_trainer_create_blank(const qd_config *config, qd_comm *world, const qd_batch_source *source, qd_trainer **trainer)
{
    return create(config, world, source, false, trainer);
}

void qd_trainer_destroy(qd_trainer *t)
{
    if (!t)
        return;
    qd_initial_end(t->ahead);
    qd_interpreter_destroy(t->evaluator);
    qd_bound_destroy(t->evaluation_bound);
    qd_interpreter_destroy(t->interpreter);
    qd_bound_destroy(t->bound);
    qd_comm_destroy(t->data);
    qd_device_destroy(t->device);
    qd_arena_destroy(t->arena);
    qd_topology_release(&t->cores);
    free(t);
}

qd_status qd_trainer_step(qd_trainer *t, qd_step_output *output)
{
    const qd_step_input input = {
        .step = t->position.step + 1,
        .first_sample = t->position.next_sample,
        .global_batch = t->config.global_batch,
        .seed = t->config.seed,
        .source = &t->source,
        .optim = &t->config.optimizer,
        .limits = t->limits,
        .trace = t->trace,
        .profile = t->profile,
        .cpu_seconds = t->cpu_seconds,
    };
    if (t->config.check_gradients > 0 && input.step % t->config.check_gradients == 0)
        QD_TRY(qd_gradients_twice(t->interpreter, t->program, t->world, &input, output));
    else
        QD_TRY(qd_interpret(t->interpreter, &input, output));
    const bool not_finite = output->skipped && !output->spike && output->different[0] == '\0';
    if (not_finite)
        QD_TRY(qd_nonfinite_explain(t, t->interpreter, t->world, &input, output));
    if (not_finite && !t->config.skip_nonfinite)
        return QD_FAIL(QD_NOT_FINITE, "step %lld: %s; the weights are those of step %lld", (long long)input.step, output->not_finite,
                       (long long)(input.step - 1));
    t->position.step++;
    t->position.next_sample += t->config.global_batch;
    return QD_OK;
}

qd_status qd_trainer_tune_more(qd_trainer *t, int *left)
{
    return qd_tune_one_more(&t->config, t->bound, left);
}

qd_status qd_trainer_evaluate(qd_trainer *t, const qd_batch_source *source, int64_t first, qd_step_output *output)
{
    const qd_step_input input = {.step = t->position.step, .first_sample = first, .global_batch = t->config.global_batch,
                                 .seed = t->config.seed, .source = source, .optim = &t->config.optimizer};
    return qd_interpret(t->evaluator, &input, output);
}

qd_status qd_trainer_scores(qd_trainer *t, double *scores, int64_t *first)
{
    const qd_program *p = t->program->evaluation;
    const qd_mesh *mesh = &p->ledger->mesh;
    const int rank = qd_comm_rank(t->world);
    const int64_t each = p->strategy.micro_batch * p->strategy.micro_batches;
    qd_stream *stream = qd_device_compute_stream(t->device);
    *first = -1;
    bool head = p->ledger->modules[p->ledger->module_count - 1].stage_rank == qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_PP), rank);
    if (!head || qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_TP) | QD_AXIS_BIT(QD_AXIS_CP), rank) != 0)
        return QD_OK;
    *first = qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_DP), rank) * each;
    QD_TRY(qd_copy(stream, scores, qd_bound_kind(t->evaluation_bound, QD_BUFFER_SCORES), each * p->strategy.seq * (int64_t)sizeof *scores));
    return qd_stream_wait(stream);
}

static qd_status find_param(const qd_trainer *t, const char *name, int64_t count, int *param)
{
    const qd_program *p = t->program;
    *param = qd_ledger_find(p->ledger, name);
    if (*param < 0 || p->ledger->params[*param].tied_to >= 0)
        return QD_FAIL(QD_USAGE, "the model has no parameter '%s'", name);
    int64_t all = p->ledger->params[*param].shape[0] * p->ledger->params[*param].shape[1];
    if (all != count)
        return QD_FAIL(QD_USAGE, "parameter '%s' has %lld elements, not %lld", name, (long long)all, (long long)count);
    return QD_OK;
}

/* The buffer that stores a kind of tensor, and its type; fp32 if there is a master copy, or its low
 * half. */
static qd_buffer_kind buffer_of(const qd_trainer *t, int param, qd_tensor_kind kind, qd_dtype *dtype)
{
    const qd_strategy *s = &t->program->strategy;
    *dtype = kind == QD_TENSOR_GRADIENT ? s->grad : QD_F32;
    switch (kind) {
    case QD_TENSOR_GRADIENT: return QD_BUFFER_GRAD;
    case QD_TENSOR_MOMENT1: return QD_BUFFER_MOMENT1;
    case QD_TENSOR_MOMENT2: return QD_BUFFER_MOMENT2;
    case QD_TENSOR_VALUE: break;
    }
    if (s->training && s->param != QD_F32 && !(param >= 0 && t->program->ledger->params[param].frozen))
        return QD_BUFFER_MASTER;
    *dtype = s->param;
    return QD_BUFFER_PARAM;
}

bool qd_trainer_holds(const qd_trainer *t, qd_tensor_kind kind)
{
    qd_dtype dtype;
    return qd_bound_kind(t->bound, buffer_of(t, -1, kind, &dtype)) != NULL;
}

qd_holding qd_trainer_holding(const qd_trainer *t, int param, qd_tensor_kind kind)
{
    qd_dtype dtype;
    return qd_program_holding(t->program, buffer_of(t, param, kind, &dtype), param);
}

int64_t qd_trainer_largest(const qd_trainer *t)
{
    int64_t largest = 1;
    for (int i = 0; i < t->program->ledger->param_count; i++) {
        int64_t count = qd_trainer_holding(t, i, QD_TENSOR_VALUE).count;
        largest = count > largest ? count : largest;
    }
    return largest;
}

static qd_status check_kept(const qd_trainer *t, int param, qd_tensor_kind kind)
{
    qd_dtype dtype;
    if (!qd_program_keeps(t->program, buffer_of(t, param, kind, &dtype), param))
        return QD_FAIL(QD_USAGE, "the optimizer keeps no such state of '%s'", t->program->ledger->params[param].name);
    return QD_OK;
}

qd_status qd_trainer_get(qd_trainer *t, int param, qd_tensor_kind kind, float *out)
{
    qd_dtype dtype;
    qd_holding own = qd_trainer_holding(t, param, kind);
    const char *base = qd_bound_kind(t->bound, buffer_of(t, param, kind, &dtype));
    QD_TRY(check_kept(t, param, kind));
    if (own.count == 0)
        return QD_OK;
    const char *from = base + own.offset * (int64_t)qd_dtype_size(dtype);
    qd_stream *stream = qd_device_compute_stream(t->device);
    if (buffer_of(t, param, kind, &dtype) == QD_BUFFER_MASTER && qd_master_is_split(&t->program->strategy)) {
        int64_t offset = qd_program_holding(t->program, QD_BUFFER_PARAM, param).offset;
        return read_parts(stream, (const uint16_t *)qd_bound_kind(t->bound, QD_BUFFER_PARAM) + offset, (const int16_t *)base + own.offset,
                          out, own.count);
    }
    if (in_host(t, buffer_of(t, param, kind, &dtype))) {
        QD_TRY(qd_stream_wait(stream));
        memcpy(out, from, (size_t)own.count * sizeof *out);
        return QD_OK;
    }
    if (dtype == QD_F32) {
        QD_TRY(qd_copy(stream, out, from, own.count * 4));
        return qd_stream_wait(stream);
    }
    void *widened;
    QD_TRY(qd_device_alloc(t->device, own.count * 4, &widened));
    qd_status status = qd_device_kernels(t->device)->cast(
        stream, &(qd_cast_args){.from = from, .to = widened, .n = own.count, .from_dtype = dtype, .to_dtype = QD_F32});
    if (status == QD_OK)
        status = qd_copy(stream, out, widened, own.count * 4);
    if (status == QD_OK)
        status = qd_stream_wait(stream);
    qd_device_free(t->device, widened, own.count * 4);
    return status;
}

qd_status qd_trainer_put(qd_trainer *t, int param, qd_tensor_kind kind, const float *values)
{
    qd_dtype dtype;
    qd_holding own = qd_trainer_holding(t, param, kind);
    if (kind == QD_TENSOR_VALUE)
        return store_param(t, param, 0, own.count, values);
    float *base = qd_bound_kind(t->bound, buffer_of(t, param, kind, &dtype));
    QD_TRY(check_kept(t, param, kind));
    if (dtype != QD_F32)
        return QD_FAIL(QD_USAGE, "the gradient of '%s' is not fp32 state and cannot be written", t->program->ledger->params[param].name);
    if (in_host(t, buffer_of(t, param, kind, &dtype)))
        return write_host(t, base + own.offset, values, own.count);
    qd_stream *stream = qd_device_compute_stream(t->device);
    QD_TRY(qd_copy(stream, base + own.offset, values, own.count * 4));
    return qd_stream_wait(stream);
}

/* The box that rank `rank` contributes when a whole tensor is gathered; empty if another replica
 * contributes it. */
static qd_atom spoken_box(const qd_program *p, int param, int rank)
{
    const qd_mesh *mesh = &p->ledger->mesh;
    qd_atom box = qd_ledger_atom(p->ledger, param, rank);
    int64_t first, rows;
    int family = p->ledger->params[param].family, parts = qd_program_share(p, QD_BUFFER_PARAM, param).parts;
    int at = qd_group_coord(mesh, qd_ledger_data_group(p->ledger, family), rank);
    qd_slice(box.length[0], parts, at % parts, &first, &rows);
    box.begin[0] += first;
    box.length[0] = at < parts && qd_ledger_counts(p->ledger, param, rank) ? rows : 0;
    return box;
}

/* All-gathers the boxes of a parameter to every rank of the world; `own` is this rank's. */
static qd_status gather_boxes(qd_trainer *t, int param, const float *own, float *out)
{
    const qd_program *p = t->program;
    int world = p->ledger->mesh.world;
    int64_t cols = p->ledger->params[param].shape[1], most = 0;
    for (int r = 0; r < world; r++)
        most += spoken_box(p, param, r).length[0];
    qd_segment_list *lists = calloc((size_t)world, sizeof *lists);
    qd_segment *segments = calloc((size_t)most + 1, sizeof *segments), *next = segments;
    qd_status status = lists && segments ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to gather %s", p->ledger->params[param].name);
    for (int r = 0; r < world && status == QD_OK; r++) {
        qd_atom box = spoken_box(p, param, r);
        lists[r].segments = next;
        if (box.length[0] > 0 && box.length[1] == cols)
            *next++ = (qd_segment){box.begin[0] * cols, box.length[0] * cols};
        for (int64_t row = 0; row < box.length[0] && box.length[1] > 0 && box.length[1] < cols; row++)
            *next++ = (qd_segment){(box.begin[0] + row) * cols + box.begin[1], box.length[1]};
        lists[r].count = (int)(next - lists[r].segments);
    }
    if (status == QD_OK)
        status = qd_comm_all_gather_v(t->world, own, out, lists, QD_F32, NULL);
    free(lists);
    free(segments);
    return status;
}

qd_status qd_trainer_read(qd_trainer *t, const char *name, qd_tensor_kind kind, float *out, int64_t count)
{
    int param;
    QD_TRY(find_param(t, name, count, &param));
    QD_TRY(check_kept(t, param, kind));
    qd_holding held = qd_trainer_holding(t, param, kind);
    if (qd_comm_size(t->world) == 1)
        return qd_trainer_get(t, param, kind, out);
    float *own = malloc((size_t)(held.count > 0 ? held.count : 1) * sizeof *own);
    if (!own)
        return QD_FAIL(QD_NO_MEMORY, "no memory to read %s", name);
    qd_status status = qd_trainer_get(t, param, kind, own);
    if (status == QD_OK)
        status = gather_boxes(t, param, own, out);
    free(own);
    return status;
}

qd_status qd_trainer_write(qd_trainer *t, const char *name, qd_tensor_kind kind, const float *values, int64_t count)
{
    int param;
    QD_TRY(find_param(t, name, count, &param));
    qd_atom box = qd_trainer_holding(t, param, kind).box;
    int64_t cols = t->program->ledger->params[param].shape[1], held = box.length[0] * box.length[1];
    float *own = malloc((size_t)(held > 0 ? held : 1) * sizeof *own);
    if (!own)
        return QD_FAIL(QD_NO_MEMORY, "no memory to write %s", name);
    for (int64_t row = 0; row < box.length[0]; row++)
        memcpy(own + row * box.length[1], values + (box.begin[0] + row) * cols + box.begin[1], (size_t)box.length[1] * sizeof *own);
    qd_status status = qd_trainer_put(t, param, kind, own);
    free(own);
    return status;
}

qd_position qd_trainer_position(const qd_trainer *t)
{
    return t->position;
}

void qd_trainer_set_position(qd_trainer *t, qd_position position)
{
    t->position = position;
}

const qd_program *qd_trainer_program(const qd_trainer *t)
{
    return t->program;
}

qd_program *qd_trainer_program_mutable(qd_trainer *t)
{
    return t->program;
}

qd_comm *qd_trainer_group(const qd_trainer *t, unsigned axes)
{
    return qd_bound_axes(t->bound, axes);
}

const qd_config *qd_trainer_config(const qd_trainer *t)
{
    return &t->config;
}

qd_comm *qd_trainer_world(const qd_trainer *t)
{
    return t->world;
}

qd_comm *qd_trainer_data(const qd_trainer *t)
{
    return t->data;
}

qd_device *qd_trainer_device(const qd_trainer *t)
{
    return t->device;
}

int64_t qd_trainer_allocated(const qd_trainer *t)
{
    return qd_device_allocated(t->device);
}

int64_t qd_trainer_allocated_host(const qd_trainer *t)
{
    return t->bound->host_bytes;
}

qd_bound *qd_trainer_bound(qd_trainer *t)
{
    return t->bound;
}

uint64_t qd_trainer_seed(const qd_trainer *t)
{
    return t->config.seed;
}

void qd_trainer_set_limits(qd_trainer *t, qd_step_limits limits)
{
    t->limits = limits;
}

void qd_trainer_set_trace(qd_trainer *t, qd_trace *trace)
{
    t->trace = trace;
}

void qd_trainer_set_cpu_seconds(qd_trainer *t, double *seconds)
{
    t->cpu_seconds = seconds;
}

void qd_trainer_set_profile(qd_trainer *t, qd_step_profile *profile)
{
    t->profile = profile;
}

qd_dispatched qd_trainer_dispatched(const qd_trainer *t)
{
    return qd_interpreter_dispatched(t->interpreter);
}

qd_status qd_trainer_dispatched_all(const qd_trainer *t, qd_comm *comm, qd_dispatched *sum)
{
    qd_dispatched mine = qd_trainer_dispatched(t);
    int64_t numbers[4] = {mine.bytes, mine.rounds, mine.crossed, mine.flat};
    QD_TRY(qd_comm_all_reduce(comm, numbers, numbers, 4, QD_I64, QD_SUM, NULL));
    *sum = (qd_dispatched){numbers[0], numbers[1], numbers[2], numbers[3]};
    return QD_OK;
}
