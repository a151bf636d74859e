/* Autotuning: the search for the fastest way to compute a GEMM.
 *
 * - Candidates, most promising first, for each split between epilogue and separate kernels:
 *   cuBLASLt's proposals, the choices of other GEMMs, its proposals for other sizes, combinations
 *   of these, and twice the best one with a single setting changed.
 * - All run on random data (zeros are faster than training data). Buffers rotate, so that the
 *   operands of a small GEMM are not in the cache.
 * - Each GEMM has a share of the total time (device/tune_share.h). A split that is far behind is
 *   dropped, and at the deadline the best so far wins.
 * - The finalists are timed again, alternately, so that a warming GPU slows them alike, and back to
 *   back after a period of steady load, because the GPU then lowers its clock and the algorithm
 *   that needs less power wins. The best median wins; a variant must also reproduce the values of
 *   the library's proposal.
 * - A choice found under a time limit is marked as rough; qd_cuda_tune_more() searches again for
 *   one of them without a limit, between the first steps of a run. */
#include "base/clock.h"
#include "device/cuda/gemm/matmul_impl.h"
#include "device/cuda/gemm/search.h"
#include "device/tune_share.h"

#include <math.h>
#include <quadrille/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUNDS = 9,
    MOST_SETS = 8,
    FAVOURITES = 6,
    HURRIED_ROUNDS = 5,
    HURRIED_FAVOURITES = 4,
    MOST_BATCH = 16,
    MOST_PER_WAY = QD_GEMM_CANDIDATES + 2 * QD_GEMM_SIBLINGS + QD_GEMM_VARIANTS + 2 * QD_GEMM_NEIGHBOURS,
};
static const double warm_seconds = 0.05, hurried_warm_seconds = 0.01, batch_seconds = 1.5e-3;
/* Relative to the best time so far: an algorithm slower than `promising` is not run again, one
 * faster than `close_to_best` is run a third time. A split between epilogue and kernels slower than
 * `worth` is dropped if there is little time. */
static const double promising = 1.2, close_to_best = 1.05, worth = 1.1;
/* Share of a GEMM's time for trying algorithms; the rest is for the finalists. */
static const double trial_share = 0.7;

/* Sets of operands, one after another, in one allocation or in memory that the caller lends. */
typedef struct bench {
    qd_cuda *cuda;
    char *memory;
    bool lent;
    int64_t bytes, set_bytes;
    int sets, next;
    cudaEvent_t from, to;
    qd_matmul_args call; /* of the first set */
    char *results;       /* from c to the end of the first set */
    int64_t results_bytes;
    char *expected;      /* as many bytes, stored after the sets, and two sums */
    double *sums;
    double seconds, deadline; /* time for the search, and when (qd_clock_now) it stops trying algorithms; INFINITY */
} bench;

typedef struct candidate {
    qd_gemm_choice choice;
    int way, index;
    bool variant;
    double quick, rounds[ROUNDS];
} candidate;

static int64_t take(int64_t *offset, int64_t bytes)
{
    int64_t at = *offset;
    *offset += (bytes + 255) & ~(int64_t)255;
    return at;
}

static const void *moved(const void *address, int64_t by)
{
    return address ? (const char *)address + by : NULL;
}

/* The call with the operands of the next set. */
static qd_matmul_args next_call(bench *b)
{
    qd_matmul_args a = b->call;
    int64_t by = b->set_bytes * b->next;
    b->next = (b->next + 1) % b->sets;
    a.a = moved(a.a, by);
    a.b = moved(a.b, by);
    a.bias = moved(a.bias, by);
    a.a_scale = moved(a.a_scale, by);
    a.b_scale = moved(a.b_scale, by);
    a.residual = moved(a.residual, by);
    a.c = (void *)(uintptr_t)moved(a.c, by);
    a.aux = (void *)(uintptr_t)moved(a.aux, by);
    a.bias_grad = (void *)(uintptr_t)moved(a.bias_grad, by);
    return a;
}

