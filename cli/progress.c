#include "progress.h"

#include "plan.h"

#include <signal.h>
#include <string.h>
#include <time.h>

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

void progress_show(progress_line *line, double share, const char *text)
{
    enum { BAR = 12 };
    char bar[4 * BAR + 1], left[32], rest[48] = "";
    double at = now();
    if (line->columns == 0 || (line->open && at - line->shown < 0.1))
        return;
    plan_bar(share, BAR, bar);
    if (share > 0.0) {
        qd_text_seconds((at - line->begin) * (1.0 - share) / share, left, sizeof left);
        snprintf(rest, sizeof rest, "  %s left", left);
    }
    /* Never wider than the terminal: a wrapped line cannot be rewritten. */
    if (line->columns > (int)(strlen(text) + strlen(rest)) + BAR + 3)
        fprintf(stderr, "\r[%s] %s%s\033[K", bar, text, rest);
    else
        fprintf(stderr, "\r%.*s\033[K", line->columns - 1, text);
    fflush(stderr);
    line->open = true;
    line->shown = at;
}

void progress_clear(progress_line *line)
{
    if (line->open)
        fputs("\r\033[K", stderr);
    line->open = false;
}

static void mark(int number)
{
    (void)number;
    stopped = 1;
}

void progress_catch_signals(void)
{
    struct sigaction action = {.sa_handler = mark, .sa_flags = SA_RESETHAND}; /* a second one ends the program */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool progress_stopped(void)
{
    return stopped != 0;
}
