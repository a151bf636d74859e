/* Products and attention of a training step on one GPU, each by itself: what is chosen for each product, what it reaches and
 * what the other choices would have cost; attention forward and backward. A line per product and pass, a sum per case.
 *
 *   bench-cuda-kernels [CASE …]     cases: 124m 355m 1558m 1.3b 1b 8b; without: all six
 *
 * Times are medians on random data. The sum of a case is what the same work takes inside a step when nothing else is in
 * the way: compare it with the step's breakdown. */
#include "device/cuda/search.h"
#include "device/device.h"
#include "spec/ops.h"

#include <quadrille/strbuf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct model {
    const char *name;
    int layers;
    int64_t batch, seq, hidden, heads, kv_heads, inner, vocab;
    bool llama;
} model;

static const model models[] = {
    {"124m", 12, 64, 1024, 768, 12, 12, 3072, 50304, false},
    {"355m", 24, 32, 1024, 1024, 16, 16, 4096, 50304, false},
    {"1558m", 48, 16, 1024, 1600, 25, 25, 6400, 50304, false},
    {"1.3b", 24, 16, 2048, 2048, 16, 16, 8192, 50304, false},
    {"1b", 16, 8, 2048, 2048, 32, 8, 8192, 128256, true},
    {"8b", 8, 4, 4096, 4096, 32, 8, 14336, 32768, true},
};

enum { REPEATS = 9 };

static char here[1]; /* stands for an address in the calls whose operands the search makes itself */

static void fail(qd_status status)
{
    fprintf(stderr, "bench-cuda-kernels: %s\n%s", qd_error_message(), qd_error_trace());
    exit(status == QD_UNSUPPORTED ? 77 : 1);
}

static void check(qd_status status)
{
    if (status != QD_OK)
        fail(status);
}

/* Searches for one product, prints its line and returns its seconds. */
static double product(qd_device *device, const model *m, const char *name, qd_matmul_args call)
{
    qd_search_report r;
    call.a_dtype = call.b_dtype = call.c_dtype = QD_BF16;
    call.ldc = call.n;
    call.lda = call.trans_a ? call.m : call.k;
    call.ldb = call.trans_b ? call.k : call.n;
    check(qd_cuda_search(device, &call, &r));
    const qd_search_way *w = &r.ways[r.chosen];
    double work = 2.0 * (double)call.m * (double)call.n * (double)call.k;
    printf("%-6s %-9s %6lld %6lld %6lld  %8.1f %6.0f  %-10s %2d/%-2d %6.0f %6.0f  id %d tile %d stages %d split %d ", m->name, name,
           (long long)call.m, (long long)call.n, (long long)call.k, r.seconds * 1e6, work / r.seconds * 1e-12, w->fused,
           w->chosen, w->candidates, work / w->first * 1e-12, work / w->worst * 1e-12, w->algorithm, w->tile, w->stages, w->split);
    for (int i = 0; i < r.way_count; i++)
        if (i != r.chosen)
            printf(" [%s %.1f us]", r.ways[i].fused, r.ways[i].best * 1e6);
    printf("\n");
    fflush(stdout);
    return r.seconds;
}

/* Forward, input gradient and weight gradient of one linear layer y = x·Wᵀ. */
typedef struct linear {
    const char *name;
    int64_t out, in;
    bool residual, gelu, gelu_before; /* GELU after it; GELU before it, whose derivative its input gradient takes */
} linear;

static double layer_products(qd_device *device, const model *m, const linear *l)
{
    int64_t rows = m->batch * m->seq;
    char name[32];
    void *bias = m->llama ? NULL : here;
    double seconds = 0;
    snprintf(name, sizeof name, "%s", l->name);
    seconds += product(device, m, name, (qd_matmul_args){
        .m = rows, .n = l->out, .k = l->in, .trans_b = true, .bias = bias, .residual = l->residual ? here : NULL,
        .gelu = l->gelu ? QD_MATMUL_GELU : QD_MATMUL_NO_GELU, .aux = l->gelu ? here : NULL});
    snprintf(name, sizeof name, "%s dx", l->name);
    seconds += product(device, m, name, (qd_matmul_args){
        .m = rows, .n = l->in, .k = l->out,
        .gelu = l->gelu_before ? QD_MATMUL_GELU_GRAD : QD_MATMUL_NO_GELU, .aux = l->gelu_before ? here : NULL});
    snprintf(name, sizeof name, "%s dW", l->name);
    seconds += product(device, m, name, (qd_matmul_args){
        .m = l->out, .n = l->in, .k = rows, .trans_a = true, .accumulate = true, .bias_grad = bias});
    return seconds;
}