static void close_bench(bench *b)
{
    if (b->from)
        (void)cudaEventDestroy(b->from);
    if (b->to)
        (void)cudaEventDestroy(b->to);
    if (!b->lent)
        qd_device_free(&b->cuda->base, b->memory, b->bytes);
}

/* Refills what calls write, and what they read of the same type. */
static qd_status fill_results(bench *b, int set, uint32_t seed)
{
    return qd_gemm_fill_random(b->cuda->base.compute, b->results + b->set_bytes * set,
                                  b->results_bytes / (int64_t)qd_dtype_size(b->call.c_dtype), b->call.c_dtype, seed);
}

static qd_status open_bench(qd_cuda *cuda, const qd_matmul_args *call, const qd_tune_args *tune, bench *b)
{
    const qd_matmul_args *a = call;
    int64_t used = 0, c_bytes = qd_gemm_span(a->m, a->n, a->ldc, a->c_dtype);
    int64_t a_at = take(&used, qd_gemm_span(a->trans_a ? a->k : a->m, a->trans_a ? a->m : a->k, a->lda, a->a_dtype));
    int64_t b_at = take(&used, qd_gemm_span(a->trans_b ? a->n : a->k, a->trans_b ? a->k : a->n, a->ldb, a->b_dtype));
    const qd_dtype bias_dtype = qd_gemm_bias_dtype((int32_t)a->b_dtype, (int32_t)a->c_dtype);
    static const float one = 1.0f;
    const int64_t a_scales = qd_fp8_scale_count(a->a_scaling, a->m, a->k), b_scales = qd_fp8_scale_count(a->b_scaling, a->n, a->k);
    const int64_t scales = !qd_dtype_is_fp8(a->a_dtype) ? 0 : a_scales > b_scales ? a_scales : b_scales;
    int64_t scale_at = take(&used, scales * (int64_t)sizeof one);
    int64_t bias_at = take(&used, a->bias ? a->n * (int64_t)qd_dtype_size(bias_dtype) : 0);
    int64_t c_at = take(&used, c_bytes), residual_at = take(&used, a->residual ? c_bytes : 0);
    int64_t aux_at = take(&used, a->gelu ? c_bytes : 0);
    int64_t grad_at = take(&used, a->bias_grad ? a->m * (int64_t)qd_dtype_size(a->c_dtype) : 0);
    int64_t sets = (2 * (int64_t)cuda->properties.l2CacheSize + used - 1) / used;
    sets = sets < 1 ? 1 : sets > MOST_SETS ? MOST_SETS : sets;
    *b = (bench){.cuda = cuda, .set_bytes = used, .sets = (int)sets, .call = *a};
    b->results_bytes = used - c_at;
    b->bytes = b->set_bytes * b->sets + b->results_bytes + 256;
    void *memory = tune->scratch;
    b->lent = memory && tune->scratch_bytes >= b->bytes;
    if (!b->lent)
        QD_TRY(qd_device_alloc(&cuda->base, b->bytes, &memory));
    b->memory = memory;
    b->results = b->memory + c_at;
    b->expected = b->memory + b->set_bytes * b->sets;
    b->sums = (double *)(b->expected + b->results_bytes);
    b->call.a = b->memory + a_at;
    b->call.b = b->memory + b_at;
    b->call.c = b->memory + c_at;
    b->call.bias = a->bias ? b->memory + bias_at : NULL;
    b->call.a_scale = b->call.b_scale = scale_at < bias_at ? (const float *)(b->memory + scale_at) : NULL;
    b->call.residual = a->residual ? b->memory + residual_at : NULL;
    b->call.aux = a->gelu ? b->memory + aux_at : NULL;
    b->call.bias_grad = a->bias_grad ? b->memory + grad_at : NULL;
    qd_status status = QD_OK;
    QD_CUDA_TRY_DONE(cudaEventCreate(&b->from));
    QD_CUDA_TRY_DONE(cudaEventCreate(&b->to));
    qd_stream *stream = cuda->base.compute;
    for (int i = 0; i < b->sets; i++) { /* a set has operands of two types: each is filled with its own */
        char *set = b->memory + b->set_bytes * i;
        uint32_t seed = 7u * (uint32_t)i;
        QD_TRY_DONE(qd_gemm_fill_random(stream, set + a_at, (b_at - a_at) / (int64_t)qd_dtype_size(a->a_dtype), a->a_dtype, seed));
        QD_TRY_DONE(qd_gemm_fill_random(stream, set + b_at, (scale_at - b_at) / (int64_t)qd_dtype_size(a->b_dtype), a->b_dtype, seed + 1));
        QD_TRY_DONE(
            qd_gemm_fill_random(stream, set + bias_at, (c_at - bias_at) / (int64_t)qd_dtype_size(bias_dtype), bias_dtype, seed + 3));
        if (scales > 1)
            QD_TRY_DONE(qd_gemm_fill_random(stream, set + scale_at, scales, QD_F32, seed + 4));
        else if (scales == 1)
            QD_TRY_DONE(qd_copy(stream, set + scale_at, &one, sizeof one));
        QD_TRY_DONE(fill_results(b, i, seed + 2));
    }
done:
    if (status != QD_OK)
        close_bench(b);
    return status;
}

