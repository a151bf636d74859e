/* Messages for the person who runs the program: a level, a subsystem, and a sink. The library logs,
 * it never prints: without a sink (the default) nothing is shown. */
#ifndef QUADRILLE_LOG_H
#define QUADRILLE_LOG_H

#include <quadrille/export.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_log_level { QD_LOG_ERROR, QD_LOG_WARN, QD_LOG_INFO, QD_LOG_DEBUG } qd_log_level;

/* The sink gets whole lines without a newline, from any thread, one at a time. Set once at start,
 * before threads. */
typedef void (*qd_log_sink)(void *context, qd_log_level level, const char *subsystem, const char *text);
QD_API void qd_log_set_sink(qd_log_sink sink, void *context, qd_log_level most);

QD_API void qd_log(qd_log_level level, const char *subsystem, const char *format, ...) __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
