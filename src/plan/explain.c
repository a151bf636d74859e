/* Explains the plan: the rules the first choice follows, what its neighbours lose, what to change
 * next; or why no layout fits. */
#include "plan/search_impl.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void say(qd_plan_draft *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(qd_plan_draft *r, const char *format, ...)
{
    if (r->reason_count == QD_PLAN_REASONS)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(r->reasons[r->reason_count], sizeof r->reasons[0], format, args);
    va_end(args);
    r->reason_count++;
}

const qd_candidate *qd_search_nearest(const qd_search *s, int tp, int pp, int zero, int64_t micro, int cp, int ep)
{
    for (int i = 0; i < s->count; i++) {
        const qd_candidate *c = &s->list[i];
        if ((tp == 0 || c->tp == tp) && (pp == 0 || c->pp == pp) && (zero < 0 || c->zero == zero) && (micro == 0 || c->micro == micro) &&
            (cp == 0 || c->cp == cp) && (ep == 0 || c->ep == ep))
            return c;
    }
    return NULL;
}

static double exposed_seconds(const qd_sim_report *r)
{
    double sum = 0.0;
    for (int i = 0; i < r->exposed_count; i++)
        sum += r->exposed[i].value;
    return sum;
}

/* The main loss of a candidate, in words: the part of its step that grows most over the best's. */
static void difference(const qd_candidate *best, const qd_candidate *c, char *text, size_t size)
{
    const qd_sim_report *a = &best->report, *b = &c->report;
    double products = b->product_seconds + b->attention_seconds - a->product_seconds - a->attention_seconds;
    const struct {
        const char *what;
        double more; /* seconds */
    } parts[] = {
        {c->recompute > best->recompute ? "recomputes more activations" : "has smaller GEMMs that use the accelerator less well",
         products},
        {"waits longer for other stages", b->bubble_seconds - a->bubble_seconds},
        {"moves more bytes through memory", b->memory_seconds - a->memory_seconds},
        {"has more exposed communication", exposed_seconds(b) - exposed_seconds(a)},
        {"updates more on each rank", b->optimizer_seconds - a->optimizer_seconds},
        {"has more gaps between kernels", b->launch_seconds - a->launch_seconds},
    };
    int most = 0;
    for (int i = 1; i < (int)(sizeof parts / sizeof *parts); i++)
        most = parts[i].more > parts[most].more ? i : most;
    bool even = c->seconds < best->seconds * 1.0005; /* 0.0 % in the table */
    snprintf(text, size, "%s", even ? "is equally fast" : parts[most].what);
}

static void neighbour(qd_search *s, const qd_candidate *best, const char *name, const qd_candidate *other)
{
    char layout[128], why[64];
    if (!other || other == best)
        return;
    qd_candidate_layout(s, other, layout, sizeof layout);
    difference(best, other, why, sizeof why);
    if (other->seconds < best->seconds * 1.0005)
        say(s->report, "%s (%s): %s", name, layout, why);
    else
        say(s->report, "%s (%s): %.1f %% slower; it %s", name, layout, 100.0 * (other->seconds / best->seconds - 1.0), why);
}

/* Settings of the user need no reason. */
static bool is_chosen(const qd_search *s, const char *key)
{
    return !qd_options_is_set(s->options, key);
}