static qd_status use(qd_gemm *gemm, const qd_gemm_choice *choice)
{
    if (!choice->converted)
        return qd_gemm_build(gemm, choice);
    qd_gemm_unbuild(gemm);
    gemm->choice = *choice;
    return QD_OK;
}

static bool hurried(const bench *b)
{
    return !isinf(b->seconds);
}

/* Seconds per run of a choice, over `runs` consecutive runs. host (may be NULL): time spent in the
 * calls themselves. */
static qd_status time_runs(bench *b, qd_gemm *gemm, const qd_gemm_choice *choice, int runs, double *seconds, double *host)
{
    qd_stream *stream = b->cuda->base.compute;
    cudaStream_t s = qd_cuda_stream_of(stream);
    float ms = 0;
    QD_TRY(use(gemm, choice));
    QD_CUDA_TRY(cudaEventRecord(b->from, s));
    const double begin = qd_clock_now();
    for (int i = 0; i < runs; i++) {
        qd_matmul_args call = next_call(b);
        QD_TRY(qd_gemm_run(stream, gemm, &call));
    }
    if (host)
        *host = qd_clock_now() - begin;
    QD_CUDA_TRY(cudaEventRecord(b->to, s));
    QD_CUDA_TRY(cudaEventSynchronize(b->to));
    QD_CUDA_TRY(cudaEventElapsedTime(&ms, b->from, b->to));
    *seconds = ms * 1e-3 / runs;
    return QD_OK;
}

/* False if the algorithm does not run. The first call loads the kernel, which takes a few
 * milliseconds of host time: without the time of the call, it is an upper bound of a run, and
 * decides whether a second run is worth it. best: so far; 0: none. */
static bool time_quick(bench *b, qd_gemm *gemm, candidate *c, double best)
{
    double first = 0, host = 0, again = 0;
    qd_status status = time_runs(b, gemm, &c->choice, 1, &first, &host);
    c->quick = first > host ? first - host : 0;
    const bool slow = best > 0 && c->quick > promising * best;
    if (status == QD_OK && !slow)
        status = time_runs(b, gemm, &c->choice, 1, &c->quick, NULL);
    if (status == QD_OK && !slow && (best == 0 || c->quick < close_to_best * best)) {
        status = time_runs(b, gemm, &c->choice, 1, &again, NULL);
        if (again < c->quick)
            c->quick = again;
    }
    if (status != QD_OK)
        qd_error_clear();
    return status == QD_OK;
}

