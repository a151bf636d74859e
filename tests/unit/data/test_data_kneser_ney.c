/* The trigram model against a brute-force reference, and that its probabilities sum to 1. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "data/kneser_ney.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { V = 6, N = 400, START = V };

/* The definition, as dense tables: c3[u][v][w], n[v][w], m[w]. */
typedef struct reference {
    double c3[V + 1][V + 1][V], n[V + 1][V], m[V];
    double discounts[3][3]; /* of m, n, c3 */
} reference;

static void reference_discounts(const double *counts, int count, double discount[3])
{
    double n[5] = {0};
    for (int i = 0; i < count; i++)
        for (int k = 1; k <= 4; k++)
            n[k] += counts[i] == k;
    double y = n[1] > 0 ? n[1] / (n[1] + 2 * n[2]) : 0.5;
    double d[3];
    bool fine = n[1] > 0 && n[2] > 0 && n[3] > 0;
    for (int k = 1; fine && k <= 3; k++) {
        d[k - 1] = k - (k + 1) * y * n[k + 1] / n[k];
        fine = d[k - 1] > 0 && d[k - 1] <= k;
    }
    for (int k = 0; k < 3; k++)
        discount[k] = fine ? d[k] : y < 1 ? y : 0.5;
}

static void reference_count(const int32_t *tokens, const bool *starts, int count, reference *r)
{
    memset(r, 0, sizeof *r);
    int u = START, v = START;
    for (int i = 0; i < count; i++) {
        if (starts[i])
            u = v = START;
        r->c3[u][v][tokens[i]]++;
        u = v;
        v = tokens[i];
    }
    for (v = 0; v <= V; v++)
        for (int w = 0; w < V; w++) {
            for (u = 0; u <= V; u++)
                r->n[v][w] += r->c3[u][v][w] > 0;
            r->m[w] += r->n[v][w] > 0;
        }
    reference_discounts(r->m, V, r->discounts[0]);
    reference_discounts(&r->n[0][0], (V + 1) * V, r->discounts[1]);
    reference_discounts(&r->c3[0][0][0], (V + 1) * (V + 1) * V, r->discounts[2]);
}

static double level(const double *counts, const double discount[3], int w, double lower)
{
    double total = 0, freed = 0;
    for (int i = 0; i < V; i++) {
        total += counts[i];
        freed += counts[i] > 0 ? discount[counts[i] >= 3 ? 2 : (int)counts[i] - 1] : 0;
    }
    if (total == 0)
        return lower;
    double own = counts[w] > 0 ? counts[w] - discount[counts[w] >= 3 ? 2 : (int)counts[w] - 1] : 0;
    return own / total + freed / total * lower;
}

static double reference_probability(const reference *r, int u, int v, int w)
{
    double p = level(r->m, r->discounts[0], w, 1.0 / V);
    p = level(r->n[v], r->discounts[1], w, p);
    return level(r->c3[u][v], r->discounts[2], w, p);
}

/* Skewed, so that some trigrams are frequent and many never occur. */
static int32_t uneven(qd_philox_key key, uint64_t i, int64_t vocab)
{
    uint64_t a = qd_rng_below(key, 2 * i, (uint64_t)vocab), b = qd_rng_below(key, 2 * i + 1, (uint64_t)vocab);
    return (int32_t)(a * b / (uint64_t)vocab);
}

static void equals_the_definition(void **state)
{
    (void)state;
    static reference r;
    bool modified = false;
    for (uint64_t seed = 0; seed < 40; seed++) {
        const int count = seed < 5 ? (int)seed + 1 : N;
        int32_t tokens[N];
        bool starts[N];
        qd_philox_key key = qd_rng_key(seed, "trigrams");
        for (int i = 0; i < count; i++) {
            tokens[i] = uneven(key, (uint64_t)i, V);
            starts[i] = i == 0 || (seed % 2 && i % 37 == 0);
        }
        reference_count(tokens, starts, count, &r);
        qd_kn *model;
        assert_int_equal(qd_kn_create(V, &model), QD_OK);
        for (int i = 0; i < count; i++) {
            if (starts[i])
                qd_kn_break(model);
            assert_int_equal(qd_kn_add(model, tokens + i, 1), QD_OK);
        }
        assert_int_equal(qd_kn_finish(model), QD_OK);
        qd_kn_info info = qd_kn_describe(model);
        assert_int_equal(info.tokens, count);
        modified = modified || info.discounts[2][0] != info.discounts[2][1];
        for (int o = 0; o < 3; o++)
            for (int k = 0; k < 3; k++)
                assert_true(fabs(info.discounts[o][k] - r.discounts[o][k]) < 1e-12);
        for (int u = 0; u <= V; u++)
            for (int v = 0; v <= V; v++)
                for (int w = 0; w < V; w++) {
                    double p = qd_kn_probability(model, u == START ? QD_KN_START : u, v == START ? QD_KN_START : v, w);
                    double expected = reference_probability(&r, u, v, w);
                    if (fabs(p - expected) > 1e-12 || p <= 0)
                        fail_msg("seed %d: P(%d|%d,%d) is %.15g, not %.15g", (int)seed, w, u, v, p, expected);
                }
        qd_kn_destroy(model);
    }
    assert_true(modified); /* not always the fallback for small texts */
}

