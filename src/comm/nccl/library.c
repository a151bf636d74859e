/* Loads NCCL at its first use: commands that do not need it start without it, also on machines that
 * do not have it. Each NCCL function that we call is defined here under its own name and forwards
 * the call. */
#include "comm/nccl/nccl_impl.h"

#include <dlfcn.h>
#include <stdio.h>

/* X(result type, result without the library, name, parameters, arguments) */
#define NCCL_TABLE(X)                                                                                       \
    X(ncclResult_t, ncclSystemError, ncclGetVersion, (int *a), (a))                                         \
    X(ncclResult_t, ncclSystemError, ncclGetUniqueId, (ncclUniqueId * a), (a))                              \
    X(ncclResult_t, ncclSystemError, ncclCommInitRankConfig,                                                \
      (ncclComm_t * a, int b, ncclUniqueId c, int d, ncclConfig_t *e), (a, b, c, d, e))                     \
    X(ncclResult_t, ncclSystemError, ncclCommFinalize, (ncclComm_t a), (a))                                 \
    X(ncclResult_t, ncclSystemError, ncclCommDestroy, (ncclComm_t a), (a))                                  \
    X(ncclResult_t, ncclSystemError, ncclCommAbort, (ncclComm_t a), (a))                                    \
    X(ncclResult_t, ncclSystemError, ncclCommGetAsyncError, (ncclComm_t a, ncclResult_t * b), (a, b))       \
    X(const char *, "NCCL is not loaded", ncclGetErrorString, (ncclResult_t a), (a))                        \
    X(const char *, "NCCL is not loaded", ncclGetLastError, (ncclComm_t a), (a))                            \
    X(ncclResult_t, ncclSystemError, ncclGroupStart, (void), ())                                            \
    X(ncclResult_t, ncclSystemError, ncclGroupEnd, (void), ())                                              \
    X(ncclResult_t, ncclSystemError, ncclAllReduce,                                                         \
      (const void *a, void *b, size_t c, ncclDataType_t d, ncclRedOp_t e, ncclComm_t f, cudaStream_t g),    \
      (a, b, c, d, e, f, g))                                                                                \
    X(ncclResult_t, ncclSystemError, ncclReduceScatter,                                                     \
      (const void *a, void *b, size_t c, ncclDataType_t d, ncclRedOp_t e, ncclComm_t f, cudaStream_t g),    \
      (a, b, c, d, e, f, g))                                                                                \
    X(ncclResult_t, ncclSystemError, ncclAllGather,                                                         \
      (const void *a, void *b, size_t c, ncclDataType_t d, ncclComm_t e, cudaStream_t f), (a, b, c, d, e, f)) \
    X(ncclResult_t, ncclSystemError, ncclBroadcast,                                                         \
      (const void *a, void *b, size_t c, ncclDataType_t d, int e, ncclComm_t f, cudaStream_t g),            \
      (a, b, c, d, e, f, g))                                                                                \
    X(ncclResult_t, ncclSystemError, ncclReduce,                                                            \
      (const void *a, void *b, size_t c, ncclDataType_t d, ncclRedOp_t e, int f, ncclComm_t g, cudaStream_t h), \
      (a, b, c, d, e, f, g, h))                                                                             \
    X(ncclResult_t, ncclSystemError, ncclSend,                                                              \
      (const void *a, size_t b, ncclDataType_t c, int d, ncclComm_t e, cudaStream_t f), (a, b, c, d, e, f)) \
    X(ncclResult_t, ncclSystemError, ncclRecv,                                                              \
      (void *a, size_t b, ncclDataType_t c, int d, ncclComm_t e, cudaStream_t f), (a, b, c, d, e, f))

static void *handle;
static char missing[256]; /* why it could not be loaded */
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define POINTER(result, otherwise, name, parameters, arguments) static result(*name##_at) parameters;
NCCL_TABLE(POINTER)

/* A missing function (an older version) makes the whole library unusable. */
static void *find(const char *name)
{
    void *at = handle ? dlsym(handle, name) : NULL;
    if (handle && !at) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        dlclose(handle);
        handle = NULL;
    }
    return at;
}

/* Tries the loader's search path, then the path from build time. */
static void load(void)
{
    handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        handle = dlopen(QD_NCCL_PATH, RTLD_NOW | RTLD_LOCAL);
    }
    /* POSIX allows storing an object pointer as a function pointer. */
#define FIND(result, otherwise, name, parameters, arguments) *(void **)&name##_at = find(#name);
    NCCL_TABLE(FIND)
}

qd_status qd_nccl_load(void)
{
    pthread_once(&once, load);
    return handle ? QD_OK : QD_FAIL(QD_UNSUPPORTED, "NCCL cannot be loaded: %s", missing);
}

#define PASS(result, otherwise, name, parameters, arguments)                                                \
    result name parameters                                                                                  \
    {                                                                                                       \
        pthread_once(&once, load);                                                                          \
        return handle ? name##_at arguments : otherwise;                                                    \
    }
NCCL_TABLE(PASS)
