/* Shows why layouts whose gradients agree may have weights that do not: AdamW divides a gradient by
 * its own magnitude, so a gradient that consists of rounding becomes a full step. The first step is
 * checked element by element against the formula. */
#include "optim/optim.h"
#include "support/models/expert_models.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <setjmp.h>
#include <cmocka.h>

typedef struct first_step {
    trained_first left;
    double scale, rate, eps; /* scale: clipping factor */
} first_step;

static first_step run(const char *words)
{
    qd_config config = layout_config(words);
    qd_random_tokens random = {.seed = 14, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    first_step f = {.left = trained_step(&config, &source)};
    f.scale = fmin(1.0, config.optimizer.clip / f.left.out.grad_norm);
    f.rate = qd_optim_lr(&config.optimizer, 1);
    f.eps = config.optimizer.eps;
    return f;
}

/* Both moments hold one gradient, and their bias corrections cancel: the step is lr g / (|g| +
 * eps). */
static double step_of(const first_step *f, int64_t i)
{
    double g = f->scale * (double)f->left.gradients[i];
    return f->rate * g / (fabs(g) + f->eps);
}

/* Relative difference of all weights; *unexplained: the part that the formula does not derive from
 * the difference of the gradients. */
static double compare(const char *more, double *unexplained)
{
    char one[1024], many[1100];
    snprintf(one, sizeof one, RUN MIXTRAL "train.optimizer=adamw train.lr=1e-3 %s", more);
    snprintf(many, sizeof many, "%sparallel.ranks=4 parallel.tp=2 parallel.ep=2 ", one);
    first_step one_rank = run(one), four = run(many);
    trained_first a = one_rank.left, b = four.left;
    double norm = 0, apart = 0, left = 0, gradient = 0, gradients = 0;
    assert_int_equal(a.count, b.count);
    assert_float_equal(a.out.loss, b.out.loss, 1e-7 * a.out.loss);
    for (int64_t i = 0; i < a.count; i++) {
        double difference = (double)a.weights[i] - b.weights[i], made = step_of(&four, i) - step_of(&one_rank, i);
        norm += pow(a.weights[i], 2);
        gradients += pow(a.gradients[i], 2);
        gradient += pow((double)a.gradients[i] - b.gradients[i], 2);
        apart += difference * difference;
        left += pow(difference - made, 2);
    }
    assert_true(sqrt(gradient / gradients) < 1e-6);
    *unexplained = sqrt(left / norm);
    free(a.gradients);
    free(a.weights);
    free(b.gradients);
    free(b.weights);
    return sqrt(apart / norm);
}

static void formula_explains_the_difference(void **state)
{
    (void)state;
    double left, usual = compare("train.eps=1e-8 ", &left);
    print_message("weights %.2e apart, %.2e beyond what AdamW makes of the gradients' differences\n", usual, left);
    assert_true(left < 1e-7);
    assert_true(usual > 3 * left);
    double raised = compare("train.eps=1e-3 ", &left); /* the eps that verify uses */
    print_message("weights %.2e apart with an eps of 1e-3\n", raised);
    assert_true(raised < 1e-7 && raised < 0.3 * usual);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(formula_explains_the_difference)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