static double head_products(qd_device *device, const model *m)
{
    int64_t rows = m->batch * m->seq, chunk = qd_head_chunk_rows(qd_device_traits_find("cuda"), m->vocab);
    if (chunk > rows)
        chunk = rows;
    double seconds = product(device, m, "head", (qd_matmul_args){.m = chunk, .n = m->vocab, .k = m->hidden, .trans_b = true});
    seconds += product(device, m, "head dx", (qd_matmul_args){.m = chunk, .n = m->hidden, .k = m->vocab});
    seconds += product(device, m, "head dW", (qd_matmul_args){
        .m = m->vocab, .n = m->hidden, .k = chunk, .trans_a = true, .accumulate = true});
    return seconds * (double)rows / (double)chunk;
}

static double all_products(qd_device *device, const model *m)
{
    int64_t head_dim = m->hidden / m->heads;
    const linear layers[] = {
        {"qkv", (m->heads + 2 * m->kv_heads) * head_dim, m->hidden, false, false, false},
        {"out", m->hidden, m->hidden, true, false, false},
        {"up", (m->llama ? 2 : 1) * m->inner, m->hidden, false, !m->llama, false},
        {"down", m->hidden, m->inner, true, false, !m->llama},
    };
    double seconds = 0;
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
        seconds += layer_products(device, m, &layers[i]);
    return seconds * m->layers + head_products(device, m);
}

