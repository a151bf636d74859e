/* The search for the fastest layout: a coarse pass over all axes, a closer look at the best of
 * them, then small refinements. Its extent is limited by work, not by time, so that every machine
 * gives the same answer. */
#include "plan/search_impl.h"

#include "base/clock.h"
#include "spec/layout/nodes.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* How much slower than the best a layout may be after the coarse pass: micro-batch size and
 * sharding stage change its time by less, and schedules remove at most this share of its bubble. */
static const double WORTH = 1.1, BUBBLE_GONE = 0.8;
/* Layouts whose estimate, promise(), exceeds that of the best so far by this factor are skipped. */
static const double PROMISING = 1.4;
/* Number of pieces of tp's GEMMs in the coarse pass; other numbers are tried for the best
 * layouts. */
enum { PIECES = 4 };
/* Limits on the number of actions built and simulated, for a plan within about a minute on one
 * core: for the coarse pass, the search and its later phases. dualpipe_v has its own. */
static const int64_t LOOK_WORK = 20000000, MOST_WORK = 48000000, REFINE_WORK = 54000000, SETTLE_WORK = 64000000, PAIRS_WORK = 8000000;
/* On a machine so slow that even this takes longer, the clock ends the search, and the report says
 * so. */
static const double CLOCK_SECONDS = 600.0;

static qd_status report_with(qd_search *s, qd_options *o, int64_t batch, qd_step_extent extent, qd_sim_report *report)
{
    qd_config config;
    QD_TRY(qd_search_set(o, "train.global_batch", "%lld", (long long)batch));
    QD_TRY(qd_cluster_config(o, &s->cluster, &config));
    QD_TRY(qd_step_report(&config, &s->cluster, extent, report));
    s->work += report->built + report->actions;
    return QD_OK;
}

static void continue_lines(qd_sim_line *lines, int count, const qd_sim_line *longer, int longer_count, double times)
{
    for (int i = 0; i < count; i++)
        for (int j = 0; j < longer_count; j++)
            if (strcmp(lines[i].name, longer[j].name) == 0)
                lines[i].value += times * (longer[j].value - lines[i].value);
}

/* Extrapolates the report `r` of a short step: every part grows by its difference to the `longer`
 * step, `times` times. */
static void continue_report(qd_sim_report *r, const qd_sim_report *longer, double times, int64_t batch)
{
    double *parts[] = {&r->step_seconds,      &r->compute_seconds, &r->product_seconds,
                       &r->attention_seconds, &r->memory_seconds,  &r->optimizer_seconds,
                       &r->launch_seconds,    &r->bubble_seconds,  &r->late_seconds};
    const double more[] = {longer->step_seconds,      longer->compute_seconds, longer->product_seconds,
                           longer->attention_seconds, longer->memory_seconds,  longer->optimizer_seconds,
                           longer->launch_seconds,    longer->bubble_seconds,  longer->late_seconds};
    double was = r->step_seconds, grown = (double)batch / (double)r->global_batch;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        *parts[i] += times * (more[i] - *parts[i]);
    continue_lines(r->exposed, r->exposed_count, longer->exposed, longer->exposed_count, times);
    continue_lines(r->hidden, r->hidden_count, longer->hidden, longer->hidden_count, times);
    double *rates[] = {&r->tokens_per_second, &r->tokens_per_gpu_second, &r->mfu, &r->mfu_causal, &r->hfu};
    double rate = grown * was / r->step_seconds;
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        *rates[i] *= rate;
    r->flops_per_step *= grown;
    r->joules_per_step *= r->step_seconds / was;
    r->cost_per_step *= r->step_seconds / was;
    r->global_batch = batch;
    r->micro_batches = (int64_t)((double)r->micro_batches * grown);
    r->tokens_per_step = batch * r->seq;
    r->loss_count = 0; /* they describe the short step */
}

/* A step with many micro-batches is periodic: two short steps give the time of each additional
 * micro-batch, and the peak memory. */
