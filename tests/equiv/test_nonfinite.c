/* Numbers that are not finite never reach the weights; the message names the rank and the tensor
 * they came from. */
#include "support/layout.h"
#include "support/trained.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define MODEL "model.layers=2 model.hidden=48 model.heads=4 model.vocab=101 data.seq=24 train.global_batch=8 run.threads=1 "
#define NORM "block.1.mlp_norm.weight"
enum { BAD_RANK = 1, WIDTH = 48 };

static qd_random_tokens tokens;

static qd_team *start(const char *words, int ranks)
{
    char text[512];
    snprintf(text, sizeof text, MODEL "%s parallel.ranks=%d", words, ranks);
    tokens = (qd_random_tokens){.seed = 2};
    return trained_team(text, &tokens);
}

/* Changes one rank's copy of a weight; the other ranks keep theirs. */
static qd_status write_one(qd_trainer *trainer, qd_comm *world, void *values)
{
    return qd_comm_rank(world) == BAD_RANK % qd_comm_size(world) ? qd_trainer_write(trainer, NORM, QD_TENSOR_VALUE, values, WIDTH) : QD_OK;
}

/* One rank's gradient is not finite and is not overwritten, while the loss is finite. */
static qd_status spoil_gradient(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)argument;
    qd_program *p = qd_trainer_program_mutable(trainer);
    int param = qd_ledger_find(p->ledger, NORM);
    if (qd_comm_rank(world) != BAD_RANK % qd_comm_size(world))
        return QD_OK;
    for (int i = 0; i < p->action_count; i++)
        p->actions[i].overwrite = false;
    float *gradient = qd_bound_kind(qd_trainer_bound(trainer), QD_BUFFER_GRAD);
    gradient[p->storage.offset[param] + 5] = INFINITY;
    return QD_OK;
}

static void named(const char *text, const char *rank, const char *what)
{
    if (!strstr(text, rank) || !strstr(text, what))
        fail_msg("'%s' and '%s' are not in: %s", rank, what, text);
}

static void weight_stops(void **state)
{
    (void)state;
    float bad[WIDTH];
    for (int i = 0; i < WIDTH; i++)
        bad[i] = i == 7 ? NAN : 1.0f;
    for (int ranks = 1; ranks <= 4; ranks += 3) {
        qd_step_output out;
        qd_team *team = start("", ranks);
        trained_ok(qd_team_step(team, &out));
        trained_ok(qd_team_call(team, write_one, bad));
        assert_int_equal(qd_team_step(team, &out), QD_NOT_FINITE);
        named(qd_error_message(), ranks > 1 ? "rank 1: " : "rank 0: ", "weight " NORM);
        named(qd_error_message(), "step 2", "those of step 1");
        qd_team_destroy(team);
    }
}

static void gradient_stops(void **state)
{
    (void)state;
    /* Small buckets; and a single one with more than the half million elements of the embedding,
     * which is searched in pieces. */
    static const char *const buckets[] = {"parallel.bucket_mb=0.02", "parallel.bucket_mb=100 model.vocab=12000 model.tied=true"};
    for (int i = 0; i < 2; i++)
        for (int ranks = 1; ranks <= 4; ranks += 3) {
            qd_step_output out;
            qd_team *team = start(buckets[i], ranks);
            trained_ok(qd_team_call(team, spoil_gradient, NULL));
            assert_int_equal(qd_team_step(team, &out), QD_NOT_FINITE);
            named(qd_error_message(), ranks > 1 ? "rank 1: " : "rank 0: ", "gradient of " NORM);
            qd_team_destroy(team);
        }
}

/* A skipped step leaves weights and moments unchanged and consumes its samples; the next step
 * trains again. */
static void step_is_skipped(void **state)
{
    (void)state;
    static const qd_tensor_kind kinds[] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};
    float good[WIDTH], bad[WIDTH], before[3][WIDTH * WIDTH], after[WIDTH * WIDTH];
    const char *matrix = "block.0.attn.q.weight";
    qd_step_output out;
    qd_team *team = start("train.on_nonfinite=skip", 2);
    trained_ok(qd_team_step(team, &out));
    assert_false(out.skipped);
    trained_ok(qd_team_read(team, NORM, QD_TENSOR_VALUE, good, WIDTH));
    for (int k = 0; k < 3; k++)
        trained_ok(qd_team_read(team, matrix, kinds[k], before[k], WIDTH * WIDTH));
    for (int i = 0; i < WIDTH; i++)
        bad[i] = INFINITY;
    trained_ok(qd_team_call(team, write_one, bad));
    for (int i = 0; i < 3; i++) {
        trained_ok(qd_team_step(team, &out));
        assert_true(out.skipped);
        named(out.not_finite, "rank 1: ", NORM);
    }
    for (int k = 0; k < 3; k++) {
        trained_ok(qd_team_read(team, matrix, kinds[k], after, WIDTH * WIDTH));
        assert_memory_equal(before[k], after, sizeof after);
    }
    trained_ok(qd_team_call(team, write_one, good));
    trained_ok(qd_team_step(team, &out));
    assert_false(out.skipped);
    trained_ok(qd_team_read(team, matrix, QD_TENSOR_VALUE, after, WIDTH * WIDTH));
    assert_memory_not_equal(before[0], after, sizeof after);
    qd_team_destroy(team);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(weight_stops), cmocka_unit_test(gradient_stops), cmocka_unit_test(step_is_skipped)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