static void say_rules(qd_search *s, const qd_candidate *b)
{
    qd_plan_draft *r = s->report;
    bool torus = s->cluster.network == QD_NETWORK_TORUS;
    const char *domain = torus ? "one dimension of the torus" : "the node";
    int domain_size = torus ? s->cluster.dims[0] : s->cluster.node_size;
    if (s->gpus > 1 && b->tp * b->pp * b->cp * b->ep == 1)
        say(r, "the model fits without splitting it: data parallelism alone has the least communication");
    if (b->tp > domain_size)
        say(r, "tp %d extends beyond %s, as configured: the reductions of every layer cross the slow links", b->tp, domain);
    else if (b->tp > 1)
        say(r, "tp %d stays inside %s, whose links carry the reductions of every layer", b->tp, domain);
    if (b->ep > 1)
        say(r, "ep %d keeps experts whole: larger GEMMs than splitting each of them with tp", b->ep);
    if (b->pp > 1 && s->gpus > domain_size)
        say(r, "pp %d crosses the slow links: a stage sends one activation per micro-batch", b->pp);
    else if (b->pp > 1)
        say(r, "pp %d: a stage sends one activation per micro-batch, less than the reductions of tp", b->pp);
    if (b->cp > 1)
        say(r, "cp %d splits %s%s", b->cp,
            s->seq >= 16384 ? "the activations of long sequences" : "sequences, because there are too few for the accelerators",
            b->cp_mode == QD_CP_GATHER    ? "; every rank gathers all keys and values"
            : b->cp_mode == QD_CP_ULYSSES ? "; ranks exchange positions for heads"
                                          : "; keys and values pass around a ring");
    if (b->offload)
        say(r, "nothing fits with the optimizer's state on the accelerators: train.offload=optimizer keeps it in host memory, %.1f GiB on "
               "each rank",
            (double)b->report.host_bytes / 1073741824.0);
    if (b->zero == 1 && is_chosen(s, "parallel.zero"))
        say(r, "zero 1 shards the optimizer state and moves no more bytes than plain data parallelism");
    if (b->zero == 3 && is_chosen(s, "parallel.zero"))
        say(r, "zero 3 shards the parameters too; gathering them overlaps with computation");
    if (b->recompute && is_chosen(s, "train.recompute"))
        say(r, "recompute %s: the activations do not fit without it", qd_recompute_names[b->recompute]);
}

/* If neither communication nor recompute costs much, reports what does. */
static void say_computing(const qd_sim_report *p, char *text, size_t size)
{
    double t = p->step_seconds, useful = p->product_seconds + p->attention_seconds;
    if (useful >= 0.6 * t)
        snprintf(text, size,
                 "GEMMs and attention take %.0f %% of the time: the layout is close to what the accelerators can do",
                 100.0 * useful / t);
    else if (p->late_seconds >= fmax(p->optimizer_seconds, fmax(p->launch_seconds, p->memory_seconds)))
        snprintf(text, size,
                 "%.0f %% of the time is spent between steps and waiting for the slowest rank: a larger global batch "
                 "makes longer steps",
                 100.0 * p->late_seconds / t);
    else if (p->optimizer_seconds >= fmax(p->launch_seconds, p->memory_seconds))
        snprintf(text, size,
                 "the optimizer takes %.0f %% of the time: a larger global batch needs fewer updates",
                 100.0 * p->optimizer_seconds / t);
    else if (p->launch_seconds >= p->memory_seconds)
        snprintf(
            text, size,
            "gaps between kernels take %.0f %% of the time: the model is small for so many accelerators of this kind",
            100.0 * p->launch_seconds / t);
    else
        snprintf(
            text, size,
            "memory-bound kernels take %.0f %% of the time: a wider model would spend more of it in GEMMs",
            100.0 * p->memory_seconds / t);
}

static void say_next(qd_search *s, const qd_candidate *b)
{
    qd_plan_draft *r = s->report;
    const qd_sim_report *p = &b->report;
    double exposed = exposed_seconds(p), t = p->step_seconds;
    if (p->bubble_seconds > 0.05 * t)
        snprintf(r->next, sizeof r->next, "stages wait %.0f %% of the time: a larger global batch (more micro-batches) would help",
                 100.0 * p->bubble_seconds / t);
    else if (exposed > 0.05 * t)
        snprintf(r->next, sizeof r->next,
                 "%.0f %% of the time is exposed communication: a larger global batch or faster links would help",
                 100.0 * exposed / t);
    else if (b->recompute == QD_RECOMPUTE_FULL)
        snprintf(r->next, sizeof r->next,
                 "activations are recomputed: more accelerators, or more memory on each, would save up to a quarter of the time");
    else
        say_computing(p, r->next, sizeof r->next);
}

/* Parameters, gradients and optimizer state need this much of all accelerators together, however
 * they are sharded. Layouts that were refused might have fitted: the first reason is reported
 * too. */