qd_status qd_search_simulate(qd_search *s, qd_options *o, bool anyway, qd_candidate *c)
{
    int64_t each = c->micro * qd_candidate_dp(s, c), micros = s->batch / each, few = 2 * c->pp, more = 3 * c->pp;
    bool whole = micros <= more;
    QD_TRY(report_with(s, o, whole ? s->batch : few * each, anyway ? QD_STEP_TIMES : QD_STEP_TIMES_IF_FITS, &c->report));
    c->fits = c->report.fits;
    if (!c->fits && !anyway)
        return QD_OK;
    c->rough = c->rough && !whole;
    if (c->rough) {
        double fill = (double)(c->pp - 1) / c->vpp;
        c->seconds = c->report.step_seconds * ((double)micros + fill) / ((double)few + fill);
        return QD_OK;
    }
    if (!whole) {
        qd_sim_report longer;
        QD_TRY(report_with(s, o, more * each, QD_STEP_TIMES, &longer));
        continue_report(&c->report, &longer, (double)(micros - few) / (double)(more - few), s->batch);
    }
    c->seconds = c->report.step_seconds;
    return QD_OK;
}

qd_status qd_search_try(qd_search *s, qd_candidate *c)
{
    qd_options *o = NULL;
    QD_TRY(qd_options_copy(s->options, &o));
    qd_status status = qd_candidate_apply(c, o);
    if (status == QD_OK)
        status = qd_search_simulate(s, o, false, c);
    qd_options_destroy(o);
    return status;
}

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

/* Network time of the expert rows, both ways in both passes, if experts are spread over several
 * nodes; minus what other work may hide. */
static double dispatch_bound(const qd_search *s, const qd_candidate *c)
{
    const qd_model *m = &s->model;
    int ranks = c->ep * c->etp, node = s->cluster.node_size;
    if (m->moe.experts == 0 || s->cluster.network == QD_NETWORK_TORUS || ranks <= node || s->cluster.network_bandwidth <= 0.0)
        return 0.0;
    double copies = s->by_node ? qd_nodes_expected(&m->moe, (ranks + node - 1) / node) : m->moe.per_token * c->etp;
    double rows = (double)s->batch * (double)s->seq * copies * (m->layers - m->moe.first_dense) / s->gpus;
    return 0.7 * rows * (double)m->hidden * 2.0 * 4.0 * (1.0 - (double)node / ranks) / s->cluster.network_bandwidth;
}

/* A lower bound on the step time: all FLOPs at the best rate, the pipeline's bubble, and the
 * exchange of expert rows. Layouts that cannot come within a tenth of the best are not built. */
static double bound(const qd_search *s, const qd_candidate *c, bool again)
{
    double flops = qd_model_flops_per_token(&s->model, s->seq) - qd_model_attention_flops(&s->model, s->seq) / 2.0;
    double micros = (double)s->batch / (double)(c->micro * qd_candidate_dp(s, c));
    double seconds = flops * (double)s->batch * (double)s->seq * (again ? 4.0 / 3.0 : 1.0) / (s->gpus * s->cluster.accelerator.product);
    bool filled = strncmp(c->schedule, "zb", 2) == 0 || strncmp(c->schedule, "dual", 4) == 0;
    return (seconds + dispatch_bound(s, c)) * (1.0 + (filled ? 0.2 : 1.0) * (c->pp - 1) / (micros * c->vpp));
}

/* Inputs of the blocks in flight on the first stage. */
static double input_bytes(const qd_search *s, const qd_candidate *c)
{
    double tokens = (double)c->micro * (double)s->seq / (c->tp * c->cp);
    double micros = (double)s->batch / (double)(c->micro * qd_candidate_dp(s, c));
    return 2.0 * tokens * (double)s->model.hidden * s->model.layers * fmin(1.0, micros / c->pp);
}

/* A lower bound on memory: parameters (sharded in stage 3), gradients (from stage 2 on), optimizer
 * state (from stage 1 on), and the inputs of the blocks in flight, which recompute keeps. A layout
 * that exceeds it is not built. */
