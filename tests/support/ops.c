/* The kernel test harness: devices, random inputs, guard zones, comparisons and speed. */
#include "support/ops.h"

#include "support/sample.h"

#include "base/clock.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GUARD = 256, SAMPLES = QD_TEST_SANITIZED ? 1 : 10, THREAD_MOST = 3 };

/* "best": the CPU device without a name, which chooses the best instruction set; that choice is
 * tested with one case per kernel, the cases themselves run on the same kernels by name. "cuda":
 * the first GPU, in deterministic mode. */
static const char *const isas[] = {
    "best", "amx", "avx512bf16", "avx512", "amx_emulated", "avx512bf16_emulated", "avx2", "neon", "generic", "cuda"};
const char *const ops_cpu_isas[OPS_CPU_ISAS] = {
    "amx", "avx512bf16", "avx512", "amx_emulated", "avx512bf16_emulated", "avx2", "neon", "generic"};
enum { ISA_COUNT = sizeof isas / sizeof *isas };
static qd_device *kept[ISA_COUNT][THREAD_MOST + 1];

static uint64_t run_seed, random_state;

/* Random numbers: splitmix64, sufficient for test inputs. */

static uint64_t next_word(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double ops_uniform(void)
{
    return (double)(next_word() >> 11) * 0x1p-53;
}

double ops_normal(void)
{
    double radius = sqrt(-2 * log(1 - ops_uniform()));
    return radius * cos(6.283185307179586 * ops_uniform());
}

static qd_status create_device(const char *isa, int threads, qd_device **device)
{
    qd_device_config config = qd_device_config_default();
    bool cuda = isa && strcmp(isa, "cuda") == 0;
    config.isa = cuda || (isa && strcmp(isa, "best") == 0) ? NULL : isa;
    config.threads = threads;
    config.deterministic = true;
    return qd_device_create(cuda ? "cuda" : "cpu", &config, device);
}

qd_device *ops_device(const char *isa, int threads)
{
    int row = 0;
    for (int i = 0; isa && i < ISA_COUNT; i++)
        if (strcmp(isa, isas[i]) == 0)
            row = i;
    if (threads > THREAD_MOST)
        fail_msg("the harness keeps devices of at most %d threads", THREAD_MOST);
    qd_device **device = &kept[row][threads];
    if (!*device)
        ops_assert_ok(create_device(isa, threads, device));
    return *device;
}

static bool isa_available(const char *isa)
{
    qd_device *device;
    bool available = create_device(isa, 1, &device) == QD_OK;
    if (!available && strcmp(isa, "cuda") == 0)
        printf("skipped: no CUDA device: %s\n", qd_error_message());
    else if (!available && strstr(qd_error_message(), "this machine"))
        printf("skipped: %s: %s\n", isa, qd_error_message());
    qd_device_destroy(device);
    qd_error_clear();
    return available;
}

qd_device *ops_cpu(const char *isa)
{
    return isa_available(isa) ? ops_device(isa, 2) : NULL;
}

qd_device *ops_cuda(void)
{
    static int available = -1;
    if (available < 0)
        available = isa_available("cuda");
    return available ? ops_device("cuda", 1) : NULL;
}

void ops_assert_ok(qd_status status)
{
    if (status != QD_OK)
        fail_msg("%s: %s\n%s", qd_status_text(status), qd_error_message(), qd_error_trace());
}

void ops_assert_fails(qd_status got, qd_status status, const char *text)
{
    if (got != status || !strstr(qd_error_message(), text))
        fail_msg("expected '%s' with a message about '%s', got '%s': %s", qd_status_text(status), text,
                 qd_status_text(got), qd_error_message());
    qd_error_clear();
}

static int64_t tensor_count(const ops_tensor *t)
{
    return t->role == OPS_ABSENT ? 0 : t->rows * t->ld;
}

static bool inside(const ops_tensor *t, int64_t i)
{
    return i % t->ld < t->cols;
}

static void *take(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p)
        fail_msg("no memory for a test buffer of %zu bytes", bytes);
    return p;
}

