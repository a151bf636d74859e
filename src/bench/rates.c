/* Measures rates on a team of ranks and fits them. */
#include "bench/rates.h"

#include "base/clock.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double qd_rates_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

/* Operands rotate through SLOTS buffers each, so that they come from the same level of the memory
 * hierarchy as in a step, not from the nearest cache. */
enum { SLOTS = 4 };
static const int64_t counts[2] = {4096, 262144}; /* elements of exchanges: 16 KiB, 1 MiB */

/* Buffers of one rank. */
typedef struct place {
    float *memory[3]; /* of the operands */
    float *in, *out;  /* of exchanges */
    qd_comm *group;   /* of the ranks that synchronize */
} place;

/* Times of one run: of a rank, then the mean over the ranks. */
typedef struct sample {
    /* begin (of the first rank) and end (of the last one) of all GEMMs, with and without
     * synchronizing after each */
    double met[2], apart[2];
    double product[QD_RATE_KINDS][QD_RATE_SHAPES], attention[2][QD_RATE_CUTS];
    double exchange[QD_RATE_EXCHANGES][2];
} sample;

struct qd_rates {
    qd_team *team;
    int64_t rows, hidden, ffn; /* shapes consist of these, their halves and quarters */
    int64_t seq, elements;     /* elements of one operand's buffer */
    int ranks, met, runs, most;
    bool alone;
    place *places;
    qd_rate_attention **attention; /* of each rank */
    sample *samples, *own;         /* own: of each rank, in the current run */
    double *sorted;                /* workspace to sort one figure of all runs */
};

/* GEMMs of a block and of its shards under tp, cp and smaller micro-batches: (m, n) over k of y =
 * x Wᵀ, in terms of rows, ffn and hidden. */
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

