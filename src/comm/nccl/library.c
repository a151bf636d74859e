/* NCCL, loaded when it is first used: commands that do not need it start without it, also on
 * machines that lack it. Each function that we call stands here under its own name and passes the
 * call on. */
#include "comm/nccl/nccl_impl.h"

#include <dlfcn.h>
#include <stdio.h>

/* X(result, what it is without the library, name, parameters, arguments) */
#define NCCL_TABLE(X)                                                                                       \
    X(ncclResult_t, ncclSystemError, ncclGetVersion, (int *a), (a))                                         \
    X(ncclResult_t, ncclSystemError, ncclGetUniqueId, (ncclUniqueId * a), (a))                              \
    X(ncclResult_t, ncclSystemError, ncclCommInitRankConfig,                                                \
      (ncclComm_t * a, int b, ncclUniqueId c, int d, ncclConfig_t *e), (a, b, c, d, e))                     \
    X(ncclResult_t, ncclSystemError, ncclCommFinalize, (ncclComm_t a), (a))                                 \
    X(ncclResult_t, ncclSystemError, ncclCommDestroy, (ncclComm_t a), (a))                                  \
    X(ncclResult_t, ncclSystemError, ncclCommAbort, (ncclComm_t a), (a))                                    \
    X(ncclResult_t, ncclSystemError, ncclCommGetAsyncError, (ncclComm_t a, ncclResult_t * b), (a, b))       \
    X(const char *, "NCCL is not there", ncclGetErrorString, (ncclResult_t a), (a))                         \
    X(const char *, "NCCL is not there", ncclGetLastError, (ncclComm_t a), (a))                             \
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
static char missing[256]; /* why it is not there */
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define POINTER(result, otherwise, name, parameters, arguments) static result(*name##_at) parameters;
NCCL_TABLE(POINTER)

/* A function that an older version lacks makes the library unusable as a whole. */
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

/* By name, as the system finds libraries; else where it was when this was built. */
static void load(void)
{
    handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        handle = dlopen(QD_NCCL_PATH, RTLD_NOW | RTLD_LOCAL);
    }
    /* POSIX lets an object pointer be stored as a function's. */
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
