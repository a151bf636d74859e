/* The sampler: every window of an epoch exactly once, mixtures by weight, independent of the rank
 * that asks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "data/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void permutations_are_permutations(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 17, 64, 65, 1000, 4096};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            char *seen = calloc(1, (size_t)sizes[s]);
            for (int64_t i = 0; i < sizes[s]; i++) {
                int64_t image = qd_permute(9, epoch, i, sizes[s]);
                assert_true(image >= 0 && image < sizes[s] && !seen[image]);
                seen[image] = 1;
            }
            free(seen);
        }
}

static int64_t fixed_points(uint64_t seed, int64_t epoch, uint64_t other_seed, int64_t other_epoch)
{
    int64_t same = 0;
    for (int64_t i = 0; i < 1000; i++)
        same += qd_permute(seed, epoch, i, 1000) == qd_permute(other_seed, other_epoch, i, 1000);
    return same;
}

static void epochs_and_seeds_differ(void **state)
{
    (void)state;
    assert_int_equal(fixed_points(1, 0, 1, 0), 1000);
    assert_true(fixed_points(1, 0, 1, 1) < 20);
    assert_true(fixed_points(1, 0, 2, 0) < 20);
    /* Neighbours do not stay together. */
    int64_t together = 0;
    for (int64_t i = 0; i + 1 < 1000; i++)
        together += llabs(qd_permute(1, 0, i, 1000) - qd_permute(1, 0, i + 1, 1000)) == 1;
    assert_true(together < 20);
}

static void shares(void **state)
{
    (void)state;
    static const struct {
        double weights[4];
        int sources;
        int64_t counts[4];
    } rows[] = {
        {{1}, 1, {4096}},
        {{0.5, 0.5}, 2, {2048, 2048}},
        {{7, 3}, 2, {2867, 1229}}, /* 2867.2, 1228.8 */
        {{1, 1, 1}, 3, {1366, 1365, 1365}},
        {{1, 1e-9}, 2, {4095, 1}},
        {{1e-9, 1, 1e-9, 1}, 4, {1, 2047, 1, 2047}},
    };
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        int64_t bounds[5];
        qd_mixture_bounds(rows[r].weights, rows[r].sources, bounds);
        for (int s = 0; s < rows[r].sources; s++)
            assert_int_equal(bounds[s + 1] - bounds[s], rows[r].counts[s]);
    }
    double many[QD_MIXTURE_BLOCK];
    int64_t bounds[QD_MIXTURE_BLOCK + 1];
    for (int s = 0; s < QD_MIXTURE_BLOCK; s++)
        many[s] = s == 7 ? 100 : 1;
    qd_mixture_bounds(many, QD_MIXTURE_BLOCK, bounds);
    for (int s = 0; s < QD_MIXTURE_BLOCK; s++)
        assert_int_equal(bounds[s + 1] - bounds[s], 1);
}

/* Over the whole run the samples of each source are its epochs, one after another, with each window
 * once in each. */
static void mixtures_lose_and_repeat_nothing(void **state)
{
    (void)state;
    static const double weights[] = {0.7, 0.2, 0.1};
    static const int64_t windows[] = {1000, 37, 5000};
    int64_t bounds[4], seen[3] = {0};
    qd_mixture_bounds(weights, 3, bounds);
    const qd_mixture mixture = {.seed = 4, .sources = 3, .windows = windows, .bounds = bounds};
    enum { BLOCKS = 5 };
    int *times[3];
    for (int s = 0; s < 3; s++)
        times[s] = calloc((size_t)windows[s], sizeof(int));
    for (int64_t g = 0; g < BLOCKS * QD_MIXTURE_BLOCK; g++) {
        qd_sample sample = qd_mixture_sample(&mixture, g);
        assert_true(sample.window >= 0 && sample.window < windows[sample.source]);
        times[sample.source][sample.window]++;
        seen[sample.source]++;
        if (g % QD_MIXTURE_BLOCK == QD_MIXTURE_BLOCK - 1)
            for (int s = 0; s < 3; s++)
                assert_int_equal(seen[s], (g / QD_MIXTURE_BLOCK + 1) * (bounds[s + 1] - bounds[s]));
    }
    for (int s = 0; s < 3; s++) {
        for (int64_t w = 0; w < windows[s]; w++)
            assert_true(times[s][w] == seen[s] / windows[s] || times[s][w] == seen[s] / windows[s] + 1);
        free(times[s]);
    }
    /* The order inside a block is mixed: no long run of one source if the shares are even. */
    static const double even[] = {1, 1};
    qd_mixture_bounds(even, 2, bounds);
    const qd_mixture two = {.seed = 4, .sources = 2, .windows = windows, .bounds = bounds};
    int longest = 0, length = 0, last = -1;
    for (int64_t g = 0; g < QD_MIXTURE_BLOCK; g++) {
        int source = qd_mixture_sample(&two, g).source;
        length = source == last ? length + 1 : 1;
        last = source;
        longest = length > longest ? length : longest;
    }
    assert_true(longest < 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(permutations_are_permutations),
        cmocka_unit_test(epochs_and_seeds_differ),
        cmocka_unit_test(shares),
        cmocka_unit_test(mixtures_lose_and_repeat_nothing),
    };
    return cmocka_run_group_tests_name("sampler", tests, NULL, NULL);
}
