/* How long the search for the fastest algorithm of each GEMM may take, so that all searches
 * together stay within their time limit. */
#ifndef QD_DEVICE_TUNE_SHARE_H
#define QD_DEVICE_TUNE_SHARE_H

#include "device/device.h"

typedef struct qd_tune_item {
    qd_matmul_args call;
    double cost;    /* approximate seconds per step: qd_tune_cost times calls */
    bool known;     /* already has a choice */
    bool rough;     /* it has one that was found under a time limit */
    double seconds; /* out: time for its search; 0: no search, the library's heuristic decides */
} qd_tune_item;

/* Approximate seconds of one call on a large GPU: good enough to compare the GEMMs of a step. */
double qd_tune_cost(const qd_matmul_args *call);

/* Sorts the items by ascending cost, so that time left over by one search goes to a more important
 * one, and shares out `seconds` among the items that are not known, in proportion to the square
 * root of their cost: trying an algorithm does not take longer because a GEMM is called more often.
 * The share of known items is not used; GEMMs below 0.4 % of the cost are left to the library.
 * INFINITY: no limit for any search. Returns the number of items to search for. */
int qd_tune_share(qd_tune_item *items, int count, double seconds);
#endif
