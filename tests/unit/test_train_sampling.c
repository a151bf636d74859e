/* Draws of the sampler against the distributions that its settings define: a chi-squared test for
 * each, with expected probabilities from a reference that sorts everything. */
#include "train/generate/sampling.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

enum { MOST_VOCAB = 3000 };

static float logits[MOST_VOCAB];

static void make_logits(int vocab, double spread)
{
    uint64_t state = 12345;
    for (int i = 0; i < vocab; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        logits[i] = (float)((double)(state >> 40) * 0x1p-24 * spread - spread / 2);
    }
    logits[vocab / 2] = logits[vocab / 3]; /* equals: the lower id is the likelier one */
}

static float penalized[MOST_VOCAB];

static int by_logit(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    return penalized[x] != penalized[y] ? (penalized[x] > penalized[y] ? -1 : 1) : x - y;
}

/* The steps of transformers, one after another, each on a normalized distribution. */
static void expect(const qd_sampling *s, int vocab, const int32_t *history, size_t count, double *p)
{
    static int order[MOST_VOCAB];
    bool seen[MOST_VOCAB] = {false};
    double sum = 0.0, kept = 0.0, best;
    int left = s->top_k > 0 && s->top_k < vocab ? s->top_k : vocab, i;
    memcpy(penalized, logits, sizeof penalized);
    for (size_t h = 0; h < count; h++) {
        if (!seen[history[h]] && s->repetition_penalty > 0.0)
            penalized[history[h]] = (float)(logits[history[h]] > 0 ? logits[history[h]] / s->repetition_penalty
                                                                    : logits[history[h]] * s->repetition_penalty);
        seen[history[h]] = true;
    }
    for (i = 0; i < vocab; i++)
        order[i] = i;
    qsort(order, (size_t)vocab, sizeof *order, by_logit);
    memset(p, 0, (size_t)vocab * sizeof *p);
    for (i = 0; i < left; i++)
        sum += p[order[i]] = exp((penalized[order[i]] - penalized[order[0]]) / s->temperature);
    for (i = 0; i < left && (i == 0 || kept < s->top_p); i++)
        kept += p[order[i]] / sum;
    for (; i < vocab; i++)
        p[order[i]] = 0.0;
    for (best = p[order[0]], sum = 0.0, i = 0; i < vocab; i++) {
        p[i] = p[i] < s->min_p * best ? 0.0 : p[i];
        sum += p[i];
    }
    for (i = 0; i < vocab; i++)
        p[i] /= sum;
}

/* Pearson's statistic over bins of at least 10 expected draws, and its standard score by Wilson and
 * Hilferty. */
static double score(const int *drawn, const double *p, int vocab, int draws)
{
    double statistic = 0.0, seen = 0.0, wanted = 0.0;
    int bins = 0;
    for (int i = 0; i < vocab; i++) {
        seen += drawn[i];
        wanted += p[i] * draws;
        if (wanted >= 10.0) {
            statistic += (seen - wanted) * (seen - wanted) / wanted;
            seen = wanted = 0.0;
            bins++;
        }
    }
    double f = bins > 1 ? bins - 1 : 1, k = 2.0 / (9.0 * f);
    return (cbrt(statistic / f) - (1.0 - k)) / sqrt(k);
}

static void draws_follow_the_distribution(void **state)
{
    (void)state;
    static const qd_sampling cases[] = {
        {.temperature = 1.0, .top_p = 1.0},
        {.temperature = 0.5, .top_p = 1.0},
        {.temperature = 1.7, .top_p = 1.0, .top_k = 7},
        {.temperature = 1.0, .top_p = 0.6},
        {.temperature = 1.0, .top_p = 0.99},
        {.temperature = 0.9, .top_p = 0.7, .top_k = 200},
        {.temperature = 1.0, .top_p = 1.0, .min_p = 0.1},
        {.temperature = 0.8, .top_p = 0.95, .top_k = 100, .min_p = 0.05},
        {.temperature = 1.0, .top_p = 1.0, .repetition_penalty = 1.5},
        {.temperature = 0.7, .top_p = 0.9, .repetition_penalty = 3.0, .min_p = 0.02},
        {.temperature = 1.0, .top_p = 1.0, .top_k = 1},
    };
    static const int vocabs[] = {23, 400, MOST_VOCAB};
    enum { DRAWS = 20000 };
    static double p[MOST_VOCAB];
    static int drawn[MOST_VOCAB];
    static int32_t history[DRAWS + 16];
    for (size_t v = 0; v < 3; v++) {
        int vocab = vocabs[v];
        qd_sampler *sampler;
        make_logits(vocab, 8.0);
        ok(qd_sampler_create(vocab, &sampler));
        for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
            qd_sampling s = cases[c];
            for (size_t i = 0; i < sizeof history / sizeof *history; i++)
                history[i] = (int32_t)(i % 11 * 2); /* the same set however long it is */
            expect(&s, vocab, history, 22, p);
            memset(drawn, 0, sizeof drawn);
            int draws = v == 0 ? DRAWS : v == 1 ? DRAWS / 4 : DRAWS / 20;
            for (int i = 0; i < draws; i++) {
                s.seed = (uint64_t)i % 5;
                s.stream = (uint64_t)i % 3;
                drawn[qd_sampler_draw(sampler, &s, logits, history, 22 + (size_t)(i / 15))]++;
            }
            for (int i = 0; i < vocab; i++)
                if (drawn[i] > 0 && p[i] == 0.0)
                    fail_msg("vocabulary %d, case %zu: token %d was drawn %d times", vocab, c, i, drawn[i]);
            double z = score(drawn, p, vocab, draws);
            if (!(fabs(z) < 4.0 || (z < 0 && s.top_k == 1)))
                fail_msg("vocabulary %d, case %zu: standard score %.2f", vocab, c, z);
        }
        qd_sampler_destroy(sampler);
    }
}

static void draws_are_functions_of_their_arguments(void **state)
{
    (void)state;
    qd_sampler *sampler;
    int32_t history[64] = {0};
    int differ = 0;
    make_logits(400, 3.0);
    ok(qd_sampler_create(400, &sampler));
    for (uint64_t seed = 0; seed < 50; seed++) {
        qd_sampling a = {.temperature = 1.0, .top_p = 0.9, .seed = seed}, b = a;
        b.stream = 1;
        int32_t first = qd_sampler_draw(sampler, &a, logits, history, 5);
        assert_int_equal(qd_sampler_draw(sampler, &a, logits, history, 5), first);
        differ += qd_sampler_draw(sampler, &b, logits, history, 5) != first;
        differ += qd_sampler_draw(sampler, &a, logits, history, 6) != first;
    }
    assert_true(differ > 80);

    /* greedy, with and without a penalty that changes the order */
    for (int i = 0; i < 400; i++)
        logits[i] = 1.0f;
    logits[3] = 2.0f;
    logits[7] = 1.9f;
    history[0] = 3;
    assert_int_equal(qd_sampler_draw(sampler, &(qd_sampling){.temperature = 0.0}, logits, history, 1), 3);
    assert_int_equal(qd_sampler_draw(sampler, &(qd_sampling){.temperature = 0.0, .repetition_penalty = 1.2}, logits, history, 1), 7);
    qd_sampler_destroy(sampler);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(draws_are_functions_of_their_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
