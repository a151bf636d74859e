/* Times each kernel of a device at a model's sizes, next to measurements of the machine's peak. */
#include "bench/kernels.h"

#include "base/clock.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Buffers of the benchmark, large enough for every row: x, y, z hold activations of the widest
 * layer or logits, w weights. GEMMs read x, y and w and write y (from x and w), z and the gradient,
 * so that values do not grow however often they run. */
enum { X, Y, Z, W, GRADIENT, STATISTICS, MOMENT1, MOMENT2, TOKENS, BUFFERS };

typedef struct context {
    qd_device *device;
    qd_stream *stream;
    const qd_kernels *kernels;
    const qd_kernel_bench_config *config;
    qd_kernel_bench *bench;
    struct product *products[QD_KERNEL_BENCH_ROWS]; /* of each compute-bound row */
    double best_adds;                               /* additions per second, the best measurement */
    double gemm_rate; /* peak rate of the instructions that GEMMs use over that of multiply-adds */
    int64_t rows;
    void *buffer[BUFFERS];
    int64_t bytes[BUFFERS];
} context;

qd_kernel_bench_config qd_kernel_bench_config_default(void)
{
    return (qd_kernel_bench_config){.batch = 1, .seq = 1024, .channels = 768, .hidden = 3072, .vocab = 50257,
                                    .heads = 12, .kv_heads = 12, .dtype = QD_F32, .seconds = 0.2};
}

/* One kernel and its argument struct, called through the slot's own type. */
typedef struct call {
    enum {
#define CALL_KIND(slot, args) CALL_##slot,
        QD_KERNEL_TABLE(CALL_KIND)
#undef CALL_KIND
    } kind;
    const void *args;
} call;

static qd_status run_call(const context *c, call what)
{
    switch (what.kind) {
#define CALL_RUN(slot, args_type)                                                                           \
    case CALL_##slot:                                                                                       \
        return c->kernels->slot(c->stream, (const args_type *)what.args);
        QD_KERNEL_TABLE(CALL_RUN)
#undef CALL_RUN
    }
    return QD_FAIL(QD_USAGE, "bench: no kernel of kind %d", (int)what.kind);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count ? values[count / 2] : 0.0;
}

/* A compute-bound row (GEMM or attention) and its runs so far. Rows are visited round-robin, so
 * that each gets its share of calm and busy times. In a visit, measurements of the machine
 * ("looks") and runs alternate strictly: look, run, look, run, look. A look at multiply-adds takes
 * about as long as a run, but at most LOOK_MOST times their loop; one at additions is short and
 * next to the run. */
enum { RUNS_LEAST = 5, RUNS_MOST = 2000, QUIET_RUNS = 15, PATIENCE = 5, LOOK_MOST = 8 };
static const double VISIT = 0.05; /* seconds, but at least one run */
typedef struct product {
    call what; /* args: `args` below; NULL: register tiles */
    union {
        qd_matmul_args matmul;
        qd_attention_args attention;
    } args;
    double flops; /* of a run */
    double rate;  /* peak rate of the instructions it uses over that of multiply-adds */
    double spent; /* seconds, including looks */
    int look;     /* iterations of the loop of multiply-adds */
    int count;
    double seconds[RUNS_MOST];
    double fma[RUNS_MOST][2], adds[RUNS_MOST][2]; /* right before and after each run */
} product;

static double share_of(const product *p, int i)
{
    return p->flops / p->seconds[i] / (0.5 * (p->fma[i][0] + p->fma[i][1]) * p->rate);
}

/* Whether no other program was on our cores before and after the run: the machine was near its
 * best. The limit is not tighter because the clock is 5 to 10 % faster for moments; a neighbour
 * takes half of the additions from a core. */
static bool is_quiet(const context *c, const product *p, int i)
{
    static const double nearly = 0.85;
    const double fma = nearly * c->bench->ceiling.fma_flops, adds = nearly * c->best_adds;
    return fmin(p->fma[i][0], p->fma[i][1]) >= fma && fmin(p->adds[i][0], p->adds[i][1]) >= adds;
}

