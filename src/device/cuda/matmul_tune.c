/* The search for the fastest way to compute a product: every algorithm that cuBLASLt proposes, for each split between epilogue
 * and separate kernels, is run on random data (zeros would be faster than what training multiplies). Buffers rotate so that
 * what a small product reads is not in the cache. The few best are then timed again in turns, so that a card that grows warm
 * slows them alike, and the best median stays. */
#include "base/log.h"
#include "device/cuda/matmul_impl.h"
#include "device/cuda/search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUICK = 2, ROUNDS = 9, MOST_SETS = 8, FAVOURITES = 4, FINALISTS = FAVOURITES + QD_PRODUCT_WAYS };

/* One set of operands; all in one allocation, then the next set. */
typedef struct bench {
    qd_cuda *cuda;
    char *memory;
    int64_t bytes, set_bytes;
    int sets, next;
    cudaEvent_t from, to;
    qd_matmul_args call; /* of the first set */
} bench;

typedef struct candidate {
    qd_product_choice choice;
    int way, index;
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
    qd_device_free(&b->cuda->base, b->memory, b->bytes);
}

static qd_status open_bench(qd_cuda *cuda, const qd_matmul_args *call, bench *b)
{
    const qd_matmul_args *a = call;
    int64_t used = 0, c_bytes = qd_product_span(a->m, a->n, a->ldc, a->c_dtype);
    int64_t a_at = take(&used, qd_product_span(a->trans_a ? a->k : a->m, a->trans_a ? a->m : a->k, a->lda, a->a_dtype));
    int64_t b_at = take(&used, qd_product_span(a->trans_b ? a->n : a->k, a->trans_b ? a->k : a->n, a->ldb, a->b_dtype));
    int64_t bias_at = take(&used, a->bias ? a->n * (int64_t)qd_dtype_size(a->b_dtype) : 0);
    int64_t c_at = take(&used, c_bytes), residual_at = take(&used, a->residual ? c_bytes : 0);
    int64_t aux_at = take(&used, a->gelu ? c_bytes : 0);
    int64_t grad_at = take(&used, a->bias_grad ? a->m * (int64_t)qd_dtype_size(a->c_dtype) : 0);
    int64_t sets = (2 * (int64_t)cuda->properties.l2CacheSize + used - 1) / used;
    *b = (bench){.cuda = cuda, .set_bytes = used, .sets = sets < 1 ? 1 : sets > MOST_SETS ? MOST_SETS : (int)sets, .call = *a};
    b->bytes = b->set_bytes * b->sets;
    void *memory;
    QD_TRY(qd_device_alloc(&cuda->base, b->bytes, &memory));
    b->memory = memory;
    b->call.a = b->memory + a_at;
    b->call.b = b->memory + b_at;
    b->call.c = b->memory + c_at;
    b->call.bias = a->bias ? b->memory + bias_at : NULL;
    b->call.residual = a->residual ? b->memory + residual_at : NULL;
    b->call.aux = a->gelu ? b->memory + aux_at : NULL;
    b->call.bias_grad = a->bias_grad ? b->memory + grad_at : NULL;
    qd_status status = QD_OK;
    QD_CUDA_TRY_DONE(cudaEventCreate(&b->from));
    QD_CUDA_TRY_DONE(cudaEventCreate(&b->to));
    qd_stream *stream = cuda->base.compute;
    for (int i = 0; i < b->sets; i++) { /* operands of two types lie in one set: each is filled in its own */
        char *set = b->memory + b->set_bytes * i;
        uint32_t seed = 7u * (uint32_t)i;
        QD_TRY_DONE(qd_product_fill_random(stream, set + a_at, (b_at - a_at) / (int64_t)qd_dtype_size(a->a_dtype), a->a_dtype, seed));
        QD_TRY_DONE(qd_product_fill_random(stream, set + b_at, (c_at - b_at) / (int64_t)qd_dtype_size(a->b_dtype), a->b_dtype, seed + 1));
        QD_TRY_DONE(qd_product_fill_random(stream, set + c_at, (used - c_at) / (int64_t)qd_dtype_size(a->c_dtype), a->c_dtype, seed + 2));
    }
done:
    if (status != QD_OK)
        close_bench(b);
    return status;
}

