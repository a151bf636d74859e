/* Times the GEMMs and the attention of a training step on one GPU, each alone.
 *
 * For each GEMM it prints the chosen algorithm, its speed, and what the other candidates would have
 * cost; for attention, forward and backward; and a sum per case. Then grouped GEMMs over experts
 * with unequal counts, compared with one GEMM of the same total size: both alternate in intervals
 * of a tenth of a second, so that they run on a card at its power limit, as in a step. Case `one`
 * has one expert, and so the same GEMM on both sides.
 *
 *   bench-cuda-kernels [CASE …]
 *
 * Cases: 124m 355m 1558m 1.3b 1b 8b mixtral fine one odd windows latent; default: all but the last
 * three.
 * `odd` is the head of 124m with GPT-2's own 50,257 tokens: each of its GEMMs whole, in rows of
 * 50,304, and in the two parts in which it runs. `windows` is attention with the heads of Gemma 2
 * over lengths of sequence and window, with cuDNN and with our own kernels; `latent` with heads of
 * 192 and values of 128 (DeepSeek V3).
 *
 * Times are medians on random data. The sum of a case is the time of the same work inside a step
 * without interference: compare it with the step's breakdown. */
#include "device/cuda/gemm/search.h"
#include "device/aligned_gemm.h"
#include "device/device.h"
#include "spec/ops/ops.h"

#include <quadrille/strbuf.h>
#include <math.h>
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

/* MoE layers: their rows are tokens times experts per token. */
typedef struct expert_layer {
    const char *name;
    int experts, per_token;
    int64_t tokens, hidden, inner;
} expert_layer;

static const expert_layer expert_layers[] = {
    {"mixtral", 8, 2, 16384, 2048, 5632},
    {"fine", 64, 6, 16384, 2048, 1408},
    {"one", 1, 1, 16384, 2048, 5632},
};

enum { REPEATS = 9, ROUNDS = 9 };

static char here[1]; /* any address: the search allocates the operands itself */

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