static qd_status run_fresh(bench *b, qd_gemm *gemm, const qd_gemm_choice *choice)
{
    QD_TRY(fill_results(b, 0, 2));
    QD_TRY(use(gemm, choice));
    return qd_gemm_run(b->cuda->base.compute, gemm, &b->call);
}

/* Whether a choice gives the results of another, up to rounding. */
static bool agrees(bench *b, qd_gemm *gemm, const qd_gemm_choice *choice, const qd_gemm_choice *other)
{
    qd_stream *stream = b->cuda->base.compute;
    const double tol = b->call.c_dtype == QD_F32 ? 1e-4 : 1e-2;
    double sums[2] = {1, 0};
    qd_status status = run_fresh(b, gemm, other);
    if (status == QD_OK)
        status = qd_copy(stream, b->expected, b->results, b->results_bytes);
    if (status == QD_OK)
        status = run_fresh(b, gemm, choice);
    if (status == QD_OK)
        status = qd_gemm_compare(stream, b->results, b->expected, b->results_bytes / (int64_t)qd_dtype_size(b->call.c_dtype),
                                    b->call.c_dtype, b->sums);
    if (status == QD_OK)
        status = qd_copy(stream, sums, b->sums, sizeof sums);
    if (status == QD_OK)
        status = qd_stream_wait(stream);
    if (status != QD_OK)
        qd_error_clear();
    return status == QD_OK && sums[0] <= tol * tol * sums[1];
}

static int by_quick(const void *x, const void *y)
{
    const candidate *a = x, *b = y;
    return (a->quick > b->quick) - (a->quick < b->quick);
}

static int by_value(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static void describe_way(const qd_gemm_choice *choice, qd_search_way *way)
{
    static const struct {
        int flag;
        const char *name;
    } names[] = {
        {QD_GEMM_BIAS, "bias"}, {QD_GEMM_GELU, "gelu"}, {QD_GEMM_GELU_GRAD, "dgelu"}, {QD_GEMM_BIAS_GRAD, "bias_grad"}};
    *way = (qd_search_way){.chosen = -1};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (choice->fused & names[i].flag)
            snprintf(way->fused + strlen(way->fused), sizeof way->fused - strlen(way->fused), "%s%s", *way->fused ? "+" : "",
                     names[i].name);
    if (!*way->fused)
        strcpy(way->fused, choice->converted ? "converted" : "none");
}

static int algorithm_value(const qd_gemm_choice *choice, cublasLtMatmulAlgoConfigAttributes_t name)
{
    int value = -1;
    size_t written;
    if (cublasLtMatmulAlgoConfigGetAttribute(&choice->algorithm, name, &value, sizeof value, &written) != CUBLAS_STATUS_SUCCESS)
        return -1;
    return value;
}

static void count_candidate(qd_search_way *way, const candidate *c)
{
    if (way->candidates++ == 0)
        way->first = c->quick;
    if (c->quick > way->worst)
        way->worst = c->quick;
    if (way->chosen >= 0 && c->quick >= way->best)
        return;
    way->best = c->quick;
    way->chosen = c->index;
}

static void describe_chosen(qd_search_way *way, const candidate *c)
{
    way->chosen = c->index;
    way->algorithm = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_ID);
    way->tile = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_TILE_ID);
    way->stages = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_STAGES_ID);
    way->split = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
}

/* Times `offered` choices of one way roughly, as long as there is time, and appends those that run
 * to `all`. index: of the first; 0 to 99 are the library's own proposals. */
static void time_offers(bench *b, qd_gemm *gemm, const qd_gemm_choice *choices, int offered, int index, int way_index,
                        qd_search_way *way, candidate *all, int *count)
{
    for (int i = 0; i < offered; i++) {
        candidate *c = &all[*count];
        if (*count > 0 && qd_clock_now() > b->deadline)
            return;
        *c = (candidate){.choice = choices[i], .way = way_index, .index = index + i,
                         .variant = index >= 100};
        if (!time_quick(b, gemm, c, way->best))
            continue;
        count_candidate(way, c);
        ++*count;
    }
}

