/* Losses of pairs: factors of rows against finite differences of the loss by the rows' own losses,
 * for each kind of loss, and what becomes of huge and of undefined scores. */
#include "support/ops.h"

#include "device/pair_loss.h"

#include <stdio.h>
#include <stdlib.h>

/* Two windows of eight rows: a pair and rows that do not count; two pairs, of which one has the
 * rows of its sequences apart. */
enum { WINDOWS = 2, ROWS = 8, COUNT = WINDOWS * ROWS, FIGURES = 5 };
#define BEGIN(number) (2 * (number) + 1)
#define MORE(number) (2 * (number))
static const int32_t sequence[COUNT] = {-1, BEGIN(0), MORE(0), -1, BEGIN(1), MORE(1), MORE(1), -1,
                                        BEGIN(0), BEGIN(2), BEGIN(1), MORE(2), MORE(0), BEGIN(3), MORE(1), MORE(3)};
static const qd_preference kinds[] = {{QD_PREFERENCE_SIGMOID, 0.3, 0.0}, {QD_PREFERENCE_SIGMOID, 2.0, 0.2},
                                      {QD_PREFERENCE_ROBUST, 0.7, 0.3},  {QD_PREFERENCE_HINGE, 0.4, 0.0},
                                      {QD_PREFERENCE_IPO, 0.5, 0.0}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static double pair_loss(qd_device *device, const qd_preference *kind, const float *losses, float *factors, double *figures)
{
    static const float reference[COUNT] = {[1] = -3.5f, [4] = -2.25f, [8] = -1.5f, [9] = -4.0f, [10] = -2.5f, [13] = -1.0f};
    static const float rest[COUNT] = {[1] = 1e-7f, [9] = -1e-7f};
    float weight[COUNT];
    double scores[WINDOWS * ROWS];
    for (int i = 0; i < COUNT; i++)
        weight[i] = kind->kind == QD_PREFERENCE_IPO ? 0.25f + 0.125f * (float)(i % 3) : 1.0f;
    const qd_pair_rows rows = {sequence, weight, reference, rest, WINDOWS, ROWS, ROWS};
    const qd_pair_sums_args sums = {rows, losses, scores};
    const qd_pair_loss_args args = {rows, scores, factors, figures, *kind};
    for (int i = 0; i < FIGURES; i++)
        figures[i] = 0.0;
    ops_assert_ok(qd_device_kernels(device)->pair_sums(qd_device_compute_stream(device), &sums));
    ops_assert_ok(qd_device_kernels(device)->pair_loss(qd_device_compute_stream(device), &args));
    return figures[0];
}

static void factors_are_derivatives(void **state)
{
    for (int k = 0; k < KINDS; k++) {
        float losses[COUNT], factors[COUNT], ignored[COUNT];
        double figures[FIGURES], other[FIGURES];
        for (int i = 0; i < COUNT; i++)
            losses[i] = 0.5f + 0.25f * (float)(i * 7 % 5);
        pair_loss(*state, &kinds[k], losses, factors, figures);
        assert_true(figures[1] == 3.0);
        for (int i = 0; i < COUNT; i++) {
            const float at = losses[i], step = 1.0f / 1024.0f;
            losses[i] = at + step;
            double more = pair_loss(*state, &kinds[k], losses, ignored, other);
            losses[i] = at - step;
            double slope = (more - pair_loss(*state, &kinds[k], losses, ignored, other)) / (2.0 * (double)step);
            losses[i] = at;
            if (!(fabs(slope - (double)factors[i]) <= 1e-5))
                fail_msg("loss %d, row %d: the factor is %g, and %g by differences", k, i, (double)factors[i], slope);
        }
    }
}

/* Losses that grow without bound stay finite; a score that is not a number is not taken for a pair
 * beyond the margin. */
static void extreme_scores(void **state)
{
    for (int k = 0; k < KINDS; k++) {
        float losses[COUNT] = {0}, factors[COUNT];
        double figures[FIGURES];
        for (int sign = -1; sign <= 1; sign += 2) {
            losses[1] = (float)sign * 1e6f;
            assert_true(isfinite(pair_loss(*state, &kinds[k], losses, factors, figures)));
            assert_true(isfinite(factors[1]) && isfinite(factors[5]));
        }
        losses[1] = NAN;
        pair_loss(*state, &kinds[k], losses, factors, figures);
        if (!isnan(figures[0]))
            fail_msg("loss %d of a score that is not a number is %g", k, figures[0]);
    }
}

static int setup(void **state)
{
    qd_device *device;
    ops_assert_ok(qd_device_create("cpu", NULL, &device));
    *state = device;
    return 0;
}

static int teardown(void **state)
{
    qd_device_destroy(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(factors_are_derivatives), cmocka_unit_test(extreme_scores)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
