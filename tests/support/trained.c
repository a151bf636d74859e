/* Short training runs with ranks as threads, and bitwise comparisons of their results. */
#include "support/trained.h"

#include "support/sample.h"
#include "support/scratch.h"
#include "train/exec/state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

void trained_ok(qd_status status)
{
    if (status != QD_OK)
        fail_msg("%s\n%s", qd_error_message(), qd_error_trace());
}

void trained_read(qd_team *team, qd_tensor_kind kind, float **out, int64_t *count)
{
    const qd_ledger *l = qd_team_program(team)->ledger;
    int64_t total = 0;
    for (int i = 0; i < l->param_count; i++)
        total += l->params[i].tied_to < 0 ? l->params[i].shape[0] * l->params[i].shape[1] : 0;
    *out = malloc((size_t)total * sizeof **out);
    *count = total;
    total = 0;
    for (int i = 0; i < l->param_count; i++) {
        int64_t n = l->params[i].shape[0] * l->params[i].shape[1];
        if (l->params[i].tied_to >= 0)
            continue;
        trained_ok(qd_team_read(team, l->params[i].name, kind, *out + total, n));
        total += n;
    }
}

qd_team *trained_team(const char *words, qd_random_tokens *random)
{
    qd_config config = layout_config(words);
    random->vocab = config.model.vocab;
    qd_batch_source source = qd_random_source(random);
    qd_team *team;
    trained_ok(qd_team_create(&config, &source, &team));
    return team;
}

void trained_steps(qd_team *team, int count, double *losses)
{
    for (int s = 0; s < count; s++) {
        qd_step_output out;
        trained_ok(qd_team_step(team, &out));
        if (losses)
            losses[s] = out.loss;
    }
}

trained_bytes trained_needs(const qd_config *config)
{
    qd_arena *arena;
    qd_program *p;
    trained_ok(qd_arena_create(&arena));
    trained_ok(qd_config_build(config, 0, arena, &p));
    trained_bytes bytes = {p->persistent_bytes, p->dynamic_bytes};
    qd_arena_destroy(arena);
    return bytes;
}

qd_program *trained_program(const char *words, qd_arena **arena)
{
    qd_config config = layout_config(words);
    qd_program *p;
    trained_ok(qd_arena_create(arena));
    trained_ok(qd_config_build(&config, 0, *arena, &p));
    return p;
}

trained_first trained_step(const qd_config *config, const qd_batch_source *source)
{
    trained_first f;
    qd_team *team;
    trained_ok(qd_team_create(config, source, &team));
    trained_ok(qd_team_step(team, &f.out));
    trained_read(team, QD_TENSOR_GRADIENT, &f.gradients, &f.count);
    trained_read(team, QD_TENSOR_VALUE, &f.weights, &f.count);
    qd_team_destroy(team);
    return f;
}

void trained_onward(const char *base, const char *const *layouts, size_t count, int each, qd_random_tokens random, double *losses)
{
    for (size_t l = 0; l < count; l++) {
        char words[1024];
        qd_random_tokens own = random;
        snprintf(words, sizeof words, "%s%s", base, layouts[l]);
        qd_team *team = trained_team(words, &own);
        if (l > 0)
            trained_ok(qd_team_call(team, trained_load, NULL));
        trained_steps(team, each, losses + l * (size_t)each);
        trained_ok(qd_team_call(team, trained_save, NULL));
        qd_team_destroy(team);
    }
}

trained trained_run(const char *words, int steps, qd_random_tokens random)
{
    qd_team *team = trained_team(words, &random);
    trained r = {.steps = steps};
    for (int s = 0; s < steps; s++) {
        qd_step_output out;
        trained_ok(qd_team_step(team, &out));
        r.losses[s] = out.loss;
        r.norms[s] = out.grad_norm;
    }
    trained_read(team, QD_TENSOR_VALUE, &r.weights, &r.count);
    qd_team_destroy(team);
    return r;
}

void trained_same_bits(const trained *a, const trained *b, const char *what)
{
    assert_int_equal(a->count, b->count);
    for (int s = 0; s < a->steps; s++)
        if (a->losses[s] != b->losses[s] || a->norms[s] != b->norms[s])
            fail_msg("%s: step %d: loss %.17g against %.17g, norm %.17g against %.17g", what, s + 1, a->losses[s], b->losses[s],
                     a->norms[s], b->norms[s]);
    if (memcmp(a->weights, b->weights, (size_t)a->count * sizeof(float)) != 0)
        fail_msg("%s: weights differ", what);
}

void trained_compare(const char *base, const char *const *variants, size_t count, int steps, int few, qd_random_tokens random)
{
    static size_t round;
    steps = sample_count(steps, few);
    trained plain = trained_run(base, steps, random);
    for (size_t v = 0; v < count; v++) {
        char words[1024];
        if (!sample_has(v, round, 3))
            continue;
        snprintf(words, sizeof words, "%s%s", base, variants[v]);
        trained other = trained_run(words, steps, random);
        trained_same_bits(&other, &plain, words);
        free(other.weights);
    }
    free(plain.weights);
    round++;
}