static int by_value(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

typedef qd_status (*attention_kernel)(qd_stream *stream, const qd_attention_args *a);

static double time_attention(qd_device *device, attention_kernel kernel, const qd_attention_args *a)
{
    qd_stream *stream = qd_device_compute_stream(device);
    qd_event *from, *to;
    double seconds[REPEATS];
    check(qd_event_create(device, &from));
    check(qd_event_create(device, &to));
    check(kernel(stream, a)); /* makes the plan */
    for (int i = 0; i < REPEATS; i++) {
        check(qd_event_record(from, stream));
        check(kernel(stream, a));
        check(qd_event_record(to, stream));
        check(qd_event_wait(to));
        check(qd_event_seconds(from, to, &seconds[i]));
    }
    qd_event_destroy(from);
    qd_event_destroy(to);
    qsort(seconds, REPEATS, sizeof *seconds, by_value);
    return seconds[REPEATS / 2];
}

/* Random bf16 values in (-1, 1): a sign, an exponent below that of 1, random digits. */
static void *random_rows(qd_device *device, int64_t elements, unsigned seed)
{
    void *there;
    uint16_t *values = malloc((size_t)elements * sizeof *values);
    if (!values)
        fail(QD_FAIL(QD_NO_MEMORY, "no host memory for %lld values", (long long)elements));
    uint32_t x = seed * 2654435761u + 1;
    for (int64_t i = 0; i < elements; i++) {
        x = x * 1664525u + 1013904223u;
        values[i] = (uint16_t)((x >> 31) << 15 | (124u + ((x >> 29) & 2u)) << 7 | ((x >> 20) & 127u));
    }
    check(qd_device_alloc(device, elements * 2, &there));
    check(qd_copy(qd_device_compute_stream(device), there, values, elements * 2));
    check(qd_stream_wait(qd_device_compute_stream(device)));
    free(values);
    return there;
}

static void *zeros(qd_device *device, int64_t bytes)
{
    void *there;
    check(qd_device_alloc(device, bytes, &there));
    return there;
}

static double attention(qd_device *device, const model *m)
{
    const qd_kernels *k = qd_device_kernels(device);
    int64_t head_dim = m->hidden / m->heads, rows = m->batch * m->seq, width = (m->heads + 2 * m->kv_heads) * head_dim;
    int64_t statistics = m->batch * m->heads * m->seq * 4;
    char *qkv = random_rows(device, rows * width, 1), *d_qkv = zeros(device, rows * width * 2);
    void *o = zeros(device, rows * m->hidden * 2), *d_o = random_rows(device, rows * m->hidden, 2);
    void *lse = zeros(device, statistics), *delta = zeros(device, statistics);
    int64_t k_at = m->hidden * 2, v_at = k_at + m->kv_heads * head_dim * 2;
    float scale = 1.0f;
    for (int64_t d = head_dim; d > 1; d /= 4)
        scale /= 2; /* close to 1 / sqrt(head_dim); its value changes no time */
    qd_attention_args a = {
        .q = qkv, .k = qkv + k_at, .v = qkv + v_at, .o = o, .lse = lse, .batch = m->batch, .seq = m->seq, .q_stride = width,
        .k_stride = width, .v_stride = width, .o_stride = m->hidden, .heads = (int)m->heads, .kv_heads = (int)m->kv_heads,
        .head_dim = (int)head_dim, .scale = scale, .dtype = QD_BF16, .d_o = d_o, .dq = d_qkv, .dk = d_qkv + k_at,
        .dv = d_qkv + v_at, .delta = delta,
    };
    double forward = time_attention(device, k->attention_forward, &a);
    double backward = time_attention(device, k->attention_backward, &a);
    /* causal: half of 2 products forward, 5 backward */
    double work = 2.0 * (double)(m->batch * m->heads * head_dim) * (double)m->seq * (double)m->seq;
    printf("%-6s attention forward %8.1f us %5.0f TFLOP/s, backward %8.1f us %5.0f TFLOP/s\n", m->name, forward * 1e6,
           work / forward * 1e-12, backward * 1e6, 2.5 * work / backward * 1e-12);
    fflush(stdout);
    qd_device_free(device, qkv, rows * width * 2);
    qd_device_free(device, d_qkv, rows * width * 2);
    qd_device_free(device, o, rows * m->hidden * 2);
    qd_device_free(device, d_o, rows * m->hidden * 2);
    qd_device_free(device, lse, statistics);
    qd_device_free(device, delta, statistics);
    return (forward + backward) * m->layers;
}

/* Device and library versions, and which engines attention uses: the lines of the tuning text that say so. */
static void print_engines(qd_device *device)
{
    qd_strbuf text = {0};
    check(qd_device_tuning_get(device, &text));
    for (char *line = strtok(text.data, "\n"); line; line = strtok(NULL, "\n"))
        if (strncmp(line, "product", 7) != 0)
            printf("%s\n", line);
    qd_strbuf_free(&text);
}

int main(int argc, char **argv)
{
    qd_device *device;
    double sums[sizeof models / sizeof *models][2] = {{0}};
    check(qd_device_create("cuda", NULL, &device));
    printf("case   product        m      n      k        us TFLOP/s fused     best/of  first  worst (TFLOP/s)\n");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        bool wanted = argc < 2;
        for (int j = 1; j < argc; j++)
            wanted |= strcmp(argv[j], models[i].name) == 0;
        if (!wanted)
            continue;
        sums[i][0] = all_products(device, &models[i]);
        sums[i][1] = attention(device, &models[i]);
    }
    print_engines(device);
    printf("case    products ms  attention ms  together ms   tokens/s of these alone\n");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (sums[i][0] > 0)
            printf("%-7s %11.2f %13.2f %12.2f %12.0f\n", models[i].name, sums[i][0] * 1e3, sums[i][1] * 1e3,
                   (sums[i][0] + sums[i][1]) * 1e3, (double)(models[i].batch * models[i].seq) / (sums[i][0] + sums[i][1]));
    qd_device_destroy(device);
    return 0;
}
