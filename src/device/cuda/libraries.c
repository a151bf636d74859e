/* Loads cuBLASLt and cuDNN on first use. If they were linked, every command would start a tenth of
 * a second later, on any device, and programs built with CUDA would not start on machines without
 * it.
 *
 * Each library function that we call is defined here under its own name, with the declaration of
 * its header, and forwards the call. */
#define _GNU_SOURCE /* dlinfo, readahead */
#include "device/cuda/libraries.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* X(result, result without the library, name, parameters, arguments) */
#define CUBLAS_TABLE(X) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtCreate, (cublasLtHandle_t *a), (a)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtDestroy, (cublasLtHandle_t a), (a)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtGetProperty, (libraryPropertyType a, int \
      *b), (a, b)) \
    X(const char *, "cuBLASLt is not loaded", cublasLtGetStatusString, (cublasStatus_t a), (a)) \
    X(size_t, 0, cublasLtGetVersion, (void), ()) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmul, (cublasLtHandle_t a, \
      cublasLtMatmulDesc_t b, const void *c, const void *d, cublasLtMatrixLayout_t e, const void *f, \
      cublasLtMatrixLayout_t g, const void *h, const void *i, cublasLtMatrixLayout_t j, void *k, \
      cublasLtMatrixLayout_t l, const cublasLtMatmulAlgo_t *m, void *n, size_t o, cudaStream_t p), (a, \
      b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulAlgoCapGetAttribute, (const \
      cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoCapAttributes_t b, void *c, size_t d, size_t *e), (a, b, \
      c, d, e)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulAlgoCheck, (cublasLtHandle_t a, \
      cublasLtMatmulDesc_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatrixLayout_t \
      e, cublasLtMatrixLayout_t f, const cublasLtMatmulAlgo_t *g, cublasLtMatmulHeuristicResult_t *h), \
      (a, b, c, d, e, f, g, h)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulAlgoConfigGetAttribute, (const \
      cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t b, void *c, size_t d, size_t *e), \
      (a, b, c, d, e)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulAlgoConfigSetAttribute, \
      (cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t b, const void *c, size_t d), (a, b, \
      c, d)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulAlgoGetHeuristic, (cublasLtHandle_t \
      a, cublasLtMatmulDesc_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, \
      cublasLtMatrixLayout_t e, cublasLtMatrixLayout_t f, cublasLtMatmulPreference_t g, int h, \
      cublasLtMatmulHeuristicResult_t *i, int *j), (a, b, c, d, e, f, g, h, i, j)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t *a, \
      cublasComputeType_t b, cudaDataType_t c), (a, b, c)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t \
      a), (a)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulDescSetAttribute, \
      (cublasLtMatmulDesc_t a, cublasLtMatmulDescAttributes_t b, const void *c, size_t d), (a, b, c, d)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulPreferenceCreate, \
      (cublasLtMatmulPreference_t *a), (a)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulPreferenceDestroy, \
      (cublasLtMatmulPreference_t a), (a)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatmulPreferenceSetAttribute, \
      (cublasLtMatmulPreference_t a, cublasLtMatmulPreferenceAttributes_t b, const void *c, size_t d), \
      (a, b, c, d)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatrixLayoutCreate, (cublasLtMatrixLayout_t \
      *a, cudaDataType b, uint64_t c, uint64_t d, int64_t e), (a, b, c, d, e)) \
    X(cublasStatus_t, CUBLAS_STATUS_NOT_INITIALIZED, cublasLtMatrixLayoutDestroy, \
      (cublasLtMatrixLayout_t a), (a))

#define CUDNN_TABLE(X) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnBackendCreateDescriptor, \
      (cudnnBackendDescriptorType_t a, cudnnBackendDescriptor_t *b), (a, b)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnBackendDestroyDescriptor, \
      (cudnnBackendDescriptor_t a), (a)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnBackendExecute, (cudnnHandle_t a, \
      cudnnBackendDescriptor_t b, cudnnBackendDescriptor_t c), (a, b, c)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnBackendFinalize, (cudnnBackendDescriptor_t a), \
      (a)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnBackendGetAttribute, (cudnnBackendDescriptor_t \
      const a, cudnnBackendAttributeName_t b, cudnnBackendAttributeType_t c, int64_t d, int64_t *e, void \
      *f), (a, b, c, d, e, f)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnBackendSetAttribute, (cudnnBackendDescriptor_t \
      a, cudnnBackendAttributeName_t b, cudnnBackendAttributeType_t c, int64_t d, const void *e), (a, b, \
      c, d, e)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnCreate, (cudnnHandle_t *a), (a)) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnDestroy, (cudnnHandle_t a), (a)) \
    X(const char *, "cuDNN is not loaded", cudnnGetErrorString, (cudnnStatus_t a), (a)) \
    X(size_t, 0, cudnnGetVersion, (void), ()) \
    X(cudnnStatus_t, CUDNN_STATUS_NOT_INITIALIZED, cudnnSetStream, (cudnnHandle_t a, cudaStream_t b), \
      (a, b))