typedef int (*more_choices)(qd_cuda *cuda, const qd_gemm *gemm, const qd_gemm_choice *seeds, int count,
                            qd_gemm_choice *more);

/* Choices that `more` derives from a way's choices so far, best first. Sorts `so_far`, which has
 * those of all ways. */
static int make_more(bench *b, qd_gemm *gemm, const qd_gemm_choice *way, int way_index, more_choices more, candidate *so_far,
                     int count, qd_gemm_choice *choices)
{
    qd_gemm_choice seeds[MOST_PER_WAY];
    const int most = hurried(b) ? QD_GEMM_CANDIDATES : MOST_PER_WAY; /* combinations are made of all pairs */
    int seed_count = 0;
    qsort(so_far, (size_t)count, sizeof *so_far, by_quick);
    for (int i = 0; i < count && seed_count < most; i++)
        if (so_far[i].way == way_index)
            seeds[seed_count++] = so_far[i].choice;
    if (qd_gemm_build(gemm, way) != QD_OK) {
        qd_error_clear();
        return 0;
    }
    return more(b->cuda, gemm, seeds, seed_count, choices);
}

/* State of one way while its algorithms are tried. */
typedef struct trial {
    qd_gemm_choice proposals[QD_GEMM_CANDIDATES];
    int offered, index; /* index: its entry in the report; -1: none of its algorithms runs */
} trial;

/* Times the first few proposals of every way; ways that run get an entry in the report. */
static qd_status time_first(bench *b, qd_gemm *gemm, const qd_gemm_choice *ways, int way_count, int few, trial *trials,
                            candidate *all, int *count, qd_search_report *report)
{
    for (int w = 0; w < way_count; w++) {
        trial *t = &trials[w];
        qd_search_way *way = &report->ways[report->way_count];
        t->index = -1;
        t->offered = 1;
        t->proposals[0] = ways[w];
        if (ways[w].converted) {
            if (*count > 0)
                break; /* last resort, if nothing else runs */
        } else {
            QD_TRY(qd_gemm_build(gemm, &ways[w]));
            QD_TRY(qd_gemm_candidates(b->cuda, gemm, t->proposals, &t->offered));
        }
        describe_way(&ways[w], way);
        time_offers(b, gemm, t->proposals, t->offered < few ? t->offered : few, 0, report->way_count, way, all, count);
        if (way->candidates > 0)
            t->index = report->way_count++;
    }
    return QD_OK;
}

/* Whether to continue with a way: one that is far behind only if there is time for everything. */
static bool is_worth_it(const bench *b, const qd_search_report *report, const trial *t, const qd_gemm_choice *way)
{
    if (t->index < 0 || way->converted || qd_clock_now() > b->deadline)
        return false;
    double best = report->ways[0].best;
    for (int i = 1; i < report->way_count; i++)
        best = report->ways[i].best < best ? report->ways[i].best : best;
    return !hurried(b) || report->ways[t->index].best <= worth * best;
}