/* Replaces an action by one that does nothing. */
static qd_status leave_out(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    qd_program *p = qd_trainer_program_mutable(trainer);
    qd_action *a = &p->actions[*(const int *)argument];
    a->kind = QD_ACTION_ZERO;
    a->buffer = p->persistent[QD_BUFFER_LOSS];
    a->first = a->count = 0;
    a->dtype = QD_F64;
    return QD_OK;
}

/* Whether the run without an action differs from the good one. */
static bool matters(const qd_config *config, int action, const trained *good)
{
    qd_random_tokens random = {.seed = 13, .vocab = config->model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    bool changed = false;
    trained_ok(qd_team_create(config, &source, &team));
    trained_ok(qd_team_call(team, leave_out, &action));
    for (int s = 0; s < good->steps && !changed; s++) {
        qd_step_output out;
        changed = qd_team_step(team, &out) != QD_OK || out.loss != good->losses[s] || out.grad_norm != good->norms[s];
    }
    if (!changed) {
        float *weights;
        int64_t count;
        trained_read(team, QD_TENSOR_VALUE, &weights, &count);
        changed = memcmp(weights, good->weights, (size_t)count * sizeof *weights) != 0;
        free(weights);
    }
    qd_team_destroy(team);
    return changed;
}

void trained_actions_matter(const char *words, int steps, bool (*wanted)(const qd_action *action), size_t every, size_t *met, int *tried)
{
    trained good = trained_run(words, steps, (qd_random_tokens){.seed = 13});
    qd_config config = layout_config(words);
    qd_arena *arena;
    qd_program *p = trained_program(words, &arena);
    for (int i = 0; i < p->action_count; i++) {
        if (!wanted(&p->actions[i]) || !sample_has((*met)++, 0, every))
            continue;
        if (!matters(&config, i, &good)) {
            char text[200];
            qd_action_describe(p, i, text, sizeof text);
            fail_msg("%s: action %d (%s) was removed without effect", words, i, text);
        }
        ++*tried;
    }
    qd_arena_destroy(arena);
    free(good.weights);
}

qd_status trained_save(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)argument;
    return qd_state_save(trainer, world, scratch_folder(), "train: {steps: 50}\n", 3);
}

qd_status trained_load(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    (void)argument;
    qd_checkpoint *checkpoint;
    QD_TRY(qd_store_open(scratch_folder(), INT64_MAX, true, &checkpoint, NULL));
    qd_status status = qd_state_load(trainer, checkpoint, false);
    qd_checkpoint_close(checkpoint);
    return status;
}

qd_status trained_count(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const qd_program *p = qd_trainer_program(trainer);
    qd_dispatched dispatched = qd_trainer_dispatched(trainer);
    int64_t planned = p->persistent_bytes + p->dynamic_bytes;
    trained_counts mine = {.planned = qd_program_comm_bytes(p),
                           .uneven = qd_program_uneven_bytes(p),
                           .rows = dispatched.bytes,
                           .rounds = dispatched.rounds},
                   sum;
    enum { NUMBERS = sizeof mine / sizeof(int64_t) };
    if (qd_trainer_allocated(trainer) != planned)
        return QD_FAIL(QD_DIFFERENT, "planned %lld bytes, allocated %lld", (long long)planned, (long long)qd_trainer_allocated(trainer));
    for (int g = 0; g < p->group_count; g++) {
        qd_comm_stats stats = qd_comm_stats_default();
        qd_comm_get_stats(qd_trainer_bound(trainer)->groups[g], &stats);
        for (int k = 0; k < QD_COLL_KIND_COUNT; k++) {
            mine.sent += stats.bytes[k];
            mine.calls += stats.calls[k];
        }
    }
    QD_TRY(qd_comm_all_reduce(world, &mine, &sum, NUMBERS, QD_I64, QD_SUM, NULL));
    if (qd_comm_rank(world) == 0)
        *(trained_counts *)argument = sum;
    return QD_OK;
}

void trained_plan_equals_run(const char *words)
{
    qd_random_tokens random = {.seed = 1};
    qd_team *team = trained_team(words, &random);
    const qd_program *p = qd_team_program(team);
    trained_counts before, after;
    int64_t calls = 0;
    trained_ok(qd_team_call(team, trained_count, &before));
    trained_steps(team, 1, NULL);
    trained_ok(qd_team_call(team, trained_count, &after));
    for (int i = 0; i < p->action_count; i++)
        calls += qd_action_communicates(&p->actions[i]);
    calls *= qd_team_size(team);
    if (after.sent - before.sent != qd_program_comm_bytes(p) ||
        (!strstr(words, "tp=") && !strstr(words, "cp=") && after.calls - before.calls != calls))
        fail_msg("%s: %lld bytes in %lld calls, planned %lld in %lld", words, (long long)(after.sent - before.sent),
                 (long long)(after.calls - before.calls), (long long)qd_program_comm_bytes(p), (long long)calls);
    qd_team_destroy(team);
}
