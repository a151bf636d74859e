/* How long the search for the fastest algorithm of each GEMM may take, so that all searches
 * together end in time. */
#ifndef QD_DEVICE_TUNE_SHARE_H
#define QD_DEVICE_TUNE_SHARE_H

#include "device/device.h"

typedef struct qd_tune_item {
    qd_matmul_args call;
    double cost;    /* seconds of a step that it takes, about (qd_tune_cost, times how often it is made) */
    bool known;     /* its choice is made already */
    double seconds; /* out: for its search; 0: none, the library's favourite does */
} qd_tune_item;

/* Seconds of one call on a large GPU, about: enough to compare GEMMs of a step with each other. */
double qd_tune_cost(const qd_matmul_args *call);

/* Sorts the items, the cheapest first, so that time that a search leaves over goes to one that
 * matters more, and shares out `seconds` among those that are not known: by the root of what they
 * take of a step, because what an algorithm costs to try does not grow with how often a GEMM is
 * made. What is known gives up its part; GEMMs that take less than 0.4 % are left to the library.
 * INFINITY: every search may take as long as it likes. Returns how many are to be searched for. */
int qd_tune_share(qd_tune_item *items, int count, double seconds);
#endif