static void put(const ops_tensor *t, void *to, int64_t i, double x)
{
    if (t->dtype == QD_F32) {
        ((float *)to)[i] = (float)x;
    } else if (t->dtype == QD_F64) {
        ((double *)to)[i] = x;
    } else if (t->dtype == QD_I32) {
        ((int32_t *)to)[i] = (int32_t)x;
    } else { /* bf16, to nearest even */
        float f = (float)x;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        ((uint16_t *)to)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

static double get(const ops_tensor *t, const void *from, int64_t i)
{
    if (t->dtype == QD_F32)
        return ((const float *)from)[i];
    if (t->dtype == QD_F64)
        return ((const double *)from)[i];
    if (t->dtype == QD_I32)
        return ((const int32_t *)from)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static int list_tensors(const ops_op *op, const void *c, ops_tensor *t)
{
    memset(t, 0, OPS_TENSORS * sizeof *t);
    int count = op->tensors(c, t);
    for (int i = 0; i < count; i++) {
        t[i].rows = t[i].rows ? t[i].rows : 1;
        t[i].ld = t[i].ld ? t[i].ld : t[i].cols;
        t[i].scale = t[i].scale == 0 ? 1 : t[i].scale;
        if (t[i].tol == 0)
            t[i].tol = t[i].dtype == QD_F32 ? 5e-6 : t[i].dtype == QD_BF16 ? 4e-3 : t[i].dtype == QD_F64 ? 1e-12 : 0;
    }
    return count;
}

/* One case: tensors, their values as doubles before (v) and expected after (w), and the raw bytes
 * for the kernel. */
typedef struct instance {
    const ops_op *op;
    const void *c;
    char text[160];
    ops_tensor t[OPS_TENSORS];
    int count;
    double *v[OPS_TENSORS], *w[OPS_TENSORS];
    char *raw[OPS_TENSORS]; /* guard, payload, guard */
    int64_t bytes[OPS_TENSORS];
} instance;

static void round_inputs(instance *in)
{
    for (int i = 0; i < in->count; i++) {
        if (in->t[i].role != OPS_IN && in->t[i].role != OPS_INOUT)
            continue;
        for (int64_t j = 0; j < tensor_count(&in->t[i]); j++) {
            put(&in->t[i], in->raw[i] + GUARD, j, in->v[i][j]);
            in->v[i][j] = get(&in->t[i], in->raw[i] + GUARD, j);
        }
    }
}

static void instance_open(instance *in, const ops_op *op, const void *c)
{
    memset(in, 0, sizeof *in);
    in->op = op;
    in->c = c;
    op->describe(c, in->text, sizeof in->text);
    in->count = list_tensors(op, c, in->t);
    for (int i = 0; i < in->count; i++) {
        const ops_tensor *t = &in->t[i];
        int64_t n = tensor_count(t);
        in->bytes[i] = n * (int64_t)qd_dtype_size(t->dtype);
        in->v[i] = take((size_t)n * sizeof(double));
        in->raw[i] = take((size_t)in->bytes[i] + 2 * GUARD);
        memset(in->raw[i], 0xa5, (size_t)in->bytes[i] + 2 * GUARD);
        memset(in->raw[i] + GUARD, 0xff, (size_t)in->bytes[i]); /* NaN in every float type */
        for (int64_t j = 0; j < n; j++)
            in->v[i][j] = t->role == OPS_OUT || t->role == OPS_SCRATCH ? NAN
                          : t->dtype == QD_I32      ? t->offset + floor(t->scale * ops_uniform())
                                                    : t->offset + t->scale * ops_normal();
    }
    round_inputs(in);
    if (op->derive) {
        op->derive(c, in->v);
        round_inputs(in);
    }
    for (int i = 0; i < in->count; i++) {
        size_t bytes = (size_t)tensor_count(&in->t[i]) * sizeof(double);
        in->w[i] = take(bytes);
        memcpy(in->w[i], in->v[i], bytes);
    }
}

static void instance_close(instance *in)
{
    for (int i = 0; i < in->count; i++) {
        free(in->v[i]);
        free(in->w[i]);
        free(in->raw[i]);
    }
}

/* Addresses for the kernel; device allocations are recorded in `base`. */
static void upload(const instance *in, qd_device *device, void **base, void **p)
{
    qd_stream *stream = qd_device_compute_stream(device);
    for (int i = 0; i < in->count; i++) {
        const ops_tensor *t = &in->t[i];
        base[i] = p[i] = NULL;
        if (t->role == OPS_ABSENT)
            continue;
        if (t->shares) {
            p[i] = p[t->shares - 1];
            continue;
        }
        int64_t bytes = in->bytes[i] + 2 * GUARD;
        if (t->host) {
            base[i] = take((size_t)bytes);
            memcpy(base[i], in->raw[i], (size_t)bytes);
        } else {
            ops_assert_ok(qd_device_alloc(device, bytes, &base[i]));
            ops_assert_ok(qd_copy(stream, base[i], in->raw[i], bytes));
        }
        p[i] = (char *)base[i] + GUARD;
    }
}

static void release(const instance *in, qd_device *device, void **base)
{
    for (int i = 0; i < in->count; i++) {
        if (in->t[i].host)
            free(base[i]);
        else
            qd_device_free(device, base[i], in->bytes[i] + 2 * GUARD);
    }
}

static void check_untouched(const instance *in, int i, const char *got, const char *isa)
{
    const ops_tensor *t = &in->t[i];
    bool shared = t->role != OPS_IN;
    for (int j = 0; j < in->count; j++)
        shared = shared || in->t[j].shares == i + 1;
    int64_t size = (int64_t)qd_dtype_size(t->dtype), end = GUARD + in->bytes[i];
    /* Most tensors match as a whole, or have no gaps between their rows; only the others are
     * searched. */
    const char *was = in->raw[i];
    bool search = shared ? t->ld != t->cols || memcmp(got, was, GUARD) != 0 || memcmp(got + end, was + end, GUARD) != 0
                         : memcmp(got, was, (size_t)(end + GUARD)) != 0;
    for (int64_t b = 0; search && b < end + GUARD; b++) {
        bool payload = b >= GUARD && b < end && inside(t, (b - GUARD) / size);
        if (payload && shared)
            continue;
        if (got[b] != in->raw[i][b])
            fail_msg("%s %s on %s: wrote to %s of '%s', at byte %lld of %lld (--seed %llu)", in->op->kernel, in->text,
                     isa, payload ? "the input" : "memory outside", t->name, (long long)(b - GUARD),
                     (long long)in->bytes[i], (unsigned long long)run_seed);
    }
}

static double check_values(const instance *in, int i, const char *payload, const char *isa)
{
    const ops_tensor *t = &in->t[i];
    double difference = 0, size = 0, count = 0;
    for (int64_t j = 0; j < tensor_count(t); j++) {
        if (!inside(t, j))
            continue;
        double a = get(t, payload, j), b = in->w[i][j];
        if (isnan(a) && !isnan(b))
            fail_msg("%s %s on %s: '%s' is NaN or was not written at row %lld column %lld; expected %g (--seed %llu)",
                     in->op->kernel, in->text, isa, t->name, (long long)(j / t->ld), (long long)(j % t->ld), b,
                     (unsigned long long)run_seed);
        if (a == b || (isnan(a) && isnan(b)))
            a = b = isfinite(b) ? b : 0; /* equal infinities do not contribute to the norms */
        difference += (a - b) * (a - b);
        size += b * b;
        count++;
    }
    double norm = fmax(sqrt(size), t->floor * sqrt(count)), error = sqrt(difference);
    if (!(error <= t->tol * norm))
        fail_msg("%s %s on %s: '%s' is off by %.3g of its norm %.4g; allowed %.1g (--seed %llu)", in->op->kernel,
                 in->text, isa, t->name, norm > 0 ? error / norm : error, norm, t->tol, (unsigned long long)run_seed);
    return norm > 0 ? error / norm : 0;
}

/* Compares the numerical derivative of the loss at a sample of elements with the gradients of the
 * reference and of the kernel. */
static void check_gradient(const instance *in, int pair, const char *const *payload, const char *isa)
{
    int of = in->op->gradients[pair].of, grad = in->op->gradients[pair].grad;
    const ops_tensor *t = &in->t[of], *g = &in->t[grad];
    if (g->role == OPS_ABSENT || t->role == OPS_ABSENT)
        return;
    double square = 0, off_reference = 0, off_kernel = 0, whole = 0;
    int64_t n = tensor_count(g), whole_count = 0;
    for (int64_t j = 0; j < n; j++) {
        double before = g->role == OPS_INOUT && !g->shares ? in->v[grad][j] : 0;
        if (inside(g, j)) {
            whole += pow(in->w[grad][j] - before, 2);
            whole_count++;
        }
    }
    int samples = 0;
    for (int tries = 0; samples < SAMPLES && tries < 10 * SAMPLES && n > 0; tries++) {
        int64_t j = (int64_t)(ops_uniform() * (double)n);
        if (!inside(g, j))
            continue;
        double *x = &in->v[of][j], middle = *x, h = 1e-5 * fmax(1, fabs(middle));
        *x = middle + h;
        double up = in->op->loss(in->c, in->v);
        *x = middle - h;
        double down = in->op->loss(in->c, in->v);
        *x = middle;
        double slope = (up - down) / (2 * h);
        double before = g->role == OPS_INOUT && !g->shares ? in->v[grad][j] : 0;
        square += slope * slope;
        off_reference += pow(in->w[grad][j] - before - slope, 2);
        off_kernel += pow(get(g, payload[grad], j) - before - slope, 2);
        samples++;
    }
    double norm = fmax(sqrt(square), sqrt(whole * samples / fmax(1, (double)whole_count)));
    norm = fmax(norm, g->floor * sqrt(samples));
    if (!(sqrt(off_reference) <= 1e-5 * norm))
        fail_msg("%s %s: the reference's gradient of '%s' is off by %.3g of the numerical one's norm %.4g (--seed %llu)",
                 in->op->kernel, in->text, t->name, sqrt(off_reference) / norm, norm, (unsigned long long)run_seed);
    /* A sample has a larger error than the whole. */
    if (!(sqrt(off_kernel) <= 10 * fmax(g->tol, 1e-5) * norm))
        fail_msg("%s %s on %s: gradient of '%s' is off by %.3g of the numerical one's norm %.4g (--seed %llu)",
                 in->op->kernel, in->text, isa, t->name, sqrt(off_kernel) / norm, norm,
                 (unsigned long long)run_seed);
}

typedef struct job {
    const ops_op *op;
    const void *c;
    bool first; /* of its kernel */
    uint64_t seed;
} job;

/* The instruction sets that this run of the program tests. */
static struct {
    const char *isa[ISA_COUNT];
    int count;
} tried;

/* Runs the kernel on one instruction set. CPU: with 1, 2 and 3 compute threads. GPU: three times on
 * the same device. */
static void run_on(const job *j, const instance *of, const char *isa, bool gradients)
{
    instance in = *of;
    char *first[OPS_TENSORS] = {0};
    bool cuda = strcmp(isa, "cuda") == 0;
    for (int run = 1; run <= THREAD_MOST; run++) {
        qd_device *device = ops_device(isa, cuda ? 1 : run);
        int64_t held = qd_device_allocated(device);
        void *base[OPS_TENSORS], *p[OPS_TENSORS];
        upload(&in, device, base, p);
        qd_stream *stream = qd_device_compute_stream(device);
        ops_assert_ok(j->op->run(qd_device_kernels(device), stream, j->c, p));
        ops_assert_ok(qd_stream_wait(stream));
        char *got[OPS_TENSORS] = {0};
        const char *payload[OPS_TENSORS] = {0};
        for (int i = 0; i < in.count; i++) {
            int at = in.t[i].shares ? in.t[i].shares - 1 : i;
            if (in.t[i].role == OPS_ABSENT)
                continue;
            got[i] = take((size_t)in.bytes[at] + 2 * GUARD);
            if (in.t[at].host)
                memcpy(got[i], base[at], (size_t)in.bytes[at] + 2 * GUARD);
            else
                ops_assert_ok(qd_copy(stream, got[i], base[at], in.bytes[at] + 2 * GUARD));
            ops_assert_ok(qd_stream_wait(stream));
            payload[i] = got[i] + GUARD;
        }
        for (int i = 0; i < in.count; i++) {
            if (in.t[i].role == OPS_ABSENT)
                continue;
            if (!in.t[i].shares)
                check_untouched(&in, i, got[i], isa);
            if (run == 1 && in.t[i].role != OPS_IN && in.t[i].role != OPS_SCRATCH)
                check_values(&in, i, payload[i], isa);
            int at = in.t[i].shares ? in.t[i].shares - 1 : i;
            if (run > 1 && memcmp(got[i], first[i], (size_t)in.bytes[at] + 2 * GUARD) != 0)
                fail_msg("%s %s on %s: '%s' is not bit-identical %s %d and %s 1 (--seed %llu)", j->op->kernel, in.text, isa,
                         in.t[i].name, cuda ? "in run" : "with threads:", run, cuda ? "in run" : "with",
                         (unsigned long long)run_seed);
        }
        for (int pair = 0; run == 1 && gradients && pair < j->op->gradient_count; pair++)
            check_gradient(&in, pair, payload, isa);
        for (int i = 0; i < in.count; i++) {
            if (run == 1)
                first[i] = got[i];
            else
                free(got[i]);
        }
        release(&in, device, base);
        assert_int_equal(qd_device_allocated(device), held);
    }
    for (int i = 0; i < in.count; i++)
        free(first[i]);
}

/* Inputs and reference are shared by all instruction sets, and so are numerical gradients of the
 * reference, which the first set checks; they are checked again for a GPU, whose tolerance may
 * differ. */
static void test_case(void **state)
{
    const job *j = *state;
    random_state = j->seed;
    instance in;
    instance_open(&in, j->op, j->c);
    j->op->reference(j->c, in.w);
    bool gradients = true;
    for (int s = 0; s < tried.count; s++) {
        bool best = strcmp(tried.isa[s], "best") == 0, cuda = strcmp(tried.isa[s], "cuda") == 0;
        if ((best && tried.count > 1 && !j->first) || (cuda && j->op->cpu_only))
            continue;
        run_on(j, &in, tried.isa[s], gradients || cuda);
        gradients = false;
    }
    instance_close(&in);
}

static void print_speed(const ops_op *op, const void *c, const char *isa, int threads)
{
    instance in;
    instance_open(&in, op, c);
    qd_device *device = ops_device(isa, threads);
    qd_stream *stream = qd_device_compute_stream(device);
    void *base[OPS_TENSORS], *p[OPS_TENSORS];
    upload(&in, device, base, p);
    /* An accelerator gets several calls in a row, so that waiting for it is not measured. */
    int calls = qd_device_get_caps(device)->host_memory ? 1 : 20;
    double best = INFINITY, spent = 0;
    for (int i = 0; i < 3 || (spent < 0.3 && i < 200); i++) {
        double start = qd_clock_now();
        for (int call = 0; call < calls; call++)
            ops_assert_ok(op->run(qd_device_kernels(device), stream, c, p));
        ops_assert_ok(qd_stream_wait(stream));
        double seconds = qd_clock_now() - start;
        best = fmin(best, seconds / calls);
        spent += seconds;
    }
    printf("%-20s %-60s %-8s %d threads %10.3f ms", op->kernel, in.text, qd_device_get_caps(device)->isa, threads,
           best * 1e3);
    if (op->flops)
        printf(" %8.1f GFLOP/s", op->flops(c) / best * 1e-9);
    if (op->bytes)
        printf(" %8.1f GB/s", op->bytes(c) / best * 1e-9);
    printf("\n");
    release(&in, device, base);
    instance_close(&in);
}

int ops_main(int argc, char **argv, const ops_op *ops, int op_count, const struct CMUnitTest *more, int more_count)
{
    run_seed = 1; /* reproducible by default; --seed selects other inputs */
    const char *only = NULL, *cases = "";
    bool speed = false;
    int threads = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--speed") == 0) {
            speed = true;
        } else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            run_seed = strtoull(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--isa") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--cases") == 0 && i + 1 < argc) {
            cases = argv[++i];
        } else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
            threads = atoi(argv[++i]);
        } else {
            fprintf(stderr, "usage: %s [--seed N] [--isa NAME] [--cases TEXT] [--speed [--threads N]]\n", argv[0]);
            return 2;
        }
    }
    if (speed) {
        for (int o = 0; o < op_count; o++)
            for (int i = 0; i < ops[o].speed_count; i++)
                print_speed(&ops[o], (const char *)ops[o].speed_cases + (size_t)i * ops[o].case_size, only, threads);
        return 0;
    }
    printf("seed %llu\n", (unsigned long long)run_seed);
    int total = more_count;
    for (int o = 0; o < op_count; o++)
        total += ops[o].case_count;
    struct CMUnitTest *tests = calloc((size_t)total, sizeof *tests);
    job *jobs = calloc((size_t)total, sizeof *jobs);
    char(*names)[224] = calloc((size_t)total, sizeof *names);
    if (!tests || !jobs || !names)
        return 1;
    for (int s = 0; s < ISA_COUNT; s++)
        if ((!only || strcmp(only, isas[s]) == 0) && isa_available(isas[s]))
            tried.isa[tried.count++] = isas[s];
    int count = 0;
    for (int o = 0; o < op_count && tried.count > 0; o++) {
        for (int i = 0; i < ops[o].case_count; i++) {
            const void *c = (const char *)ops[o].cases + (size_t)i * ops[o].case_size;
            char text[160];
            ops[o].describe(c, text, sizeof text);
            snprintf(names[count], sizeof *names, "%s %s", ops[o].kernel, text);
            if (!strstr(names[count], cases))
                continue;
            jobs[count] = (job){&ops[o], c, i == 0, run_seed + (uint64_t)(o * 1000 + i) * 7919};
            tests[count] = (struct CMUnitTest){.name = names[count], .test_func = test_case, .initial_state = &jobs[count]};
            count++;
        }
    }
    if (count == 0)
        fprintf(stderr, "no case '%s', or no instruction set '%s' here\n", cases, only ? only : "");
    int failed = count == 0;
    for (int i = 0; i < more_count; i++)
        tests[count++] = more[i];
    failed += _cmocka_run_group_tests("ops", tests, (size_t)count, NULL, NULL);
    free(tests);
    free(jobs);
    free(names);
    for (int i = 0; i < ISA_COUNT * (THREAD_MOST + 1); i++)
        qd_device_destroy(kept[i / (THREAD_MOST + 1)][i % (THREAD_MOST + 1)]);
    return failed != 0;
}
