/* The page and its data, separately: a report embeds the data, a server sends it on request. */
#ifndef QD_REPORT_PAGE_H
#define QD_REPORT_PAGE_H

#include <quadrille/report.h>

/* Appends the data of a report as one JSON object, as the page embeds it. QD_USAGE for an
 * inconsistent description. */
qd_status qd_report_data(const qd_report *report, qd_strbuf *json);

/* Appends the page with this data: of a report, or {"live":true} for a page that asks its server.
 * nonce: of the Content-Security-Policy with which it is sent; NULL: none. */
qd_status qd_report_page(const char *title, const qd_strbuf *json, const char *nonce, qd_strbuf *html);
#endif
