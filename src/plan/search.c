#include "plan/search_impl.h"

#include "base/clock.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

const char *const qd_recompute_names[QD_RECOMPUTE_COUNT] = {"none", "selective", "full"};

/* How far behind the best a first look may be: schedules, micro-batches and stages of sharding change a layout's time by less. */
static const double WORTH = 1.2;
/* A plan is given within a minute: the first look ends after so many seconds, and the search. */
static const double LOOK_SECONDS = 25.0, MOST_SECONDS = 45.0;

static int dp_of(const qd_search *s, const qd_candidate *c)
{
    return s->gpus / (c->tp * c->cp * c->pp);
}

/* ---- one candidate ---- */

static qd_status set(qd_options *o, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
static qd_status set(qd_options *o, const char *key, const char *format, ...)
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

static qd_status apply(const qd_candidate *c, qd_options *o)
{
    QD_TRY(set(o, "parallel.dp", "-1"));
    QD_TRY(set(o, "parallel.tp", "%d", c->tp));
    QD_TRY(set(o, "parallel.cp", "%d", c->cp));
    QD_TRY(set(o, "parallel.pp", "%d", c->pp));
    QD_TRY(set(o, "parallel.zero", "%d", c->zero));
    QD_TRY(set(o, "train.micro_batch", "%lld", (long long)c->micro));
    QD_TRY(set(o, "train.recompute", "%s", qd_recompute_names[c->recompute]));
    /* A ring over many ranks costs its hops for every bucket. */
    if (!qd_options_is_set(o, "parallel.bucket_mb"))
        QD_TRY(set(o, "parallel.bucket_mb", "%d", qd_options_int(o, "parallel.ranks") / (c->tp * c->pp) > 64 ? 400 : 100));
    if (c->ep > 1)
        QD_TRY(set(o, "parallel.ep", "%d", c->ep));
    if (c->schedule[0] != '\0')
        QD_TRY(set(o, "parallel.schedule", "%s", c->schedule));
    if (c->vpp > 1)
        QD_TRY(set(o, "parallel.virtual_stages", "%d", c->vpp));
    return QD_OK;
}

static qd_status report_with(const qd_search *s, qd_options *o, int64_t batch, bool times, qd_sim_report *report)
{
    qd_config config;
    QD_TRY(set(o, "train.global_batch", "%lld", (long long)batch));
    QD_TRY(qd_cluster_config(o, &s->cluster, &config));
    return qd_step_report(&config, &s->cluster, times, report);
}

/* A step with many micro-batches repeats itself: two short ones give the time of each further micro-batch, and the most memory. */
static qd_status simulate(qd_search *s, qd_options *o, qd_candidate *c)
{
    int64_t each = c->micro * dp_of(s, c), micros = s->batch / each, unit = c->pp;
    int64_t few = 2 * unit, more = 3 * unit;
    if (micros <= more) {
        QD_TRY(report_with(s, o, s->batch, false, &c->report));
        c->fits = c->report.fits;
        if (c->fits)
            QD_TRY(report_with(s, o, s->batch, true, &c->report));
        c->seconds = c->report.step_seconds;
        return QD_OK;
    }
    qd_sim_report longer;
    QD_TRY(report_with(s, o, few * each, false, &c->report));
    c->fits = c->report.fits;
    if (!c->fits)
        return QD_OK;
    QD_TRY(report_with(s, o, few * each, true, &c->report));
    QD_TRY(report_with(s, o, more * each, true, &longer));
    c->seconds = c->report.step_seconds + (longer.step_seconds - c->report.step_seconds) * (double)(micros - few) / (double)(more - few);
    return QD_OK;
}

qd_status qd_search_try(qd_search *s, qd_candidate *c)
{
    qd_options *o = NULL;
    QD_TRY(qd_options_copy(s->options, &o));
    qd_status status = apply(c, o);
    if (status == QD_OK)
        status = simulate(s, o, c);
    qd_options_destroy(o);
    return status;
}

/* ---- the list ---- */

static qd_status keep(qd_search *s, const qd_candidate *c)
{
    if (s->count == s->capacity) {
        int capacity = s->capacity ? 2 * s->capacity : 256;
        qd_candidate *grown = realloc(s->list, (size_t)capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d layouts", capacity);
        s->list = grown;
        s->capacity = capacity;
    }
    s->list[s->count++] = *c;
    s->best = s->best == 0.0 || c->seconds < s->best ? c->seconds : s->best;
    return QD_OK;
}

static void refuse(qd_search *s)
{
    if (s->report->refused++ == 0)
        snprintf(s->report->refusal, sizeof s->report->refusal, "%s", qd_error_message());
    qd_error_clear();
}

/* The least time that the layout could take: all FLOPs at the best rate, and the pipeline's bubble. Layouts that could not come
 * within a tenth of the best are not built. */
static double bound(const qd_search *s, const qd_candidate *c, bool again)
{
    double flops = qd_model_flops_per_token(&s->model, s->seq) - 6.0 * s->model.layers * (double)s->seq * s->model.heads * s->model.head_dim;
    double micros = (double)s->batch / (double)(c->micro * dp_of(s, c));
    double seconds = flops * (double)s->batch * (double)s->seq * (again ? 4.0 / 3.0 : 1.0) / (s->gpus * s->cluster.accelerator.product);
    bool filled = strncmp(c->schedule, "zb", 2) == 0 || strncmp(c->schedule, "dual", 4) == 0;
    return seconds * (1.0 + (filled ? 0.2 : 1.0) * (c->pp - 1) / (micros * c->vpp));
}

/* Parameters and gradients alone, which no stage below 3 shares out: what is too large for them need not be built. */
static double least_bytes(const qd_search *s, const qd_candidate *c)
{
    const qd_model *m = &s->model;
    double experts = m->moe.experts > 0 ? 3.0 * (double)(m->layers - m->moe.first_dense) * m->moe.experts * (double)m->moe.ffn * (double)m->hidden : 0.0;
    double dense = (double)qd_model_parameters(m) - experts, bytes = 4.0;
    return c->zero == 3 ? 0.0 : bytes * (dense / c->tp + experts / (c->ep > 1 ? c->ep : c->tp)) / c->pp;
}

/* The first kind of recompute with which the layout fits: less of it is always faster. */
static qd_status try_recompute(qd_search *s, qd_candidate *c)
{
    c->looked = false;
    if (least_bytes(s, c) > (double)s->cluster.accelerator.memory) {
        s->report->too_large++;
        if (s->least_memory == 0)
            s->least_memory = (int64_t)least_bytes(s, c);
        return QD_OK;
    }
    bool fixed = qd_options_is_set(s->options, "train.recompute");
    int first = fixed ? qd_options_enum(s->options, "train.recompute") : 0, last = fixed ? first : QD_RECOMPUTE_COUNT - 1;
    for (c->recompute = first; c->recompute <= last; c->recompute++) {
        if (s->best > 0.0 && bound(s, c, c->recompute == QD_RECOMPUTE_FULL) > 1.1 * s->best)
            return QD_OK;
        qd_status status = qd_search_try(s, c);
        if (status == QD_USAGE || status == QD_UNSUPPORTED) {
            refuse(s);
            return QD_OK;
        }
        QD_TRY(status);
        if (s->least_memory == 0 || c->report.memory_bytes < s->least_memory)
            s->least_memory = c->report.memory_bytes;
        if (c->fits) {
            s->report->tried++;
            return keep(s, c);
        }
    }
    s->report->too_large++;
    return QD_OK;
}

/* ---- the space ---- */

/* The user's own number, or powers of two up to `most`. `at` counts from 0; 0 ends the list. */
static int64_t nth(const qd_search *s, const char *key, int at, int64_t least, int64_t most)
{
    if (qd_options_find(s->options, key) && qd_options_is_set(s->options, key) && qd_options_int(s->options, key) > 0)
        return at == 0 ? qd_options_int(s->options, key) : 0;
    int64_t value = least << at;
    return value <= most ? value : 0;
}

/* More and more sequences per micro-batch, until they do not fit. */
static qd_status try_micros(qd_search *s, qd_candidate c)
{
    int dp = dp_of(s, &c);
    int64_t share = s->batch / dp, micro;
    for (int i = 0; (micro = nth(s, "train.micro_batch", i, 1, share < 64 ? share : 64)) > 0; i++) {
        if (share % micro != 0 || (share / micro) % (c.vpp > 1 ? c.pp : 1) != 0)
            continue;
        int too_large = s->report->too_large;
        c.micro = micro;
        QD_TRY(try_recompute(s, &c));
        if (s->report->too_large > too_large)
            break;
    }
    return QD_OK;
}

static qd_status try_zero(qd_search *s, qd_candidate c)
{
    bool fixed = qd_options_is_set(s->options, "parallel.zero");
    /* With experts laid out apart, plain data parallelism is tried too. */
    int from = fixed ? (int)qd_options_int(s->options, "parallel.zero") : dp_of(s, &c) * c.cp > 1 && c.ep == 1 ? 1 : 0;
    int to = fixed ? from : dp_of(s, &c) * c.cp > 1 ? 3 : 0;
    for (c.zero = from; c.zero <= to; c.zero++) {
        if (c.zero == 2 && !fixed)
            continue; /* with gradients summed once per step it holds what stage 1 holds; per micro-batch it moves more */
        if (c.zero == 3 && c.pp > 1 && !fixed)
            continue; /* every stage would gather its parameters again for every micro-batch */
        QD_TRY(try_micros(s, c));
    }
    return QD_OK;
}

/* A first look at the axes alone: one micro-batch size, the lowest stage, the schedule with the shortest bubble among the plain ones. */
static qd_status look(qd_search *s, qd_candidate c)
{
    bool stage_given = qd_options_is_set(s->options, "parallel.zero"), micro_given = qd_options_is_set(s->options, "train.micro_batch");
    int64_t share = s->batch / dp_of(s, &c);
    c.schedule = c.pp > 1 ? "1f1b" : "";
    for (int vpp = 8; vpp > 1 && c.pp > 1 && c.vpp == 1; vpp /= 2)
        if (c.pp * vpp <= s->model.layers && share % c.pp == 0) {
            c.schedule = "interleaved";
            c.vpp = vpp;
        }
    if (c.pp > 1 && qd_options_is_set(s->options, "parallel.schedule")) {
        c.schedule = qd_options_string(s->options, "parallel.schedule");
        c.vpp = strcmp(c.schedule, "interleaved") == 0 ? c.vpp : 1;
    }
    c.micro = micro_given ? qd_options_int(s->options, "train.micro_batch") : 1;
    c.zero = stage_given ? (int)qd_options_int(s->options, "parallel.zero") : dp_of(s, &c) * c.cp > 1;
    if (share % c.micro != 0)
        return QD_OK;
    int before = s->count;
    QD_TRY(try_recompute(s, &c));
    if (s->count > before)
        s->list[s->count - 1].looked = true;
    else if (!stage_given && c.pp == 1 && dp_of(s, &c) * c.cp > 1) { /* does not fit: everything shared out */
        c.zero = 3;
        QD_TRY(try_recompute(s, &c));
        if (s->count > before)
            s->list[s->count - 1].looked = true;
    }
    return QD_OK;
}

/* Axes whose first look was far behind the best are not looked at again. */
static bool is_promising(const qd_search *s, const qd_candidate *c)
{
    for (int i = 0; i < s->count; i++) {
        const qd_candidate *seen = &s->list[i];
        if (seen->looked && seen->tp == c->tp && seen->cp == c->cp && seen->pp == c->pp && seen->ep == c->ep)
            return seen->seconds <= WORTH * s->best;
    }
    return false;
}

static qd_status try_schedules(qd_search *s, qd_candidate c)
{
    static const struct {
        const char *name;
        int vpp;
    } schedules[] = {{"1f1b", 1}, {"interleaved", 2}, {"interleaved", 4}, {"interleaved", 8}, {"zb_h1", 1}, {"zb_v", 1}};
    if (c.pp == 1) {
        c.schedule = "";
        c.vpp = 1;
        return try_zero(s, c);
    }
    bool fixed = qd_options_find(s->options, "parallel.schedule") && qd_options_is_set(s->options, "parallel.schedule");
    for (size_t i = 0; i < sizeof schedules / sizeof *schedules; i++) {
        if (fixed && strcmp(qd_options_string(s->options, "parallel.schedule"), schedules[i].name) != 0)
            continue;
        if (c.pp * schedules[i].vpp > s->model.layers)
            continue;
        c.schedule = schedules[i].name;
        c.vpp = schedules[i].vpp;
        QD_TRY(try_zero(s, c));
    }
    return QD_OK;
}

static qd_status try_layout(qd_search *s, qd_candidate c)
{
    int64_t ep, room = s->gpus / c.pp;
    if (s->gpus % (c.tp * c.cp * c.pp) != 0 || s->batch % dp_of(s, &c) != 0 || dp_of(s, &c) > s->batch)
        return QD_OK;
    int experts = s->model.moe.experts;
    for (int i = 0; (ep = nth(s, "parallel.ep", i, 1, experts > 0 ? experts : 1)) > 0; i++) {
        if (ep > room || (experts > 0 && experts % ep != 0))
            continue;
        c.ep = (int)ep;
        if (qd_clock_now() - s->begin > (s->looking ? LOOK_SECONDS : MOST_SECONDS)) {
            s->report->stopped = true;
            return QD_OK;
        }
        if (s->looking)
            QD_TRY(look(s, c));
        else if (is_promising(s, &c))
            QD_TRY(try_schedules(s, c));
    }
    return QD_OK;
}

/* Small degrees first: they are the fastest that fit, and what is slower than they can be is then not built. */
static qd_status go_through(qd_search *s)
{
    int64_t tp, cp, pp;
    int64_t most_cp = s->seq >= 16384 ? s->seq / 4096 : 1;
    for (int k = 0; (cp = nth(s, "parallel.cp", k, 1, most_cp < 32 ? most_cp : 32)) > 0; k++)
        for (int i = 0; (tp = nth(s, "parallel.tp", i, 1, s->most_tp)) > 0; i++)
            for (int j = 0; (pp = nth(s, "parallel.pp", j, 1, s->model.layers < 64 ? s->model.layers : 64)) > 0; j++)
                if (tp * cp * pp <= s->gpus)
                    QD_TRY(try_layout(s, (qd_candidate){.tp = (int)tp, .cp = (int)cp, .pp = (int)pp, .vpp = 1, .ep = 1, .schedule = ""}));
    return QD_OK;
}

/* The same layout may have been the first look and a try. */
static void drop_repeats(qd_search *s)
{
    int kept = 0;
    for (int i = 0; i < s->count; i++) {
        const qd_candidate *c = &s->list[i], *k = kept > 0 ? &s->list[kept - 1] : NULL;
        bool same = k && k->tp == c->tp && k->cp == c->cp && k->pp == c->pp && k->vpp == c->vpp && k->ep == c->ep && k->zero == c->zero &&
                    k->micro == c->micro && k->recompute == c->recompute && strcmp(k->schedule, c->schedule) == 0;
        if (!same)
            s->list[kept++] = *c;
    }
    s->count = kept;
}

/* Twice: a look at all combinations of axes, then everything else for those that are not far behind. */
static qd_status search_all(qd_search *s)
{
    s->looking = true;
    QD_TRY(go_through(s));
    s->looking = false;
    return go_through(s);
}

static int by_time(const void *a, const void *b)
{
    const qd_candidate *x = a, *y = b;
    if (x->seconds != y->seconds)
        return x->seconds < y->seconds ? -1 : 1;
    return x->report.memory_bytes < y->report.memory_bytes ? -1 : x->report.memory_bytes > y->report.memory_bytes;
}

void qd_candidate_layout(const qd_search *s, const qd_candidate *c, char *text, size_t size)
{
    int used = snprintf(text, size, "dp %d", dp_of(s, c));
    const struct {
        const char *name;
        int value;
    } axes[] = {{"tp", c->tp}, {"cp", c->cp}, {"pp", c->pp}, {"vpp", c->vpp}, {"ep", c->ep}};
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        if (axes[i].value > 1)
            used += snprintf(text + used, size - (size_t)used, ", %s %d", axes[i].name, axes[i].value);
    if (c->schedule[0])
        used += snprintf(text + used, size - (size_t)used, " (%s)", c->schedule);
    if (c->zero > 0)
        used += snprintf(text + used, size - (size_t)used, ", zero %d", c->zero);
    used += snprintf(text + used, size - (size_t)used, ", micro-batch %lld", (long long)c->micro);
    if (c->recompute)
        snprintf(text + used, size - (size_t)used, ", recompute %s", qd_recompute_names[c->recompute]);
}

static void fill_choice(const qd_search *s, const qd_candidate *c, qd_plan_choice *out)
{
    *out = (qd_plan_choice){.dp = dp_of(s, c), .tp = c->tp, .cp = c->cp, .pp = c->pp, .vpp = c->vpp, .ep = c->ep, .zero = c->zero,
                            .micro_batch = c->micro, .micro_batches = s->batch / c->micro / dp_of(s, c),
                            .recompute = qd_recompute_names[c->recompute], .schedule = c->schedule, .step_seconds = c->seconds,
                            .memory_bytes = c->report.memory_bytes, .fits = true};
    out->mfu = c->report.mfu * c->report.step_seconds / c->seconds * (double)s->batch / (double)c->report.global_batch;
    qd_candidate_layout(s, c, out->layout, sizeof out->layout);
}

static qd_status fill_report(qd_search *s)
{
    qd_plan_report *r = s->report;
    char amount[64];
    if (s->count == 0) {
        if (r->too_large == 0)
            return QD_FAIL(QD_USAGE, "no layout of %d accelerators can be built: %s", s->gpus,
                           r->refusal[0] ? r->refusal : "the global batch does not divide among them");
        snprintf(amount, sizeof amount, "%.1f of %.1f GiB", (double)s->least_memory / 1073741824.0, (double)s->cluster.accelerator.memory / 1073741824.0);
        return QD_FAIL(QD_NO_MEMORY, "no layout fits on %d accelerators; the smallest needs %s on each: take more of them", s->gpus, amount);
    }
    qsort(s->list, (size_t)s->count, sizeof *s->list, by_time);
    drop_repeats(s);
    for (int i = 0; i < s->count && r->count < QD_PLAN_CHOICES; i++)
        fill_choice(s, &s->list[i], &r->choices[r->count++]);
    r->best = s->list[0].report;
    qd_plan_explain(s);
    return QD_OK;
}

static qd_status set_up(qd_search *s)
{
    qd_config config;
    QD_TRY(qd_cluster_resolve(s->options, &s->cluster));
    QD_TRY(qd_cluster_config(s->options, &s->cluster, &config));
    s->model = config.model;
    s->gpus = config.world;
    s->batch = config.global_batch;
    s->seq = config.strategy.seq;
    /* Products are split inside the fastest domain: a node, or one dimension of a torus. */
    s->most_tp = s->cluster.network == QD_NETWORK_TORUS ? s->cluster.dims[0] : s->cluster.node_size;
    s->most_tp = s->most_tp > 16 ? 16 : s->most_tp;
    return QD_OK;
}

qd_status qd_plan(const qd_options *options, qd_plan_report *report)
{
    double begin = qd_clock_now();
    memset(report, 0, sizeof *report);
    qd_search s = {.options = options, .report = report, .begin = begin};
    QD_TRY(set_up(&s));
    qd_status status = search_all(&s);
    if (status == QD_OK)
        status = fill_report(&s);
    free(s.list);
    report->wall_seconds = qd_clock_now() - begin;
    return status;
}

qd_status qd_plan_apply(const qd_plan_choice *choice, qd_options *options)
{
    qd_candidate c = {.tp = choice->tp, .cp = choice->cp, .pp = choice->pp, .vpp = choice->vpp, .ep = choice->ep, .zero = choice->zero,
                      .micro = choice->micro_batch, .schedule = choice->schedule};
    while (strcmp(qd_recompute_names[c.recompute], choice->recompute) != 0)
        c.recompute++;
    return apply(&c, options);
}
