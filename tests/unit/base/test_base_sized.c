/* Structs that begin with their size: programs that were compiled with fewer members, or with
 * more, than the library has. */
#include "base/sized.h"

#include <quadrille/check.h>
#include <quadrille/comm.h>
#include <quadrille/data.h>
#include <quadrille/generate.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/layout.h"
#include "support/ok.h"

/* The library's version of a struct, and those of an older and a newer program. */
typedef struct thing {
    size_t size;
    int first, second;
    double third;
} thing;

typedef struct old_thing {
    size_t size;
    int first, second;
} old_thing;

typedef struct new_thing {
    size_t size;
    int first, second;
    double third, fourth;
} new_thing;

static void options_of_older_and_newer_programs(void **state)
{
    (void)state;
    const thing defaults = {sizeof(thing), 1, 2, 3.0};
    thing own = defaults;
    ok(qd_sized_read(&(old_thing){sizeof(old_thing), 10, 20}, "thing", &own, sizeof own));
    assert_true(own.size == sizeof own && own.first == 10 && own.second == 20 && own.third == 3.0);
    own = defaults;
    ok(qd_sized_read(&(new_thing){sizeof(new_thing), 10, 20, 30.0, 0.0}, "thing", &own, sizeof own));
    assert_true(own.size == sizeof own && own.first == 10 && own.third == 30.0);
    own = defaults;
    assert_int_equal(qd_sized_read(&(new_thing){sizeof(new_thing), 10, 20, 30.0, 40.0}, "thing", &own, sizeof own), QD_UNSUPPORTED);
    assert_non_null(strstr(qd_error_message(), "needs a newer one"));
    assert_memory_equal(&own, &defaults, sizeof own);
}

static void a_size_that_was_not_set(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, sizeof(size_t), 1 << 20, SIZE_MAX};
    thing own = {0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        thing given = {.size = sizes[i]};
        assert_int_equal(qd_sized_read(&given, "thing", &own, sizeof own), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "start from thing_default()"));
        assert_int_equal(qd_sized_check(&given, "thing", sizeof own), QD_USAGE);
    }
    assert_int_equal(qd_sized_check(NULL, "thing", sizeof own), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "thing: there is none"));
}

static void reports_for_older_and_newer_programs(void **state)
{
    (void)state;
    const thing own = {sizeof own, 1, 2, 3.0};
    struct {
        old_thing given;
        unsigned char behind[16];
    } old = {{.size = sizeof(old_thing)}, "untouched"};
    new_thing new = {.size = sizeof new, .fourth = 7.0};
    qd_sized_write(&old, &own, sizeof own);
    assert_true(old.given.size == sizeof(old_thing) && old.given.first == 1 && old.given.second == 2);
    assert_string_equal((char *)old.behind, "untouched");
    qd_sized_write(&new, &own, sizeof own);
    assert_true(new.size == sizeof new && new.third == 3.0 && new.fourth == 0.0);
    qd_sized_write(NULL, &own, sizeof own);
    qd_sized_init(&old, sizeof(old_thing), &own, sizeof own);
    assert_true(old.given.size == sizeof(old_thing) && old.given.second == 2);
    assert_string_equal((char *)old.behind, "untouched");
    qd_sized_init(&new, sizeof new, &own, sizeof own);
    assert_true(new.size == sizeof new && new.third == 3.0 && new.fourth == 0.0);
}

/* Public functions, called by a program that knows only the first members. */
static void public_functions_with_fewer_members(void **state)
{
    (void)state;
    qd_options *options = layout_options("model.layers=2 model.hidden=32 model.heads=2 parallel.ranks=2");
    qd_check_report whole = qd_check_report_default(), part;
    ok(qd_check(options, 0, &whole));
    memset(&part, 0x5a, sizeof part);
    part.size = offsetof(qd_check_report, parameters);
    ok(qd_check(options, 0, &part));
    assert_int_equal(part.size, offsetof(qd_check_report, parameters));
    assert_string_equal(part.layout, whole.layout);
    assert_int_equal(part.world, 2);
    for (size_t i = part.size; i < sizeof part; i++)
        assert_int_equal(((unsigned char *)&part)[i], 0x5a);
    qd_options_destroy(options);

    qd_comm_config config;
    memset(&config, 0xff, sizeof config); /* no staging memory and no deadline could be had with these */
    qd_comm_config_init(&config, offsetof(qd_comm_config, staging_bytes));
    qd_local_world *world = NULL;
    ok(qd_local_world_create(1, &config, &world));
    qd_local_world_destroy(world);

    qd_generate_options generate;
    memset(&generate, 0xff, sizeof generate);
    qd_generate_options_init(&generate, offsetof(qd_generate_options, temperature));
    assert_int_equal(generate.tokens, 200);
    assert_true(generate.temperature != 0.8); /* beyond what the program has */
    qd_generate_report report = qd_generate_report_default();
    assert_int_equal(qd_generate(&generate, &report), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "no model is named")); /* and not the temperature */
    generate = (qd_generate_options){0};
    assert_int_equal(qd_generate(&generate, &report), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "start from qd_generate_options_default()"));
    assert_int_equal(qd_generate(NULL, &report), QD_USAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_of_older_and_newer_programs),
        cmocka_unit_test(a_size_that_was_not_set),
        cmocka_unit_test(reports_for_older_and_newer_programs),
        cmocka_unit_test(public_functions_with_fewer_members),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
