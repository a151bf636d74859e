#include "support/trained.h"

#include <stdarg.h>
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

trained trained_run(const char *words, int steps, qd_random_tokens random)
{
    qd_config config = layout_config(words);
    random.vocab = config.model.vocab;
    qd_batch_source source = qd_random_source(&random);
    qd_team *team;
    trained r = {.steps = steps};
    trained_ok(qd_team_create(&config, &source, &team));
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
