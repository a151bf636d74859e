/* Rates of single-threaded ranks with all cores busy: GEMMs by shape, attention by the length of
 * its parts, exchanges by size, and the cost of synchronizing ranks. One run takes a tenth of a
 * second. Runs are interleaved with other measurements, so that a machine whose speed varies
 * affects all of them equally; results are medians over the runs. */
#ifndef QD_BENCH_RATES_H
#define QD_BENCH_RATES_H

#include "train/exec/team.h"

#include <quadrille/bench.h>

enum { QD_RATE_SHAPES = 10 };
enum { QD_RATE_FORWARD, QD_RATE_INPUTS, QD_RATE_WEIGHTS, QD_RATE_KINDS };
enum { QD_RATE_SUM, QD_RATE_GATHER, QD_RATE_SCATTER, QD_RATE_SEND, QD_RATE_EXCHANGES };
enum { QD_RATE_CUTS = 3 }; /* attention of a sequence: whole, over two ranks, over four */

typedef struct qd_rates qd_rates;
/* On a team that outlives it. met: number of ranks that synchronize between GEMMs; alone: without
 * attention and exchanges; runs: the maximum. */
qd_status qd_rates_create(qd_team *team, const qd_config *config, int met, bool alone, int runs, qd_rates **rates);
void qd_rates_destroy(qd_rates *rates); /* NULL is legal */

/* One run, on all ranks. */
qd_status qd_rates_run(qd_rates *rates);

/* Results of the runs so far. */
void qd_rates_product(const qd_rates *rates, int kind, qd_bench_product *product);
void qd_rates_exchange(const qd_rates *rates, int kind, qd_bench_exchange *exchange);
/* Number of keys of a part for which it takes twice the time of whole attention, per FLOP: time
 * grows as 1 + this / keys. */
double qd_rates_part(const qd_rates *rates, bool backward);
/* Extra seconds of GEMMs when the ranks synchronize after each of them, per synchronization. */
double qd_rates_meeting(const qd_rates *rates);

/* How much longer ranks that share cores take for their GEMMs, without synchronizing, than ranks
 * with a core each: 0 and up. */
double qd_rates_turns(const qd_rates *crowd, const qd_rates *apart);

/* The median; sorts the values. */
double qd_rates_median(double *values, int count);

/* Seconds of attention over sequences that are split over 1, 2 and 4 ranks, on rank 0 of these,
 * forward and backward. 0 for sequences that are too short to be split. */
typedef struct qd_rate_attention qd_rate_attention;
qd_status qd_rate_attention_create(const qd_model *model, const qd_strategy *strategy, qd_rate_attention **attention);
void qd_rate_attention_destroy(qd_rate_attention *attention);
qd_status qd_rate_attention_run(const qd_rate_attention *attention, qd_device *device, double seconds[2][QD_RATE_CUTS]);
#endif
