/* Compares a given layout with the first choice: how much slower it is, and where it loses time. */
#include "plan/search_impl.h"

#include "spec/schedule/schedule.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A layout within this share of the first choice needs no explanation. */
static const double NEAR = 0.05;
/* Parts of a difference below this share are not mentioned. */
static const double SMALL = 0.005;

/* The parts of a step's time, averaged over stages. */
typedef struct part {
    char what[96];
    double seconds;
} part;

enum { PARTS = 16 };
typedef struct parts {
    part list[PARTS];
    int count;
} parts;

static void put(parts *p, double seconds, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put(parts *p, double seconds, const char *format, ...)
{
    if (p->count == PARTS)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(p->list[p->count].what, sizeof p->list[0].what, format, args);
    va_end(args);
    p->list[p->count++].seconds = seconds;
}

static double seconds_of(const parts *p, const char *what)
{
    for (int i = 0; i < p->count; i++)
        if (strcmp(p->list[i].what, what) == 0)
            return p->list[i].seconds;
    return 0.0;
}

static parts take_apart(const qd_sim_report *r)
{
    parts p = {.count = 0};
    /* What is neither bubble nor exposed communication is computation, in the proportions of the
     * busiest stage. */
    double all = r->product_seconds + r->attention_seconds + r->memory_seconds + r->launch_seconds + r->optimizer_seconds;
    double slowed = r->compute_seconds > all ? r->compute_seconds - all : 0.0, rest = r->step_seconds - r->bubble_seconds;
    for (int i = 0; i < r->exposed_count; i++)
        rest -= r->exposed[i].value;
    double scale = all > 0.0 ? rest / (all + slowed) : 1.0, computing = scale * (r->product_seconds + r->attention_seconds);
    double again = r->hfu > r->mfu_causal && r->mfu_causal > 0.0 ? computing * (1.0 - r->mfu_causal / r->hfu) : 0.0;
    put(&p, computing - again, "GEMMs and attention");
    put(&p, again, "recomputing activations");
    put(&p, scale * r->memory_seconds, "memory-bound kernels");
    put(&p, scale * r->launch_seconds, "gaps between kernels");
    put(&p, scale * r->optimizer_seconds, "the optimizer");
    put(&p, scale * slowed, "computation slowed by concurrent collectives");
    put(&p, r->bubble_seconds, "waiting for other stages of the pipeline");
    for (int i = 0; i < r->exposed_count; i++)
        put(&p, r->exposed[i].value, "exposed communication over %s", r->exposed[i].name);
    return p;
}

static void say(qd_plan_against *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(qd_plan_against *a, const char *format, ...)
{
    if (a->why_count == (int)(sizeof a->why / sizeof *a->why))
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(a->why[a->why_count++], sizeof a->why[0], format, args);
    va_end(args);
}

static void say_memory(const qd_search *s, qd_plan_against *a, const qd_sim_report *r)
{
    const double gib = 1024.0 * 1024.0 * 1024.0;
    const qd_sim_line *most = &r->memory[0];
    for (int i = 1; i < r->memory_count; i++)
        if (r->memory[i].value > most->value)
            most = &r->memory[i];
    if (!r->fits)
        say(a, "it does not fit: %.1f of %.1f GiB on its fullest stage%s, of which %.1f GiB are %s", (double)r->memory_bytes / gib,
            (double)s->memory / gib, r->memory_bytes <= s->memory ? ", which leaves too little free" : "", most->value / gib, most->name);
}

/* The parts that take longer, largest first. */
static void say_losses(qd_plan_against *a, const qd_sim_report *best, const qd_sim_report *r)
{
    parts first = take_apart(best), other = take_apart(r);
    for (;;) {
        int most = -1;
        double more = SMALL * best->step_seconds;
        for (int i = 0; i < other.count; i++)
            if (other.list[i].seconds - seconds_of(&first, other.list[i].what) > more) {
                most = i;
                more = other.list[i].seconds - seconds_of(&first, other.list[i].what);
            }
        if (most < 0)
            return;
        part *p = &other.list[most];
        say(a, "%.1f points: %s, %.1f %% of its step compared with %.1f %%", 100.0 * more / best->step_seconds, p->what,
            100.0 * p->seconds / r->step_seconds, 100.0 * seconds_of(&first, p->what) / best->step_seconds);
        p->seconds = 0.0;
    }
}

static int number(const qd_options *o, const char *key)
{
    int64_t value = qd_options_int(o, key);
    return value > 1 ? (int)value : 1;
}

static qd_status read_candidate(const qd_search *s, qd_options *o, qd_candidate *c)
{
    qd_config config;
    QD_TRY(qd_cluster_config(o, &s->cluster, &config));
    if (config.world != s->gpus || config.global_batch != s->batch || config.strategy.seq != s->seq ||
        !qd_model_equal(&config.model, &s->model))
        return QD_FAIL(QD_USAGE, "the layout to compare with has another model, batch, sequence length or number of accelerators");
    qd_mesh mesh;
    QD_TRY(qd_mesh_create(config.world, config.degrees, &mesh));
    int64_t dp = mesh.degree[QD_AXIS_DP], micro = qd_options_int(o, "train.micro_batch");
    if (micro == 0) { /* the whole share of a rank, made explicit: shorter steps are simulated with the same */
        char text[24];
        micro = s->batch / dp;
        snprintf(text, sizeof text, "%lld", (long long)micro);
        QD_TRY(qd_options_set(o, "train.micro_batch", text));
    }
    if (micro < 1 || s->batch % (micro * dp) != 0)
        return QD_FAIL(QD_USAGE, "the global batch of %lld does not divide into micro-batches of %lld on %lld data-parallel ranks",
                       (long long)s->batch, (long long)micro, (long long)dp);
    *c = (qd_candidate){.tp = mesh.degree[QD_AXIS_TP], .cp = mesh.degree[QD_AXIS_CP],
                        .pp = mesh.degree[QD_AXIS_PP], .vpp = number(o, "parallel.virtual_stages"),
                        .ep = number(o, "parallel.ep"), .etp = number(o, "parallel.etp"),
                        .zero = (int)qd_options_int(o, "parallel.zero"), .recompute = qd_options_enum(o, "train.recompute"),
                        .pieces = number(o, "parallel.tp_overlap"), .micro = micro,
                        .cp_mode = mesh.degree[QD_AXIS_CP] > 1 ? qd_options_enum(o, "parallel.cp_mode") : 0,
                        .offload = config.strategy.offload};
    c->schedule = c->pp > 1 ? qd_schedule_name((qd_schedule_kind)qd_options_enum(o, "parallel.schedule")) : "";
    /* Stages per rank matter only for schedules that use them. */
    if (strcmp(c->schedule, "interleaved") != 0)
        c->vpp = 1;
    return QD_OK;
}

/* A layout that does not fit may fit with full recompute. */
static qd_status try_full(qd_search *s, qd_options *o, qd_candidate c, qd_plan_against *a)
{
    if (c.fits || c.recompute == QD_RECOMPUTE_FULL)
        return QD_OK;
    QD_TRY(qd_options_set(o, "train.recompute", qd_recompute_names[QD_RECOMPUTE_FULL]));
    QD_TRY(qd_search_simulate(s, o, true, &c));
    if (c.fits)
        say(a, "with recompute full it fits and takes %.4g s, %.1f %% more than the first choice", c.seconds,
            100.0 * (c.seconds / s->list[0].seconds - 1.0));
    else
        say(a, "nor does it fit with recompute full: %.1f GiB", (double)c.report.memory_bytes / 1073741824.0);
    return QD_OK;
}

static qd_status compare(qd_search *s, qd_options *o, qd_plan_against *a)
{
    const qd_candidate *best = &s->list[0];
    qd_candidate c;
    QD_TRY(read_candidate(s, o, &c));
    QD_TRY(qd_search_buckets(o, c.tp, c.pp));
    QD_TRY(qd_search_simulate(s, o, true, &c));
    qd_search_choice(s, &c, &s->report->against_choice);
    a->possible = true;
    a->behind = c.seconds / best->seconds - 1.0;
    say_memory(s, a, &c.report);
    QD_TRY(try_full(s, o, c, a));
    if (a->behind > NEAR)
        say_losses(a, &best->report, &c.report);
    return QD_OK;
}

qd_status qd_search_against(qd_search *s, const qd_options *options)
{
    qd_plan_against *a = &s->report->against;
    qd_options *o = NULL;
    s->report->asked = true;
    QD_TRY(qd_options_copy(options, &o));
    qd_status status = compare(s, o, a);
    qd_options_destroy(o);
    if (status != QD_USAGE && status != QD_UNSUPPORTED)
        return status;
    snprintf(a->refusal, sizeof a->refusal, "%s", qd_error_message());
    qd_error_clear();
    return QD_OK;
}