/* Enough time and runs, and enough quiet runs unless PATIENCE is exhausted. */
static bool enough(const context *c, const product *p)
{
    int quiet = 0;
    if (p->count < RUNS_LEAST || p->spent < c->config->seconds)
        return false;
    if (p->count == RUNS_MOST || p->spent >= PATIENCE * c->config->seconds)
        return true;
    for (int i = 0; i < p->count; i++)
        quiet += is_quiet(c, p, i);
    return quiet >= QUIET_RUNS;
}

static qd_status time_call(const context *c, call what, double *seconds)
{
    double start = qd_clock_now();
    QD_TRY(run_call(c, what));
    QD_TRY(qd_stream_wait(c->stream));
    *seconds = qd_clock_now() - start;
    return QD_OK;
}

static qd_status time_product(const context *c, const product *p, double *seconds)
{
    double flops;
    return p->what.args ? time_call(c, p->what, seconds) : qd_device_run_tiles(c->device, c->config->dtype, &flops, seconds);
}

static qd_status look_at_fma(context *c, int runs, double *rate)
{
    QD_TRY(qd_device_average_fma(c->device, runs, rate));
    c->bench->ceiling.fma_flops = fmax(c->bench->ceiling.fma_flops, *rate);
    return QD_OK;
}

static qd_status look_at_adds(context *c, double *rate)
{
    QD_TRY(qd_device_measure_adds(c->device, rate));
    c->best_adds = fmax(c->best_adds, *rate);
    return QD_OK;
}

/* Touches the pages, and finds how many iterations of the loop of multiply-adds take as long as the
 * run. */
static qd_status prepare(context *c, product *p)
{
    double rate, seconds;
    QD_TRY(time_product(c, p, &seconds));
    QD_TRY(time_product(c, p, &seconds));
    double start = qd_clock_now();
    QD_TRY(look_at_fma(c, 1, &rate));
    p->look = (int)fmin(fmax(round(seconds / (qd_clock_now() - start)), 1), LOOK_MOST);
    return QD_OK;
}

static qd_status visit(context *c, product *p)
{
    double begin = qd_clock_now(), fma;
    QD_TRY(look_at_fma(c, p->look, &fma));
    do {
        int i = p->count;
        p->fma[i][0] = fma;
        QD_TRY(look_at_adds(c, &p->adds[i][0]));
        QD_TRY(time_product(c, p, &p->seconds[i]));
        QD_TRY(look_at_adds(c, &p->adds[i][1]));
        QD_TRY(look_at_fma(c, p->look, &fma));
        p->fma[i][1] = fma;
        p->count++;
    } while (p->count < RUNS_MOST && qd_clock_now() - begin < fmin(VISIT, c->config->seconds));
    p->spent += qd_clock_now() - begin;
    return QD_OK;
}

/* On a machine that shares its cores the peak moves within milliseconds, so each run is compared
 * with the measurements next to it. */
static void end_product(const context *c, const product *p, qd_kernel_bench_row *row)
{
    double all[RUNS_MOST], quiet[RUNS_MOST], best = INFINITY;
    row->runs = p->count;
    for (int i = 0; i < p->count; i++) {
        best = fmin(best, p->seconds[i]);
        all[i] = share_of(p, i);
        if (is_quiet(c, p, i))
            quiet[row->quiet_runs++] = all[i];
    }
    row->seconds = best;
    row->flops = p->flops / best;
    row->share = median(all, row->runs);
    row->quiet_share = row->quiet_runs >= RUNS_LEAST ? median(quiet, row->quiet_runs) : 0.0;
}

/* Runs all compute-bound rows. */
static qd_status run_products(context *c)
{
    const int count = c->bench->count;
    for (int i = 0; i < count; i++)
        QD_TRY(prepare(c, c->products[i]));
    for (bool again = true; again;) {
        again = false;
        for (int i = 0; i < count; i++) {
            if (enough(c, c->products[i]))
                continue;
            QD_TRY(visit(c, c->products[i]));
            again = true;
        }
    }
    for (int i = 0; i < count; i++) /* last, when the machine's best is known */
        end_product(c, c->products[i], &c->bench->rows[i]);
    return QD_OK;
}

