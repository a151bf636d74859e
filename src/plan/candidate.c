/* A candidate layout: as keys of a configuration, in words, and as an entry of the report. */
#include "plan/search_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *const qd_recompute_names[QD_RECOMPUTE_COUNT] = {"none", "selective", "full"};
const char *const qd_cp_mode_names[QD_CP_MODES] = {"ring", "gather", "ulysses"};

int qd_candidate_dp(const qd_search *s, const qd_candidate *c)
{
    return s->gpus / (c->tp * c->cp * c->pp);
}

qd_status qd_search_set(qd_options *o, const char *key, const char *format, ...)
{
    char text[64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!qd_options_find(o, key))
        return QD_FAIL(QD_UNSUPPORTED, "the step program has no %s", key);
    return qd_options_set(o, key, text);
}

/* A ring over many ranks pays its latency for every bucket. */
qd_status qd_search_buckets(qd_options *o, int tp, int pp)
{
    if (qd_options_is_set(o, "parallel.bucket_mb"))
        return QD_OK;
    return qd_search_set(o, "parallel.bucket_mb", "%d", qd_options_int(o, "parallel.ranks") / (tp * pp) > 64 ? 400 : 100);
}

qd_status qd_candidate_apply(const qd_candidate *c, qd_options *o)
{
    if (!qd_options_is_set(o, "parallel.dp")) /* otherwise it is the candidate's */
        QD_TRY(qd_search_set(o, "parallel.dp", "-1"));
    QD_TRY(qd_search_set(o, "parallel.tp", "%d", c->tp));
    QD_TRY(qd_search_set(o, "parallel.cp", "%d", c->cp));
    QD_TRY(qd_search_set(o, "parallel.pp", "%d", c->pp));
    QD_TRY(qd_search_set(o, "parallel.zero", "%d", c->zero));
    QD_TRY(qd_search_set(o, "train.micro_batch", "%lld", (long long)c->micro));
    QD_TRY(qd_search_set(o, "train.recompute", "%s", qd_recompute_names[c->recompute]));
    QD_TRY(qd_search_buckets(o, c->tp, c->pp));
    if (c->ep > 1)
        QD_TRY(qd_search_set(o, "parallel.ep", "%d", c->ep));
    if (c->etp > 1)
        QD_TRY(qd_search_set(o, "parallel.etp", "%d", c->etp));
    if (c->pieces > 1)
        QD_TRY(qd_search_set(o, "parallel.tp_overlap", "%d", c->pieces));
    if (c->schedule[0] != '\0')
        QD_TRY(qd_search_set(o, "parallel.schedule", "%s", c->schedule));
    if (c->vpp > 1)
        QD_TRY(qd_search_set(o, "parallel.virtual_stages", "%d", c->vpp));
    if (c->cp > 1 && c->cp_mode != QD_CP_RING)
        QD_TRY(qd_search_set(o, "parallel.cp_mode", "%s", qd_cp_mode_names[c->cp_mode]));
    if (c->offload)
        QD_TRY(qd_search_set(o, "train.offload", "optimizer"));
    return QD_OK;
}

bool qd_candidate_same_axes(const qd_candidate *a, const qd_candidate *b)
{
    return a->tp == b->tp && a->cp == b->cp && a->pp == b->pp && a->ep == b->ep && a->etp == b->etp;
}

bool qd_candidate_same(const qd_candidate *a, const qd_candidate *b)
{
    return qd_candidate_same_axes(a, b) && a->vpp == b->vpp && a->zero == b->zero && a->pieces == b->pieces && a->micro == b->micro &&
           a->recompute == b->recompute && a->cp_mode == b->cp_mode && a->offload == b->offload && strcmp(a->schedule, b->schedule) == 0;
}

