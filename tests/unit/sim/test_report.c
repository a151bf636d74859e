/* The report's arithmetic and the contents of its page. */
#include "base/intern.h"
#include "report/report_impl.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "support/ok.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void test_spans(void **state)
{
    (void)state;
    qd_span a[] = {{5, 6}, {0, 2}, {1, 3}, {4, 4}, {3, 3.5}}, b[] = {{2.5, 5.25}, {8, 9}};
    int64_t n = qd_spans_join(a, 5);
    assert_int_equal(n, 2); /* [0, 3.5) and [5, 6) */
    assert_true(a[0].begin == 0 && a[0].end == 3.5 && a[1].begin == 5 && a[1].end == 6);
    assert_true(qd_spans_length(a, n) == 4.5);
    assert_true(qd_spans_overlap(a, n, b, qd_spans_join(b, 2)) == 1.25);
    assert_true(qd_spans_overlap(a, n, b, 0) == 0);
    qd_span left[4], c[] = {{1, 2}, {3, 5.5}};
    assert_int_equal(qd_spans_subtract(a, n, c, 2, left), 3); /* [0, 1), [2, 3) and [5.5, 6) */
    assert_true(left[0].begin == 0 && left[0].end == 1 && left[1].begin == 2 && left[1].end == 3 && left[2].begin == 5.5 &&
                left[2].end == 6);
    assert_int_equal(qd_spans_subtract(a, n, c, 0, left), 2);
    assert_int_equal(qd_spans_subtract(c, 2, (qd_span[]){{0, 9}}, 1, left), 0);
}

static void test_intern(void **state)
{
    (void)state;
    qd_intern *table;
    const char *first, *again, *none;
    ok(qd_intern_create(&table));
    ok(qd_intern_text(table, "forward block.0", &first));
    for (int i = 0; i < 5000; i++) {
        int32_t number;
        char text[32];
        snprintf(text, sizeof text, "action %d", i % 2500);
        ok(qd_intern_add(table, text, strlen(text) + 1, &number));
        assert_int_equal(number, i % 2500 + 1);
    }
    assert_int_equal(qd_intern_count(table), 2501);
    assert_string_equal(qd_intern_key(table, 2500), "action 2499");
    ok(qd_intern_text(table, "forward block.0", &again));
    assert_ptr_equal(first, again);
    ok(qd_intern_text(table, NULL, &none));
    assert_null(none);
    qd_intern_destroy(table);
}

/* Two ranks, one of which represents three: 2 s each, of which 1 s computes and 1 s communicates,
 * half of it hidden. */
static const qd_report_rank two[] = {{.rank = 0, .stands_for = 1}, {.rank = 7, .label = "</script>", .stands_for = 3}};
static const char *const streams[] = {"compute", "communication"};
static const qd_report_event events[] = {
    {.rank = 7,
     .stream = 1,
     .name = "gather block.0",
     .kind = "gather",
     .group = "dp",
     .step = 1,
     .microbatch = -1,
     .bytes = 4000,
     .begin = 10.5,
     .end = 11.5},
    {.rank = 0, .stream = 0, .name = "forward block.0", .kind = "forward", .step = 1, .microbatch = 0, .begin = 10, .end = 11},
    {.rank = 0,
     .stream = 1,
     .name = "gather block.0",
     .kind = "gather",
     .group = "dp",
     .step = 1,
     .microbatch = -1,
     .bytes = 4000,
     .begin = 10.5,
     .end = 11.5},
    {.rank = 7, .stream = 0, .name = "forward block.0", .kind = "forward", .step = 1, .microbatch = 0, .begin = 10, .end = 11},
    {.rank = 0, .stream = 0, .name = "update block.0", .kind = "update", .step = 1, .microbatch = -1, .begin = 11.75, .end = 12},
};
static const qd_report_timeline timeline = {
    .size = sizeof(qd_report_timeline),
    .name = "measured", .ranks = two, .rank_count = 2, .streams = streams, .stream_count = 2, .events = events, .event_count = 5};

static void expect(const char *html, const char *part)
{
    if (!strstr(html, part))
        fail_msg("the page should contain %s", part);
}