typedef struct library {
    void *handle;
    char missing[256]; /* why it could not be loaded */
} library;

static library cublas, cudnn;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define POINTER(result, otherwise, name, parameters, arguments) static result(*name##_at) parameters;
CUBLAS_TABLE(POINTER)
CUDNN_TABLE(POINTER)
static void (*cudnnGetLastErrorString_at)(char *a, size_t b);

/* Thread: brings a library's file into the page cache. */
static void *read_ahead(void *path)
{
    enum { CHUNK = 4 << 20 };
    struct stat file;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &file) == 0)
        for (off_t at = 0; at < file.st_size; at += CHUNK)
            if (readahead(fd, at, CHUNK) != 0)
                break;
    if (fd >= 0)
        close(fd);
    free(path);
    return NULL;
}

/* Kernels are spread over a file of hundreds of MiB and are loaded on first use: on a machine that
 * has just started, each would be fetched from the disk by page faults, and the search for
 * algorithms uses hundreds. Reading the file in order meanwhile is faster. */
static void begin_read_ahead(const library *l)
{
    struct link_map *map;
    pthread_t thread;
    if (!l->handle || dlinfo(l->handle, RTLD_DI_LINKMAP, &map) != 0)
        return;
    char *path = strdup(map->l_name);
    if (path && pthread_create(&thread, NULL, read_ahead, path) == 0)
        pthread_detach(thread);
    else
        free(path);
}

/* By name, as the system finds libraries; else at its location at build time. */
static void open_library(library *l, const char *name, const char *built_with)
{
    l->handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (l->handle)
        return;
    snprintf(l->missing, sizeof l->missing, "%s", dlerror());
    l->handle = dlopen(built_with, RTLD_NOW | RTLD_LOCAL);
}

/* A function that an older version does not have makes the whole library unusable. */
static void *find(library *l, const char *name)
{
    void *at = l->handle ? dlsym(l->handle, name) : NULL;
    if (l->handle && !at) {
        snprintf(l->missing, sizeof l->missing, "%s", dlerror());
        dlclose(l->handle);
        l->handle = NULL;
    }
    return at;
}

static void load(void)
{
    open_library(&cublas, QD_CUBLASLT_NAME, QD_CUBLASLT_PATH);
    begin_read_ahead(&cublas);
    open_library(&cudnn, QD_CUDNN_NAME, QD_CUDNN_PATH);
    /* POSIX allows storing an object pointer as a function pointer. */
#define FIND_CUBLAS(result, otherwise, name, parameters, arguments) *(void **)&name##_at = find(&cublas, #name);
#define FIND_CUDNN(result, otherwise, name, parameters, arguments) *(void **)&name##_at = find(&cudnn, #name);
    CUBLAS_TABLE(FIND_CUBLAS)
    CUDNN_TABLE(FIND_CUDNN)
    *(void **)&cudnnGetLastErrorString_at = find(&cudnn, "cudnnGetLastErrorString");
}

qd_status qd_cuda_libraries_load(void)
{
    pthread_once(&once, load);
    if (!cublas.handle)
        return QD_FAIL(QD_UNSUPPORTED, "device 'cuda': cuBLASLt cannot be loaded: %s", cublas.missing);
    if (!cudnn.handle)
        return QD_FAIL(QD_UNSUPPORTED, "device 'cuda': cuDNN cannot be loaded: %s", cudnn.missing);
    return QD_OK;
}

#define PASS_CUBLAS(result, otherwise, name, parameters, arguments) \
    result name parameters                                          \
    {                                                               \
        pthread_once(&once, load);                                  \
        return cublas.handle ? name##_at arguments : otherwise;     \
    }
#define PASS_CUDNN(result, otherwise, name, parameters, arguments) \
    result name parameters                                         \
    {                                                              \
        pthread_once(&once, load);                                 \
        return cudnn.handle ? name##_at arguments : otherwise;     \
    }
CUBLAS_TABLE(PASS_CUBLAS)
CUDNN_TABLE(PASS_CUDNN)

void cudnnGetLastErrorString(char *a, size_t b)
{
    pthread_once(&once, load);
    if (cudnn.handle)
        cudnnGetLastErrorString_at(a, b);
    else if (b > 0)
        snprintf(a, b, "%s", cudnn.missing);
}
