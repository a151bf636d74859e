/* The library for fp32 products. It runs inside our own compute threads, one call per tile, each call on one thread. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_DEFAULT */
#endif
#include "device/cpu/matmul_impl.h"

#if defined(QD_HAVE_ONEDNN)

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* omp_set_num_threads of the OpenMP runtime that oneDNN brought along, or NULL when it was built without one. Looked up
 * by name, because oneDNN does not say which runtime it is; the setting belongs to the calling thread. */
static void (*set_threads)(int threads);

/* dnnl_sgemm is row-major. It fails on bad arguments only, and matmul.c has checked them, or when its packing buffers
 * find no memory; then a plain loop gives the right numbers slowly. */
static void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                  const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc)
{
    if (set_threads)
        set_threads(1);
    if (dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1, a, lda, b, ldb, accumulate, c, ldc) ==
        dnnl_success)
        return;
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t p = 0; p < k; p++)
                sum += a[trans_a ? p * lda + i : i * lda + p] * b[trans_b ? j * ldb + p : p * ldb + j];
            c[i * ldc + j] = accumulate ? c[i * ldc + j] + sum : sum;
        }
    }
}

static char name[32];
static const qd_cpu_blas onednn = {.name = name, .sgemm = sgemm};

static void find_library(void)
{
    const dnnl_version_t *version = dnnl_version();
    snprintf(name, sizeof name, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
    void *found = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    memcpy(&set_threads, &found, sizeof found); /* C has no cast from object to function pointers */
}

const qd_cpu_blas *qd_cpu_blas_find(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_library);
    return &onednn;
}

#else

const qd_cpu_blas *qd_cpu_blas_find(void)
{
    return NULL;
}

#endif