/* A total order, so that ties are resolved identically on every machine. */
int qd_candidate_order(const void *a, const void *b)
{
    const qd_candidate *x = a, *y = b;
    if (x->seconds != y->seconds)
        return x->seconds < y->seconds ? -1 : 1;
    const int64_t ours[] = {x->report.memory_bytes, x->tp, x->cp, x->pp, x->vpp, x->ep, x->etp, x->zero, x->recompute, x->pieces, x->micro,
                            x->cp_mode};
    const int64_t theirs[] = {y->report.memory_bytes, y->tp, y->cp, y->pp, y->vpp, y->ep, y->etp, y->zero, y->recompute, y->pieces,
                              y->micro, y->cp_mode};
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (ours[i] != theirs[i])
            return ours[i] < theirs[i] ? -1 : 1;
    return strcmp(x->schedule, y->schedule);
}

void qd_candidate_layout(const qd_search *s, const qd_candidate *c, char *text, size_t size)
{
    enum { CP = 1 };
    const char *mode = c->cp_mode == QD_CP_RING ? NULL : qd_cp_mode_names[c->cp_mode];
    int used = snprintf(text, size, "dp %d", qd_candidate_dp(s, c));
    const struct {
        const char *name;
        int value;
    } axes[] = {{"tp", c->tp}, {"cp", c->cp}, {"pp", c->pp}, {"vpp", c->vpp}, {"ep", c->ep}, {"etp", c->etp}};
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        if (axes[i].value > 1)
            used += snprintf(text + used, size - (size_t)used, ", %s %d%s%s", axes[i].name, axes[i].value, i == CP && mode ? " " : "",
                             i == CP && mode ? mode : "");
    if (c->schedule[0])
        used += snprintf(text + used, size - (size_t)used, " (%s)", c->schedule);
    if (c->zero > 0)
        used += snprintf(text + used, size - (size_t)used, ", zero %d", c->zero);
    used += snprintf(text + used, size - (size_t)used, ", micro-batch %lld", (long long)c->micro);
    if (c->recompute)
        used += snprintf(text + used, size - (size_t)used, ", recompute %s", qd_recompute_names[c->recompute]);
    if (c->pieces > 1)
        used += snprintf(text + used, size - (size_t)used, ", tp in %d pieces", c->pieces);
    if (c->offload)
        snprintf(text + used, size - (size_t)used, ", offload");
}

void qd_search_choice(const qd_search *s, const qd_candidate *c, qd_plan_choice *out)
{
    *out = (qd_plan_choice){.dp = qd_candidate_dp(s, c), .tp = c->tp, .cp = c->cp, .pp = c->pp,
                            .vpp = c->vpp, .ep = c->ep, .etp = c->etp, .zero = c->zero, .tp_overlap = c->pieces,
                            .micro_batch = c->micro, .micro_batches = s->batch / c->micro / qd_candidate_dp(s, c),
                            .recompute = qd_recompute_names[c->recompute], .schedule = c->schedule,
                            .cp_mode = c->cp > 1 ? qd_cp_mode_names[c->cp_mode] : "", .offload = c->offload,
                            .host_bytes = c->report.host_bytes, .step_seconds = c->seconds,
                            .memory_bytes = c->report.memory_bytes, .fits = c->fits, .mfu = c->report.mfu};
    qd_candidate_layout(s, c, out->layout, sizeof out->layout);
}

qd_status qd_plan_apply(const qd_plan_choice *choice, qd_options *options)
{
    qd_candidate c = {.tp = choice->tp, .cp = choice->cp, .pp = choice->pp, .vpp = choice->vpp, .ep = choice->ep, .etp = choice->etp,
                      .zero = choice->zero, .pieces = choice->tp_overlap,
                      .micro = choice->micro_batch, .schedule = choice->schedule, .offload = choice->offload};
    while (strcmp(qd_recompute_names[c.recompute], choice->recompute) != 0)
        c.recompute++;
    while (c.cp > 1 && strcmp(qd_cp_mode_names[c.cp_mode], choice->cp_mode) != 0)
        c.cp_mode++;
    return qd_candidate_apply(&c, options);
}
