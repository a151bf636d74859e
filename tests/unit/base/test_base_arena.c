/* Arena, log and clock. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/arena.h"
#include "base/clock.h"

#include <pthread.h>
#include <quadrille/log.h>
#include <stdio.h>
#include <string.h>

static void arena_gives_zeroed_aligned_memory(void **state)
{
    (void)state;
    qd_arena *arena;
    unsigned char *blocks[500];
    assert_int_equal(qd_arena_create(&arena), QD_OK);
    for (size_t i = 0; i < 500; i++) {
        size_t bytes = i * 37 % 5000;
        blocks[i] = qd_arena_alloc(arena, bytes);
        assert_non_null(blocks[i]);
        assert_int_equal((uintptr_t)blocks[i] % 16, 0);
        for (size_t j = 0; j < bytes; j++)
            assert_int_equal(blocks[i][j], 0);
        memset(blocks[i], (int)(i % 251 + 1), bytes);
    }
    /* No allocation overwrote its neighbour. */
    for (size_t i = 0; i < 500; i++)
        for (size_t j = 0; j < i * 37 % 5000; j++)
            assert_int_equal(blocks[i][j], i % 251 + 1);
    assert_true(qd_arena_bytes(arena) >= 1000000);
    assert_non_null(qd_arena_alloc(arena, 10 << 20));
    assert_string_equal(qd_arena_printf(arena, "%d-%s", 7, "x"), "7-x");
    char text[] = "copy";
    char *copy = qd_arena_strdup(arena, text);
    text[0] = 'X';
    assert_string_equal(copy, "copy");
    char *given = strdup("given"); /* freed with the arena: the sanitizers would report it */
    size_t before = qd_arena_bytes(arena);
    assert_ptr_equal(qd_arena_adopt(arena, given, 6), given);
    assert_true(qd_arena_bytes(arena) >= before + 6);
    qd_arena_destroy(arena);
    qd_arena_destroy(NULL);
}

static void arena_refuses_overflow(void **state)
{
    (void)state;
    qd_arena *arena;
    assert_int_equal(qd_arena_create(&arena), QD_OK);
    qd_error_clear();
    assert_null(qd_arena_array(arena, SIZE_MAX / 2, 3));
    assert_string_not_equal(qd_error_message(), "");
    qd_error_clear();
    assert_null(qd_arena_alloc(arena, SIZE_MAX));
    assert_string_not_equal(qd_error_message(), "");
    int *numbers = QD_ARENA_NEW(arena, int, 3);
    assert_non_null(numbers);
    numbers[2] = 1;
    qd_arena_destroy(arena);
}

typedef struct heard {
    int lines;
    char last[2200];
    qd_log_level level;
} heard;

static void listen_to(void *context, qd_log_level level, const char *subsystem, const char *text)
{
    heard *ear = context;
    ear->lines++;
    ear->level = level;
    snprintf(ear->last, sizeof ear->last, "%s: %s", subsystem, text);
}

static void *talk(void *argument)
{
    for (int i = 0; i < 1000; i++)
        qd_log(QD_LOG_INFO, "test", "%d %s", i, (const char *)argument);
    return NULL;
}

static void log_filters_and_serialises(void **state)
{
    (void)state;
    heard ear = {0};
    qd_log(QD_LOG_ERROR, "test", "no sink");
    qd_log_set_sink(listen_to, &ear, QD_LOG_INFO);
    qd_log(QD_LOG_DEBUG, "test", "too detailed");
    assert_int_equal(ear.lines, 0);
    qd_log(QD_LOG_WARN, "comm", "rank %d is late", 3);
    assert_string_equal(ear.last, "comm: rank 3 is late");
    assert_int_equal(ear.level, QD_LOG_WARN);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, talk, "x"), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(ear.lines, 4001); /* a lost update would show here */
    qd_log_set_sink(NULL, NULL, QD_LOG_ERROR);
    qd_log(QD_LOG_ERROR, "test", "no sink");
    assert_int_equal(ear.lines, 4001);
}

static void clocks_advance(void **state)
{
    (void)state;
    double start = qd_clock_now(), cpu = qd_clock_thread_cpu();
    volatile double sum = 0.0;
    while (qd_clock_now() - start < 0.02)
        sum = sum + 1.0;
    assert_true(qd_clock_now() > start);
    double used = qd_clock_thread_cpu() - cpu;
    assert_true(used > 0.0 && used < 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arena_gives_zeroed_aligned_memory),
        cmocka_unit_test(arena_refuses_overflow),
        cmocka_unit_test(log_filters_and_serialises),
        cmocka_unit_test(clocks_advance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
