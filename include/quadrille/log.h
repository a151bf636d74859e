/* Log messages: a level, a subsystem and a sink. The library never prints; without a sink, the
 * default, messages are dropped. */
#ifndef QUADRILLE_LOG_H
#define QUADRILLE_LOG_H

#include <quadrille/export.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_log_level { QD_LOG_ERROR, QD_LOG_WARN, QD_LOG_INFO, QD_LOG_DEBUG } qd_log_level;

/* Receives one line without a newline. Called on any thread, never concurrently. */
typedef void (*qd_log_sink)(void *context, qd_log_level level, const char *subsystem, const char *text);
/* Sets the sink for messages up to level `most`. Call it once, before threads start. */
QD_API void qd_log_set_sink(qd_log_sink sink, void *context, qd_log_level most);

/* Formats a message and passes it to the sink. Not collective. */
QD_API void qd_log(qd_log_level level, const char *subsystem, const char *format, ...) __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
