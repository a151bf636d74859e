#include "train/bench_rates.h"

#include "base/clock.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

/* ---- products ---- */

/* Products of a block and of their parts under tp, cp and smaller micro-batches: (m, n) over k of y = x Wᵀ, as parts of rows, ffn and
 * hidden. */
static void shape_of(const qd_rates *r, int kind, int index, int64_t shape[3])
{
    const int64_t rows = r->rows, f = r->ffn, h = r->hidden;
    const int64_t all[QD_RATE_SHAPES][3] = {{rows, f, h},     {rows / 2, f, h}, {rows / 4, f, h}, {rows, f / 2, h},     {rows, f / 4, h},
                                            {rows, f, h / 2}, {rows, f, h / 4}, {rows, h, f},     {rows, h, h}, {rows / 2, f / 2, h}};
    for (int i = 0; i < 3; i++) {
        /* Gradients of inputs sum over the outputs, gradients of weights over the rows. */
        int from = kind == QD_RATE_WEIGHTS ? (i + 1) % 3 : kind == QD_RATE_INPUTS && i > 0 ? 3 - i : i;
        shape[i] = all[index][from] > 8 ? all[index][from] : 8;
    }
}

/* Operands are taken in turn from SLOTS places each, so that they come from where they come from in a step: not from the nearest cache. */
enum { SLOTS = 4 };
typedef struct operands {
    float *memory[3];
    int64_t elements; /* of one place */
} operands;

