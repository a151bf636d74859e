/* Renders a report: its data as JSON, inside a single HTML page. */
#include "base/text/strbuf.h"
#include "base/sized.h"
#include "report/page.h"
#include "report/report_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

qd_status qd_report_put_column(qd_json_writer *w, const char *key, const void *data, size_t bytes)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *in = data;
    char *out = qd_json_put_plain(w, key, (bytes + 2) / 3 * 4);
    if (!out)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a column of %zu bytes", bytes);
    for (size_t i = 0; i < bytes; i += 3) {
        size_t left = bytes - i;
        uint32_t three = (uint32_t)in[i] << 16 | (left > 1 ? (uint32_t)in[i + 1] << 8 : 0) | (left > 2 ? in[i + 2] : 0);
        *out++ = digits[three >> 18];
        *out++ = digits[three >> 12 & 63];
        *out++ = left > 1 ? digits[three >> 6 & 63] : '=';
        *out++ = left > 2 ? digits[three & 63] : '=';
    }
    return QD_OK;
}

static void put_figures(qd_json_writer *w, const qd_report *r)
{
    qd_json_list_begin(w, "figures");
    for (int i = 0; i < r->figure_count; i++) {
        qd_json_object_begin(w, NULL);
        qd_json_put_string(w, "name", r->figures[i].name);
        qd_json_put_string(w, "value", r->figures[i].value);
        qd_json_put_string(w, "unit", r->figures[i].unit);
        qd_json_put_string(w, "note", r->figures[i].note);
        qd_json_end(w);
    }
    qd_json_end(w);
    qd_json_list_begin(w, "notes");
    for (int i = 0; i < r->note_count; i++)
        qd_json_put_string(w, NULL, r->notes[i]);
    qd_json_end(w);
}

static void put_marks(qd_json_writer *w, const qd_report *r)
{
    qd_json_list_begin(w, "marks");
    for (int i = 0; i < r->mark_count; i++) {
        qd_json_object_begin(w, NULL);
        qd_json_put_double(w, "x", r->marks[i].x);
        qd_json_put_string(w, "text", r->marks[i].text);
        qd_json_end(w);
    }
    qd_json_end(w);
}

static void put_tables(qd_json_writer *w, const qd_report *r)
{
    qd_json_list_begin(w, "tables");
    for (int i = 0; i < r->table_count; i++) {
        const qd_report_table *t = &r->tables[i];
        qd_json_object_begin(w, NULL);
        qd_json_put_string(w, "title", t->title);
        qd_json_put_string(w, "lead", t->lead);
        qd_json_list_begin(w, "rows");
        for (int row = 0; row < t->rows; row++) {
            qd_json_list_begin(w, NULL);
            for (int column = 0; column < t->columns; column++)
                qd_json_put_string(w, NULL, t->cells[row * t->columns + column]);
            qd_json_end(w);
        }
        qd_json_end(w);
        qd_json_end(w);
    }
    qd_json_end(w);
}

static qd_status check_series(const qd_report_series *s)
{
    if (!s->chart || s->count < 0 || (s->count > 0 && (!s->x || !s->y)))
        return QD_FAIL(QD_USAGE, "the curve '%s' has no chart or no values", s->name ? s->name : "");
    for (int64_t i = 0; i < s->count; i++)
        if (!isfinite(s->x[i]) || (i > 0 && s->x[i] < s->x[i - 1]))
            return QD_FAIL(QD_USAGE, "the curve '%s' of the chart '%s' is not in increasing order of x at point %lld",
                           s->name ? s->name : "", s->chart, (long long)i);
    return QD_OK;
}

static qd_status put_series(qd_json_writer *w, const qd_report *r)
{
    qd_json_list_begin(w, "series");
    for (int i = 0; i < r->series_count; i++) {
        const qd_report_series *s = &r->series[i];
        int same = 0; /* curves often share their x */
        QD_TRY(check_series(s));
        while (same < i && (r->series[same].x != s->x || r->series[same].count != s->count))
            same++;
        qd_json_object_begin(w, NULL);
        qd_json_put_string(w, "chart", s->chart);
        qd_json_put_string(w, "name", s->name);
        qd_json_put_string(w, "x_name", s->x_name);
        qd_json_put_string(w, "unit", s->unit);
        qd_json_put_bool(w, "log_x", s->log_x);
        qd_json_put_bool(w, "log_y", s->log_y);
        if (same < i)
            qd_json_put_int(w, "x_of", same);
        else
            QD_TRY(qd_report_put_column(w, "x", s->x, (size_t)s->count * sizeof *s->x));
        QD_TRY(qd_report_put_column(w, "y", s->y, (size_t)s->count * sizeof *s->y));
        qd_json_end(w);
    }
    qd_json_end(w);
    return QD_OK;
}

qd_status qd_report_put_progress(qd_json_writer *w, const qd_report *r)
{
    put_figures(w, r);
    put_marks(w, r);
    return put_series(w, r);
}

static void put_measured(qd_json_writer *w, const char *key, int64_t bytes)
{
    if (bytes >= 0)
        qd_json_put_int(w, key, bytes);
    else
        qd_json_put_null(w, key);
}