/* One timed run of a choice. */
static qd_status time_run(bench *b, qd_product *product, const qd_product_choice *choice, double *seconds)
{
    qd_stream *stream = b->cuda->base.compute;
    cudaStream_t s = qd_cuda_stream_of(stream);
    float ms = 0;
    qd_matmul_args call = next_call(b);
    if (choice->converted) {
        qd_product_unbuild(product);
        product->choice = *choice;
    } else {
        QD_TRY(qd_product_build(product, choice));
    }
    QD_CUDA_TRY(cudaEventRecord(b->from, s));
    QD_TRY(qd_product_run(stream, product, &call));
    QD_CUDA_TRY(cudaEventRecord(b->to, s));
    QD_CUDA_TRY(cudaEventSynchronize(b->to));
    QD_CUDA_TRY(cudaEventElapsedTime(&ms, b->from, b->to));
    *seconds = ms * 1e-3;
    return QD_OK;
}

/* false: the algorithm does not run. */
static bool time_quick(bench *b, qd_product *product, candidate *c)
{
    double seconds;
    for (int i = 0; i <= QUICK; i++) {
        if (time_run(b, product, &c->choice, &seconds) != QD_OK) {
            qd_error_clear();
            return false;
        }
        if (i == 1 || (i > 1 && seconds < c->quick)) /* the first run loads the kernel */
            c->quick = seconds;
    }
    return true;
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

static void describe_way(const qd_product_choice *choice, qd_search_way *way)
{
    static const struct {
        int flag;
        const char *name;
    } names[] = {{QD_PRODUCT_BIAS, "bias"}, {QD_PRODUCT_GELU, "gelu"}, {QD_PRODUCT_GELU_GRAD, "dgelu"}, {QD_PRODUCT_BIAS_GRAD, "bias_grad"}};
    *way = (qd_search_way){.chosen = -1};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (choice->fused & names[i].flag)
            snprintf(way->fused + strlen(way->fused), sizeof way->fused - strlen(way->fused), "%s%s", *way->fused ? "+" : "",
                     names[i].name);
    if (!*way->fused)
        strcpy(way->fused, choice->converted ? "converted" : "none");
}

static int algorithm_value(const qd_product_choice *choice, cublasLtMatmulAlgoConfigAttributes_t name)
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
    way->algorithm = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_ID);
    way->tile = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_TILE_ID);
    way->stages = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_STAGES_ID);
    way->split = algorithm_value(&c->choice, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
}

/* Everything that runs, timed roughly. all: QD_PRODUCT_WAYS * QD_PRODUCT_CANDIDATES */
static qd_status time_all(bench *b, qd_product *product, candidate *all, int *count, qd_search_report *report)
{
    qd_product_choice ways[QD_PRODUCT_WAYS], choices[QD_PRODUCT_CANDIDATES];
    int way_count = qd_product_ways(&product->key, ways);
    *count = 0;
    *report = (qd_search_report){.chosen = -1};
    for (int w = 0; w < way_count; w++) {
        int offered = 1;
        choices[0] = ways[w];
        if (ways[w].converted) {
            if (*count > 0)
                break; /* for what nothing else takes */
        } else {
            QD_TRY(qd_product_build(product, &ways[w]));
            QD_TRY(qd_product_candidates(b->cuda, product, choices, &offered));
        }
        qd_search_way *way = &report->ways[report->way_count];
        describe_way(&ways[w], way);
        for (int i = 0; i < offered; i++) {
            candidate *c = &all[*count];
            *c = (candidate){.choice = choices[i], .way = report->way_count, .index = i};
            if (!time_quick(b, product, c))
                continue;
            count_candidate(way, c);
            ++*count;
        }
        report->way_count += way->candidates > 0;
    }
    return QD_OK;
}

