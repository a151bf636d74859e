/* Single bits flip in the gradients of one rank before they are summed: a step that computes its
 * gradients twice (run.check_gradients) notices every flip and names the rank. Without flips
 * nothing is noticed, and results are bit-identical to those of steps that compute once. A rank
 * that is lost before the verdict leaves no state that others may keep.
 * QUADRILLE_FLIPS=200 for the long form.
 * ctest: wrap qd_nn_run qd_comm_all_gather
 * ctest: timeout 120 */
#include "nn/nn.h"
#include "support/layout.h"
#include "train/exec/team.h"

#include <quadrille/train.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=2 model.hidden=8 model.heads=2 data.seq=8 train.global_batch=12 run.threads=1 model.tied=false model.vocab=11 "

/* In the backward pass of a step: the first or the second time it is executed. */
static struct {
    atomic_int rank, left; /* rank -1: no flip; left: further executions before it */
    int param, bit;
    int64_t element;
    atomic_int done;
} flip = {.rank = -1};

qd_status __real_qd_nn_run(const qd_frame *frame, unsigned phases);
qd_status __wrap_qd_nn_run(const qd_frame *frame, unsigned phases);

qd_status __wrap_qd_nn_run(const qd_frame *frame, unsigned phases)
{
    QD_TRY(__real_qd_nn_run(frame, phases));
    const qd_program *p = frame->program;
    if (p->rank != flip.rank || !(phases & 1u << QD_PHASE_WEIGHT) || !frame->use[QD_USE_GRAD])
        return QD_OK;
    const qd_module *module = &p->ledger->modules[frame->module];
    if (flip.param < module->param_begin || flip.param >= module->param_begin + module->param_count || atomic_fetch_sub(&flip.left, 1) != 0)
        return QD_OK;
    const int64_t at = p->storage.offset[flip.param] - frame->first[QD_USE_GRAD] + flip.element % p->storage.trained[flip.param];
    ((uint32_t *)(void *)frame->use[QD_USE_GRAD])[at] ^= UINT32_C(1) << flip.bit;
    flip.done = 1;
    return QD_OK;
}

/* Once the gradients are compared, every rank sees that another one is lost. */
static atomic_int lost;
qd_status __real_qd_comm_all_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work);
qd_status __wrap_qd_comm_all_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work);

qd_status __wrap_qd_comm_all_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work)
{
    if (lost && dtype == QD_I32)
        return QD_FAIL(QD_REMOTE, "rank 2 was lost");
    return __real_qd_comm_all_gather(comm, in, out, count, dtype, work);
}

static uint64_t drawn = 88172645463325252u;
static int draw(int below)
{
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    drawn ^= drawn << 17;
    return (int)(drawn % (uint64_t)below);
}

static int flips(void)
{
    const char *text = getenv("QUADRILLE_FLIPS");
    return text ? atoi(text) : 8;
}

