/* How a run looks before it starts, for check, train and plan. */
#ifndef CLI_PLAN_H
#define CLI_PLAN_H

#include "cli.h"

#include <quadrille/check.h>
#include <quadrille/plan.h>

void plan_print_head(const qd_check_report *report);   /* model, layout, batch */
void plan_print_memory(const qd_check_report *report); /* per rank, by kind, with bars */
void plan_print_host(const qd_check_report *report); /* what lies in host memory, if anything */

/* A layout that was asked about, beside the first choice. */
void plan_print_against(const qd_plan_report *report);
void plan_put_against(qd_json_writer *writer, const qd_plan_against *against);

/* Cells of the bars in lines that have so many columns beside them: less than 24 on narrow
 * terminals, and none where there is no room. */
enum { PLAN_BAR = 24 };
int plan_bar_width(int beside);

/* A bar of `width` cells, filled to `share` (0 to 1), with eighths of a cell in UTF-8. `text` needs
 * 4 * width + 1 bytes. */
void plan_bar(double share, int width, char *text);
/* Before a search: programs are built and thrown away by the thousand, and memory that goes back to
 * the system each time costs an eighth of the search. */
void plan_keep_memory(void);
#endif