static qd_status run_product(qd_device *device, const qd_rates *r, const place *o, int kind, const int64_t shape[3], int turn)
{
    int64_t m = shape[0], n = shape[1], k = shape[2];
    bool weights = kind == QD_RATE_WEIGHTS, forward = kind == QD_RATE_FORWARD;
    int64_t at = (turn % SLOTS) * r->elements;
    qd_matmul_args args = {.a = o->memory[0] + at, .b = o->memory[1] + at, .c = o->memory[2] + at, .m = m, .n = n, .k = k,
                           .lda = weights ? m : k, .ldb = forward ? k : n, .ldc = n, .trans_a = weights, .trans_b = forward,
                           .accumulate = weights, .a_dtype = QD_F32, .b_dtype = QD_F32, .c_dtype = QD_F32};
    QD_TRY(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
    return qd_stream_wait(qd_device_compute_stream(device));
}

/* Every GEMM once. group: the ranks that synchronize after each one; NULL: none. times: begin and
 * end. */
static qd_status run_products(qd_device *device, qd_comm *world, const qd_rates *r, qd_comm *group, sample *own, double times[2])
{
    const place *mine = &r->places[qd_comm_rank(world)];
    QD_TRY(qd_comm_barrier(world, NULL));
    times[0] = qd_clock_now();
    for (int i = 0; i < QD_RATE_KINDS * QD_RATE_SHAPES; i++) {
        int64_t shape[3];
        shape_of(r, i / QD_RATE_SHAPES, i % QD_RATE_SHAPES, shape);
        double begin = qd_clock_now();
        QD_TRY(run_product(device, r, mine, i / QD_RATE_SHAPES, shape, r->runs + i));
        own->product[i / QD_RATE_SHAPES][i % QD_RATE_SHAPES] = qd_clock_now() - begin;
        if (group)
            QD_TRY(qd_comm_barrier(group, NULL));
    }
    times[1] = qd_clock_now();
    return qd_comm_barrier(world, NULL);
}

/* Gaussian elimination with partial pivoting for the unknowns of `use`; singular ones become 0. */
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
        for (int k = 0; k < 5; k++) { /* swap the equations, not their names */
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

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Elements of the largest operand or result of all GEMMs: it may be (m, k), (n, k) or (m, n). */
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

/* Seconds of one exchange, as this rank sees it. */
static qd_status time_exchange(qd_comm *world, int kind, const place *p, int64_t count, double *seconds)
{
    enum { CALLS = 4 };
    double begin = 0.0;
    for (int i = -1; i < CALLS; i++) { /* the first one is a warm-up */
        QD_TRY(run_exchange(world, kind, p->in, p->out, count));
        if (i < 0) {
            QD_TRY(qd_comm_barrier(world, NULL));
            begin = qd_clock_now();
        }
    }
    *seconds = (qd_clock_now() - begin) / CALLS;
    return QD_OK;
}

static qd_status run_rank(qd_trainer *trainer, qd_comm *world, void *rates)
{
    qd_rates *r = rates;
    qd_device *device = qd_trainer_device(trainer);
    int rank = qd_comm_rank(world);
    sample *own = &r->own[rank];
    QD_TRY(run_products(device, world, r, NULL, own, own->apart));
    QD_TRY(run_products(device, world, r, r->places[rank].group, own, own->met));
    if (r->alone)
        return QD_OK;
    QD_TRY(qd_rate_attention_run(r->attention[rank], device, own->attention));
    for (int i = 0; i < 2 * QD_RATE_EXCHANGES && r->ranks > 1; i++)
        QD_TRY(time_exchange(world, i / 2, &r->places[rank], counts[i % 2], &own->exchange[i / 2][i % 2]));
    return QD_OK;
}

static double mean_over_ranks(const qd_rates *r, size_t offset)
{
    double sum = 0.0;
    for (int rank = 0; rank < r->ranks; rank++)
        sum += *(const double *)((const char *)&r->own[rank] + offset);
    return sum / r->ranks;
}

qd_status qd_rates_run(qd_rates *r)
{
    if (r->runs == r->most)
        return QD_FAIL(QD_USAGE, "there is memory for at most %d runs of GEMMs", r->most);
    QD_TRY(qd_team_call(r->team, run_rank, r));
    /* A sample is an array of doubles: take the mean of each over the ranks. */
    for (size_t at = 0; at < sizeof(sample); at += sizeof(double))
        *(double *)((char *)&r->samples[r->runs] + at) = mean_over_ranks(r, at);
    sample *all = &r->samples[r->runs++];
    for (int rank = 0; rank < r->ranks; rank++) { /* ranks that share cores begin when they are scheduled */
        const sample *own = &r->own[rank];
        all->apart[0] = fmin(all->apart[0], own->apart[0]);
        all->apart[1] = fmax(all->apart[1], own->apart[1]);
        all->met[0] = fmin(all->met[0], own->met[0]);
        all->met[1] = fmax(all->met[1], own->met[1]);
    }
    return QD_OK;
}

/* The median over runs of one figure of a sample. */
static double median_of(const qd_rates *r, size_t offset)
{
    double *values = r->sorted;
    for (int run = 0; run < r->runs; run++)
        values[run] = *(const double *)((const char *)&r->samples[run] + offset);
    return r->runs > 0 ? qd_rates_median(values, r->runs) : 0.0;
}

/* Least squares of relative errors: seconds per FLOP = x0 + x1 / m + x2 / n + x3 / k, without terms
 * that would be negative. */
void qd_rates_product(const qd_rates *r, int kind, qd_bench_product *product)
{
    bool use[4] = {true, true, true, true};
    double x[4];
    for (bool again = true; again;) {
        double a[4][5] = {{0}};
        for (int i = 0; i < QD_RATE_SHAPES; i++) {
            int64_t shape[3];
            shape_of(r, kind, i, shape);
            double m = (double)shape[0], n = (double)shape[1], k = (double)shape[2],
                   each = median_of(r, offsetof(sample, product[kind][i])) / (2.0 * m * n * k);
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
            if (x[i] < 0.0 || (x[0] <= 0.0 && use[i])) { /* times that do not depend on shapes leave one rate */
                use[i] = false;
                again = true;
            }
    }
    *product = (qd_bench_product){.flops = 1.0 / x[0], .half_m = x[1] / x[0], .half_n = x[2] / x[0],
                                  .half_k = x[3] / x[0]};
}

void qd_rates_exchange(const qd_rates *r, int kind, qd_bench_exchange *exchange)
{
    double n = r->ranks, part = (n - 1.0) / n;
    const double moved[QD_RATE_EXCHANGES] = {2.0 * part, part, part, 1.0}; /* by a rank, per byte of the message */
    double small = median_of(r, offsetof(sample, exchange[kind][0])), large = median_of(r, offsetof(sample, exchange[kind][1]));
    double each = fmax(1e-13, (large - small) / ((double)(counts[1] - counts[0]) * sizeof(float)));
    *exchange =
        (qd_bench_exchange){.latency = fmax(0.0, small - each * (double)counts[0] * sizeof(float)), .bandwidth = moved[kind] / each};
}

double qd_rates_part(const qd_rates *r, bool backward)
{
    double sum = 0.0, whole = median_of(r, offsetof(sample, attention[backward][0]));
    int count = 0;
    for (int cut = 1; cut < QD_RATE_CUTS; cut++) {
        double cp = 1 << cut, parts = median_of(r, offsetof(sample, attention[backward][cut]));
        if (parts <= 0.0)
            continue;
        sum += (parts * cp / whole - 1.0) * (double)r->seq / cp;
        count++;
    }
    return count > 0 ? fmax(0.0, sum / count) : 0.0;
}

static double lasted(const double times[2])
{
    return times[1] - times[0];
}

double qd_rates_turns(const qd_rates *crowd, const qd_rates *apart)
{
    double *values = crowd->sorted;
    for (int run = 0; run < crowd->runs; run++)
        values[run] = lasted(crowd->samples[run].apart) * apart->ranks / (lasted(apart->samples[run].apart) * crowd->ranks);
    return fmax(0.0, qd_rates_median(values, crowd->runs) - 1.0);
}

double qd_rates_meeting(const qd_rates *r)
{
    double *values = r->sorted;
    for (int run = 0; run < r->runs; run++)
        values[run] = lasted(r->samples[run].met) - lasted(r->samples[run].apart);
    return r->runs > 0 ? fmax(0.0, qd_rates_median(values, r->runs)) / (QD_RATE_KINDS * QD_RATE_SHAPES) : 0.0;
}

/* The rank itself touches the memory of its device first, so that it is placed as in training. */
static qd_status set_up_rank(qd_trainer *trainer, qd_comm *world, void *rates)
{
    qd_rates *r = rates;
    place *p = &r->places[qd_comm_rank(world)];
    size_t bytes = (size_t)(SLOTS * r->elements) * sizeof(float);
    (void)trainer;
    for (int i = 0; i < 3; i++) {
        if (!(p->memory[i] = aligned_alloc(64, (bytes + 63) / 64 * 64)))
            return QD_FAIL(QD_NO_MEMORY, "no memory for the operands of GEMMs");
        memset(p->memory[i], 0, bytes);
    }
    p->in = calloc((size_t)counts[1], sizeof *p->in);
    p->out = calloc((size_t)counts[1], sizeof *p->out);
    if (!p->in || !p->out)
        return QD_FAIL(QD_NO_MEMORY, "no memory to measure exchanges");
    return qd_comm_split(world, qd_comm_rank(world) / r->met, 0, "meeting", &p->group);
}

qd_status qd_rates_create(qd_team *team, const qd_config *config, int met, bool alone, int runs, qd_rates **rates)
{
    const qd_strategy *s = &qd_team_program(team)->strategy;
    qd_rates *r = calloc(1, sizeof *r);
    if (!r)
        return QD_FAIL(QD_NO_MEMORY, "no memory to measure rates");
    *rates = r;
    *r = (qd_rates){.team = team, .rows = s->micro_batch * s->seq, .hidden = config->model.hidden,
                    .ffn = config->model.ffn, .seq = s->seq,
                    .ranks = qd_team_size(team), .met = met, .most = runs, .alone = alone};
    r->elements = largest_operand(r);
    r->places = calloc((size_t)r->ranks, sizeof *r->places);
    r->attention = calloc((size_t)r->ranks, sizeof(qd_rate_attention *));
    r->own = calloc((size_t)r->ranks, sizeof *r->own);
    r->samples = calloc((size_t)runs, sizeof *r->samples);
    r->sorted = calloc((size_t)runs, sizeof *r->sorted);
    if (!r->places || !r->attention || !r->own || !r->samples || !r->sorted)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of GEMMs");
    for (int rank = 0; rank < r->ranks && !alone; rank++)
        QD_TRY(qd_rate_attention_create(&config->model, s, &r->attention[rank]));
    return qd_team_call(team, set_up_rank, r);
}

void qd_rates_destroy(qd_rates *r)
{
    if (!r)
        return;
    for (int rank = 0; rank < r->ranks; rank++) {
        if (r->attention)
            qd_rate_attention_destroy(r->attention[rank]);
        for (int i = 0; i < 3 && r->places; i++)
            free(r->places[rank].memory[i]);
        if (r->places) {
            qd_comm_destroy(r->places[rank].group); /* not on the rank's thread: a failed team runs nothing */
            free(r->places[rank].in);
            free(r->places[rank].out);
        }
    }
    free(r->places);
    free(r->attention);
    free(r->own);
    free(r->samples);
    free(r->sorted);
    free(r);
}
