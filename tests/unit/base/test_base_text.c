/* Formatting of amounts and lines for people. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <quadrille/text.h>

static void seconds(void **state)
{
    (void)state;
    static const struct {
        double seconds;
        const char *text;
    } rows[] = {
        {-1.0, "0 s"},  {0.0, "0 s"},   {0.00042, "0.42 ms"}, {0.0284, "28 ms"},     {0.0996, "0.1 s"},      {1.25, "1.2 s"},
        {9.96, "10 s"}, {59.4, "59 s"}, {59.6, "1 min 00 s"}, {200.0, "3 min 20 s"}, {7500.0, "2 h 05 min"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[32];
        qd_text_seconds(rows[i].seconds, text, sizeof text);
        assert_string_equal(text, rows[i].text);
    }
}

static void counts_and_bytes(void **state)
{
    (void)state;
    char text[32];
    qd_text_count(950.0, text, sizeof text);
    assert_string_equal(text, "950");
    qd_text_count(12345.0, text, sizeof text);
    assert_string_equal(text, "12.3 k");
    qd_text_count(70.6e9, text, sizeof text);
    assert_string_equal(text, "70.6 B");
    qd_text_bytes(0, text, sizeof text);
    assert_string_equal(text, "0 B");
    qd_text_bytes((int64_t)7 << 29, text, sizeof text);
    assert_string_equal(text, "3.50 GiB");
}

static void units(void **state)
{
    (void)state;
    static const struct {
        double value;
        const char *unit, *text;
    } rows[] = {
        {0.0, "s", "0.000 s"},     {1.4994, "s", "1.499 s"},  {0.99996, "s", "1.000 s"},  {0.0774, "s", "77.40 ms"},
        {4.2e-6, "s", "4.200 us"}, {12345.6, "s", "12346 s"}, {80876.0, "J", "80.88 kJ"}, {1.616, "J", "1.616 J"},
        {61.5e6, "J", "61.50 MJ"}, {1720e3, "W", "1.720 MW"}, {999.96, "W", "1.000 kW"},  {6720.0, "W", "6.720 kW"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[32];
        qd_text_unit(rows[i].value, rows[i].unit, text, sizeof text);
        assert_string_equal(text, rows[i].text);
    }
}

static void lines(void **state)
{
    (void)state;
    static const struct {
        int indent, width;
        const char *text, *wrapped;
    } rows[] = {
        {0, 0, "all in one line", "all in one line\n"},
        {0, 8, "all in one line", "all in\none line\n"},
        {2, 10, "all in one line", "all in\n  one line\n"},
        {0, 4, "µ µ µ unbroken", "µ µ\nµ\nunbroken\n"}, /* characters count, not bytes; a long word stays whole */
        {3, 9, "", "\n"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qd_strbuf out = {0};
        char *text;
        qd_text_wrap(rows[i].text, rows[i].indent, rows[i].width, &out);
        assert_int_equal(qd_strbuf_take(&out, &text), QD_OK);
        assert_string_equal(text, rows[i].wrapped);
        free(text);
    }
    assert_int_equal(qd_text_columns("16 µs"), 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seconds),
        cmocka_unit_test(counts_and_bytes),
        cmocka_unit_test(units),
        cmocka_unit_test(lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
