/* Initial values drawn ahead of time, all, some or none of them, equal those drawn piece by
 * piece. */
#include "support/trained.h"
#include "train/exec/initial.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const char words[] = "model.layers=3 model.hidden=96 model.heads=4 model.vocab=331 data.seq=8 train.global_batch=4 parallel.ranks=4 "
                            "parallel.tp=2 parallel.zero=3 ";

typedef struct stored {
    const qd_program *program;
    float *values;
    int64_t count;
} stored;

/* Parts of a parameter arrive in order, one parameter after another. */
static qd_status store(void *context, int param, int64_t first, int64_t count, const float *values)
{
    stored *s = context;
    (void)param;
    (void)first;
    memcpy(s->values + s->count, values, (size_t)count * sizeof *values);
    s->count += count;
    return QD_OK;
}

static stored draw_with(const qd_program *p, qd_initial_ahead *ahead)
{
    stored s = {.program = p, .values = calloc(1 << 20, sizeof(float))};
    assert_non_null(s.values);
    trained_ok(qd_initial_values(p, 7, 2, ahead, store, &s));
    qd_initial_end(ahead);
    return s;
}

static void ahead_gives_the_same(void **state)
{
    (void)state;
    qd_arena *arena;
    qd_program *p = trained_program(words, &arena);
    stored plain = draw_with(p, NULL);
    assert_true(plain.count > 10000);
    static const int64_t bytes[] = {0, 1000, 150000, 1 << 30};
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        for (int wait = 0; wait < 2; wait++) { /* used immediately, or after the drawing has ended */
            qd_initial_ahead *ahead = qd_initial_begin(p, 7, 2, bytes[i]);
            assert_non_null(ahead);
            usleep(wait ? 20000 : 0);
            stored s = draw_with(p, ahead);
            assert_int_equal(s.count, plain.count);
            assert_memory_equal(s.values, plain.values, (size_t)plain.count * sizeof(float));
            free(s.values);
        }
    qd_initial_end(qd_initial_begin(p, 7, 1, 1 << 30)); /* a start that fails */
    qd_initial_end(NULL);
    free(plain.values);
    qd_arena_destroy(arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ahead_gives_the_same)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
