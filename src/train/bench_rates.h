/* What ranks of one thread reach on all cores at once: products by their shape, exchanges by their size, and what it costs them to meet.
 * Called on every rank of a team; all see the result, which is shared. */
#ifndef QD_TRAIN_BENCH_RATES_H
#define QD_TRAIN_BENCH_RATES_H

#include "train/trainer.h"

#include <quadrille/bench.h>

enum { QD_RATE_SHAPES = 10, QD_RATE_RUNS = 9 };
enum { QD_RATE_FORWARD, QD_RATE_INPUTS, QD_RATE_WEIGHTS, QD_RATE_KINDS };
enum { QD_RATE_SUM, QD_RATE_GATHER, QD_RATE_SCATTER, QD_RATE_SEND, QD_RATE_EXCHANGES };

typedef struct qd_rates {
    int64_t rows, hidden, ffn; /* in: the shapes are made of these, their halves and quarters */
    int ranks;                 /* in */
    qd_bench_product product[QD_RATE_KINDS];
    qd_bench_exchange exchange[QD_RATE_EXCHANGES];
    double work;               /* seconds of all these products on one rank, mean over ranks, median over runs */
    double wall;               /* from the first to the last, the ranks meeting after each: median over runs */
    double walls[QD_RATE_RUNS];
    double *seconds;           /* (ranks, QD_RATE_RUNS, QD_RATE_KINDS, QD_RATE_SHAPES), by the caller: of single products */
} qd_rates;

qd_status qd_rates_measure(qd_trainer *trainer, qd_comm *world, void *rates);
/* Seconds that a meeting of the ranks costs where the products alone would take `work`. */
double qd_rates_meeting(const qd_rates *rates, double work);
/* Products alone. */
qd_status qd_rates_products(qd_trainer *trainer, qd_comm *world, void *rates);
#endif
