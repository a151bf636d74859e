/* Status codes and the thread-local error record.
 *
 * Every function that can fail returns qd_status. The library never prints and never exits. The
 * first failure records a message that names the file, key or rank and the remedy; each caller that
 * passes it on adds a frame to the trace (QD_TRY).
 *
 * Headers list the failures that are specific to a function. In addition, any function may return
 * QD_NO_MEMORY, one that reads or writes files QD_IO, or QD_USAGE for a file that is missing or not
 * accessible, and one that takes a sized struct QD_USAGE or QD_UNSUPPORTED (sized.h). */
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
    X(STOPPED, "stopped, with a checkpoint to resume from") /* on request of a scheduler: exit status 75 */ \
    X(BUSY, "in use by another run")    /* not an error of the caller: retry later; exit status 75 */       \
    X(SYSTEM, "a library or system call failed")

typedef enum qd_status {
#define QD_STATUS_ENUM(name, text) QD_##name,
    QD_STATUS_TABLE(QD_STATUS_ENUM)
#undef QD_STATUS_ENUM
} qd_status;

/* Describes a code, for example "out of memory". Static, never NULL. */
QD_API const char *qd_status_text(qd_status status);

/* The message of this thread's last failure; "" if there was none. Valid until the next failure. */
QD_API const char *qd_error_message(void);

/* The call path of that failure, innermost frame first, one per line; "" if there was none. */
QD_API const char *qd_error_trace(void);

/* Clears this thread's error record. */
QD_API void qd_error_clear(void);

/* Records a failure with a printf-style message, replacing an earlier record, and returns
 * `status`. */
QD_API qd_status qd_fail_at(const char *file, int line, const char *function, qd_status status, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Prefixes the current message with printf-style context ("run.yaml: …: ") and returns `status`. */
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