/* Times everything that runs, roughly, most promising first. all: QD_GEMM_WAYS * MOST_PER_WAY */
static qd_status time_all(bench *b, qd_gemm *gemm, candidate *all, int *count, qd_search_report *report)
{
    enum { FEW = 4 };
    static const struct {
        more_choices make;
        int index;
    } more[] = {{qd_gemm_transfers, 500}, {qd_gemm_siblings, 100}, {qd_gemm_variants, 200}, {qd_gemm_neighbours, 300},
                {qd_gemm_neighbours, 400}};
    qd_gemm_choice ways[QD_GEMM_WAYS], choices[MOST_PER_WAY];
    trial trials[QD_GEMM_WAYS] = {0};
    int way_count = qd_gemm_ways(&gemm->key, ways);
    for (int w = 0; w < QD_GEMM_WAYS; w++)
        trials[w].index = -1;
    *count = 0;
    *report = (qd_search_report){.chosen = -1};
    QD_TRY(time_first(b, gemm, ways, way_count, FEW, trials, all, count, report));
    for (int w = 0; w < way_count; w++)
        if (is_worth_it(b, report, &trials[w], &ways[w]) && trials[w].offered > FEW)
            time_offers(b, gemm, trials[w].proposals + FEW, trials[w].offered - FEW, FEW, trials[w].index,
                        &report->ways[trials[w].index], all, count);
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        for (int w = 0; w < way_count; w++) {
            if (!is_worth_it(b, report, &trials[w], &ways[w]))
                continue;
            int offered = make_more(b, gemm, &ways[w], trials[w].index, more[i].make, all, *count, choices);
            time_offers(b, gemm, choices, offered, more[i].index, trials[w].index, &report->ways[trials[w].index], all, count);
        }
    return QD_OK;
}

/* Moves the finalists to the front: the best overall, then the best of each other way, unless it is
 * far behind and there is little time. */
static int pick_finalists(const bench *b, candidate *all, int count)
{
    qsort(all, (size_t)count, sizeof *all, by_quick);
    const int most = hurried(b) ? HURRIED_FAVOURITES : FAVOURITES;
    const double limit = hurried(b) ? worth * all[0].quick : INFINITY;
    int finalists = count < most ? count : most;
    bool seen[QD_GEMM_WAYS] = {false};
    for (int i = 0; i < count; i++) {
        bool first = !seen[all[i].way];
        seen[all[i].way] = true;
        if (i >= finalists && first && all[i].quick <= limit) {
            candidate swap = all[finalists];
            all[finalists] = all[i];
            all[i] = swap;
            finalists++;
        }
    }
    return finalists;
}

/* The first proposal for a candidate's way, as the reference. */
static const qd_gemm_choice *proposal_of(const candidate *all, int count, int way)
{
    for (int i = 0; i < count; i++)
        if (all[i].way == way && !all[i].variant)
            return &all[i].choice;
    return NULL;
}

static int by_median(const void *x, const void *y)
{
    const candidate *a = x, *b = y;
    return (a->choice.seconds > b->choice.seconds) - (a->choice.seconds < b->choice.seconds);
}

/* Times the finalists, which are at the front of `all`, under steady load and sorts them, fastest
 * first. With little time, fewer of them and in fewer rounds; returns their number. */
static qd_status time_finalists(bench *b, qd_gemm *gemm, candidate *all, int *finalists)
{
    double seconds;
    int batch = all[0].quick > 1e-7 ? (int)(batch_seconds / all[0].quick) : MOST_BATCH, rounds = hurried(b) ? HURRIED_ROUNDS : ROUNDS;
    batch = batch < 1 ? 1 : batch > MOST_BATCH ? MOST_BATCH : batch;
    const double left = (1 - trial_share) * b->seconds, each = batch * all[0].quick;
    while (rounds > 3 && rounds * *finalists * each > left)
        rounds -= 2;
    while (*finalists > 2 && rounds * *finalists * each > left)
        --*finalists;
    for (double warm = 0; warm < (hurried(b) ? hurried_warm_seconds : warm_seconds); warm += each)
        QD_TRY(time_runs(b, gemm, &all[0].choice, batch, &seconds, NULL));
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < *finalists; i++)
            QD_TRY(time_runs(b, gemm, &all[i].choice, batch, &all[i].rounds[r], NULL));
    for (int i = 0; i < *finalists; i++) {
        qsort(all[i].rounds, (size_t)rounds, sizeof *all[i].rounds, by_value);
        all[i].choice.seconds = all[i].rounds[rounds / 2];
    }
    qsort(all, (size_t)*finalists, sizeof *all, by_median);
    return QD_OK;
}

