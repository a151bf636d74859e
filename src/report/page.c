/* Embeds the files of page/ in the library. */
#include "report/report_impl.h"

#define EMBED(symbol, file)                                                                                 \
    __asm__(".section .rodata\n"                                                                            \
            ".global " #symbol "\n"                                                                         \
            ".hidden " #symbol "\n"                                                                         \
            #symbol ":\n"                                                                                   \
            ".incbin \"" QD_REPORT_PAGE "/" file "\"\n"                                                     \
            ".byte 0\n"                                                                                     \
            ".previous\n");                                                                                 \
    extern const char symbol[]

EMBED(qd_page_html, "page.html");
EMBED(qd_page_style, "style.css");
EMBED(qd_page_data, "data.js");
EMBED(qd_page_charts, "charts.js");
EMBED(qd_page_tables, "tables.js");
EMBED(qd_page_detail, "detail.js");
EMBED(qd_page_timeline, "timeline.js");
EMBED(qd_page_live, "live.js");
EMBED(qd_page_planner, "planner.js");
EMBED(qd_page_main, "main.js");

qd_page qd_page_parts(void)
{
    static const char *const scripts[] = {qd_page_data,     qd_page_charts, qd_page_tables, qd_page_detail,
                                          qd_page_timeline, qd_page_live,   qd_page_planner, qd_page_main, NULL};
    return (qd_page){.html = qd_page_html, .style = qd_page_style, .scripts = scripts};
}
