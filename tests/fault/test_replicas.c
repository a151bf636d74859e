/* Single bits flip in the weights or moments of one rank: every flip in a part that has replicas is
 * noticed, the tensor and the rank are named, a majority heals it, and a run neither trains on nor
 * saves such a state, nor do ranks hand it over. QUADRILLE_FLIPS=200 for the long form.
 * ctest: wrap qd_trainer_step
 * ctest: timeout 120 */
#include "ckpt/checkpoint.h"
#include "support/layout.h"
#include "support/scratch.h"
#include "train/elastic/handover.h"
#include "train/run/replicas.h"

#include <quadrille/train.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

#define MODEL "model.layers=2 model.hidden=8 model.heads=2 data.seq=8 train.global_batch=12 run.threads=1 model.tied=false "
enum { MOST_RANKS = 4 };

typedef struct flip {
    int rank, param;
    qd_tensor_kind kind;
    int64_t element;
    int bit;
} flip;

typedef struct trial {
    flip flip;
    bool heal;
    bool exist, held; /* the rank holds such a tensor */
    qd_status status[MOST_RANKS];
    char message[MOST_RANKS][1024], healed[MOST_RANKS][512];
} trial;

static qd_status apply(qd_trainer *trainer, qd_comm *world, void *argument)
{
    trial *t = argument;
    const flip *f = &t->flip;
    if (qd_comm_rank(world) != f->rank)
        return QD_OK;
    int64_t count = qd_trainer_holding(trainer, f->param, f->kind).count;
    t->held = count > 0 && qd_trainer_program(trainer)->ledger->params[f->param].tied_to < 0;
    if (!t->held)
        return QD_OK;
    uint32_t *values = malloc((size_t)qd_trainer_largest(trainer) * sizeof *values);
    assert_non_null(values);
    qd_status status = qd_trainer_get(trainer, f->param, f->kind, (float *)values);
    values[f->element % count] ^= UINT32_C(1) << f->bit;
    if (status == QD_OK)
        status = qd_trainer_put(trainer, f->param, f->kind, (const float *)values);
    free(values);
    return status;
}

static qd_status compare(qd_trainer *trainer, qd_comm *world, void *argument)
{
    trial *t = argument;
    qd_replicas *replicas;
    int rank = qd_comm_rank(world);
    QD_TRY(qd_replicas_create(trainer, world, &replicas));
    if (rank == 0)
        t->exist = qd_replicas_exist(replicas);
    t->status[rank] = qd_replicas_compare(replicas, t->heal, t->healed[rank]);
    snprintf(t->message[rank], sizeof t->message[rank], "%s", t->status[rank] == QD_OK ? "" : qd_error_message());
    qd_replicas_destroy(replicas);
    return QD_OK;
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
    return text ? atoi(text) : 24;
}

/* all: every part of the state has replicas. */
static void notices(const char *layout, int ranks, bool all, bool heal)
{
    char words[512], named[32];
    snprintf(words, sizeof words, MODEL "model.vocab=11 %s", layout);
    qd_config config = layout_config(words);
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    ok(qd_team_create(&config, &source, &team));
    int noticed = 0, held = 0, params = qd_team_program(team)->ledger->param_count;
    for (int n = 0; n < flips(); n++) {
        static const qd_tensor_kind kinds[] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};
        trial t = {.heal = heal, .flip = {draw(ranks), draw(params), kinds[draw(3)], draw(1 << 20), draw(32)}};
        ok(qd_team_step(team, &out));
        ok(qd_team_call(team, compare, &t)); /* no false alarm */
        assert_true(t.exist);
        ok(t.status[0]);
        assert_string_equal(t.healed[0], "");
        ok(qd_team_call(team, apply, &t));
        ok(qd_team_call(team, compare, &t));
        for (int rank = 1; rank < ranks; rank++) {
            assert_int_equal(t.status[rank], t.status[0]);
            assert_string_equal(t.message[rank], t.message[0]);
        }
        const char *text = heal ? t.healed[0] : t.message[0];
        bool differs = heal ? text[0] != '\0' : t.status[0] == QD_DIFFERENT;
        held += t.held;
        noticed += differs;
        if (all)
            assert_int_equal(differs, t.held);
        if (differs) {
            snprintf(named, sizeof named, heal ? "rank %d holds other bits" : "%d", t.flip.rank);
            assert_non_null(strstr(text, named));
            assert_non_null(strstr(text, qd_team_program(team)->ledger->params[t.flip.param].name));
        }
        if (t.held && !(heal && differs))
            ok(qd_team_call(team, apply, &t)); /* back again */
    }
    assert_true(noticed > 0 && noticed <= held);
    qd_team_destroy(team);
}

