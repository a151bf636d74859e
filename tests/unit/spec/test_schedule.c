/* Pipeline schedules: bubbles and activations in flight against theory, validation, CSV. */
#include "spec/schedule/schedule.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

static const double units[QD_PASS_COUNT] = {1.0, 2.0, 1.0, 1.0};

typedef struct made {
    qd_arena *arena;
    qd_schedule *s;
    qd_schedule_times times;
} made;

static made make(qd_schedule_kind kind, int ranks, int per_rank, int micro_batches)
{
    made m;
    ok(qd_arena_create(&m.arena));
    ok(qd_schedule_create(kind, ranks, ranks * per_rank, micro_batches, true, m.arena, &m.s));
    ok(qd_schedule_replay(m.s, units, 0.0, m.arena, &m.times));
    return m;
}

static void same(double a, double b)
{
    if (fabs(a - b) > 1e-12)
        fail_msg("%.6f is not %.6f", a, b);
}

static void classical_bubbles_are_the_textbooks(void **state)
{
    (void)state;
    for (int p = 1; p <= 8; p++) {
        for (int m = 1; m <= 24; m++) {
            for (int kind = QD_SCHEDULE_1F1B; kind <= QD_SCHEDULE_GPIPE; kind++) {
                made x = make((qd_schedule_kind)kind, p, 1, m);
                same(x.times.bubble, (p - 1.0) / (m + p - 1.0));
                same(x.times.bubble, qd_schedule_theory(x.s));
                for (int r = 0; r < p; r++) {
                    int expected = kind == QD_SCHEDULE_GPIPE ? m : m < p - r ? m : p - r;
                    assert_int_equal(qd_schedule_in_flight(x.s, r), expected);
                }
                qd_arena_destroy(x.arena);
            }
        }
    }
}

static void interleaving_divides_the_bubble(void **state)
{
    (void)state;
    for (int p = 1; p <= 8; p++)
        for (int v = 1; v <= 4; v++)
            for (int m = 1; m <= 24; m++) {
                made x = make(QD_SCHEDULE_INTERLEAVED, p, v, m); /* also if m is not a multiple of p */
                if (m % p == 0) {
                    same(x.times.bubble, (p - 1.0) / (v * m + p - 1.0));
                    /* 2 (p - 1) + (v - 1) p turns ahead, plus the current one. */
                    int ahead = 2 * (p - 1) + (v - 1) * p + 1, all = v * m;
                    assert_int_equal(qd_schedule_in_flight(x.s, 0), ahead < all ? ahead : all);
                } else {
                    same(qd_schedule_theory(x.s), -1.0);
                }
                qd_arena_destroy(x.arena);
            }
}

static void zero_bubble_schedules_do_better(void **state)
{
    (void)state;
    for (int p = 2; p <= 8; p++) {
        for (int m = 1; m <= 32; m++) {
            double plain = (p - 1.0) / (m + p - 1.0);
            made h1 = make(QD_SCHEDULE_ZB_H1, p, 1, m), v = make(QD_SCHEDULE_ZB_V, p, 2, m);
            assert_true(h1.times.bubble < plain);
            assert_true(v.times.bubble < plain);
            for (int r = 0; r < p; r++) { /* not more than rank 0 of 1F1B; stages of zb_v are half as large */
                assert_true(qd_schedule_in_flight(h1.s, r) <= (m < p ? m : p));
                assert_true(qd_schedule_in_flight(v.s, r) <= 2 * (m < p ? m : p));
            }
            if (m >= p) /* (p - 1)(F + I - W) */
                same(h1.times.makespan, 3.0 * m + p - 1.0);
            if (m >= 2 * p - 1) /* only because rank r starts r turns of half a stage late */
                same(v.times.makespan, 6.0 * m + p - 1.0);
            qd_arena_destroy(h1.arena);
            qd_arena_destroy(v.arena);
        }
        for (int m = 2 * p; m <= 4 * p; m++) {
            made d = make(QD_SCHEDULE_DUALPIPE_V, p, 2, m), f = make(QD_SCHEDULE_1F1B, p, 1, m);
            assert_true(d.times.bubble < f.times.bubble);
            for (int r = 0; r < p; r++)
                assert_true(qd_schedule_in_flight(d.s, r) <= 2 * p + 1);
            qd_arena_destroy(d.arena);
            qd_arena_destroy(f.arena);
        }
    }
}

static void placement_is_round_robin_or_a_v(void **state)
{
    (void)state;
    static const int robin[] = {0, 1, 2, 0, 1, 2}, v[] = {0, 1, 2, 2, 1, 0};
    for (int stage = 0; stage < 6; stage++) {
        assert_int_equal(qd_schedule_rank_of(QD_SCHEDULE_INTERLEAVED, 3, stage), robin[stage]);
        assert_int_equal(qd_schedule_rank_of(QD_SCHEDULE_ZB_V, 3, stage), v[stage]);
    }
}

/* Evaluation: forward passes only, as fast as stages and micro-batches allow. */
static void forward_only_is_a_plain_pipeline(void **state)
{
    (void)state;
    for (int kind = 0; kind < QD_SCHEDULE_FILE; kind++) {
        bool fixed;
        int v = qd_schedule_stages((qd_schedule_kind)kind, &fixed);
        qd_arena *arena;
        qd_schedule *s;
        qd_schedule_times times;
        ok(qd_arena_create(&arena));
        ok(qd_schedule_create((qd_schedule_kind)kind, 3, 3 * v, 5, false, arena, &s));
        ok(qd_schedule_replay(s, units, 0.0, arena, &times));
        assert_int_equal(s->begin[3], 15 * v);
        if (v == 1)
            same(times.makespan, 7.0);
        qd_arena_destroy(arena);
    }
}

