/* Trains a layout for a few steps and compares its outcome with that of one rank. */
#include "support/outcome.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <setjmp.h>
#include <cmocka.h>

void (*outcome_prepare)(qd_team *team);
const qd_family *outcome_family;

static qd_config configure(const char *words)
{
    qd_config config = layout_config(words);
    config.family = outcome_family;
    return config;
}

outcome outcome_run(const char *words, qd_random_tokens random)
{
    qd_config config = configure(words);
    random.vocab = config.model.vocab;
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    outcome r = {.count = 0};
    qd_status created = qd_team_create(&config, &source, &team);
    if (created != QD_OK)
        fail_msg("%s: %s\n%s", words, qd_error_message(), qd_error_trace());
    if (outcome_prepare)
        outcome_prepare(team);
    for (int s = 0; s < OUTCOME_STEPS; s++) {
        qd_step_output out;
        trained_counts before, after;
        trained_ok(qd_team_call(team, trained_count, &before));
        if (qd_team_step(team, &out) != QD_OK)
            fail_msg("%s: step %d: %s\n%s", words, s + 1, qd_error_message(), qd_error_trace());
        trained_ok(qd_team_call(team, trained_count, &after));
        int64_t planned = (after.planned - after.uneven) / config.world + after.rows - before.rows;
        if (after.sent - before.sent != planned || (after.planned - after.uneven) % config.world != 0)
            fail_msg("%s: %lld bytes were sent, but %lld were planned and dispatched", words, (long long)(after.sent - before.sent),
                     (long long)planned);
        r.rounds = after.rounds;
        r.losses[s] = out.loss + out.mtp_loss;
        r.norms[s] = out.grad_norm;
        if (s == 0)
            trained_read(team, QD_TENSOR_GRADIENT, &r.gradients, &r.count);
    }
    trained_read(team, QD_TENSOR_VALUE, &r.weights, &r.count);
    qd_team_destroy(team);
    return r;
}

void outcome_free(outcome *r)
{
    free(r->gradients);
    free(r->weights);
}

/* Per tensor: ‖a−b‖ ≤ OUTCOME_TOLERANCE · max(‖b‖, 1e-3 · RMS norm over all tensors). */
static void compare_tensors(const char *words, const char *what, const qd_ledger *l, const float *a, const float *b)
{
    double squares = 0.0;
    int tensors = 0;
    int64_t at = 0;
    for (int i = 0; i < l->param_count; i++) {
        int64_t n = l->params[i].shape[0] * l->params[i].shape[1];
        if (l->params[i].tied_to >= 0)
            continue;
        squares += pow(qd_norm_of(b + at, n), 2.0);
        at += n;
        tensors++;
    }
    at = 0;
    for (int i = 0; i < l->param_count; i++) {
        int64_t n = l->params[i].shape[0] * l->params[i].shape[1];
        if (l->params[i].tied_to >= 0)
            continue;
        double error = qd_relative_error(a + at, b + at, n, sqrt(squares / tensors));
        if (!(error <= OUTCOME_TOLERANCE))
            fail_msg("%s: %s of %s differs by %.3g", words, what, l->params[i].name, error);
        at += n;
    }
}

void outcome_compare(const char *words, const qd_ledger *ledger, const outcome *a, const outcome *b)
{
    assert_int_equal(a->count, b->count);
    compare_tensors(words, "the gradient", ledger, a->gradients, b->gradients);
    for (int s = 0; s < OUTCOME_STEPS; s++) {
        if (!(fabs(a->losses[s] - b->losses[s]) <= OUTCOME_TOLERANCE * fabs(b->losses[s])))
            fail_msg("%s: step %d: loss %.9g against %.9g", words, s + 1, a->losses[s], b->losses[s]);
        if (!(fabs(a->norms[s] - b->norms[s]) <= OUTCOME_TOLERANCE * fabs(b->norms[s])))
            fail_msg("%s: step %d: gradient norm %.9g against %.9g", words, s + 1, a->norms[s], b->norms[s]);
    }
    compare_tensors(words, "the value", ledger, a->weights, b->weights);
}

void outcome_compare_all(const char *base, qd_random_tokens random, const char *const *layouts, size_t count)
{
    static size_t round;
    char words[1024];
    outcome one = outcome_run(base, random);
    qd_config config = configure(base);
    qd_arena *arena;
    qd_program *program;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(&config, 0, arena, &program));
    for (size_t i = 0; i < count; i++) {
        if (!sample_has(i, round, 3))
            continue;
        snprintf(words, sizeof words, "%s%s", base, layouts[i]);
        outcome many = outcome_run(words, random);
        outcome_compare(words, program->ledger, &many, &one);
        outcome_free(&many);
    }
    qd_arena_destroy(arena);
    outcome_free(&one);
    round++;
}

void outcome_favour(qd_team *team, const int *experts, int count)
{
    const qd_ledger *l = qd_team_program(team)->ledger;
    float bias[64] = {0};
    for (int i = 0; i < count; i++)
        bias[experts[i]] = 100.0f;
    for (int i = 0; i < l->param_count; i++)
        if (l->params[i].counts)
            trained_ok(qd_team_write(team, l->params[i].name, bias, l->params[i].shape[0]));
}
