/* Output that several commands share: a run before it starts (check, train), a layout compared with
 * the planner's choice (plan, bench plans), bars. */
#ifndef CLI_PLAN_H
#define CLI_PLAN_H

#include "cli.h"

#include <quadrille/check.h>
#include <quadrille/plan.h>

void plan_print_head(const qd_check_report *report);   /* model, layout, batch */
void plan_print_memory(const qd_check_report *report); /* per rank, by kind, with bars */
void plan_print_host(const qd_check_report *report); /* host memory, if any is used */

/* The layout of --against, compared with the first choice, as text. */
void plan_print_against(const qd_plan_report *report);

/* Cells of a bar in a line whose other columns take `used`: PLAN_BAR, fewer on narrow terminals, 0
 * if less than 4 would fit. */
enum { PLAN_BAR = 24 };
int plan_bar_width(int used);

/* A bar of `width` cells, filled to `share` (0 to 1), with eighths of a cell in UTF-8. `text` needs
 * 4 * width + 1 bytes. */
void plan_bar(double share, int width, char *text);
/* Call it before a search. It builds and frees thousands of programs; returning their memory to the
 * system each time would take an eighth of the search. */
void plan_keep_memory(void);
#endif
