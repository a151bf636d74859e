/* Status codes and the thread-local error record.
 *
 * Every function that can fail returns qd_status. The library never prints and never exits: the
 * first failure writes a message that names the file, key or rank and says what would be right, and
 * each caller that passes it on adds its place (QD_TRY), so that the whole path can be shown. */
#ifndef QUADRILLE_STATUS_H
#define QUADRILLE_STATUS_H

#include <quadrille/export.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QD_STATUS_TABLE(X)                                                                                  \
    X(OK, "ok")                                                                                             \
    X(USAGE, "bad usage or configuration") /* the user must change something: exit status 2 */              \
    X(IO, "input or output failed")                                                                         \
    X(CORRUPT, "data is damaged")                                                                           \
    X(NO_MEMORY, "out of memory")                                                                           \
    X(UNSUPPORTED, "not supported by this build or device")                                                 \
    X(MISMATCH, "ranks disagree")       /* a collective was called differently on another rank */           \
    X(TIMEOUT, "deadline passed")       /* a rank did not arrive in time */                                 \
    X(REMOTE, "another rank failed")    /* a peer failed first; the message names it */                     \
    X(NOT_FINITE, "not a finite number")                                                                    \
    X(DIFFERENT, "results differ")      /* verify: two layouts disagree */                                  \
    X(INTERRUPTED, "interrupted")                                                                           \
    X(STOPPED, "stopped with a checkpoint to go on from") /* a scheduler asked for it: exit status 75 */    \
    X(BUSY, "in use by another run")    /* nothing is wrong; the same call succeeds later: exit status 75 */  \
    X(SYSTEM, "a library or system call failed")

typedef enum qd_status {
#define QD_STATUS_ENUM(name, text) QD_##name,
    QD_STATUS_TABLE(QD_STATUS_ENUM)
#undef QD_STATUS_ENUM
} qd_status;

/* One line for a code, for example "out of memory". Never NULL. */
QD_API const char *qd_status_text(qd_status status);

/* The message of this thread's last failure; "" when there was none. Valid until the next
 * failure. */
QD_API const char *qd_error_message(void);

/* The places the failure passed through, innermost first, one per line; "" when there was none. */
QD_API const char *qd_error_trace(void);

/* Forgets this thread's failure. */
QD_API void qd_error_clear(void);

/* Records a failure with a printf-style message and returns `status`. Replaces an earlier
 * record. */
QD_API qd_status qd_fail_at(const char *file, int line, const char *function, qd_status status, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Puts printf-style context before the current message ("run.yaml: …: "); returns `status`. */
QD_API qd_status qd_error_prefix(qd_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Adds a frame to the trace. Used by QD_TRY. */
QD_API void qd_error_frame(const char *file, int line, const char *function);

#define QD_FAIL(status, ...) qd_fail_at(__FILE__, __LINE__, __func__, (status), __VA_ARGS__)

/* Returns from the calling function when the expression fails. */
#define QD_TRY(expression)                                                                                  \
    do {                                                                                                    \
        qd_status qd_try_status = (expression);                                                             \
        if (qd_try_status != QD_OK) {                                                                       \
            qd_error_frame(__FILE__, __LINE__, __func__);                                                   \
            return qd_try_status;                                                                           \
        }                                                                                                   \
    } while (0)

/* Like QD_TRY, for functions with one `done:` label that cleans up and returns the variable
 * `status`. */
#define QD_TRY_DONE(expression)                                                                             \
    do {                                                                                                    \
        status = (expression);                                                                              \
        if (status != QD_OK) {                                                                              \
            qd_error_frame(__FILE__, __LINE__, __func__);                                                   \
            goto done;                                                                                      \
        }                                                                                                   \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