static qd_status add_row(context *c, const char *kernel, const char *shape, qd_kernel_bench_row **row)
{
    if (c->bench->count == QD_KERNEL_BENCH_ROWS)
        return QD_FAIL(QD_USAGE, "bench: more than %d rows", QD_KERNEL_BENCH_ROWS);
    *row = &c->bench->rows[c->bench->count++];
    snprintf((*row)->kernel, sizeof (*row)->kernel, "%s", kernel);
    snprintf((*row)->shape, sizeof (*row)->shape, "%s", shape);
    return QD_OK;
}

/* Adds a row for run_products(), which runs before the memory-bound rows. */
static qd_status add_product(context *c, const char *kernel, const char *shape, double flops, product **added)
{
    qd_kernel_bench_row *row;
    QD_TRY(add_row(c, kernel, shape, &row));
    product *p = *added = c->products[row - c->bench->rows] = calloc(1, sizeof *p);
    if (!p)
        return QD_FAIL(QD_NO_MEMORY, "bench: no memory for the times of %d runs", RUNS_MOST);
    p->flops = flops;
    p->rate = 1.0;
    return QD_OK;
}

static qd_status add_matmul(context *c, const char *kernel, const char *shape, qd_matmul_args args)
{
    product *p;
    QD_TRY(add_product(c, kernel, shape, 2.0 * (double)args.m * (double)args.n * (double)args.k, &p));
    p->rate = c->gemm_rate;
    p->args.matmul = args;
    p->what = (call){CALL_matmul, &p->args.matmul};
    return QD_OK;
}

/* A memory-bound row: bytes that a run moves, compared with copying. */
static qd_status measure(context *c, const char *kernel, const char *shape, call what, double bytes)
{
    qd_kernel_bench_row *row;
    double begin = qd_clock_now(), best = INFINITY, seconds;
    QD_TRY(add_row(c, kernel, shape, &row));
    QD_TRY(time_call(c, what, &seconds));
    for (; row->runs < RUNS_LEAST || qd_clock_now() - begin < c->config->seconds; row->runs++) {
        QD_TRY(time_call(c, what, &seconds));
        best = fmin(best, seconds);
    }
    row->seconds = best;
    row->bytes = bytes / best;
    row->share = row->bytes / c->bench->ceiling.copy_bytes;
    return QD_OK;
}

/* What the GEMMs below could reach if packing and memory cost nothing. */
static qd_status add_tiles(context *c)
{
    double flops, seconds;
    product *p;
    QD_TRY(qd_device_run_tiles(c->device, c->config->dtype, &flops, &seconds));
    if (flops <= 0.0)
        return QD_OK;
    QD_TRY(add_product(c, "register tiles", "panels in the L2 cache", flops, &p));
    p->rate = c->gemm_rate;
    return QD_OK;
}

/* Forward, input gradient and weight gradient of a layer (rows, in) -> (rows, out). */
static qd_status add_linear(context *c, const char *name, int64_t out, int64_t in)
{
    qd_dtype d = c->config->dtype;
    char shape[64];
    snprintf(shape, sizeof shape, "%s %lld x %lld x %lld", name, (long long)c->rows, (long long)out, (long long)in);
    qd_matmul_args forward = {
        .a = c->buffer[X], .b = c->buffer[W], .bias = c->buffer[STATISTICS], .c = c->buffer[Y],
        .m = c->rows, .n = out, .k = in, .lda = in, .ldb = in, .ldc = out, .trans_b = true,
        .a_dtype = d, .b_dtype = d, .c_dtype = d,
    };
    QD_TRY(add_matmul(c, "linear forward", shape, forward));
    qd_matmul_args input = {
        .a = c->buffer[Y], .b = c->buffer[W], .c = c->buffer[Z],
        .m = c->rows, .n = in, .k = out, .lda = out, .ldb = in, .ldc = in,
        .a_dtype = d, .b_dtype = d, .c_dtype = d,
    };
    QD_TRY(add_matmul(c, "linear input gradient", shape, input));
    qd_matmul_args weight = {
        .a = c->buffer[Y], .b = c->buffer[X], .c = c->buffer[GRADIENT],
        .m = out, .n = in, .k = c->rows, .lda = out, .ldb = in, .ldc = in, .trans_a = true, .accumulate = true,
        .a_dtype = d, .b_dtype = d, .c_dtype = d,
    };
    return add_matmul(c, "linear weight gradient", shape, weight);
}

