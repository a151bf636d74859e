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

/* What a candidate loses to, in words: the exposed communication, bubble or slower products that the best has less of. */
static void difference(const qd_candidate *best, const qd_candidate *c, char *text, size_t size)
{
    const qd_sim_report *a = &best->report, *b = &c->report;
    double scale_a = 1.0 / a->step_seconds, scale_b = 1.0 / b->step_seconds;
    struct {
        const char *what;
        double more;
    } parts[] = {
        {"waits longer for other stages", b->bubble_seconds * scale_b - a->bubble_seconds * scale_a},
        {"moves more bytes through memory", b->memory_seconds * scale_b - a->memory_seconds * scale_a},
        {"computes more activations again", 0.0},
        {"communicates more that nothing hides", 0.0},
    };
    for (int i = 0; i < b->exposed_count; i++)
        parts[3].more += b->exposed[i].value * scale_b;
    for (int i = 0; i < a->exposed_count; i++)
        parts[3].more -= a->exposed[i].value * scale_a;
    parts[2].more = c->recompute > best->recompute ? 0.25 * (c->recompute == QD_RECOMPUTE_FULL) : 0.0;
    int most = -1;
    for (int i = 0; i < 4; i++)
        if (parts[i].more > 0.003 && (most < 0 || parts[i].more > parts[most].more))
            most = i;
    snprintf(text, size, "%s", most >= 0 ? parts[most].what : "has smaller products that fill the accelerator less");
}

static void neighbour(qd_search *s, const qd_candidate *best, const char *name, const qd_candidate *other)
{
    char layout[128], why[64];
    if (!other || other == best)
        return;
    qd_candidate_layout(s, other, layout, sizeof layout);
    difference(best, other, why, sizeof why);
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
    double exposed = 0.0, t = p->step_seconds;
    for (int i = 0; i < p->exposed_count; i++)
        exposed += p->exposed[i].value;
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
