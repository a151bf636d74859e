/* A progress line on the terminal, which is rewritten while a command works. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "cli.h"

typedef struct progress_line {
    int columns; /* of standard error; 0: not a terminal, nothing is shown */
    bool open;
    double begin, shown; /* seconds */
} progress_line;

progress_line progress_start(void);
double progress_seconds(const progress_line *line); /* since the start */
/* Shows "[####            ] text  12 s left", at most ten times a second. share: 0 to 1. */
void progress_show(progress_line *line, double share, const char *text);
/* Seconds since the start, and those left; below 0: unknown. */
typedef struct progress_times {
    double elapsed, left;
} progress_times;
/* "12 s, 3 min 20 s left"; "" if both are unknown. Returns text. */
const char *progress_times_text(progress_times times, char *text, size_t size);
/* Draws the line on any terminal. Narrow terminals lose the bar first, then the times. */
void progress_draw(FILE *file, double share, const char *text, progress_times times);
/* The same for a text in several lengths, longest first: shows the first that fits next to the
 * times. If none fits, shows the last one, truncated and without the times. */
void progress_draw_first(FILE *file, double share, const char *const *texts, int count, progress_times times);
void progress_clear(progress_line *line); /* removes the line */

/* Shows "text, 12 s", twice a second, during work that reports no progress. A second call changes
 * the text. SIGINT clears the line before it ends the program. Nothing else may be written to the
 * terminal until progress_watch_end(). */
void progress_watch(const char *format, ...) __attribute__((format(printf, 1, 2)));
void progress_watch_end(void);

/* Makes SIGINT and SIGTERM set a flag, which progress_stopped() returns, instead of ending the
 * program, so that no partial output is left. */
void progress_catch_signals(void);
bool progress_stopped(void);
#endif