static qd_status add_attention(context *c)
{
    const qd_kernel_bench_config *f = c->config;
    int head_dim = (int)(f->channels / f->heads);
    int64_t kv = (int64_t)f->kv_heads * head_dim, stride = f->channels + 2 * kv;
    size_t size = qd_dtype_size(f->dtype);
    char *x = c->buffer[X], *y = c->buffer[Y], *z = c->buffer[Z];
    float *lse = c->buffer[STATISTICS];
    char shape[64];
    snprintf(shape, sizeof shape, "%lld x %lld, %d/%d heads of %d", (long long)f->batch, (long long)f->seq, f->heads,
             f->kv_heads, head_dim);
    qd_attention_args a = {
        .q = x, .k = x + (size_t)f->channels * size, .v = x + (size_t)(f->channels + kv) * size, .o = y, .lse = lse,
        .batch = f->batch, .seq = f->seq, .q_stride = stride, .k_stride = stride, .v_stride = stride,
        .o_stride = f->channels, .heads = f->heads, .kv_heads = f->kv_heads, .head_dim = head_dim,
        .scale = 1 / sqrtf((float)head_dim), .dtype = f->dtype, .d_o = y,
        .dq = z, .dk = z + (size_t)f->channels * size, .dv = z + (size_t)(f->channels + kv) * size,
        .delta = lse + f->batch * f->heads * f->seq,
    };
    /* FLOPs of the causal triangle: two GEMMs forward, five backward */
    double triangle = (double)f->batch * f->heads * head_dim * (double)f->seq * (double)(f->seq + 1);
    product *forward, *backward;
    QD_TRY(add_product(c, "attention forward", shape, 2 * triangle, &forward));
    forward->args.attention = a;
    forward->what = (call){CALL_attention_forward, &forward->args.attention};
    QD_TRY(add_product(c, "attention backward", shape, 5 * triangle, &backward));
    backward->args.attention = a;
    backward->what = (call){CALL_attention_backward, &backward->args.attention};
    return QD_OK;
}