static double least_bytes(const qd_search *s, const qd_candidate *c)
{
    const qd_model *m = &s->model;
    double experts =
        m->moe.experts > 0 ? 3.0 * (double)(m->layers - m->moe.first_dense) * m->moe.experts * (double)m->moe.ffn * (double)m->hidden : 0.0;
    double dense = ((double)qd_model_parameters(m) - experts) / (c->tp * c->pp), held = experts / (c->ep * c->etp * c->pp);
    double ranks = (double)s->gpus / c->pp, dp = ranks / c->tp, edp = ranks / (c->ep * c->etp), state = s->state_bytes;
    if (c->zero == 3)
        return (s->param_bytes + s->grad_bytes + state) * (dense / dp + held / edp);
    double whole = dense + held, shared = dense / dp + held / edp;
    return s->param_bytes * whole + s->grad_bytes * (c->zero > 1 ? shared : whole) +
           state * (c->zero > 0 ? shared : whole) + input_bytes(s, c);
}

/* Selective recompute frees at most this share of the activations: a layout that exceeds memory by
 * more is not tried with it. */
static const double SELECTIVE_MOST = 0.5;

static bool is_selective_hopeless(const qd_candidate *c)
{
    double activations = 0.0;
    for (int i = 0; i < c->report.memory_count; i++)
        if (strncmp(c->report.memory[i].name, "activations until", 17) == 0)
            activations += c->report.memory[i].value;
    return (double)c->report.memory_bytes - SELECTIVE_MOST * activations > (double)c->report.memory_limit;
}

static void note_memory(qd_search *s, int64_t bytes)
{
    s->least_memory = s->least_memory == 0 || bytes < s->least_memory ? bytes : s->least_memory;
}

/* The first kind of recompute with which the layout fits: less recompute is always faster. */
static qd_status try_recompute(qd_search *s, qd_candidate *c)
{
    c->looked = false;
    if (least_bytes(s, c) > (double)s->cluster.accelerator.memory) {
        s->report->too_large++;
        note_memory(s, (int64_t)least_bytes(s, c));
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
        note_memory(s, c->report.memory_bytes);
        if (c->fits) {
            s->report->tried++;
            return keep(s, c);
        }
        if (c->recompute == QD_RECOMPUTE_NONE && !fixed && is_selective_hopeless(c))
            c->recompute = QD_RECOMPUTE_SELECTIVE; /* continue with full */
    }
    s->report->too_large++;
    return QD_OK;
}

/* The user's own value, or powers of two up to `most`. `at` counts from 0; 0 ends the list. */
static int64_t nth(const qd_search *s, const char *key, int at, int64_t least, int64_t most)
{
    if (qd_options_find(s->options, key) && qd_options_is_set(s->options, key) && qd_options_int(s->options, key) > 0)
        return at == 0 ? qd_options_int(s->options, key) : 0;
    int64_t value = least << at;
    return value <= most ? value : 0;
}

/* Whether the watch, if there is one, wants the search to continue. */
static bool is_wanted(qd_search *s)
{
    char layout[sizeof s->report->choices[0].layout] = "";
    const qd_candidate *best = NULL;
    if (!s->watch || s->halted)
        return !s->halted;
    for (int i = 0; i < s->count; i++)
        if (!best || s->list[i].seconds < best->seconds)
            best = &s->list[i];
    if (best)
        qd_candidate_layout(s, best, layout, sizeof layout);
    const qd_plan_progress progress = {.seconds = qd_clock_now() - s->begin, .tried = s->report->tried, .too_large = s->report->too_large,
                                       .refused = s->report->refused, .layout = layout, .step_seconds = best ? best->seconds : 0.0};
    s->halted = !s->watch->call(s->watch->context, &progress);
    return !s->halted;
}

static bool is_spent(qd_search *s, int64_t work)
{
    bool late = qd_clock_now() - s->begin > CLOCK_SECONDS;
    if (s->work <= work && !late && is_wanted(s))
        return false;
    s->report->stopped = true;
    s->report->late = s->report->late || late;
    return true;
}

/* Tries increasing micro-batches, until they do not fit or too few are left for the schedule. A
 * size that the user has set is always tried, so that the refusal gives the reason. */