static void sums_to_one(void **state)
{
    (void)state;
    enum { VOCAB = 1500, COUNT = 300000 };
    int32_t *tokens = malloc(COUNT * sizeof *tokens);
    qd_philox_key key = qd_rng_key(3, "sum");
    for (uint64_t i = 0; i < COUNT; i++)
        tokens[i] = uneven(key, i, VOCAB - 20); /* twenty tokens never occur */
    qd_kn *model;
    assert_int_equal(qd_kn_create(VOCAB, &model), QD_OK);
    assert_int_equal(qd_kn_add(model, tokens, COUNT / 2), QD_OK);
    assert_int_equal(qd_kn_add(model, tokens + COUNT / 2, COUNT - COUNT / 2), QD_OK);
    assert_int_equal(qd_kn_finish(model), QD_OK);
    for (uint64_t i = 0; i < 200; i++) {
        /* Contexts that were seen, that were not, and the start. */
        uint64_t at = qd_rng_below(key, 5000000 + i, COUNT - 2);
        int32_t u = i % 3 == 0 ? (int32_t)qd_rng_below(key, 6000000 + i, VOCAB) : tokens[at], v = tokens[at + 1];
        if (i % 50 == 7)
            u = v = QD_KN_START;
        if (i % 50 == 8)
            v = VOCAB - 1;
        double sum = 0, least = 1;
        for (int32_t w = 0; w < VOCAB; w++) {
            double p = qd_kn_probability(model, u, v, w);
            sum += p;
            least = p < least ? p : least;
        }
        assert_true(fabs(sum - 1) < 1e-9 && least > 0);
    }
    qd_kn_destroy(model);
    free(tokens);
}

/* The purpose of the model: text with structure costs less than its unigrams. */
static void learns_structure(void **state)
{
    (void)state;
    int32_t tokens[3000]; /* a digit, a digit, their sum: three ranges of tokens */
    for (int i = 0; i < 3000; i++)
        tokens[i] = i % 3 == 2 ? tokens[i - 1] + tokens[i - 2] + 10
                               : (int32_t)qd_rng_below(qd_rng_key(1, "digits"), (uint64_t)i, 10) + i % 3 * 10;
    qd_kn *model;
    assert_int_equal(qd_kn_create(39, &model), QD_OK);
    assert_int_equal(qd_kn_add(model, tokens, 2000), QD_OK);
    assert_int_equal(qd_kn_finish(model), QD_OK);
    double loss[3] = {0};
    for (int i = 2001; i < 2999; i++)
        loss[i % 3] -= log(qd_kn_probability(model, tokens[i - 2], tokens[i - 1], tokens[i])) / 333;
    qd_kn_destroy(model);
    assert_true(loss[2] < 0.5 && loss[0] > 2.2 && loss[1] > 2.2); /* log 10 is 2.3 */
}

static void refuses(void **state)
{
    (void)state;
    qd_kn *model;
    const int32_t bad[] = {3, 4};
    assert_int_equal(qd_kn_create(1 << 21, &model), QD_USAGE);
    assert_int_equal(qd_kn_create(4, &model), QD_OK);
    assert_int_equal(qd_kn_finish(model), QD_USAGE);
    assert_int_equal(qd_kn_add(model, bad, 2), QD_USAGE);
    qd_kn_destroy(model);
    qd_kn_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_the_definition),
        cmocka_unit_test(sums_to_one),
        cmocka_unit_test(learns_structure),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests_name("Kneser-Ney", tests, NULL, NULL);
}