static qd_status measure_memory_bound(context *c)
{
    const qd_kernel_bench_config *f = c->config;
    qd_dtype d = f->dtype;
    double size = (double)qd_dtype_size(d), narrow = (double)(c->rows * f->channels) * size,
           wide = (double)(c->rows * f->hidden) * size, logits = (double)(c->rows * f->vocab) * size;
    float *mean = c->buffer[STATISTICS];
    char shape[64], wide_shape[64], logit_shape[64], weight_shape[64];
    snprintf(shape, sizeof shape, "%lld x %lld", (long long)c->rows, (long long)f->channels);
    snprintf(wide_shape, sizeof wide_shape, "%lld x %lld", (long long)c->rows, (long long)f->hidden);
    snprintf(logit_shape, sizeof logit_shape, "%lld x %lld", (long long)c->rows, (long long)f->vocab);
    qd_norm_forward_args norm = {
        .x = c->buffer[X], .gamma = c->buffer[W], .beta = c->buffer[W], .y = c->buffer[Y], .mean = mean,
        .rstd = mean + c->rows, .rows = c->rows, .cols = f->channels, .eps = 1e-5f, .dtype = d, .param_dtype = d,
    };
    QD_TRY(measure(c, "LayerNorm forward", shape, (call){CALL_norm_forward, &norm}, 2 * narrow));
    qd_norm_backward_args norm_back = {
        .dy = c->buffer[Y], .x = c->buffer[X], .gamma = c->buffer[W], .mean = mean, .rstd = mean + c->rows,
        .dx = c->buffer[Z], .dgamma = c->buffer[GRADIENT], .dbeta = c->buffer[GRADIENT], .rows = c->rows,
        .cols = f->channels, .accumulate = true, .dtype = d, .param_dtype = d, .grad_dtype = d,
    };
    QD_TRY(measure(c, "LayerNorm backward", shape, (call){CALL_norm_backward, &norm_back}, 3 * narrow));
    qd_activation_args gelu = {
        .kind = QD_ACT_GELU_TANH, .x = c->buffer[X], .dy = c->buffer[Y], .y = c->buffer[Y], .dx = c->buffer[Z],
        .rows = c->rows, .cols = f->hidden, .dtype = d,
    };
    QD_TRY(measure(c, "GELU forward", wide_shape, (call){CALL_activation_forward, &gelu}, 2 * wide));
    QD_TRY(measure(c, "GELU backward", wide_shape, (call){CALL_activation_backward, &gelu}, 3 * wide));
    qd_add_args add = {.a = c->buffer[X], .b = c->buffer[Y], .y = c->buffer[Z], .n = c->rows * f->channels,
                       .a_dtype = d, .b_dtype = d, .y_dtype = d};
    QD_TRY(measure(c, "add", shape, (call){CALL_add, &add}, 3 * narrow));
    qd_bias_grad_args bias = {.dy = c->buffer[X], .grad = c->buffer[GRADIENT], .rows = c->rows, .cols = f->hidden,
                              .accumulate = true, .dtype = d, .grad_dtype = d};
    QD_TRY(measure(c, "bias gradient", wide_shape, (call){CALL_bias_grad, &bias}, wide));
    qd_cross_entropy_args loss = {
        .logits = c->buffer[Y], .targets = c->buffer[TOKENS], .losses = mean, .rows = c->rows, .vocab = f->vocab,
        .ld = f->vocab, .scale = 1, .grad = true, .dtype = d,
    };
    QD_TRY(measure(c, "cross-entropy", logit_shape, (call){CALL_cross_entropy, &loss}, 2 * logits));
    qd_param_range range = {.count = f->hidden * f->channels, .decay = true};
    snprintf(weight_shape, sizeof weight_shape, "%lld parameters", (long long)range.count);
    /* fp32: reads parameter, gradient and two moments, writes three of them; a bf16 parameter has
     * its own fp32 master */
    qd_adamw_args adamw = {
        .param = c->buffer[W], .grad = c->buffer[GRADIENT], .master = c->buffer[d == QD_F32 ? W : Z],
        .m = c->buffer[MOMENT1], .v = c->buffer[MOMENT2], .ranges = &range, .range_count = 1, .lr = 1e-4f,
        .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .bias_correction1 = 0.1f,
        .bias_correction2 = 0.05f, .grad_scale = c->buffer[MOMENT2] /* zeros, and they stay so */, .param_dtype = d, .grad_dtype = d,
    };
    return measure(c, "AdamW", weight_shape, (call){CALL_adamw, &adamw},
                   (double)range.count * (24 + size + (d == QD_F32 ? 0 : size)));
}

static int64_t largest(const int64_t *sizes, int count)
{
    int64_t most = 0;
    for (int i = 0; i < count; i++)
        most = sizes[i] > most ? sizes[i] : most;
    return most;
}

static qd_status fill_random(context *c, int buffer)
{
    int64_t count = c->bytes[buffer] / (int64_t)qd_dtype_size(c->config->dtype);
    char *host = malloc((size_t)c->bytes[buffer]);
    if (!host)
        return QD_FAIL(QD_NO_MEMORY, "bench: no memory for %lld bytes of input", (long long)c->bytes[buffer]);
    uint32_t state = 1;
    for (int64_t i = 0; i < count; i++) { /* roughly uniform in (-1, 1): zeros would be faster than real data */
        state = state * 1664525u + 1013904223u;
        float x = (float)(int32_t)state * 0x1p-31f;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint16_t half = (uint16_t)(bits >> 16);
        if (c->config->dtype == QD_F32)
            memcpy(host + i * 4, &x, 4);
        else
            memcpy(host + i * 2, &half, 2);
    }
    qd_status status = qd_copy(c->stream, c->buffer[buffer], host, c->bytes[buffer]);
    if (status == QD_OK)
        status = qd_stream_wait(c->stream);
    free(host);
    return status;
}

