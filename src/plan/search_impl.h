/* Inside the planner: a layout that is tried. */
#ifndef QD_PLAN_SEARCH_IMPL_H
#define QD_PLAN_SEARCH_IMPL_H

#include "sim/step.h"

#include <quadrille/plan.h>

/* One point of the search. pieces: of products beside the exchanges of tp (parallel.tp_overlap). */
typedef struct qd_candidate {
    int tp, cp, pp, vpp, ep, etp, zero, recompute, pieces;
    int cp_mode; /* qd_cp_mode; one rank of cp: the first */
    int64_t micro;
    bool offload; /* optimizer state in host memory */
    const char *schedule;
    bool fits, looked; /* looked: it stands for its axes in the first look */
    bool rough;        /* seconds from one short step and the textbook's bubble */
    bool refined;      /* what changes little has been tried for it */
    double seconds;
    qd_sim_report report; /* continued from short steps, if the real one has many micro-batches */
} qd_candidate;

typedef struct qd_search {
    const qd_options *options;
    qd_cluster cluster;
    qd_model model;
    int gpus, most_tp;
    int given_dp, given_vpp; /* by the user; not positive: any */
    bool by_node;            /* rows go to a node once */
    int64_t batch, seq;
    double param_bytes, grad_bytes, state_bytes; /* per parameter; state: at least */
    qd_candidate *list;
    int count, capacity;
    double best; /* seconds */
    bool offload; /* all candidates keep optimizer state in host memory, which is not what the user asked for */
    bool may_offload, offload_tried;
    int64_t memory, reserve; /* bytes of an accelerator, and of them those that are kept free: cluster has the rest */
    int64_t work;  /* actions built and simulated so far */
    int64_t until; /* and how many there may be, for the tries of now */
    double begin;  /* clock */
    int64_t least_memory;
    int uneven_dp; /* the fewest data-parallel ranks among those that the global batch does not divide among; 0: none */
    bool axes_found; /* there are axes that divide the accelerators and the batch */
    qd_plan_report *report;
} qd_search;

enum { QD_CP_MODES = 3 };
extern const char *const qd_recompute_names[QD_RECOMPUTE_COUNT], *const qd_cp_mode_names[QD_CP_MODES];

/* ---- candidate.c ---- */

int qd_candidate_dp(const qd_search *search, const qd_candidate *candidate);
/* Sets a key to what is printed; QD_UNSUPPORTED where there is none. */
qd_status qd_search_set(qd_options *options, const char *key, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Its keys. */
qd_status qd_candidate_apply(const qd_candidate *candidate, qd_options *options);
bool qd_candidate_same_axes(const qd_candidate *a, const qd_candidate *b);
bool qd_candidate_same(const qd_candidate *a, const qd_candidate *b);
int qd_candidate_order(const void *a, const void *b); /* by time; for qsort */

/* ---- search.c ---- */

/* Builds and simulates a candidate: the recompute it names. QD_OK and `fits` false when memory does
 * not suffice. */
qd_status qd_search_try(qd_search *search, qd_candidate *candidate);
/* The same for keys that are set already; `anyway`: also what does not fit. */
qd_status qd_search_simulate(qd_search *search, qd_options *options, bool anyway, qd_candidate *candidate);
/* Buckets of gradients, unless the user has chosen them. */
qd_status qd_search_buckets(qd_options *options, int tp, int pp);
void qd_search_choice(const qd_search *search, const qd_candidate *candidate, qd_plan_choice *choice);

/* qd_plan() without layouts that keep optimizer state in host memory. */
qd_status qd_plan_on_device(const qd_options *options, qd_plan_report *report);

/* The layout in `options` beside the first choice. */
qd_status qd_search_against(qd_search *search, const qd_options *options);

/* The best candidate with these values; 0 (zero: -1) stands for any. NULL: none. */
const qd_candidate *qd_search_nearest(const qd_search *search, int tp, int pp, int zero, int64_t micro, int cp, int ep);

void qd_plan_explain(qd_search *search);
/* Why the list is empty; never QD_OK. */
qd_status qd_plan_explain_none(const qd_search *search);
void qd_candidate_layout(const qd_search *search, const qd_candidate *c, char *text, size_t size);
#endif