/* Moves the finalists to the front: the best overall, then the best of each way that is not among them. */
static int pick_finalists(candidate *all, int count)
{
    qsort(all, (size_t)count, sizeof *all, by_quick);
    int finalists = count < FAVOURITES ? count : FAVOURITES;
    bool seen[QD_PRODUCT_WAYS] = {false};
    for (int i = 0; i < count; i++) {
        bool first = !seen[all[i].way];
        seen[all[i].way] = true;
        if (i >= finalists && first) {
            candidate swap = all[finalists];
            all[finalists] = all[i];
            all[i] = swap;
            finalists++;
        }
    }
    return finalists;
}

static qd_status search(qd_cuda *cuda, const qd_matmul_args *call, qd_search_report *report)
{
    qd_matmul_args plain = *call;
    plain.a = plain.b = NULL;
    plain.c = NULL;
    plain.aux = NULL;
    qd_product_key key = qd_product_key_of(&plain);
    key.alignment = 16;
    qd_product product = {.key = key}, *kept;
    candidate *all = calloc(QD_PRODUCT_WAYS * QD_PRODUCT_CANDIDATES, sizeof *all);
    bench b;
    int count = 0;
    if (!all)
        return QD_FAIL(QD_NO_MEMORY, "products: no host memory for a search");
    qd_status status = open_bench(cuda, call, &b);
    if (status != QD_OK) {
        free(all);
        return status;
    }
    QD_TRY_DONE(time_all(&b, &product, all, &count, report));
    if (count == 0) {
        status = QD_FAIL(QD_UNSUPPORTED, "matmul (%lld, %lld, %lld): nothing that cuBLASLt proposes runs", (long long)key.m,
                         (long long)key.n, (long long)key.k);
        goto done;
    }
    int finalists = pick_finalists(all, count), best = 0;
    for (int r = 0; r < ROUNDS; r++)
        for (int i = 0; i < finalists; i++)
            QD_TRY_DONE(time_run(&b, &product, &all[i].choice, &all[i].rounds[r]));
    for (int i = 0; i < finalists; i++) {
        qsort(all[i].rounds, ROUNDS, sizeof *all[i].rounds, by_value);
        all[i].choice.seconds = all[i].rounds[ROUNDS / 2];
        if (all[i].choice.seconds < all[best].choice.seconds)
            best = i;
    }
    report->chosen = all[best].way;
    report->seconds = all[best].choice.seconds;
    report->ways[all[best].way].chosen = all[best].index;
    QD_TRY_DONE(qd_product_find(cuda->products, &key, &kept));
    qd_product_unbuild(kept);
    kept->choice = all[best].choice;
done:
    qd_product_unbuild(&product);
    close_bench(&b);
    free(all);
    return status;
}

qd_status qd_cuda_search(qd_device *device, const qd_matmul_args *call, qd_search_report *report)
{
    return search((qd_cuda *)device, call, report);
}

qd_status qd_cuda_tune(qd_device *device, const qd_matmul_args *calls, int count, bool *searched)
{
    qd_cuda *cuda = (qd_cuda *)device;
    *searched = false;
    if (cuda->deterministic)
        return QD_OK; /* two runs must choose alike: the library's favourites */
    for (int i = 0; i < count; i++) {
        if (calls[i].m < 1 || calls[i].n < 1 || calls[i].k < 1)
            continue;
        qd_product_key key = qd_product_key_of(&calls[i]);
        key.alignment = 16;
        qd_product *known;
        QD_TRY(qd_product_find(cuda->products, &key, &known));
        if (known->choice.seconds > 0)
            continue;
        qd_search_report report;
        qd_status status = search(cuda, &calls[i], &report);
        if (status == QD_NO_MEMORY) {
            qd_log(QD_LOG_WARN, "device", "product (%lld, %lld, %lld) is not tuned: %s", (long long)key.m, (long long)key.n,
                   (long long)key.k, qd_error_message());
            qd_error_clear();
            continue;
        }
        QD_TRY(status);
        *searched = true;
    }
    return QD_OK;
}