static void put_memory(qd_json_writer *w, const qd_report_memory *m)
{
    qd_json_object_begin(w, "memory");
    qd_json_put_int(w, "capacity", m->capacity);
    qd_json_list_begin(w, "kinds");
    for (int i = 0; i < m->kind_count; i++)
        qd_json_put_string(w, NULL, m->kinds[i]);
    qd_json_end(w);
    qd_json_list_begin(w, "ranks");
    for (int i = 0; i < m->rank_count; i++) {
        const qd_report_memory_rank *r = &m->ranks[i];
        qd_json_object_begin(w, NULL);
        qd_json_put_string(w, "label", r->label);
        qd_json_list_begin(w, "planned");
        for (int k = 0; k < m->kind_count; k++)
            qd_json_put_int(w, NULL, r->planned[k]);
        qd_json_end(w);
        put_measured(w, "allocated", r->allocated);
        put_measured(w, "resident", r->resident);
        qd_json_end(w);
    }
    qd_json_end(w);
    qd_json_end(w);
}

static qd_status put_data(const qd_report *r, qd_strbuf *out)
{
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "title", r->title);
    qd_json_put_string(&w, "subtitle", r->subtitle);
    QD_TRY(qd_report_put_progress(&w, r));
    put_tables(&w, r);
    if (r->memory)
        put_memory(&w, r->memory);
    if (r->measured)
        QD_TRY(qd_report_put_timeline(&w, "measured", r->measured));
    if (r->simulated)
        QD_TRY(qd_report_put_timeline(&w, "simulated", r->simulated));
    if (r->config)
        qd_json_put_string(&w, "config", r->config);
    qd_json_end(&w);
    return QD_OK;
}

/* Text between tags. */
static void put_escaped(qd_strbuf *out, const char *text)
{
    for (const char *c = text; *c; c++) {
        switch (*c) {
        case '<': qd_strbuf_puts(out, "&lt;"); break;
        case '>': qd_strbuf_puts(out, "&gt;"); break;
        case '&': qd_strbuf_puts(out, "&amp;"); break;
        default: qd_strbuf_append(out, c, 1);
        }
    }
}

/* JSON inside a script: '<' occurs in strings only and must not start a tag there. */
static void put_json(qd_strbuf *out, const qd_strbuf *json)
{
    const char *text = json->data, *end;
    for (; (end = strchr(text, '<')) != NULL; text = end + 1) {
        qd_strbuf_append(out, text, (size_t)(end - text));
        qd_strbuf_puts(out, "\\u003c");
    }
    qd_strbuf_puts(out, text);
}

/* Copies the template up to a marker; returns what follows it. */
static const char *put_until(qd_strbuf *out, const char *html, const char *mark)
{
    const char *at = strstr(html, mark);
    qd_strbuf_append(out, html, (size_t)(at - html));
    return at + strlen(mark);
}

/* The attribute of a style or script that the policy of the page allows. */
static void put_nonce(qd_strbuf *out, const char *nonce)
{
    if (nonce)
        qd_strbuf_printf(out, " nonce=\"%s\"", nonce);
}

qd_status qd_report_page(const char *title, const qd_strbuf *json, const char *nonce, qd_strbuf *html)
{
    qd_page page = qd_page_parts();
    const char *rest = put_until(html, page.html, "<!--title-->");
    put_escaped(html, title ? title : "run");
    rest = put_until(html, rest, "<!--nonce-->");
    put_nonce(html, nonce);
    rest = put_until(html, rest, "<!--style-->");
    qd_strbuf_puts(html, page.style);
    rest = put_until(html, rest, "<!--data-->");
    put_json(html, json);
    rest = put_until(html, rest, "<!--nonce-->");
    put_nonce(html, nonce);
    rest = put_until(html, rest, "<!--script-->");
    for (int i = 0; page.scripts[i]; i++)
        qd_strbuf_puts(html, page.scripts[i]);
    qd_strbuf_puts(html, rest);
    return html->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the report") : QD_OK;
}

qd_status qd_report_data(const qd_report *report, qd_strbuf *json)
{
    qd_report r = qd_report_default();
    qd_report_memory memory = qd_report_memory_default();
    qd_report_timeline timelines[2] = {qd_report_timeline_default(), qd_report_timeline_default()};
    QD_TRY(QD_SIZED_READ(report, qd_report, &r));
    if (r.memory)
        QD_TRY(QD_SIZED_READ(r.memory, qd_report_memory, &memory));
    if (r.measured)
        QD_TRY(QD_SIZED_READ(r.measured, qd_report_timeline, &timelines[0]));
    if (r.simulated)
        QD_TRY(QD_SIZED_READ(r.simulated, qd_report_timeline, &timelines[1]));
    r.memory = r.memory ? &memory : NULL;
    r.measured = r.measured ? &timelines[0] : NULL;
    r.simulated = r.simulated ? &timelines[1] : NULL;
    QD_TRY(put_data(&r, json));
    return json->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the report") : QD_OK;
}

qd_status qd_report_render(const qd_report *report, qd_strbuf *html)
{
    qd_strbuf json = {0};
    qd_status status = qd_report_data(report, &json);
    if (status == QD_OK)
        status = qd_report_page(report->title, &json, NULL, html);
    qd_strbuf_free(&json);
    return status;
}

qd_status qd_report_write(const qd_report *r, const char *path)
{
    qd_strbuf html = {0};
    qd_status status = qd_report_render(r, &html);
    if (status == QD_OK)
        status = qd_file_replace(path, html.data, html.length);
    qd_strbuf_free(&html);
    return status;
}
