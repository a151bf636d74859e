/* Which positions a rank of cp holds: every position once, early and late chunks balanced, inputs
 * selected accordingly. */
#include "spec/layout/context.h"
#include "support/ok.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static void every_position_once(void **state)
{
    (void)state;
    for (int cp = 1; cp <= 9; cp++) {
        for (int64_t seq = 2 * cp; seq < 70; seq++) {
            int held[70] = {0};
            int64_t most = 0;
            for (int r = 0; r < cp; r++) {
                qd_row_run runs[QD_CONTEXT_RUNS];
                int count = qd_context_runs(seq, cp, r, runs);
                int64_t rows = 0;
                for (int i = 0; i < count; i++) {
                    assert_int_equal(runs[i].row, rows);
                    assert_true(runs[i].count > 0 && (i == 0 || runs[i].position > runs[i - 1].position + runs[i - 1].count));
                    for (int64_t k = 0; k < runs[i].count; k++)
                        held[runs[i].position + k]++;
                    rows += runs[i].count;
                }
                assert_int_equal(qd_context_rows(seq, cp, r), rows);
                most = rows > most ? rows : most;
            }
            assert_int_equal(qd_context_most_rows(seq, cp), most);
            for (int64_t t = 0; t < seq; t++)
                assert_int_equal(held[t], 1);
        }
    }
}

/* Total number of keys that the rows of a rank attend to: equal on all ranks if chunks are even. */
static void work_is_balanced(void **state)
{
    (void)state;
    for (int cp = 2; cp <= 8; cp++) {
        int64_t first = 0;
        for (int r = 0; r < cp; r++) {
            qd_row_run runs[QD_CONTEXT_RUNS];
            int64_t seen = 0;
            for (int i = qd_context_runs(16 * cp, cp, r, runs) - 1; i >= 0; i--)
                for (int64_t k = 0; k < runs[i].count; k++)
                    seen += runs[i].position + k + 1;
            first = r == 0 ? seen : first;
            assert_int_equal(seen, first);
        }
    }
}

/* The share of a pair that is `apart` positions apart: 1 inside the window, a half on its
 * borders. */
static double share(int64_t apart, int64_t window)
{
    return apart < 0 || (window > 0 && apart > window) ? 0.0 : apart == 0 || apart == window ? 0.5 : 1.0;
}

/* Pairs of queries and keys of two ranks, against counting. */
static void pairs_are_counted(void **state)
{
    (void)state;
    for (int cp = 1; cp <= 4; cp++)
        for (int64_t window = 0; window < 40; window += 1 + window / 3)
            for (int of = 0; of < cp * cp; of++) {
                enum { SEQ = 37 };
                qd_row_run q[QD_CONTEXT_RUNS], k[QD_CONTEXT_RUNS];
                int rows = qd_context_runs(SEQ, cp, of / cp, q), cols = qd_context_runs(SEQ, cp, of % cp, k);
                double counted = 0.0;
                for (int i = 0; i < rows * cols; i++)
                    for (int64_t x = 0; x < q[i / cols].count; x++)
                        for (int64_t y = 0; y < k[i % cols].count; y++)
                            counted += share(q[i / cols].position + x - k[i % cols].position - y, window);
                assert_true(qd_context_pairs(SEQ, cp, of / cp, of % cp, window) == counted);
            }
}

static void inputs_are_picked(void **state)
{
    (void)state;
    enum { BATCH = 2, SEQ = 11, CP = 3 };
    int32_t in[3 * BATCH * SEQ], *out;
    for (int i = 0; i < 3 * BATCH * SEQ; i++)
        in[i] = i;
    for (int whole = 0; whole < 2; whole++) {
        for (int r = 0; r < CP; r++) {
            qd_row_run runs[QD_CONTEXT_RUNS];
            int count = qd_context_runs(SEQ, CP, r, runs);
            int64_t rows = qd_context_rows(SEQ, CP, r), size = qd_context_input(BATCH, SEQ, CP, r, whole);
            assert_int_equal(size, BATCH * (4 * rows + (whole ? SEQ : 0)));
            out = calloc((size_t)size, sizeof *out);
            qd_context_select(BATCH, SEQ, CP, r, whole, in, out);
            for (int b = 0; b < BATCH; b++) {
                for (int i = 0; i < count; i++) {
                    for (int64_t k = 0; k < runs[i].count; k++) {
                        int64_t at = b * rows + runs[i].row + k, from = b * SEQ + runs[i].position + k;
                        for (int part = 0; part < 3; part++)
                            assert_int_equal(out[part * BATCH * rows + at], part * BATCH * SEQ + from);
                        assert_int_equal(out[3 * BATCH * rows + at], runs[i].position + k);
                    }
                }
            }
            if (whole)
                assert_memory_equal(out + 4 * BATCH * rows, in + 2 * BATCH * SEQ, BATCH * SEQ * sizeof *out);
            free(out);
        }
    }
}

/* Tokens and targets further on come from whole sequences: also where they are on another rank; not
 * from other documents, and not from beyond the end. */
static void further_tokens(void **state)
{
    (void)state;
    enum { BATCH = 2, SEQ = 11, CP = 2, AHEAD = 2, SECOND = 4 };
    int32_t in[3 * BATCH * SEQ], out[2 * AHEAD * BATCH * SEQ];
    for (int i = 0; i < BATCH * SEQ; i++) {
        in[i] = 100 + i;
        in[BATCH * SEQ + i] = 200 + i;
        in[2 * BATCH * SEQ + i] = i >= SECOND && i < SEQ ? SECOND : 0; /* the first sequence has two documents */
    }
    for (int r = 0; r < CP; r++) {
        qd_row_run runs[QD_CONTEXT_RUNS];
        int count = qd_context_runs(SEQ, CP, r, runs);
        int64_t rows = qd_context_rows(SEQ, CP, r);
        qd_context_ahead(BATCH, SEQ, CP, r, AHEAD, in, out);
        for (int i = 0; i < count * BATCH * AHEAD; i++) {
            const qd_row_run *run = &runs[i % count];
            int64_t b = i / count % BATCH, k = 1 + i / (count * BATCH);
            for (int64_t x = 0; x < run->count; x++) {
                int64_t at = run->position + x, part = 2 * (k - 1) * BATCH * rows + b * rows + run->row + x;
                bool inside = at + k < SEQ, same = b == 1 || at >= SECOND || at + k < SECOND;
                assert_int_equal(out[part], inside ? 100 + b * SEQ + at + k : 0);
                assert_int_equal(out[part + BATCH * rows], inside && same ? 200 + b * SEQ + at + k : -1);
            }
        }
    }
}

static void short_sequences_are_refused(void **state)
{
    (void)state;
    assert_int_equal(qd_context_check(8, 4), QD_OK);
    assert_int_equal(qd_context_check(1, 1), QD_OK);
    assert_int_equal(qd_context_check(7, 4), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "at least 8 positions"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_position_once), cmocka_unit_test(work_is_balanced),
                                       cmocka_unit_test(pairs_are_counted),
                                       cmocka_unit_test(inputs_are_picked), cmocka_unit_test(further_tokens),
                                       cmocka_unit_test(short_sequences_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