static void test_page(void **state)
{
    (void)state;
    qd_strbuf html = {0};
    qd_report report = {.size = sizeof report, .title = "a <b>", .measured = &timeline};
    ok(qd_report_render(&report, &html));
    expect(html.data, "<title>a &lt;b&gt; · Quadrille</title>");
    expect(html.data, "\"title\":\"a \\u003cb>\"");
    expect(html.data, "\"label\":\"\\u003c/script>\"");
    expect(html.data, "\"world\":4,\"weight\":4");
    expect(html.data, "{\"rank\":0,\"seconds\":2,\"compute\":1.25,\"communication\":1,\"exposed\":0.5,\"idle\":0.25}");
    expect(html.data, "{\"rank\":1,\"seconds\":2,\"compute\":1,\"communication\":1,\"exposed\":0.5,\"idle\":0.5}");
    /* Four ranks with one call each; 4000 bytes are the sum of all four. */
    expect(html.data, "{\"kind\":\"gather\",\"group\":\"dp\",\"count\":4,\"seconds\":4,\"least\":1,\"most\":1,\"bytes\":4000,\"exposed\":2,"
                      "\"hidden\":2}");
    expect(html.data,
           "{\"name\":\"update "
           "block.0\",\"kind\":\"update\",\"group\":null,\"count\":1,\"seconds\":0.25,\"least\":0.25,\"most\":0.25,\"bytes\":0}");
    qd_strbuf_free(&html);
}

/* A rank that waits for a message and computes nothing is idle. */
static void test_bubble(void **state)
{
    (void)state;
    const qd_report_event waits[] = {
        {.rank = 0, .stream = 1, .name = "recv block.0", .kind = "recv", .group = "pp", .step = 1, .microbatch = 0, .begin = 0, .end = 3},
        {.rank = 0, .stream = 0, .name = "forward block.0", .kind = "forward", .step = 1, .microbatch = 0, .begin = 2, .end = 4},
        {.rank = 0,
         .stream = 1,
         .name = "all_reduce block.0",
         .kind = "all_reduce",
         .group = "tp",
         .step = 1,
         .microbatch = 0,
         .begin = 3,
         .end = 4,
         .waited = 0.5},
    };
    qd_strbuf html = {0};
    qd_report_timeline line = timeline;
    line.rank_count = 1;
    line.events = waits;
    line.event_count = 3;
    qd_report report = {.size = sizeof report, .measured = &line};
    ok(qd_report_render(&report, &html));
    expect(html.data, "{\"rank\":0,\"seconds\":4,\"compute\":1.5,\"communication\":1,\"exposed\":0.5,\"idle\":2}");
    qd_strbuf_free(&html);
}

static void refused(qd_report_event event, qd_report_rank other, const char *word)
{
    qd_strbuf html = {0};
    qd_report_rank ranks[] = {two[0], other};
    qd_report_timeline wrong = timeline;
    wrong.ranks = ranks;
    wrong.events = &event;
    wrong.event_count = 1;
    qd_report report = {.size = sizeof report, .simulated = &wrong};
    assert_int_equal(qd_report_render(&report, &html), QD_USAGE);
    if (!strstr(qd_error_message(), word))
        fail_msg("'%s' should say '%s'", qd_error_message(), word);
    qd_strbuf_free(&html);
}

static void test_contradictions(void **state)
{
    (void)state;
    qd_report_event e = events[1];
    e.rank = 3;
    refused(e, two[1], "rank 3");
    e = events[1];
    e.stream = 2;
    refused(e, two[1], "stream 2");
    e = events[1];
    e.end = 9;
    refused(e, two[1], "ends at 9 s");
    e = events[1];
    e.kind = NULL;
    refused(e, two[1], "no kind");
    refused(events[1], two[0], "twice");
    qd_strbuf html = {0};
    const double x[] = {1, 3, 2};
    qd_report report = {.size = sizeof report, .series_count = 1,
                        .series = &(qd_report_series){.chart = "loss", .x = x, .y = x, .count = 3}};
    assert_int_equal(qd_report_render(&report, &html), QD_USAGE);
    qd_strbuf_free(&html);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_intern),
        cmocka_unit_test(test_page),
        cmocka_unit_test(test_bubble),
        cmocka_unit_test(test_contradictions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