/* Searches for the best algorithm of one GEMM, prints its line and returns its seconds. */
static double product(qd_device *device, const model *m, const char *name, qd_matmul_args call)
{
    qd_search_report r;
    call.a_dtype = call.b_dtype = call.c_dtype = QD_BF16;
    if (!call.ldc) { /* contiguous rows */
        call.ldc = call.n;
        call.lda = call.trans_a ? call.m : call.k;
        call.ldb = call.trans_b ? call.k : call.n;
    }
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
    bool residual, gelu, gelu_before; /* GELU after it; GELU before it, whose derivative is fused into its input gradient */
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

static void odd_head(qd_device *device)
{
    const model m = {"odd", 12, 64, 1024, 768, 12, 12, 3072, 50257, false};
    const int64_t chunk = qd_head_chunk_rows(qd_device_traits_find("cuda"), m.vocab), stride = qd_logits_stride(m.vocab), h = m.hidden;
    const struct {
        const char *name;
        qd_matmul_args call;
    } gemms[] = {
        {"head", {.m = chunk, .n = m.vocab, .k = h, .lda = h, .ldb = h, .ldc = stride, .trans_b = true}},
        {"head dx", {.m = chunk, .n = h, .k = m.vocab, .lda = stride, .ldb = h, .ldc = h}},
        {"head dW", {.m = m.vocab, .n = h, .k = chunk, .lda = stride, .ldb = h, .ldc = h, .trans_a = true, .accumulate = true}},
    };
    for (size_t i = 0; i < sizeof gemms / sizeof *gemms; i++) {
        qd_matmul_args whole = gemms[i].call, parts[2];
        double seconds = 0;
        whole.a_dtype = whole.b_dtype = whole.c_dtype = QD_BF16;
        const double one = product(device, &m, gemms[i].name, whole);
        const int count = qd_matmul_cut(&whole, 0, parts);
        for (int p = 0; p < count; p++)
            seconds += product(device, &m, count == 2 ? "  part" : "  whole", parts[p]);
        printf("odd    %-9s whole %.1f us, in %d parts %.1f us\n", gemms[i].name, one * 1e6, count, seconds * 1e6);
    }
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

typedef struct timed_call {
    qd_status (*call)(qd_stream *stream, const void *args);
    const void *args;
} timed_call;

/* Seconds per call of `times` consecutive calls. */
static double time_calls(qd_device *device, timed_call c, int times)
{
    qd_stream *stream = qd_device_compute_stream(device);
    qd_event *from, *to;
    double seconds;
    check(qd_event_create(device, &from));
    check(qd_event_create(device, &to));
    check(qd_event_record(from, stream));
    for (int i = 0; i < times; i++)
        check(c.call(stream, c.args));
    check(qd_event_record(to, stream));
    check(qd_event_wait(to));
    check(qd_event_seconds(from, to, &seconds));
    qd_event_destroy(from);
    qd_event_destroy(to);
    return seconds / times;
}

/* Median seconds of a call, each call timed alone. */
static double time_call(qd_device *device, timed_call c)
{
    double seconds[REPEATS];
    (void)time_calls(device, c, 1); /* creates the plan */
    for (int i = 0; i < REPEATS; i++)
        seconds[i] = time_calls(device, c, 1);
    qsort(seconds, REPEATS, sizeof *seconds, by_value);
    return seconds[REPEATS / 2];
}

/* Medians of two alternating calls, under steady load. */
static void time_in_turn(qd_device *device, const timed_call calls[2], double seconds[2])
{
    const double round = 0.1, warm_up = 0.5;
    double all[2][ROUNDS];
    int times[2];
    for (int c = 0; c < 2; c++)
        times[c] = 1 + (int)(round / time_call(device, calls[c]));
    (void)time_calls(device, calls[0], (int)(times[0] * warm_up / round));
    for (int r = 0; r < ROUNDS; r++)
        for (int c = 0; c < 2; c++)
            all[c][r] = time_calls(device, calls[c], times[c]);
    for (int c = 0; c < 2; c++) {
        qsort(all[c], ROUNDS, sizeof *all[c], by_value);
        seconds[c] = all[c][ROUNDS / 2];
    }
}

#define CALL(slot, type)                                                                                    \
    static qd_status call_##slot(qd_stream *stream, const void *args)                                       \
    {                                                                                                       \
        return qd_device_kernels(qd_stream_device(stream))->slot(stream, (const type *)args);                \
    }
CALL(attention_forward, qd_attention_args)
CALL(attention_backward, qd_attention_args)
static qd_status call_own_forward(qd_stream *stream, const void *args)
{
    return qd_cuda_attention_forward_own(stream, args);
}
static qd_status call_own_backward(qd_stream *stream, const void *args)
{
    return qd_cuda_attention_backward_own(stream, args);
}
CALL(grouped, qd_grouped_args)
CALL(matmul, qd_matmul_args)

/* Random bf16 values in (-1, 1): random sign and mantissa, an exponent below that of 1. */
static void *random_rows(qd_device *device, int64_t elements, unsigned seed)
{
    void *there;
    int64_t part = elements < 1 << 24 ? elements : 1 << 24; /* repeated after that */
    uint16_t *values = malloc((size_t)part * sizeof *values);
    if (!values)
        fail(QD_FAIL(QD_NO_MEMORY, "no host memory for %lld values", (long long)part));
    uint32_t x = seed * 2654435761u + 1;
    for (int64_t i = 0; i < part; i++) {
        x = x * 1664525u + 1013904223u;
        values[i] = (uint16_t)((x >> 31) << 15 | (124u + ((x >> 29) & 2u)) << 7 | ((x >> 20) & 127u));
    }
    check(qd_device_alloc(device, elements * 2, &there));
    for (int64_t at = 0; at < elements; at += part)
        check(qd_copy(qd_device_compute_stream(device), (uint16_t *)there + at, values, (elements - at < part ? elements - at : part) * 2));
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
    double forward = time_call(device, (timed_call){call_attention_forward, &a});
    double backward = time_call(device, (timed_call){call_attention_backward, &a});
    /* causal: half of 2 GEMMs forward, 5 backward */
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

/* Counts with a mild imbalance: 0.7 to 1.3 of the mean. */
static void *expert_counts(qd_device *device, const expert_layer *l, int64_t rows)
{
    int32_t counts[64];
    int64_t left = rows;
    for (int e = 0; e < l->experts; e++)
        left -= counts[e] = (int32_t)((double)(rows / l->experts) * (0.7 + 0.6 * (double)(e * 37 % 17) / 16.0));
    for (int e = 0; left != 0; e = (e + 1) % l->experts, left += left > 0 ? -1 : 1)
        counts[e] += left > 0 ? 1 : -1;
    void *there = zeros(device, (int64_t)sizeof counts);
    check(qd_copy(qd_device_compute_stream(device), there, counts, (int64_t)sizeof counts));
    check(qd_stream_wait(qd_device_compute_stream(device)));
    return there;
}

/* One grouped GEMM: n and k as in qd_grouped_args. */
static void grouped(qd_device *device, const expert_layer *l, const char *name, qd_grouped_args a)
{
    a.rows = l->tokens * l->per_token;
    a.sources = 1;
    a.experts = l->experts;
    a.a_dtype = a.b_dtype = a.c_dtype = QD_BF16;
    int64_t weights = a.experts * a.n * a.k;
    void *counts = expert_counts(device, l, a.rows);
    void *x = random_rows(device, a.rows * a.k, 1);
    a.counts = counts;
    a.a = x;
    a.b = random_rows(device, weights, 2);
    a.c = random_rows(device, a.rows * a.n, 3);
    qd_matmul_args whole = {.a = x, .b = a.b, .c = a.c, .m = a.rows, .n = a.n, .k = a.k, .trans_b = a.trans_b};
    if (a.by_experts)
        whole = (qd_matmul_args){.a = a.c, .b = x, .c = a.b, .m = a.n, .n = a.k, .k = a.rows, .trans_a = true};
    whole.accumulate = a.accumulate;
    whole.a_dtype = whole.b_dtype = whole.c_dtype = QD_BF16;
    whole.lda = whole.trans_a ? whole.m : whole.k;
    whole.ldb = whole.trans_b ? whole.k : whole.n;
    whole.ldc = whole.n;
    bool searched;
    double seconds[2];
    check(qd_device_tune(device, &(qd_tune_args){.calls = &whole, .count = 1, .seconds = INFINITY}, &searched));
    time_in_turn(device, (timed_call[2]){{call_grouped, &a}, {call_matmul, &whole}}, seconds);
    const double work = 2e-12 * (double)a.rows * (double)a.n * (double)a.k;
    printf("%-8s %-8s %2d experts, %6lld rows, n %5lld, k %5lld  %8.1f us %4.0f TFLOP/s, one GEMM %8.1f us %4.0f TFLOP/s: %.2f\n",
           l->name, name, a.experts, (long long)a.rows, (long long)a.n, (long long)a.k, seconds[0] * 1e6, work / seconds[0],
           seconds[1] * 1e6, work / seconds[1], seconds[1] / seconds[0]);
    fflush(stdout);
    qd_device_free(device, counts, 64 * 4);
    qd_device_free(device, x, a.rows * a.k * 2);
    qd_device_free(device, a.b, weights * 2);
    qd_device_free(device, a.c, a.rows * a.n * 2);
}

static void expert_products(qd_device *device, const expert_layer *l)
{
    grouped(device, l, "up", (qd_grouped_args){.n = 2 * l->inner, .k = l->hidden, .trans_b = true});
    grouped(device, l, "down", (qd_grouped_args){.n = l->hidden, .k = l->inner, .trans_b = true});
    grouped(device, l, "down dx", (qd_grouped_args){.n = l->inner, .k = l->hidden});
    grouped(device, l, "up dx", (qd_grouped_args){.n = l->hidden, .k = 2 * l->inner});
    for (int add = 0; add < 2; add++) { /* gradients of the first micro-batch overwrite, those of the others accumulate */
        grouped(device, l, add ? "up dW+" : "up dW",
                (qd_grouped_args){.n = 2 * l->inner, .k = l->hidden, .by_experts = true, .accumulate = add});
        grouped(device, l, add ? "down dW+" : "down dW",
                (qd_grouped_args){.n = l->hidden, .k = l->inner, .by_experts = true, .accumulate = add});
    }
}

/* Prints the lines of the tuning text with device and library versions and the engines of
 * attention. */
static void print_engines(qd_device *device)
{
    qd_strbuf text = {0};
    check(qd_device_tuning_get(device, &text));
    for (char *line = strtok(text.data, "\n"); line; line = strtok(NULL, "\n"))
        if (strncmp(line, "product", 7) != 0)
            printf("%s\n", line);
    qd_strbuf_free(&text);
}

/* One line of a table of attention: us and TFLOP/s of both passes, then with our own kernels. */
typedef struct attention_line {
    int64_t batch, seq, window; /* window 0: none */
    float softcap;
    bool documents; /* of a quarter of a sequence each */
} attention_line;

static void attention_lines(qd_device *device, int heads, int kv_heads, int dim, int v_dim, const attention_line *lines, int count)
{
    int64_t rows = 0;
    for (int i = 0; i < count; i++)
        rows = rows < lines[i].batch * lines[i].seq ? lines[i].batch * lines[i].seq : rows;
    const int64_t k_at = (int64_t)heads * dim * 2, v_at = k_at + (int64_t)kv_heads * dim * 2, width = v_at / 2 + (int64_t)kv_heads * v_dim;
    const int64_t o_width = (int64_t)heads * v_dim, bytes = rows * width * 2, o_bytes = rows * o_width * 2, statistics = rows * heads * 4;
    char *qkv = random_rows(device, rows * width, 1), *d_qkv = zeros(device, bytes);
    void *o = zeros(device, o_bytes), *d_o = random_rows(device, rows * o_width, 2), *lse = zeros(device, statistics);
    void *delta = zeros(device, statistics), *starts = zeros(device, rows * 4);
    int32_t *host = calloc((size_t)rows, sizeof *host);
    if (!host)
        fail(QD_FAIL(QD_NO_MEMORY, "no host memory for %lld rows", (long long)rows));
    printf("attention, %d and %d heads of %d, values of %d: us and TFLOP/s forward and backward, the same with our own kernels\n", heads,
           kv_heads, dim, v_dim);
    for (int i = 0; i < count; i++) {
        const attention_line *l = &lines[i];
        for (int64_t r = 0; r < l->batch * l->seq; r++)
            host[r] = (int32_t)(r % l->seq / (l->seq / 4) * (l->seq / 4));
        check(qd_copy(qd_device_compute_stream(device), starts, host, l->batch * l->seq * 4));
        check(qd_stream_wait(qd_device_compute_stream(device)));
        const qd_attention_args a = {
            .q = qkv, .k = qkv + k_at, .v = qkv + v_at, .o = o, .lse = lse, .batch = l->batch, .seq = l->seq, .q_stride = width,
            .k_stride = width, .v_stride = width, .o_stride = o_width, .heads = heads, .kv_heads = kv_heads, .head_dim = dim,
            .v_dim = v_dim,
            .scale = 0.0625f, .softcap = l->softcap, .window = l->window, .doc_start = l->documents ? starts : NULL, .dtype = QD_BF16,
            .d_o = d_o, .dq = d_qkv, .dk = d_qkv + k_at, .dv = d_qkv + v_at, .delta = delta,
        };
        const timed_call calls[] = {{call_attention_forward, &a}, {call_attention_backward, &a}, {call_own_forward, &a},
                                    {call_own_backward, &a}};
        const double outside = l->window && l->window < l->seq ? (double)(l->seq - l->window) : 0, all = (double)l->seq;
        const double pairs = l->documents ? all * all / 4 : all * all - outside * outside;
        printf("batch %lld seq %5lld window %5lld cap %2.0f%s", (long long)l->batch, (long long)l->seq, (long long)l->window,
               (double)l->softcap, l->documents ? " documents" : "");
        for (int c = 0; c < 4; c++) {
            /* scores, results; backward: scores, dq and dk, dv and the gradients of the weights */
            const double seconds = time_call(device, calls[c]), sizes = c % 2 ? 3.0 * dim + 2.0 * v_dim : dim + v_dim;
            printf(" | %9.1f %5.0f", seconds * 1e6, (double)(l->batch * heads) * sizes * pairs / seconds * 1e-12);
        }
        printf("\n");
        fflush(stdout);
    }
    free(host);
    qd_device_free(device, qkv, bytes);
    qd_device_free(device, d_qkv, bytes);
    qd_device_free(device, o, o_bytes);
    qd_device_free(device, d_o, o_bytes);
    qd_device_free(device, lse, statistics);
    qd_device_free(device, delta, statistics);
    qd_device_free(device, starts, rows * 4);
}

/* Attention of Gemma 2: the time grows with the window, not with the sequence. */
static void windows(qd_device *device)
{
    static const int64_t lengths[] = {4096, 8192, 16384, 32768}, sizes[] = {1024, 4096, 0};
    attention_line lines[24];
    int count = 0;
    for (int capped = 0; capped < 2; capped++)
        for (int w = 0; w < 3; w++)
            for (int n = 0; n < 4; n++)
                lines[count++] = (attention_line){1, lengths[n], sizes[w], capped ? 50.0f : 0.0f, false};
    attention_lines(device, 8, 4, 256, 256, lines, count);
}

/* Latent attention of DeepSeek V3, and for comparison heads of 128. */
static void latent(qd_device *device)
{
    static const attention_line lines[] = {{8, 2048, 0, 0, false}, {4, 4096, 0, 0, false}, {4, 4096, 0, 0, true}, {1, 16384, 0, 0, false}};
    attention_lines(device, 16, 16, 192, 128, lines, 4);
    attention_lines(device, 16, 16, 128, 128, lines, 4);
}

static bool is_wanted(const char *name, int argc, char **argv)
{
    bool wanted = argc < 2;
    for (int i = 1; i < argc; i++)
        wanted |= strcmp(argv[i], name) == 0;
    return wanted;
}

int main(int argc, char **argv)
{
    qd_device *device;
    double sums[sizeof models / sizeof *models][2] = {{0}};
    check(qd_device_create("cuda", NULL, &device));
    printf("case   GEMM           m      n      k        us TFLOP/s fused     best/of  first  worst (TFLOP/s)\n");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        if (!is_wanted(models[i].name, argc, argv))
            continue;
        sums[i][0] = all_products(device, &models[i]);
        sums[i][1] = attention(device, &models[i]);
    }
    for (size_t i = 0; i < sizeof expert_layers / sizeof *expert_layers; i++)
        if (is_wanted(expert_layers[i].name, argc, argv))
            expert_products(device, &expert_layers[i]);
    if (argc > 1 && is_wanted("odd", argc, argv))
        odd_head(device);
    if (argc > 1 && is_wanted("windows", argc, argv))
        windows(device);
    if (argc > 1 && is_wanted("latent", argc, argv))
        latent(device);
    print_engines(device);
    printf("case       GEMMs ms  attention ms  together ms   tokens/s of these alone\n");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (sums[i][0] > 0)
            printf("%-7s %11.2f %13.2f %12.2f %12.0f\n", models[i].name, sums[i][0] * 1e3, sums[i][1] * 1e3,
                   (sums[i][0] + sums[i][1]) * 1e3, (double)(models[i].batch * models[i].seq) / (sums[i][0] + sums[i][1]));
    qd_device_destroy(device);
    return 0;
}