static void flips_are_noticed(void **state)
{
    (void)state;
    notices("parallel.ranks=2", 2, true, false);
    notices("parallel.ranks=3", 3, true, false);
    notices("parallel.ranks=4 parallel.dp=2 parallel.pp=2", 4, true, false);
    notices("parallel.ranks=4 parallel.dp=2 parallel.tp=2", 4, true, false);
    notices("parallel.ranks=4 parallel.dp=2 parallel.cp=2", 4, true, false);
    notices("parallel.ranks=4 parallel.zero=1 parallel.dp_shard=2", 4, true, false);
    notices("parallel.ranks=2 parallel.tp=2", 2, false, false); /* norms only */
    notices("parallel.ranks=2 train.precision=bf16", 2, false, false);
    notices("parallel.ranks=2 train.optimizer=muon", 2, false, false);
    notices("parallel.ranks=4 parallel.ep=2 model.experts=4 model.experts_per_token=2", 4, false, false);
}

typedef struct giving {
    int fd;
    uint64_t left; /* ranks that have the state */
    bool complete[MOST_RANKS];
} giving;

static qd_status give(qd_trainer *trainer, qd_comm *world, void *argument)
{
    giving *g = argument;
    qd_replicas *replicas;
    qd_handover_facts facts = {.position = qd_trainer_position(trainer)};
    const int rank = qd_comm_rank(world);
    QD_TRY(qd_replicas_create(trainer, world, &replicas));
    qd_status status = qd_replicas_mark(replicas, facts.marks);
    qd_replicas_destroy(replicas);
    if (status == QD_OK && (g->left >> rank & 1) != 0)
        status = qd_handover_write(g->fd, trainer, g->left, &facts, &g->complete[rank]);
    return status;
}

/* Whether what the ranks in `left` hand over differs. */
static bool given_differs(qd_team *team, uint64_t left)
{
    giving g = {.left = left};
    qd_handover *handover;
    ok(qd_handover_create(&g.fd));
    ok(qd_team_call(team, give, &g));
    ok(qd_handover_open(g.fd, &handover));
    const bool differs = qd_handover_differs(handover);
    for (int rank = 0; rank < MOST_RANKS; rank++)
        assert_int_equal(g.complete[rank], left >> rank & 1);
    qd_handover_close(handover);
    close(g.fd);
    return differs;
}

/* left: the ranks that are left, in which every part of the state has a replica. */
static void is_not_handed_over(const char *layout, uint64_t left)
{
    char words[512];
    snprintf(words, sizeof words, MODEL "model.vocab=11 %s", layout);
    qd_config config = layout_config(words);
    qd_random_tokens random = {.seed = 3, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    qd_step_output out;
    ok(qd_team_create(&config, &source, &team));
    int params = qd_team_program(team)->ledger->param_count;
    for (int n = 0; n < flips(); n++) {
        static const qd_tensor_kind kinds[] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};
        trial t = {.flip = {draw(MOST_RANKS), draw(params), kinds[draw(3)], draw(1 << 20), draw(32)}};
        ok(qd_team_step(team, &out));
        assert_false(given_differs(team, left));
        ok(qd_team_call(team, apply, &t));
        assert_int_equal(given_differs(team, left), t.held && (left >> t.flip.rank & 1));
        if (t.held)
            ok(qd_team_call(team, apply, &t)); /* back again */
    }
    qd_team_destroy(team);
}