static qd_status take_buffers(context *c)
{
    const qd_kernel_bench_config *f = c->config;
    int64_t size = (int64_t)qd_dtype_size(f->dtype), rows = c->rows, channels = f->channels, kv = channels / f->heads * f->kv_heads;
    int64_t activation = largest((int64_t[]){rows * f->hidden, rows * (channels + 2 * kv), rows * channels}, 3) * size;
    int64_t weight = largest((int64_t[]){f->vocab, f->hidden, channels + 2 * kv}, 3) * channels * size;
    int64_t master = f->hidden * channels * 4;
    int64_t statistics = largest((int64_t[]){2 * rows * f->heads, 4 * rows, f->vocab, f->hidden}, 4) * 4;
    int64_t bytes[BUFFERS] = {
        [X] = activation, [Y] = largest((int64_t[]){activation, rows * f->vocab * size}, 2),
        [Z] = largest((int64_t[]){activation, master}, 2), [W] = weight, [GRADIENT] = weight,
        [STATISTICS] = statistics, [MOMENT1] = master, [MOMENT2] = master, [TOKENS] = rows * 4,
    };
    for (int i = 0; i < BUFFERS; i++) {
        QD_TRY(qd_device_alloc(c->device, bytes[i], &c->buffer[i]));
        c->bytes[i] = bytes[i];
    }
    QD_TRY(fill_random(c, X));
    QD_TRY(fill_random(c, Y));
    return fill_random(c, W);
}

qd_status qd_kernel_bench_run(qd_device *device, const qd_kernel_bench_config *config, qd_kernel_bench *bench)
{
    qd_status status;
    memset(bench, 0, sizeof *bench);
    if (config->heads < 1 || config->kv_heads < 1 || config->channels % config->heads || config->batch < 1 ||
        config->seq < 1)
        return QD_FAIL(QD_USAGE, "bench kernels: %lld channels in %d heads; channels must be a multiple of heads",
                       (long long)config->channels, config->heads);
    context c = {.device = device, .stream = qd_device_compute_stream(device), .kernels = qd_device_kernels(device),
                 .config = config, .bench = bench, .rows = config->batch * config->seq};
    int64_t qkv = config->channels + 2 * (config->channels / config->heads) * config->kv_heads;
    QD_TRY_DONE(qd_device_measure_ceiling(device, fmax(0.3, config->seconds), &bench->ceiling));
    c.gemm_rate = qd_ceiling_of(&bench->ceiling, config->dtype) / bench->ceiling.fma_flops;
    QD_TRY_DONE(take_buffers(&c));
    QD_TRY_DONE(add_tiles(&c));
    QD_TRY_DONE(add_linear(&c, "qkv", qkv, config->channels));
    QD_TRY_DONE(add_linear(&c, "attention out", config->channels, config->channels));
    QD_TRY_DONE(add_linear(&c, "MLP up", config->hidden, config->channels));
    QD_TRY_DONE(add_linear(&c, "MLP down", config->channels, config->hidden));
    QD_TRY_DONE(add_linear(&c, "head", config->vocab, config->channels));
    QD_TRY_DONE(add_attention(&c));
    QD_TRY_DONE(run_products(&c));
    QD_TRY_DONE(measure_memory_bound(&c));
done:
    for (int i = 0; i < BUFFERS; i++)
        qd_device_free(device, c.buffer[i], c.bytes[i]);
    for (int i = 0; i < QD_KERNEL_BENCH_ROWS; i++)
        free(c.products[i]);
    return status;
}
