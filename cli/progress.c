/* Progress lines on the terminal, a watch for work that reports no progress, and signals that stop
 * a command cleanly. */
#include "progress.h"

#include "plan.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t stopped;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

progress_line progress_start(void)
{
    return (progress_line){.columns = cli_columns(stderr), .begin = now()};
}

double progress_seconds(const progress_line *line)
{
    return now() - line->begin;
}

const char *progress_times_text(progress_times times, char *text, size_t size)
{
    char elapsed[32] = "", left[32] = "";
    if (times.elapsed >= 0.0)
        qd_text_seconds(times.elapsed, elapsed, sizeof elapsed);
    if (times.left >= 0.0)
        qd_text_seconds(times.left, left, sizeof left);
    snprintf(text, size, "%s%s%s%s", elapsed, elapsed[0] && left[0] ? ", " : "", left, left[0] ? " left" : "");
    return text;
}

void progress_draw_first(FILE *file, double share, const char *const *texts, int count, progress_times times)
{
    enum { BAR = 16 };
    char bar[4 * BAR + 1], shown[96], rest[128] = "";
    int columns = cli_columns(file); /* each time: the terminal may have been resized */
    if (progress_times_text(times, shown, sizeof shown)[0])
        snprintf(rest, sizeof rest, "  %s", shown);
    int chosen = 0;
    while (chosen < count && columns <= qd_text_columns(texts[chosen]) + qd_text_columns(rest))
        chosen++;
    plan_bar(share, BAR, bar);
    /* Never wider than the terminal: a wrapped line cannot be rewritten. */
    if (chosen == count)
        fprintf(file, "\r%.*s\033[K", columns > 1 ? columns - 1 : 0, texts[count - 1]);
    else if (chosen == 0 && columns > qd_text_columns(texts[0]) + qd_text_columns(rest) + BAR + 3)
        fprintf(file, "\r[%s%s%s] %s%s%s%s\033[K", cli_colour(file, CLI_GREEN), bar, cli_colour(file, CLI_PLAIN), texts[0],
                cli_colour(file, CLI_DIM), rest, cli_colour(file, CLI_PLAIN));
    else
        fprintf(file, "\r%s%s%s%s\033[K", texts[chosen], cli_colour(file, CLI_DIM), rest, cli_colour(file, CLI_PLAIN));
    fflush(file);
}

void progress_draw(FILE *file, double share, const char *text, progress_times times)
{
    progress_draw_first(file, share, &text, 1, times);
}

void progress_show(progress_line *line, double share, const char *text)
{
    double at = now();
    if (line->columns == 0 || (line->open && at - line->shown < 0.1))
        return;
    progress_draw(stderr, share, text, (progress_times){-1.0, share > 0.0 ? (at - line->begin) * (1.0 - share) / share : -1.0});
    line->open = true;
    line->shown = at;
}

void progress_clear(progress_line *line)
{
    if (line->open)
        fputs("\r\033[K", stderr);
    line->open = false;
}

/* The state of progress_watch(). */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    pthread_t thread;
    bool running, shown;
    double begin;
    char text[160];
    struct sigaction before; /* of SIGINT */
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};

static const char clear_line[] = "\r\033[K";

static void clear_and_end(int number)
{
    ssize_t written = write(STDERR_FILENO, clear_line, sizeof clear_line - 1);
    (void)written;
    raise(number); /* SA_RESETHAND has restored the default action */
}

static void show_watch(void)
{
    char line[224], seconds[32];
    int columns = cli_columns(stderr); /* the terminal may have been resized */
    qd_text_seconds(now() - watch.begin, seconds, sizeof seconds);
    snprintf(line, sizeof line, "%s, %s", watch.text, seconds);
    fprintf(stderr, "\r%.*s\033[K", columns > 1 ? columns - 1 : 0, line);
    fflush(stderr);
    watch.shown = true;
}

static void *run_watch(void *nothing)
{
    (void)nothing;
    pthread_mutex_lock(&watch.lock);
    while (watch.running) {
        struct timespec next;
        clock_gettime(CLOCK_REALTIME, &next);
        next.tv_nsec += 500000000;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&watch.ended, &watch.lock, &next) == ETIMEDOUT && watch.running)
            show_watch();
    }
    pthread_mutex_unlock(&watch.lock);
    return NULL;
}

void progress_watch(const char *format, ...)
{
    if (cli_columns(stderr) == 0)
        return;
    pthread_mutex_lock(&watch.lock);
    va_list args;
    va_start(args, format);
    vsnprintf(watch.text, sizeof watch.text, format, args);
    va_end(args);
    if (!watch.running) {
        sigset_t all, before;
        struct sigaction action = {.sa_handler = clear_and_end, .sa_flags = SA_RESETHAND};
        watch.begin = now();
        /* Signals must be delivered to the thread that works. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        watch.shown = false;
        watch.running = true;
        watch.running = pthread_create(&watch.thread, NULL, run_watch, NULL) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        sigaction(SIGINT, NULL, &watch.before);
        if (watch.running && watch.before.sa_handler != SIG_IGN) /* as under nohup */
            sigaction(SIGINT, &action, NULL);
    }
    pthread_mutex_unlock(&watch.lock);
}

void progress_watch_end(void)
{
    pthread_mutex_lock(&watch.lock);
    bool was_running = watch.running;
    watch.running = false;
    pthread_cond_signal(&watch.ended);
    pthread_mutex_unlock(&watch.lock);
    if (!was_running)
        return;
    pthread_join(watch.thread, NULL);
    sigaction(SIGINT, &watch.before, NULL);
    if (watch.shown)
        fputs(clear_line, stderr);
    fflush(stderr);
}

static void mark(int number)
{
    (void)number;
    stopped = 1;
}

void progress_catch_signals(void)
{
    struct sigaction action = {.sa_handler = mark, .sa_flags = SA_RESETHAND}; /* a second signal kills the program */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool progress_stopped(void)
{
    return stopped != 0;
}
