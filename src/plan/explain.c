/* Why the first choice is the first: the rules it follows, what its neighbours lose, what to change next. */
#include "plan/search_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void say(qd_plan_report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(qd_plan_report *r, const char *format, ...)
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

/* What a candidate loses by, in words: the part of its step that is most longer than the best's. */
static void difference(const qd_candidate *best, const qd_candidate *c, char *text, size_t size)
{
    const qd_sim_report *a = &best->report, *b = &c->report;
    double products = b->product_seconds + b->attention_seconds - a->product_seconds - a->attention_seconds;
    const struct {
        const char *what;
        double more; /* seconds */
    } parts[] = {
        {c->recompute > best->recompute ? "computes more activations again" : "has smaller products that fill the accelerator less", products},
        {"waits longer for other stages", b->bubble_seconds - a->bubble_seconds},
        {"moves more bytes through memory", b->memory_seconds - a->memory_seconds},
        {"communicates more that nothing hides", exposed_seconds(b) - exposed_seconds(a)},
        {"updates more on each rank", b->optimizer_seconds - a->optimizer_seconds},
        {"has more gaps between kernels", b->launch_seconds - a->launch_seconds},
    };
    int most = 0;
    for (int i = 1; i < (int)(sizeof parts / sizeof *parts); i++)
        most = parts[i].more > parts[most].more ? i : most;
    bool even = c->seconds < best->seconds * 1.0005; /* 0.0 % in the table */
    snprintf(text, size, "%s", even ? "takes as long" : parts[most].what);
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

static void say_rules(qd_search *s, const qd_candidate *b)
{
    qd_plan_report *r = s->report;
    const char *domain = s->cluster.network == QD_NETWORK_TORUS ? "one dimension of the torus" : "the node";
    if (b->tp * b->pp * b->cp == 1)
        say(r, "the model fits without splitting it: data parallelism alone has the least communication");
    if (b->tp > 1)
        say(r, "tp %d stays inside %s, whose links carry the sums of every layer", b->tp, domain);
    if (b->ep > 1)
        say(r, "ep %d keeps experts whole: larger products than splitting each of them with tp", b->ep);
    if (b->pp > 1)
        say(r, "pp %d crosses the slow links: a stage sends one activation per micro-batch", b->pp);
    if (b->cp > 1)
        say(r, "cp %d shares out the activations of long sequences", b->cp);
    if (b->zero == 1)
        say(r, "zero 1: the lowest stage that fits; it moves no more than plain data parallelism and shares out the optimizer's state");
    if (b->zero == 3)
        say(r, "zero 3: parameters are shared out too; their gathering is hidden behind computation");
    if (b->recompute)
        say(r, "recompute %s: activations do not fit otherwise", qd_recompute_names[b->recompute]);
}

static void say_next(qd_search *s, const qd_candidate *b)
{
    qd_plan_report *r = s->report;
    const qd_sim_report *p = &b->report;
    double exposed = exposed_seconds(p), t = p->step_seconds;
    if (p->bubble_seconds > 0.05 * t)
        snprintf(r->next, sizeof r->next, "stages wait %.0f %% of the time: a larger global batch (more micro-batches) would help", 100.0 * p->bubble_seconds / t);
    else if (exposed > 0.05 * t)
        snprintf(r->next, sizeof r->next, "%.0f %% of the time is communication that nothing hides: a larger global batch or faster links would help", 100.0 * exposed / t);
    else if (b->recompute == QD_RECOMPUTE_FULL)
        snprintf(r->next, sizeof r->next, "activations are computed twice: more accelerators, or more memory on each, would save up to a quarter");
    else
        snprintf(r->next, sizeof r->next, "products take %.0f %% of the time: the layout is near what the accelerators can do", 100.0 * p->product_seconds / t);
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