static qd_status search_with(bench *b, qd_gemm *gemm, candidate *all, qd_search_report *report)
{
    const qd_gemm_key *key = &gemm->key;
    int count = 0, best = 0;
    QD_TRY(time_all(b, gemm, all, &count, report));
    if (count == 0)
        return QD_FAIL(QD_UNSUPPORTED, "matmul (%lld, %lld, %lld): nothing that cuBLASLt proposes runs", (long long)key->m,
                       (long long)key->n, (long long)key->k);
    int finalists = pick_finalists(b, all, count);
    QD_TRY(time_finalists(b, gemm, all, &finalists));
    while (best < finalists - 1 && all[best].variant) {
        const qd_gemm_choice *proposal = proposal_of(all, count, all[best].way);
        if (proposal && agrees(b, gemm, &all[best].choice, proposal))
            break;
        best++;
    }
    if (all[best].variant && best == finalists - 1) /* only an unchecked one is left: take the library's proposal */
        for (best = 0; best < count - 1 && all[best].variant;)
            best++;
    for (int i = finalists - 1; i >= 0; i--)
        report->ways[all[i].way].best = all[i].choice.seconds;
    report->chosen = all[best].way;
    report->seconds = all[best].choice.seconds > 0 ? all[best].choice.seconds : all[best].quick;
    describe_chosen(&report->ways[all[best].way], &all[best]);
    qd_gemm *kept;
    QD_TRY(qd_gemm_find(b->cuda->gemms, key, &kept));
    qd_gemm_unbuild(kept);
    kept->choice = all[best].choice;
    kept->choice.seconds = report->seconds;
    kept->choice.rough = hurried(b);
    return QD_OK;
}

static qd_status search(qd_cuda *cuda, const qd_matmul_args *call, const qd_tune_args *tune, double seconds, qd_search_report *report)
{
    const double begin = qd_clock_now();
    qd_gemm gemm = {.key = qd_gemm_key_of(call)};
    gemm.key.alignment = 16;
    candidate *all = calloc(QD_GEMM_WAYS * MOST_PER_WAY, sizeof *all);
    bench b;
    if (!all)
        return QD_FAIL(QD_NO_MEMORY, "GEMM tuning: no host memory for a search");
    qd_status status = open_bench(cuda, call, tune, &b);
    if (status == QD_OK) {
        b.seconds = seconds;
        b.deadline = begin + trial_share * seconds;
        status = search_with(&b, &gemm, all, report);
        qd_gemm_unbuild(&gemm);
        close_bench(&b);
    }
    free(all);
    return status;
}

qd_status qd_cuda_search(qd_device *device, const qd_matmul_args *call, qd_search_report *report)
{
    return search((qd_cuda *)device, call, &(qd_tune_args){0}, INFINITY, report);
}

/* The entry of a GEMM as searches see it: their addresses are aligned. */
static qd_status entry_of(qd_cuda *cuda, const qd_matmul_args *call, qd_gemm **gemm)
{
    qd_gemm_key key = qd_gemm_key_of(call);
    key.alignment = 16;
    return qd_gemm_find(cuda->gemms, &key, gemm);
}

/* Without memory for timing, a GEMM keeps the library's first proposal. */
static qd_status tune_one(qd_cuda *cuda, const qd_matmul_args *call, const qd_tune_args *tune, double seconds, bool *searched)
{
    qd_search_report report;
    qd_status status = search(cuda, call, tune, seconds, &report);
    if (status == QD_NO_MEMORY) {
        qd_log(QD_LOG_WARN, "device", "GEMM (%lld, %lld, %lld) is not tuned: %s", (long long)call->m, (long long)call->n,
               (long long)call->k, qd_error_message());
        qd_error_clear();
        return QD_OK;
    }
    *searched |= status == QD_OK;
    return status;
}