static qd_status try_micros(qd_search *s, qd_candidate c)
{
    int dp = qd_candidate_dp(s, &c);
    int64_t share = s->batch / dp, micro;
    int64_t least = strcmp(c.schedule, "dualpipe_v") == 0 && !qd_options_is_set(s->options, "parallel.schedule") ? 2 * c.pp : 1;
    for (int i = 0; (micro = nth(s, "train.micro_batch", i, 1, share < 64 ? share : 64)) > 0; i++) {
        if (share % micro != 0 || (share / micro) % (c.vpp > 1 ? c.pp : 1) != 0 || share / micro < least)
            continue;
        int too_large = s->report->too_large;
        if (is_spent(s, s->until))
            break;
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
    /* With separate axes for experts, plain data parallelism is tried too. */
    int from = fixed ? (int)qd_options_int(s->options, "parallel.zero") : qd_candidate_dp(s, &c) * c.cp > 1 && c.ep == 1 ? 1 : 0;
    int to = fixed ? from : qd_candidate_dp(s, &c) * c.cp > 1 ? 3 : 0;
    for (c.zero = from; c.zero <= to; c.zero++) {
        if (c.zero == 2 && !fixed)
            continue; /* with gradients reduced once per step it needs the memory of stage 1; per micro-batch it moves more */
        if (c.zero == 3 && c.pp > 1 && !fixed)
            continue; /* every stage would gather its parameters again for every micro-batch */
        QD_TRY(try_micros(s, c));
    }
    return QD_OK;
}

/* The schedule of the coarse pass: the shortest bubble among the simple ones. */
static void choose_schedule(const qd_search *s, qd_candidate *c)
{
    int64_t share = s->batch / qd_candidate_dp(s, c);
    c->schedule = c->pp > 1 ? "1f1b" : "";
    int most = s->given_vpp > 1 ? s->given_vpp : 8, least = s->given_vpp > 1 ? s->given_vpp : 2;
    for (int vpp = most; vpp >= least && c->pp > 1 && c->vpp == 1; vpp /= 2)
        if ((s->given_vpp == 0 || s->given_vpp == vpp) && c->pp * vpp <= s->model.layers && share % c->pp == 0) {
            c->schedule = "interleaved";
            c->vpp = vpp;
        }
    if (c->pp > 1 && qd_options_is_set(s->options, "parallel.schedule")) {
        c->schedule = qd_options_string(s->options, "parallel.schedule");
        c->vpp = strcmp(c->schedule, "interleaved") == 0 ? c->vpp : 1;
    }
}

/* Tries one cp mode; *best: index in the list of the fastest so far, -1: none. */
static qd_status look_one(qd_search *s, qd_candidate c, bool stage_given, int *best)
{
    int before = s->count;
    QD_TRY(try_recompute(s, &c));
    if (s->count == before && !stage_given && c.pp == 1 && qd_candidate_dp(s, &c) * c.cp > 1) { /* does not fit: shard everything */
        c.zero = 3;
        QD_TRY(try_recompute(s, &c));
    }
    if (s->count > before && (*best < 0 || s->list[before].seconds < s->list[*best].seconds))
        *best = before;
    return QD_OK;
}

/* The coarse pass over the axes alone: one micro-batch size, the lowest stage, and every cp
 * mode. */
static qd_status look(qd_search *s, qd_candidate c)
{
    bool stage_given = qd_options_is_set(s->options, "parallel.zero"), micro_given = qd_options_is_set(s->options, "train.micro_batch");
    int64_t share = s->batch / qd_candidate_dp(s, &c);
    choose_schedule(s, &c);
    c.rough = true;
    c.micro = micro_given ? qd_options_int(s->options, "train.micro_batch") : 1;
    c.zero = stage_given ? (int)qd_options_int(s->options, "parallel.zero") : qd_candidate_dp(s, &c) * c.cp > 1;
    if (share % c.micro != 0)
        return QD_OK;
    int best = -1, first = 0, last = c.cp > 1 ? QD_CP_MODES - 1 : 0;
    if (c.cp > 1 && qd_options_is_set(s->options, "parallel.cp_mode"))
        first = last = qd_options_enum(s->options, "parallel.cp_mode");
    for (c.cp_mode = first; c.cp_mode <= last; c.cp_mode++)
        QD_TRY(look_one(s, c, stage_given, &best));
    if (best >= 0)
        s->list[best].looked = true;
    return QD_OK;
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
    const char *given = qd_options_is_set(s->options, "parallel.schedule") ? qd_options_string(s->options, "parallel.schedule") : NULL;
    bool listed = false;
    for (size_t i = 0; i < sizeof schedules / sizeof *schedules; i++) {
        const char *name = schedules[i].name;
        bool interleaved = strcmp(name, "interleaved") == 0, two = strcmp(name, "zb_v") == 0; /* two stages per rank, without a key */
        int vpp = interleaved && s->given_vpp > 1 ? s->given_vpp : schedules[i].vpp;
        bool allowed = s->given_vpp <= 0 || s->given_vpp == vpp || (two && s->given_vpp == 2);
        if (given && strcmp(given, name) != 0)
            continue;
        bool again = interleaved && s->given_vpp > 1 && schedules[i].vpp > 2; /* the user's number has been tried */
        listed = true;
        if (!allowed || again || c.pp * vpp > s->model.layers)
            continue;
        c.schedule = name;
        c.vpp = vpp;
        QD_TRY(try_zero(s, c));
    }
    if (!given || listed)
        return QD_OK;
    c.schedule = given;
    c.vpp = 1;
    return try_zero(s, c);
}

typedef struct axes_list {
    qd_candidate *list;
    int count, capacity;
} axes_list;

static qd_status note(axes_list *a, const qd_candidate *c)
{
    if (a->count == a->capacity) {
        int capacity = a->capacity ? 2 * a->capacity : 256;
        qd_candidate *grown = realloc(a->list, (size_t)capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d combinations of axes", capacity);
        a->list = grown;
        a->capacity = capacity;
    }
    a->list[a->count++] = *c;
    return QD_OK;
}

/* The order of the coarse pass: layouts that could be fast and need little recompute first, small
 * degrees before large ones. A block keeps about 34 bytes per token and unit of width, 17 times its
 * input, and the rows of its experts with a capacity of twice the mean load. */
static double promise(const qd_search *s, qd_candidate c)
{
    const qd_model *m = &s->model;
    choose_schedule(s, &c);
    c.micro = 1;
    c.zero = qd_candidate_dp(s, &c) * c.cp > 1;
    double memory = (double)s->cluster.accelerator.memory, least = least_bytes(s, &c), inputs = input_bytes(s, &c);
    double kept = 17.0 + (m->moe.experts > 0 ? 6.0 * m->moe.per_token * (double)(m->hidden + m->moe.ffn) / (double)m->hidden : 0.0);
    double again = least + (kept - 1.0) * inputs <= memory         ? 1.0
                   : least + (0.6 * kept - 1.0) * inputs <= memory ? 1.03
                   : least <= memory                               ? 1.33
                                                                   : 4.0;
    return bound(s, &c, false) * again * (1.0 + 0.02 * log2(c.tp) + 0.02 * log2(c.cp));
}

/* Experts are split only if each already has its own rank, or if the user requests it. */
static qd_status note_experts(qd_search *s, qd_candidate c, axes_list *a)
{
    int64_t ep, etp, room = s->gpus / c.pp;
    int dp = qd_candidate_dp(s, &c);
    if (s->gpus % (c.tp * c.cp * c.pp) != 0 || (s->given_dp > 0 && dp != s->given_dp))
        return QD_OK;
    if (s->batch % dp != 0) {
        s->uneven_dp = s->uneven_dp == 0 || dp < s->uneven_dp ? dp : s->uneven_dp;
        return QD_OK;
    }
    s->axes_found = true;
    int experts = s->model.moe.experts;
    /* What the user has set is tried even if it is impossible, so that the refusal gives the
     * reason. */
    bool given = qd_options_is_set(s->options, "parallel.ep") || qd_options_is_set(s->options, "parallel.etp");
    for (int i = 0; (ep = nth(s, "parallel.ep", i, 1, experts > 0 ? experts : 1)) > 0; i++) {
        if (!given && (ep > room || (experts > 0 && experts % ep != 0)))
            continue;
        int64_t most = experts > 0 && ep == experts ? s->most_tp : 1;
        for (int j = 0; (etp = nth(s, "parallel.etp", j, 1, most)) > 0; j++) {
            c.ep = (int)ep;
            c.etp = (int)etp;
            c.seconds = promise(s, c);
            if (given || ep * etp <= room)
                QD_TRY(note(a, &c));
        }
    }
    return QD_OK;
}

/* Long sequences are split down to 4,096 tokens; if there are too few sequences for the
 * accelerators, down to 512. */
static int64_t most_cp(const qd_search *s)
{
    bool few = s->batch < s->most_tp || 2 * s->batch * s->most_tp <= s->gpus;
    int64_t most = few ? s->seq / 512 : s->seq >= 16384 ? s->seq / 4096 : 1;
    return most < 1 ? 1 : most < 32 ? most : 32;
}

static qd_status note_axes(qd_search *s, axes_list *a)
{
    int64_t tp, cp, pp;
    for (int k = 0; (cp = nth(s, "parallel.cp", k, 1, most_cp(s))) > 0; k++)
        for (int i = 0; (tp = nth(s, "parallel.tp", i, 1, s->most_tp)) > 0; i++)
            for (int j = 0; (pp = nth(s, "parallel.pp", j, 1, s->model.layers < 64 ? s->model.layers : 64)) > 0; j++)
                if (tp * cp * pp <= s->gpus)
                    QD_TRY(note_experts(s, (qd_candidate){.tp = (int)tp, .cp = (int)cp, .pp = (int)pp, .vpp = 1, .ep = 1, .etp = 1,
                                                          .schedule = "", .offload = s->offload,
                                                          .pieces = (int)nth(s, "parallel.tp_overlap", 0, tp > 1 ? PIECES : 1, 64)}, a));
    return QD_OK;
}

static void sort(qd_candidate *list, int count)
{
    if (count > 0) /* an empty list may be NULL */
        qsort(list, (size_t)count, sizeof *list, qd_candidate_order);
}

static qd_status look_at_all(qd_search *s)
{
    axes_list a = {0};
    qd_status status = note_axes(s, &a);
    sort(a.list, a.count);
    double promised = 0.0, best = 0.0; /* of the best so far */
    for (int i = 0; i < a.count && status == QD_OK && !is_spent(s, LOOK_WORK); i++) {
        if (promised > 0.0 && a.list[i].seconds > PROMISING * promised)
            break;
        status = look(s, a.list[i]);
        if (s->best > 0.0 && s->best != best) {
            best = s->best;
            promised = a.list[i].seconds;
        }
    }
    free(a.list);
    return status;
}

/* A layout may appear from the coarse pass and from a later try: keep the exact one. */
static void drop_repeats(qd_search *s)
{
    int kept = 0;
    for (int i = 0, k; i < s->count; i++) {
        for (k = 0; k < kept && !qd_candidate_same(&s->list[k], &s->list[i]); k++)
            continue;
        if (k == kept)
            s->list[kept++] = s->list[i];
        else if (s->list[k].rough && !s->list[i].rough)
            s->list[k] = s->list[i];
    }
    s->count = kept;
}

/* Refinements with a small effect, for the best layouts: the number of pieces of tp's GEMMs, and
 * experts split in two instead of spread over twice the ranks. */
static qd_status refine(qd_search *s)
{
    enum { BEST = 6 };
    static const int pieces[] = {1, 2, 8};
    sort(s->list, s->count);
    for (int i = 0, best = s->count < BEST ? s->count : BEST; i < best; i++) {
        if (s->list[i].refined)
            continue;
        s->list[i].refined = true;
        for (size_t j = 0; j < sizeof pieces / sizeof *pieces && s->list[i].tp > 1 && !qd_options_is_set(s->options, "parallel.tp_overlap");
             j++) {
            qd_candidate c = s->list[i]; /* the list may be reallocated */
            c.rough = false;
            c.pieces = pieces[j];
            if (!is_spent(s, REFINE_WORK))
                QD_TRY(try_recompute(s, &c));
        }
        bool free_ = !qd_options_is_set(s->options, "parallel.ep") && !qd_options_is_set(s->options, "parallel.etp");
        if (free_ && s->list[i].ep > 1 && s->list[i].etp < s->most_tp && !is_spent(s, REFINE_WORK)) {
            qd_candidate c = s->list[i];
            c.rough = false;
            c.ep /= 2;
            c.etp *= 2;
            QD_TRY(try_recompute(s, &c));
        }
    }
    return QD_OK;
}

/* Whether it would be close to the best with most of its bubble removed. */
static bool is_worth_more(const qd_search *s, const qd_candidate *seen)
{
    return seen->seconds * (1.0 - BUBBLE_GONE * seen->report.bubble_seconds / seen->report.step_seconds) <= WORTH * s->best;
}

static qd_candidate axes_of(const qd_candidate *seen)
{
    return (qd_candidate){.tp = seen->tp, .cp = seen->cp, .pp = seen->pp, .vpp = 1, .ep = seen->ep, .etp = seen->etp,
                          .pieces = seen->pieces, .cp_mode = seen->cp_mode, .offload = seen->offload, .schedule = ""};
}

/* Searches everything but the axes for promising layouts; the best first. */
static qd_status look_closer(qd_search *s)
{
    sort(s->list, s->count);
    int looked = s->count;
    s->until = MOST_WORK;
    for (int i = 0; i < looked && !is_spent(s, s->until); i++)
        if (s->list[i].looked && is_worth_more(s, &s->list[i]))
            QD_TRY(try_schedules(s, axes_of(&s->list[i])));
    return QD_OK;
}

/* Sorts and removes duplicates. Extrapolated times among the first are replaced by exact ones; that
 * of the very first always. */
static qd_status settle(qd_search *s)
{
    enum { FIRST = 10 };
    bool changed = true;
    while (changed) {
        changed = false;
        drop_repeats(s);
        sort(s->list, s->count);
        for (int i = 0; i < s->count && i < FIRST && !changed; i++) {
            if (!s->list[i].rough || (i > 0 && is_spent(s, SETTLE_WORK)))
                continue;
            qd_candidate c = s->list[i];
            c.rough = false;
            QD_TRY(qd_search_try(s, &c));
            s->list[i] = c;
            changed = true;
        }
    }
    return QD_OK;
}

/* dualpipe_v takes about the time of zb_v with less memory. It is tried last, the best layouts
 * first, so that a search ended by the clock finds what it would find without it. */
static qd_status try_pairs(qd_search *s)
{
    if (qd_options_is_set(s->options, "parallel.schedule") || (s->given_vpp > 0 && s->given_vpp != 2))
        return QD_OK;
    int seen = s->count;
    s->until = s->work + PAIRS_WORK;
    for (int i = 0, k; i < seen; i++) {
        qd_candidate c = axes_of(&s->list[i]);
        for (k = 0; k < i && !qd_candidate_same_axes(&s->list[k], &c); k++)
            continue;
        if (k < i || c.pp == 1 || 2 * c.pp > s->model.layers || s->batch / qd_candidate_dp(s, &c) < 2 * c.pp ||
            !is_worth_more(s, &s->list[i]))
            continue;
        if (is_spent(s, s->until))
            break;
        c.schedule = "dualpipe_v";
        QD_TRY(try_zero(s, c));
    }
    if (s->count == seen)
        return QD_OK;
    QD_TRY(refine(s));
    return settle(s);
}

static qd_status search_all(qd_search *s)
{
    QD_TRY(look_at_all(s));
    QD_TRY(look_closer(s));
    QD_TRY(refine(s));
    QD_TRY(settle(s));
    return try_pairs(s);
}

static qd_status fill_report(qd_search *s)
{
    qd_plan_draft *r = s->report;
    if (s->count == 0 && s->halted)
        return QD_FAIL(QD_INTERRUPTED, "the search was stopped before it found a layout");
    if (s->count == 0)
        return qd_plan_explain_none(s);
    r->tried = s->count;
    for (int i = 0; i < s->count && r->count < QD_PLAN_CHOICES; i++)
        qd_search_choice(s, &s->list[i], &r->choices[r->count++]);
    r->best = s->list[0].report;
    qd_plan_explain(s);
    return QD_OK;
}

static qd_status set_up(qd_search *s)
{
    qd_config config;
    QD_TRY(qd_cluster_resolve(s->options, &s->cluster));
    s->memory = s->cluster.accelerator.memory;
    s->reserve = (int64_t)(qd_options_float(s->options, "accelerator.reserve") * (double)s->memory);
    s->cluster.accelerator.memory -= s->reserve;
    QD_TRY(qd_cluster_config(s->options, &s->cluster, &config));
    s->model = config.model;
    /* AdamW's two moments in fp32, and the master weights of narrower parameters, unless they are
     * in host memory. */
    s->state_bytes =
        config.strategy.optimizer == QD_OPTIM_ADAMW && !config.strategy.offload ? 8.0 + qd_master_bytes(&config.strategy) : 0.0;
    s->param_bytes = (double)qd_dtype_size(config.strategy.param);
    s->grad_bytes = (double)qd_dtype_size(config.strategy.grad);
    s->given_dp = config.degrees[QD_AXIS_DP];
    s->given_vpp = (int)qd_options_int(s->options, "parallel.virtual_stages");
    s->by_node = config.by_node;
    s->gpus = config.world;
    s->batch = config.global_batch;
    s->seq = config.strategy.seq;
    /* Tensor parallelism stays inside the fastest domain: a node, or one dimension of a torus. */
    s->most_tp = s->cluster.network == QD_NETWORK_TORUS ? s->cluster.dims[0] : s->cluster.node_size;
    s->most_tp = s->most_tp > 16 ? 16 : s->most_tp;
    return QD_OK;
}

/* A complete search; the caller frees the list. */
static qd_status search(qd_search *s)
{
    s->report->stopped = false;
    QD_TRY(set_up(s));
    return search_all(s);
}

/* If nothing fits: searches layouts with optimizer state in host memory, unless the user has set
 * its placement. */
static qd_status search_offloaded(qd_search *s, qd_options **options)
{
    if (s->count > 0 || s->halted || s->report->too_large == 0 || !s->may_offload || qd_options_is_set(s->options, "train.offload"))
        return QD_OK;
    qd_search other = {.report = s->report, .begin = s->begin, .offload = true, .watch = s->watch};
    qd_plan_draft before = *s->report;
    QD_TRY(qd_options_copy(s->options, options));
    QD_TRY(qd_search_set(*options, "train.offload", "optimizer"));
    other.options = *options;
    qd_status status = search(&other);
    if (status == QD_OK && other.count > 0) {
        other.reserve = s->reserve;
        free(s->list);
        *s = other;
        return QD_OK;
    }
    free(other.list);
    s->halted = other.halted;
    *s->report = before;
    s->offload_tried = true;
    if (status != QD_USAGE && status != QD_UNSUPPORTED)
        return status;
    qd_error_clear(); /* this optimizer has no state, or keeps it elsewhere */
    return QD_OK;
}

qd_status qd_plan_search(const qd_options *options, const qd_options *layout, bool may_offload, const qd_search_watch *watch,
                         qd_plan_draft *draft)
{
    double begin = qd_clock_now();
    memset(draft, 0, sizeof *draft);
    qd_search s = {.options = options, .report = draft, .begin = begin, .may_offload = may_offload, .watch = watch};
    qd_options *offloaded = NULL;
    qd_status status = search(&s);
    if (status == QD_OK)
        status = search_offloaded(&s, &offloaded);
    if (status == QD_OK)
        status = fill_report(&s);
    if (status == QD_OK && layout)
        status = qd_search_against(&s, layout);
    free(s.list);
    qd_options_destroy(offloaded);
    draft->wall_seconds = qd_clock_now() - begin;
    return status;
}

qd_status qd_plan_watched(const qd_options *options, const qd_options *layout, bool (*call)(void *, const qd_plan_progress *),
                          void *context, qd_plan_report **report)
{
    const qd_search_watch watch = {.call = call, .context = context};
    qd_plan_draft *draft = NULL;
    *report = NULL;
    QD_TRY(qd_plan_draft_create(&draft));
    return qd_plan_publish(qd_plan_search(options, layout, true, call ? &watch : NULL, draft), draft, report);
}

qd_status qd_plan_beside(const qd_options *options, const qd_options *layout, qd_plan_report **report)
{
    return qd_plan_watched(options, layout, NULL, NULL, report);
}

qd_status qd_plan(const qd_options *options, qd_plan_report **report)
{
    return qd_plan_beside(options, NULL, report);
}
