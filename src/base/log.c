/* The log: formats lines and passes them to the sink of the host program, under one lock. */
#include <quadrille/log.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

enum { LINE_BYTES = 2048 };

static struct {
    qd_log_sink sink;
    void *context;
    qd_log_level most;
    pthread_mutex_t lock;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

void qd_log_set_sink(qd_log_sink sink, void *context, qd_log_level most)
{
    pthread_mutex_lock(&state.lock);
    state.sink = sink;
    state.context = context;
    state.most = most;
    pthread_mutex_unlock(&state.lock);
}

void qd_log(qd_log_level level, const char *subsystem, const char *format, ...)
{
    /* Read without the lock: the sink is set before threads start, and a disabled log must cost
     * nothing. */
    if (!state.sink || level > state.most)
        return;
    char text[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&state.lock);
    if (state.sink)
        state.sink(state.context, level, subsystem, text);
    pthread_mutex_unlock(&state.lock);
}