/* The parts of all calls and their number. */
static qd_status list_parts(qd_cuda *cuda, const qd_tune_args *t, qd_tune_item *items, int *count)
{
    *count = 0;
    for (int i = 0; i < t->count; i++) {
        qd_matmul_args parts[2];
        if (t->calls[i].m < 1 || t->calls[i].n < 1 || t->calls[i].k < 1)
            continue;
        const int part_count = qd_gemm_parts(&t->calls[i], parts);
        for (int p = 0; p < part_count; p++) {
            qd_tune_item *item = &items[(*count)++];
            const double calls = t->times ? (double)t->times[i] : 1.0;
            *item = (qd_tune_item){.call = parts[p], .cost = qd_tune_cost(&parts[p]) * calls};
            qd_gemm *gemm;
            QD_TRY(entry_of(cuda, &item->call, &gemm));
            item->known = gemm->choice.seconds > 0;
            item->rough = item->known && gemm->choice.rough;
        }
    }
    return QD_OK;
}

qd_status qd_cuda_tune(qd_device *device, const qd_tune_args *t, bool *searched)
{
    qd_cuda *cuda = (qd_cuda *)device;
    *searched = false;
    if (cuda->deterministic || t->seconds <= 0)
        return QD_OK; /* two runs must choose the same: the library's first proposals */
    int count = 0;
    qd_tune_item *items = calloc((size_t)t->count * 2 + 1, sizeof *items);
    if (!items)
        return QD_FAIL(QD_NO_MEMORY, "GEMM tuning: no host memory for a list of %d", t->count);
    qd_status status = list_parts(cuda, t, items, &count);
    const int missing = status == QD_OK ? qd_tune_share(items, count, t->seconds) : 0;
    if (missing > 0 && t->begin)
        t->begin(t->context, missing);
    double over = 0; /* time that earlier searches left over, or exceeded */
    for (int i = 0; i < count && status == QD_OK; i++) {
        const qd_tune_item *item = &items[i];
        const double begin = qd_clock_now(), least = 0.2 * item->seconds;
        if (item->seconds <= 0)
            continue;
        double seconds = item->seconds + (isinf(item->seconds) ? 0 : over);
        status = tune_one(cuda, &item->call, t, seconds > least ? seconds : least, searched);
        over += isinf(item->seconds) ? 0 : item->seconds - (qd_clock_now() - begin);
    }
    free(items);
    return status;
}

/* A GEMM for whose search there is no memory keeps what it has, for good. */
static qd_status refine(qd_cuda *cuda, const qd_tune_args *t, const qd_matmul_args *call)
{
    bool searched = false;
    QD_TRY(tune_one(cuda, call, t, INFINITY, &searched));
    qd_gemm *gemm;
    QD_TRY(entry_of(cuda, call, &gemm));
    gemm->choice.rough = false;
    return QD_OK;
}

qd_status qd_cuda_tune_more(qd_device *device, const qd_tune_args *t, int *left)
{
    qd_cuda *cuda = (qd_cuda *)device;
    *left = 0;
    if (cuda->deterministic || t->seconds <= 0)
        return QD_OK;
    QD_CUDA_TRY(cudaDeviceSynchronize()); /* the step that used the memory lent to searches */
    int count = 0, next = -1;
    qd_tune_item *items = calloc((size_t)t->count * 2 + 1, sizeof *items);
    if (!items)
        return QD_FAIL(QD_NO_MEMORY, "GEMM tuning: no host memory for a list of %d", t->count);
    qd_status status = list_parts(cuda, t, items, &count);
    for (int i = 0; i < count && status == QD_OK; i++) {
        if (!items[i].rough)
            continue;
        ++*left;
        next = next < 0 || items[i].cost > items[next].cost ? i : next;
    }
    if (status == QD_OK && next >= 0) {
        status = refine(cuda, t, &items[next].call);
        --*left;
    }
    free(items);
    return status;
}