static void refused(qd_schedule_kind kind, int ranks, int stages, int micro_batches, const char *expected)
{
    qd_arena *arena;
    qd_schedule *s;
    ok(qd_arena_create(&arena));
    assert_int_equal(qd_schedule_create(kind, ranks, stages, micro_batches, true, arena, &s), QD_USAGE);
    if (!strstr(qd_error_message(), expected))
        fail_msg("gave: %s", qd_error_message());
    qd_arena_destroy(arena);
}

static void impossible_numbers_are_refused(void **state)
{
    (void)state;
    refused(QD_SCHEDULE_DUALPIPE_V, 4, 8, 7, "8 for 4 ranks");
    refused(QD_SCHEDULE_1F1B, 4, 8, 8, "has 1 stage per pipeline rank, not 2");
    refused(QD_SCHEDULE_ZB_V, 4, 4, 8, "has 2 stages per pipeline rank, not 1");
    refused(QD_SCHEDULE_INTERLEAVED, 4, 6, 8, "multiple of the ranks");
    refused(QD_SCHEDULE_FILE, 4, 4, 8, "parallel.schedule_file");
}

static qd_status read_text(const char *text, qd_arena *arena, qd_schedule **s)
{
    char copy[512];
    snprintf(copy, sizeof copy, "%s", text);
    FILE *in = fmemopen(copy, strlen(copy), "r");
    assert_non_null(in);
    qd_status status = qd_schedule_read_csv(in, "test.csv", arena, s);
    fclose(in);
    return status;
}

static void csv_comes_back(void **state)
{
    (void)state;
    for (int kind = 0; kind < QD_SCHEDULE_FILE; kind++) {
        bool fixed;
        made x = make((qd_schedule_kind)kind, 3, qd_schedule_stages((qd_schedule_kind)kind, &fixed), 7);
        char *text = NULL;
        size_t size = 0;
        FILE *out = open_memstream(&text, &size);
        ok(qd_schedule_write_csv(x.s, out));
        fclose(out);
        FILE *in = fmemopen(text, size, "r");
        qd_schedule *back;
        ok(qd_schedule_read_csv(in, "text", x.arena, &back));
        fclose(in);
        free(text);
        assert_int_equal(back->ranks, x.s->ranks);
        assert_int_equal(back->stages, x.s->stages);
        assert_memory_equal(back->begin, x.s->begin, (size_t)(x.s->ranks + 1) * sizeof *x.s->begin);
        assert_memory_equal(back->rank_of, x.s->rank_of, (size_t)x.s->stages * sizeof *x.s->rank_of);
        for (int i = 0; i < x.s->begin[x.s->ranks]; i++) {
            assert_int_equal(back->turns[i].pass, x.s->turns[i].pass);
            assert_int_equal(back->turns[i].stage, x.s->turns[i].stage);
            assert_int_equal(back->turns[i].microbatch, x.s->turns[i].microbatch);
        }
        qd_arena_destroy(x.arena);
    }
}

static void bad_files_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"", "has no turns"},
        {"# nothing\n\n", "has no turns"},
        {"0F0,0X0\n", "line 1: '0X0"},
        {"0F0,0F\n", "is not a turn"},
        {"0F0,0F1,0B1,0B0\n", "ascending order"},
        {"0F0,0B0,0B0\n", "occurs twice"},
        {"0F0,0W0,0I0\n", "gradients of its inputs"},
        {"0B0,0F0\n", "forward pass comes later"},
        {"0F0,0B0,0F1\n", "stage 0 never does the backward pass of micro-batch 1"},
        {"0F0,0I0\n", "never does the backward (weights) pass"},
        {"0F0,0B0,1F0,1B0\n", "deadlock"},
        {"0F0,0B0\n1F0,1B0,0F1,0B1\n", "belongs to another rank"},
        {"0F0,0B0\n1F0,1B0,1F9,1B9\n", "but there are only 6 turns"},
        {"0F0,0B0\n1F0,1B0,1F1,1B1\n", "stage 0 never does the forward pass of micro-batch 1"},
        {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock: rank 0, turn 1 (0B0) waits for stage 1 of rank 1, which is at 1F1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_arena *arena;
        qd_schedule *s;
        ok(qd_arena_create(&arena));
        assert_int_equal(read_text(cases[i].text, arena, &s), QD_USAGE);
        if (!strstr(qd_error_message(), cases[i].expected))
            fail_msg("case %zu gave: %s", i, qd_error_message());
        qd_arena_destroy(arena);
    }
}

static void drawings_show_the_bubble(void **state)
{
    (void)state;
    made x = make(QD_SCHEDULE_1F1B, 2, 1, 2);
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    ok(qd_schedule_draw_text(x.s, out));
    fclose(out);
    assert_string_equal(text, "0 | F0 F1  .  . B0  -  . B1  -\n1 |  . F0 B0  - F1 B1  -\n");
    free(text);
    out = open_memstream(&text, &size);
    ok(qd_schedule_draw_svg(x.s, out));
    fclose(out);
    assert_non_null(strstr(text, "bubble 33.3 %"));
    free(text);
    qd_arena_destroy(x.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classical_bubbles_are_the_textbooks), cmocka_unit_test(interleaving_divides_the_bubble),
        cmocka_unit_test(zero_bubble_schedules_do_better),     cmocka_unit_test(placement_is_round_robin_or_a_v),
        cmocka_unit_test(forward_only_is_a_plain_pipeline),    cmocka_unit_test(impossible_numbers_are_refused),
        cmocka_unit_test(csv_comes_back),                      cmocka_unit_test(bad_files_are_refused),
        cmocka_unit_test(drawings_show_the_bubble),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
