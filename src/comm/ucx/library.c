/* Loads UCX at its first use: commands that do not need it start without it, also on machines that
 * do not have it. Each UCX function that we call is defined here under its own name and forwards
 * the call. */
#include "comm/ucx/ucx_impl.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* X(result type, result without the library, name, parameters, arguments) */
#define UCX_TABLE(X)                                                                                        \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_config_read,                                                   \
      (const char *a, const char *b, ucp_config_t **c), (a, b, c))                                          \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_config_modify,                                                 \
      (ucp_config_t * a, const char *b, const char *c), (a, b, c))                                          \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_init_version,                                                  \
      (unsigned a, unsigned b, const ucp_params_t *c, const ucp_config_t *d, ucp_context_h *e),             \
      (a, b, c, d, e))                                                                                      \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_worker_create,                                                 \
      (ucp_context_h a, const ucp_worker_params_t *b, ucp_worker_h *c), (a, b, c))                          \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_worker_get_address,                                            \
      (ucp_worker_h a, ucp_address_t * *b, size_t *c), (a, b, c))                                           \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_ep_create,                                                     \
      (ucp_worker_h a, const ucp_ep_params_t *b, ucp_ep_h *c), (a, b, c))                                   \
    X(ucs_status_ptr_t, NULL, ucp_ep_close_nbx, (ucp_ep_h a, const ucp_request_param_t *b), (a, b))         \
    X(ucs_status_ptr_t, NULL, ucp_tag_send_nbx,                                                             \
      (ucp_ep_h a, const void *b, size_t c, ucp_tag_t d, const ucp_request_param_t *e), (a, b, c, d, e))    \
    X(ucs_status_ptr_t, NULL, ucp_tag_recv_nbx,                                                             \
      (ucp_worker_h a, void *b, size_t c, ucp_tag_t d, ucp_tag_t e, const ucp_request_param_t *f),          \
      (a, b, c, d, e, f))                                                                                   \
    X(ucp_tag_message_h, NULL, ucp_tag_probe_nb,                                                            \
      (ucp_worker_h a, ucp_tag_t b, ucp_tag_t c, int d, ucp_tag_recv_info_t *e), (a, b, c, d, e))           \
    X(ucs_status_ptr_t, NULL, ucp_tag_msg_recv_nbx,                                                         \
      (ucp_worker_h a, void *b, size_t c, ucp_tag_message_h d, const ucp_request_param_t *e), (a, b, c, d, e)) \
    X(unsigned, 0, ucp_worker_progress, (ucp_worker_h a), (a))                                              \
    X(ucs_status_t, UCS_ERR_UNSUPPORTED, ucp_request_check_status, (void *a), (a))                          \
    X(const char *, "UCX is not loaded", ucs_status_string, (ucs_status_t a), (a))

/* The same for functions without a result. */
#define UCX_VOID_TABLE(X)                                                                                   \
    X(ucp_config_print, (const ucp_config_t *a, FILE *b, const char *c, ucs_config_print_flags_t d), (a, b, c, d)) \
    X(ucp_config_release, (ucp_config_t * a), (a))                                                          \
    X(ucp_cleanup, (ucp_context_h a), (a))                                                                  \
    X(ucp_worker_destroy, (ucp_worker_h a), (a))                                                            \
    X(ucp_worker_release_address, (ucp_worker_h a, ucp_address_t * b), (a, b))                              \
    X(ucp_request_cancel, (ucp_worker_h a, void *b), (a, b))                                                \
    X(ucp_request_free, (void *a), (a))

static void *handle;
static char missing[256]; /* why it could not be loaded */
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define POINTER(result, otherwise, name, parameters, arguments) static result(*name##_at) parameters;
#define VOID_POINTER(name, parameters, arguments) static void(*name##_at) parameters;
UCX_TABLE(POINTER)
UCX_VOID_TABLE(VOID_POINTER)

/* A missing function (an older version) makes the whole library unusable. */
static void *find(const char *name)
{
    void *at = handle ? dlsym(handle, name) : NULL;
    if (handle && !at) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        handle = NULL;
    }
    return at;
}

/* UCX reports the death of a peer as an error of its own; ours names the rank and the operation.
 * What the user has set stays. */
static void quiet(void)
{
    ucs_status_t (*get)(const char *, char *, size_t), (*set)(const char *, const char *);
    char level[32] = "";
    *(void **)&get = dlsym(handle, "ucs_global_opts_get_value");
    *(void **)&set = dlsym(handle, "ucs_global_opts_set_value");
    if (get && set && get("LOG_LEVEL", level, sizeof level) == UCS_OK && strcasecmp(level, "warn") == 0)
        set("LOG_LEVEL", "FATAL");
}

static void load(void)
{
    struct sigaction before[64];
    for (int s = 1; s < 64; s++)
        sigaction(s, NULL, &before[s]);
    handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        snprintf(missing, sizeof missing, "%s", dlerror());
    for (int s = 1; s < 64; s++) /* UCX handles crashes, and SIGHUP, when it is loaded */
        sigaction(s, &before[s], NULL);
    if (handle)
        quiet();
    /* POSIX allows storing an object pointer as a function pointer. */
#define FIND(result, otherwise, name, parameters, arguments) *(void **)&name##_at = find(#name);
#define VOID_FIND(name, parameters, arguments) *(void **)&name##_at = find(#name);
    UCX_TABLE(FIND)
    UCX_VOID_TABLE(VOID_FIND)
}

qd_status qd_ucx_load(void)
{
    pthread_once(&once, load);
    return handle ? QD_OK
                  : QD_FAIL(QD_UNSUPPORTED, "UCX, which ranks without MPI need, cannot be loaded (Debian: libucx0): %s", missing);
}

#define PASS(result, otherwise, name, parameters, arguments)                                                \
    result name parameters                                                                                  \
    {                                                                                                       \
        return handle ? name##_at arguments : otherwise;                                                    \
    }
#define VOID_PASS(name, parameters, arguments)                                                              \
    void name parameters                                                                                    \
    {                                                                                                       \
        if (handle)                                                                                         \
            name##_at arguments;                                                                            \
    }
UCX_TABLE(PASS)
UCX_VOID_TABLE(VOID_PASS)
