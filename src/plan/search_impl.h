/* Internals of the planner: candidates and the state of the search. */
#ifndef QD_PLAN_SEARCH_IMPL_H
#define QD_PLAN_SEARCH_IMPL_H

#include "sim/step.h"

#include <quadrille/plan.h>

/* One candidate. pieces: of GEMMs overlapped with the exchanges of tp (parallel.tp_overlap). */
typedef struct qd_candidate {
    int tp, cp, pp, vpp, ep, etp, zero, recompute, pieces;
    int cp_mode; /* qd_cp_mode; the first if cp is 1 */
    int64_t micro;
    bool offload; /* optimizer state in host memory */
    const char *schedule;
    bool fits, looked; /* looked: it represents its axes in the coarse pass */
    bool rough;        /* seconds from one short step and the theoretical bubble */
    bool refined;      /* small refinements have been tried for it */
    double seconds;
    qd_sim_report report; /* extrapolated from short steps if the real one has many micro-batches */
} qd_candidate;

/* A report that is being made. qd_plan_publish() makes a public one of it. */
enum { QD_PLAN_CHOICES = 32, QD_PLAN_REASONS = 12 };
typedef struct qd_plan_draft {
    qd_plan_choice choices[QD_PLAN_CHOICES];
    int count;
    qd_sim_report best;
    char reasons[QD_PLAN_REASONS][240];
    int reason_count;
    char next[240];
    int tried, too_large, refused;
    char refusal[200];
    double wall_seconds;
    bool asked; /* about the layout below */
    qd_plan_against against;
    qd_plan_choice against_choice;
    char nearest[256];
    bool stopped, late;
} qd_plan_draft;

typedef struct qd_search {
    const qd_options *options;
    qd_cluster cluster;
    qd_model model;
    int gpus, most_tp;
    int given_dp, given_vpp; /* set by the user; not positive: any */
    bool by_node;            /* rows are sent to a node once */
    int64_t batch, seq;
    double param_bytes, grad_bytes, state_bytes; /* per parameter; state: lower bound */
    qd_candidate *list;
    int count, capacity;
    double best; /* seconds */
    bool offload; /* all candidates keep optimizer state in host memory, although the user did not request it */
    bool may_offload, offload_tried;
    int64_t memory, reserve; /* bytes of an accelerator, and those kept free; `cluster` has the remainder */
    int64_t work;  /* actions built and simulated so far */
    int64_t until; /* limit on `work` for the current phase */
    double begin;  /* clock */
    int64_t least_memory;
    int uneven_dp; /* fewest data-parallel ranks among which the global batch does not divide; 0: none */
    bool axes_found; /* some axes divide the accelerators and the batch */
    qd_plan_draft *report;
    const struct qd_search_watch *watch; /* NULL: none */
    bool halted; /* the watch has ended the search */
} qd_search;

/* See qd_plan_watched(). */
typedef struct qd_search_watch {
    bool (*call)(void *context, const qd_plan_progress *progress);
    void *context;
} qd_search_watch;

enum { QD_CP_MODES = 3 };
extern const char *const qd_recompute_names[QD_RECOMPUTE_COUNT], *const qd_cp_mode_names[QD_CP_MODES];

/* candidate.c */

int qd_candidate_dp(const qd_search *search, const qd_candidate *candidate);
/* Sets a key to the formatted value; QD_UNSUPPORTED if there is no such key. */
qd_status qd_search_set(qd_options *options, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Sets the keys of a candidate. */
qd_status qd_candidate_apply(const qd_candidate *candidate, qd_options *options);
bool qd_candidate_same_axes(const qd_candidate *a, const qd_candidate *b);
bool qd_candidate_same(const qd_candidate *a, const qd_candidate *b);
int qd_candidate_order(const void *a, const void *b); /* by time; for qsort */

/* search.c */

/* Builds and simulates a candidate with its own recompute mode. QD_OK with `fits` false if memory
 * does not suffice. */
qd_status qd_search_try(qd_search *search, qd_candidate *candidate);
/* The same for keys that are already set; `anyway`: also if it does not fit. */
qd_status qd_search_simulate(qd_search *search, qd_options *options, bool anyway, qd_candidate *candidate);
/* Sets the bucket size of gradients, unless the user has. */
qd_status qd_search_buckets(qd_options *options, int tp, int pp);
void qd_search_choice(const qd_search *search, const qd_candidate *candidate, qd_plan_choice *choice);

/* layout NULL: none to compare with. may_offload: where nothing else fits, layouts that keep
 * optimizer state in host memory. watch: may be NULL. */
qd_status qd_plan_search(const qd_options *options, const qd_options *layout, bool may_offload, const qd_search_watch *watch,
                         qd_plan_draft *draft);

/* Memory for a draft, tens of kilobytes; what it becomes is freed with it. */
qd_status qd_plan_draft_create(qd_plan_draft **draft);
void qd_plan_draft_destroy(qd_plan_draft *draft); /* NULL is legal */
/* The draft becomes part of a report or, after a failure, is freed, and *report is NULL. Returns
 * `status`. */
qd_status qd_plan_publish(qd_status status, qd_plan_draft *draft, qd_plan_report **report);

/* Compares the layout in `options` with the first choice. */
qd_status qd_search_against(qd_search *search, const qd_options *options);

/* The best candidate with these values; 0 (zero: -1) means any. NULL: none. */
const qd_candidate *qd_search_nearest(const qd_search *search, int tp, int pp, int zero, int64_t micro, int cp, int ep);

void qd_plan_explain(qd_search *search);
/* The reason why the list is empty; never QD_OK. */
qd_status qd_plan_explain_none(const qd_search *search);
void qd_candidate_layout(const qd_search *search, const qd_candidate *c, char *text, size_t size);
#endif