static qd_status explain_size(const qd_search *s)
{
    const double gib = 1073741824.0;
    /* Ranks on the CPUs of one machine share its memory. */
    int sharers = s->cluster.processor.cores > 0 ? s->gpus : 1;
    double usable = (double)s->cluster.accelerator.memory / sharers, memory = (double)s->memory / sharers,
           least = ceil((s->param_bytes + s->grad_bytes + s->state_bytes) * (double)qd_model_parameters(&s->model) / usable);
    char advice[240], refused[240] = "";
    if ((double)s->least_memory <= memory)
        snprintf(advice, sizeof advice, "it would fit if less were kept free: accelerator.reserve=0.01");
    else if (least > s->gpus)
        snprintf(advice, sizeof advice, "parameters, gradients and optimizer state alone fill at least %.0f%s", least,
                 s->offload_tried ? ", and with train.offload=optimizer nothing fits either" : "");
    else if (!is_chosen(s, "train.recompute") && qd_options_enum(s->options, "train.recompute") != QD_RECOMPUTE_FULL)
        snprintf(advice, sizeof advice, "use more of them, or leave train.recompute to the plan");
    else
        snprintf(advice, sizeof advice, "use more of them, shorter sequences, or fewer fixed keys");
    if (s->report->stopped)
        snprintf(refused, sizeof refused, "; the search was not complete: set some of the axes");
    else if (s->report->refused > 0)
        snprintf(refused, sizeof refused, "; %d more cannot be built: %s", s->report->refused, s->report->refusal);
    return QD_FAIL(QD_NO_MEMORY,
                   "no layout fits on %d accelerator%s; the smallest takes %.1f of %.1f GiB on each, %.1f of which are kept free: %s%s",
                   s->gpus, s->gpus == 1 ? "" : "s", (double)s->least_memory / gib, memory / gib, (memory - usable) / gib, advice, refused);
}

/* No layout could be built from the axes. */
static qd_status explain_axes(const qd_search *s)
{
    qd_config config;
    qd_mesh mesh;
    if (s->axes_found)
        return QD_FAIL(QD_USAGE,
                       "no data-parallel rank's share of train.global_batch (%lld) divides into micro-batches of "
                       "train.micro_batch (%lld)",
                       (long long)s->batch, (long long)qd_options_int(s->options, "train.micro_batch"));
    if (s->uneven_dp > 0)
        return QD_FAIL(QD_USAGE,
                       "train.global_batch (%lld) does not divide among %d data-parallel ranks, the fewest that the "
                       "other axes leave: use a multiple of %d",
                       (long long)s->batch, s->uneven_dp, s->uneven_dp);
    QD_TRY(qd_cluster_config(s->options, &s->cluster, &config));
    QD_TRY(qd_mesh_create(config.world, config.degrees, &mesh));
    return QD_FAIL(QD_USAGE, "the given axes do not divide their number");
}

qd_status qd_plan_explain_none(const qd_search *s)
{
    if (s->report->late)
        return QD_FAIL(QD_USAGE, "the clock ended the search before it found a layout that fits: set some of the axes");
    if (s->report->too_large > 0)
        return explain_size(s);
    qd_status status = s->report->refusal[0] ? QD_FAIL(QD_USAGE, "%s", s->report->refusal) : explain_axes(s);
    return qd_error_prefix(status, "no layout of %d accelerator%s can be built: ", s->gpus, s->gpus == 1 ? "" : "s");
}

void qd_plan_explain(qd_search *s)
{
    const qd_candidate *b = &s->list[0];
    say_rules(s, b);
    neighbour(s, b, "twice the tp", qd_search_nearest(s, 2 * b->tp, 0, -1, 0, 0, 0));
    if (b->tp > 1)
        neighbour(s, b, "half the tp", qd_search_nearest(s, b->tp / 2, 0, -1, 0, 0, 0));
    neighbour(s, b, "twice the pp", qd_search_nearest(s, 0, 2 * b->pp, -1, 0, 0, 0));
    if (b->pp > 1)
        neighbour(s, b, "half the pp", qd_search_nearest(s, 0, b->pp / 2, -1, 0, 0, 0));
    neighbour(s, b, b->zero == 1 ? "zero 3" : "zero 1", qd_search_nearest(s, 0, 0, b->zero == 1 ? 3 : 1, 0, 0, 0));
    if (b->micro > 1)
        neighbour(s, b, "half the micro-batch", qd_search_nearest(s, b->tp, b->pp, b->zero, b->micro / 2, b->cp, b->ep));
    for (int i = 1; i < s->report->count; i++)
        difference(b, &s->list[i], s->report->choices[i].loses, sizeof s->report->choices[i].loses);
    say_next(s, b);
}
