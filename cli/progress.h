/* One line on the terminal that is rewritten while something goes on. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "cli.h"

typedef struct progress_line {
    int columns; /* of standard error; 0: it is no terminal, nothing is shown */
    bool open;
    double begin, shown; /* seconds */
} progress_line;

progress_line progress_start(void);
double progress_seconds(const progress_line *line); /* since the start */
/* "[####            ] text  12 s left", at most ten times a second. share: 0 to 1. */
void progress_show(progress_line *line, double share, const char *text);
/* The line itself, on any terminal. Where it is narrow the bar goes first; the time left (< 0:
 * unknown) goes last. */
void progress_draw(FILE *file, double share, const char *text, double seconds_left);
/* The same for a text in several lengths, longest first: the first one that fits next to the time
 * left is shown. Where none does, the last one is, cut and without the time. */
void progress_draw_first(FILE *file, double share, const char *const *texts, int count, double seconds_left);
void progress_clear(progress_line *line); /* the line disappears */

/* "text, 12 s", twice a second from the first half on, while something goes on that tells nothing
 * before its end. A second call changes the text; SIGINT clears the line before it ends the
 * program. Nothing else may be written to the terminal until the end. */
void progress_watch(const char *format, ...) __attribute__((format(printf, 1, 2)));
void progress_watch_end(void);

/* SIGINT and SIGTERM set a mark instead of ending the program, so that nothing half-made is
 * left. */
void progress_catch_signals(void);
bool progress_stopped(void);
#endif