static void start(const char *layout, const char *more, qd_random_tokens *random, qd_team **team)
{
    char words[512];
    snprintf(words, sizeof words, MODEL "%s %s", layout, more);
    static qd_config config;
    config = layout_config(words);
    *random = (qd_random_tokens){.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(random);
    ok(qd_team_create(&config, &source, team));
}

static void notices(const char *layout, int ranks)
{
    qd_random_tokens random;
    qd_team *team;
    qd_step_output out;
    char named[64];
    start(layout, "run.check_gradients=1 train.on_nonfinite=skip", &random, &team);
    const qd_ledger *ledger = qd_team_program(team)->ledger;
    for (int n = 0; n < flips(); n++) {
        ok(qd_team_step(team, &out)); /* no false alarm */
        assert_string_equal(out.different, "");
        flip.param = draw(ledger->param_count);
        flip.element = draw(1 << 20);
        flip.bit = draw(32);
        flip.left = draw(2);
        flip.done = 0;
        flip.rank = draw(ranks);
        ok(qd_team_step(team, &out));
        snprintf(named, sizeof named, "the gradients of rank %d differed", flip.rank);
        flip.rank = -1;
        if (!flip.done) /* the rank does not hold this parameter */
            assert_string_equal(out.different, "");
        else if (!strstr(out.different, named))
            fail_msg("%s: bit %d of %s: '%s', not '%s'", layout, flip.bit, ledger->params[flip.param].name, out.different, named);
    }
    qd_team_destroy(team);
}

static void flips_are_noticed(void **state)
{
    (void)state;
    notices("parallel.ranks=1 train.micro_batch=12", 1);
    notices("parallel.ranks=2 train.micro_batch=6", 2);
    notices("parallel.ranks=2 train.micro_batch=3 train.grad_sync=per_microbatch", 2);
    notices("parallel.ranks=3 parallel.zero=1 train.micro_batch=4", 3);
    notices("parallel.ranks=2 parallel.zero=2 train.micro_batch=6", 2);
    notices("parallel.ranks=2 parallel.tp=2 train.micro_batch=12", 2);
    notices("parallel.ranks=4 parallel.cp=2 train.micro_batch=6", 4);
    notices("parallel.ranks=4 parallel.pp=2 train.micro_batch=6", 4);
}

static atomic_int torn;

static qd_status step_and_look(qd_trainer *trainer, qd_comm *world, void *argument)
{
    qd_step_output out = {.torn = false};
    (void)world, (void)argument;
    qd_status status = qd_trainer_step(trainer, &out);
    torn += out.torn && qd_trainer_position(trainer).step == 0;
    return status;
}

/* The update has been applied, but the position is still before the step: a rank that kept this
 * state would apply it twice. */
static void a_lost_rank_leaves_no_state(void **state)
{
    qd_random_tokens random;
    qd_team *team;
    (void)state;
    start("parallel.ranks=2 train.micro_batch=6", "run.check_gradients=1", &random, &team);
    lost = 1;
    assert_int_equal(qd_team_call(team, step_and_look, NULL), QD_REMOTE);
    lost = 0;
    assert_int_equal(torn, 2);
    qd_team_destroy(team);
}

static void same_bits(const char *layout)
{
    enum { STEPS = 6 };
    qd_random_tokens random;
    qd_team *team;
    qd_step_output once[STEPS], twice;
    start(layout, "", &random, &team);
    for (int step = 0; step < STEPS; step++)
        ok(qd_team_step(team, &once[step]));
    qd_team_destroy(team);
    start(layout, "run.check_gradients=2", &random, &team);
    for (int step = 0; step < STEPS; step++) {
        ok(qd_team_step(team, &twice));
        assert_string_equal(twice.different, "");
        if (twice.loss != once[step].loss || twice.grad_norm != once[step].grad_norm)
            fail_msg("%s: step %d: loss %.17g, not %.17g", layout, step + 1, twice.loss, once[step].loss);
    }
    qd_team_destroy(team);
}

static void results_are_the_same(void **state)
{
    static const char *const layouts[] = {
        "parallel.ranks=1", "parallel.ranks=1 model.dropout=0.1", "parallel.ranks=3",
        "parallel.ranks=4 parallel.zero=1 parallel.dp_shard=2",
        "parallel.ranks=2 parallel.zero=2", "parallel.ranks=2 parallel.zero=3", "parallel.ranks=2 parallel.tp=2",
        "parallel.ranks=2 parallel.pp=2 train.micro_batch=2", "parallel.ranks=2 parallel.cp=2", "parallel.ranks=2 train.precision=bf16",
        "parallel.ranks=2 train.precision=bf16 train.master=split parallel.zero=1",
        "parallel.ranks=2 train.precision=fp8 model.hidden=32 model.ffn=32",
        "parallel.ranks=2 train.optimizer=muon", "parallel.ranks=2 train.qk_clip=0.01", "parallel.ranks=2 train.recompute=full",
        "parallel.ranks=4 parallel.ep=2 model.experts=4 model.experts_per_token=2 model.router_bias_rate=0.01",
        /* padding between gradients, which nothing clears, is reduced along with them */
        ("parallel.ranks=2 train.micro_batch=2 train.grad_sync=per_microbatch model.experts=3 model.experts_per_token=2 "
         "model.router_bias_rate=0.01"),
    };
    (void)state;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        same_bits(layouts[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(flips_are_noticed), cmocka_unit_test(results_are_the_same),
                                       cmocka_unit_test(a_lost_rank_leaves_no_state)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