static qd_status run_product(qd_device *device, const operands *o, int kind, const int64_t shape[3], int turn)
{
    int64_t m = shape[0], n = shape[1], k = shape[2];
    bool weights = kind == QD_RATE_WEIGHTS, forward = kind == QD_RATE_FORWARD;
    int64_t at = (turn % SLOTS) * o->elements;
    qd_matmul_args args = {.a = o->memory[0] + at, .b = o->memory[1] + at, .c = o->memory[2] + at, .m = m, .n = n, .k = k,
                           .lda = weights ? m : k, .ldb = forward ? k : n, .ldc = n, .trans_a = weights, .trans_b = forward,
                           .accumulate = weights, .a_dtype = QD_F32, .b_dtype = QD_F32, .c_dtype = QD_F32};
    QD_TRY(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
    return qd_stream_wait(qd_device_compute_stream(device));
}

static double *sample(const qd_rates *r, int rank, int run, int kind, int shape)
{
    return &r->seconds[((rank * QD_RATE_RUNS + run) * QD_RATE_KINDS + kind) * QD_RATE_SHAPES + shape];
}

/* One run: every product once, the ranks meeting before each. */
static qd_status run_all(qd_device *device, qd_comm *world, const operands *o, const qd_rates *r, int run)
{
    for (int i = 0; i < QD_RATE_KINDS * QD_RATE_SHAPES; i++) {
        int64_t shape[3];
        shape_of(r, i / QD_RATE_SHAPES, i % QD_RATE_SHAPES, shape);
        QD_TRY(qd_comm_barrier(world, NULL));
        double begin = qd_clock_now();
        QD_TRY(run_product(device, o, i / QD_RATE_SHAPES, shape, run + 1 + i));
        if (run >= 0)
            *sample(r, qd_comm_rank(world), run, i / QD_RATE_SHAPES, i % QD_RATE_SHAPES) = qd_clock_now() - begin;
    }
    return qd_comm_barrier(world, NULL);
}

static qd_status time_products(qd_device *device, qd_comm *world, const operands *o, qd_rates *r)
{
    for (int run = -1; run < QD_RATE_RUNS; run++) { /* the first touches pages */
        QD_TRY(qd_comm_barrier(world, NULL));
        double begin = qd_clock_now();
        QD_TRY(run_all(device, world, o, r, run));
        if (run >= 0 && qd_comm_rank(world) == 0)
            r->walls[run] = qd_clock_now() - begin;
    }
    return QD_OK;
}

/* Solves the equations of `use` unknowns by elimination with the largest pivots; singular ones become 0. */
static void solve(double a[4][5], const bool use[4], double x[4])
{
    int rows[4], count = 0;
    for (int i = 0; i < 4; i++) {
        x[i] = 0.0;
        if (use[i])
            rows[count++] = i;
    }
    for (int c = 0; c < count; c++) {
        int best = c;
        for (int i = c; i < count; i++)
            best = fabs(a[rows[i]][rows[c]]) > fabs(a[rows[best]][rows[c]]) ? i : best;
        for (int k = 0; k < 5; k++) { /* exchange the equations, not their names */
            double keep = a[rows[c]][k];
            a[rows[c]][k] = a[rows[best]][k];
            a[rows[best]][k] = keep;
        }
        for (int i = 0; i < count; i++) {
            double times = i == c || a[rows[c]][rows[c]] == 0.0 ? 0.0 : a[rows[i]][rows[c]] / a[rows[c]][rows[c]];
            for (int k = 0; k < 5; k++)
                a[rows[i]][k] -= times * a[rows[c]][k];
        }
    }
    for (int c = 0; c < count; c++)
        x[rows[c]] = a[rows[c]][rows[c]] != 0.0 ? a[rows[c]][4] / a[rows[c]][rows[c]] : 0.0;
}

/* Least squares of relative errors: seconds per FLOP = x0 + x1 / m + x2 / n + x3 / k, with what would be negative left out. */
static void fit(const qd_rates *r, int kind, qd_bench_product *product)
{
    bool use[4] = {true, true, true, true};
    double x[4];
    for (bool again = true; again;) {
        double a[4][5] = {{0}};
        for (int i = 0; i < QD_RATE_SHAPES; i++) {
            int64_t shape[3];
            double means[QD_RATE_RUNS];
            shape_of(r, kind, i, shape);
            for (int run = 0; run < QD_RATE_RUNS; run++) {
                means[run] = 0.0;
                for (int rank = 0; rank < r->ranks; rank++)
                    means[run] += *sample(r, rank, run, kind, i) / r->ranks;
            }
            double m = (double)shape[0], n = (double)shape[1], k = (double)shape[2], each = median(means, QD_RATE_RUNS) / (2.0 * m * n * k);
            double terms[4] = {1.0 / each, 1.0 / (m * each), 1.0 / (n * each), 1.0 / (k * each)};
            for (int row = 0; row < 4; row++) {
                for (int column = 0; column < 4; column++)
                    a[row][column] += terms[row] * terms[column];
                a[row][4] += terms[row];
            }
        }
        solve(a, use, x);
        again = false;
        for (int i = 1; i < 4; i++)
            if (x[i] < 0.0 || (x[0] <= 0.0 && use[i])) { /* times that say nothing of shapes leave one rate */
                use[i] = false;
                again = true;
            }
    }
    *product = (qd_bench_product){.flops = 1.0 / x[0], .half_m = x[1] / x[0], .half_n = x[2] / x[0], .half_k = x[3] / x[0]};
}

static double work_of(const qd_rates *r)
{
    double work[QD_RATE_RUNS] = {0};
    for (int run = 0; run < QD_RATE_RUNS; run++)
        for (int rank = 0; rank < r->ranks; rank++)
            for (int i = 0; i < QD_RATE_KINDS * QD_RATE_SHAPES; i++)
                work[run] += *sample(r, rank, run, i / QD_RATE_SHAPES, i % QD_RATE_SHAPES) / r->ranks;
    return median(work, QD_RATE_RUNS);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Elements of the largest operand or result of all products: any of them may be (m, k), (n, k) or (m, n). */
static int64_t largest_operand(const qd_rates *r)
{
    int64_t most = 0;
    for (int i = 0; i < QD_RATE_KINDS * QD_RATE_SHAPES; i++) {
        int64_t s[3];
        shape_of(r, i / QD_RATE_SHAPES, i % QD_RATE_SHAPES, s);
        most = larger(most, larger(s[0] * s[1], larger(s[0] * s[2], s[1] * s[2])));
    }
    return most;
}

qd_status qd_rates_products(qd_trainer *trainer, qd_comm *world, void *rates)
{
    qd_device *device = qd_trainer_device(trainer);
    qd_rates *r = rates;
    operands o = {.elements = largest_operand(r)};
    int64_t bytes = SLOTS * o.elements * (int64_t)sizeof(float);
    qd_status status = QD_OK;
    for (int i = 0; i < 3 && status == QD_OK; i++) {
        status = qd_device_alloc(device, bytes, (void **)&o.memory[i]);
        if (status == QD_OK)
            memset(o.memory[i], 0, (size_t)bytes);
    }
    if (status == QD_OK)
        status = time_products(device, world, &o, r);
    for (int i = 0; i < 3; i++)
        if (o.memory[i])
            qd_device_free(device, o.memory[i], bytes);
    QD_TRY(status);
    QD_TRY(qd_comm_barrier(world, NULL));
    if (qd_comm_rank(world) != 0)
        return QD_OK;
    for (int kind = 0; kind < QD_RATE_KINDS; kind++)
        fit(r, kind, &r->product[kind]);
    r->work = work_of(r);
    r->wall = median(r->walls, QD_RATE_RUNS);
    return QD_OK;
}

double qd_rates_meeting(const qd_rates *r, double work)
{
    return fmax(0.0, r->wall - work) / (QD_RATE_KINDS * QD_RATE_SHAPES);
}

/* ---- exchanges ---- */

static qd_status run_exchange(qd_comm *world, int kind, float *in, float *out, int64_t count)
{
    int size = qd_comm_size(world), rank = qd_comm_rank(world);
    qd_work *work = NULL;
    switch (kind) {
    case QD_RATE_SUM: return qd_comm_all_reduce(world, in, in, count, QD_F32, QD_SUM, NULL);
    case QD_RATE_GATHER: return qd_comm_all_gather(world, in, out, count, QD_F32, NULL);
    case QD_RATE_SCATTER: return qd_comm_reduce_scatter(world, in, out, count, QD_F32, QD_SUM, NULL);
    default:
        QD_TRY(qd_comm_send(world, in, count, QD_F32, (rank + 1) % size, &work));
        QD_TRY(qd_comm_recv(world, out, count, QD_F32, (rank + size - 1) % size, NULL));
        return qd_work_wait(work);
    }
}

/* Median seconds of one exchange, as this rank sees it. */
static qd_status time_exchange(qd_comm *world, int kind, float *in, float *out, int64_t count, double *seconds)
{
    enum { RUNS = 11, CALLS = 4 };
    double runs[RUNS];
    for (int run = -1; run < RUNS; run++) {
        QD_TRY(qd_comm_barrier(world, NULL));
        double begin = qd_clock_now();
        for (int i = 0; i < CALLS; i++)
            QD_TRY(run_exchange(world, kind, in, out, count));
        if (run >= 0)
            runs[run] = (qd_clock_now() - begin) / CALLS;
    }
    *seconds = median(runs, RUNS);
    return QD_OK;
}

static qd_status measure_exchanges(qd_comm *world, qd_rates *r)
{
    static const int64_t counts[2] = {4096, 262144}; /* 16 KiB, 1 MiB */
    double n = qd_comm_size(world), part = (n - 1.0) / n;
    const double moved[QD_RATE_EXCHANGES] = {2.0 * part, part, part, 1.0}; /* by a rank, per byte of the message */
    qd_status status = QD_OK;
    float *in = calloc((size_t)counts[1], sizeof *in), *out = calloc((size_t)counts[1], sizeof *out);
    if (!in || !out)
        status = QD_FAIL(QD_NO_MEMORY, "no memory to measure exchanges");
    for (int kind = 0; kind < QD_RATE_EXCHANGES && status == QD_OK; kind++) {
        double seconds[2] = {0.0, 0.0};
        for (int i = 0; i < 2 && status == QD_OK; i++)
            status = time_exchange(world, kind, in, out, counts[i], &seconds[i]);
        if (qd_comm_rank(world) != 0 || status != QD_OK)
            continue;
        double each = fmax(1e-13, (seconds[1] - seconds[0]) / ((double)(counts[1] - counts[0]) * 4.0));
        r->exchange[kind] = (qd_bench_exchange){.latency = fmax(0.0, seconds[0] - each * (double)counts[0] * 4.0), .bandwidth = moved[kind] / each};
    }
    free(in);
    free(out);
    return status;
}

qd_status qd_rates_measure(qd_trainer *trainer, qd_comm *world, void *rates)
{
    QD_TRY(qd_rates_products(trainer, world, rates));
    return measure_exchanges(world, rates);
}
