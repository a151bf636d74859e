/* Amounts as people read them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <quadrille/text.h>

static void seconds(void **state)
{
    (void)state;
    static const struct {
        double seconds;
        const char *text;
    } rows[] = {
        {-1.0, "0 s"}, {0.0, "0 s"}, {0.00042, "0.42 ms"}, {0.0284, "28 ms"}, {0.0996, "0.1 s"}, {1.25, "1.2 s"}, {9.96, "10 s"}, {59.4, "59 s"},
        {59.6, "1 min 00 s"}, {200.0, "3 min 20 s"}, {7500.0, "2 h 05 min"},
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seconds),
        cmocka_unit_test(counts_and_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