static void flips_are_not_handed_over(void **state)
{
    (void)state;
    is_not_handed_over("parallel.ranks=4 train.micro_batch=3", 0x7);
    is_not_handed_over("parallel.ranks=4 parallel.zero=1 parallel.dp_shard=2", 0xf);
    is_not_handed_over("parallel.ranks=4 parallel.dp=2 parallel.pp=2", 0xf);
    is_not_handed_over("parallel.ranks=4 parallel.dp=2 parallel.tp=2", 0xf);
}

static void majority_heals(void **state)
{
    (void)state;
    notices("parallel.ranks=3", 3, true, true);
}

static _Atomic int64_t spoiled_at; /* after this step a bit of rank 1 flips */
static _Atomic int flipped;

qd_status __real_qd_trainer_step(qd_trainer *trainer, qd_step_output *output);
qd_status __wrap_qd_trainer_step(qd_trainer *trainer, qd_step_output *output);

qd_status __wrap_qd_trainer_step(qd_trainer *trainer, qd_step_output *output)
{
    QD_TRY(__real_qd_trainer_step(trainer, output));
    const qd_program *p = qd_trainer_program(trainer);
    if (p->rank != 1 || qd_trainer_position(trainer).step != spoiled_at || atomic_exchange(&flipped, 1))
        return QD_OK;
    trial t = {.flip = {.rank = 1, .kind = QD_TENSOR_VALUE, .bit = 20}};
    return apply(trainer, qd_trainer_bound(trainer)->world, &t);
}

static char notes[4096];

static void take_note(void *context, const char *text)
{
    (void)context;
    snprintf(notes + strlen(notes), sizeof notes - strlen(notes), "%s\n", text);
}

static qd_status train(void **state, const char *more)
{
    char words[2048], text[512];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    scratch_text(state, "text", text);
    snprintf(words, sizeof words, MODEL "model.vocab=256 run.ranks_as=threads data.path=%s run.dir=%s/run run.overwrite=true %s",
             scratch_path(state, "text"), (const char *)*state, more);
    qd_options *options = layout_options(words);
    flipped = 0;
    notes[0] = '\0';
    qd_status status = qd_train(options, NULL, &(qd_train_observer){.size = sizeof(qd_train_observer), .on_note = take_note});
    qd_options_destroy(options);
    return status;
}

static void run_ends(void **state)
{
    char folder[600];
    spoiled_at = 5;
    assert_int_equal(train(state, "parallel.ranks=2 train.steps=20 run.check_replicas=100 run.save_every=4"), QD_DIFFERENT);
    assert_non_null(strstr(qd_error_message(), "after step 8, ranks 0 and 1 hold different bits of"));
    for (int step = 4; step <= 8; step += 4) { /* compared before each checkpoint */
        snprintf(folder, sizeof folder, "%s/run/checkpoints/step-%012d", (const char *)*state, step);
        assert_int_equal(access(folder, F_OK), step == 4 ? 0 : -1);
    }
    assert_int_equal(train(state, "parallel.ranks=3 train.steps=20 run.check_replicas=3"), QD_DIFFERENT);
    assert_non_null(strstr(qd_error_message(), "after step 6, rank 1 holds other bits of"));
    ok(train(state, "parallel.ranks=3 train.steps=20 run.check_replicas=3 run.on_difference=heal"));
    assert_non_null(strstr(notes, "after step 6, rank 1 holds other bits of"));
    ok(train(state, "parallel.ranks=2 train.steps=9 run.check_replicas=0"));
    assert_int_equal(train(state, "parallel.ranks=3 run.check_replicas=0 run.on_difference=heal"), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "set run.check_replicas"));
    spoiled_at = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(flips_are_noticed), cmocka_unit_test(flips_are_not_handed_over),
                                       cmocka_unit_test(majority_heals),
                                       cmocka_unit_test_setup_teardown(run_ends, scratch_setup, scratch_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
