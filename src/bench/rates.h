/* What ranks of one thread reach on all cores at once: products by their shape, attention by the
 * length of its parts, exchanges by their size, and what it costs ranks to meet. One run takes a
 * tenth of a second; runs are taken between other measurements, so that a machine whose speed moves
 * is the same for all of them, and medians are taken over the runs. */
#ifndef QD_BENCH_RATES_H
#define QD_BENCH_RATES_H

#include "train/exec/team.h"

#include <quadrille/bench.h>

enum { QD_RATE_SHAPES = 10 };
enum { QD_RATE_FORWARD, QD_RATE_INPUTS, QD_RATE_WEIGHTS, QD_RATE_KINDS };
enum { QD_RATE_SUM, QD_RATE_GATHER, QD_RATE_SCATTER, QD_RATE_SEND, QD_RATE_EXCHANGES };
enum { QD_RATE_CUTS = 3 }; /* of a sequence, for attention: whole, over two ranks, over four */

typedef struct qd_rates qd_rates;
/* On a team that outlives it. met: ranks that meet between products; alone: attention and exchanges
 * are left out; runs: the most. */
qd_status qd_rates_create(qd_team *team, const qd_config *config, int met, bool alone, int runs, qd_rates **rates);
void qd_rates_destroy(qd_rates *rates); /* NULL is legal */

/* One run, on all ranks. */
qd_status qd_rates_run(qd_rates *rates);

/* Of the runs so far. */
void qd_rates_product(const qd_rates *rates, int kind, qd_bench_product *product);
void qd_rates_exchange(const qd_rates *rates, int kind, qd_bench_exchange *exchange);
/* Keys of a part at which it takes twice the time of whole attention, per FLOP: time grows as 1 +
 * this / keys. */
double qd_rates_part(const qd_rates *rates, bool backward);
/* Seconds by which products take longer when the ranks meet after each of them, per meeting. */
double qd_rates_meeting(const qd_rates *rates);

/* How much longer ranks that share cores take for their products in turn, without meeting, than the
 * ranks of a core each do: 0 and up. */
double qd_rates_turns(const qd_rates *crowd, const qd_rates *apart);

/* The middle one; sorts the values. */
double qd_rates_median(double *values, int count);

/* Seconds of attention over sequences that are cut over 1, 2 and 4 ranks, as rank 0 of these sees
 * it, forward and backward. Sequences too short to be cut so take no time. */
typedef struct qd_rate_attention qd_rate_attention;
qd_status qd_rate_attention_create(const qd_model *model, const qd_strategy *strategy, qd_rate_attention **attention);
void qd_rate_attention_destroy(qd_rate_attention *attention);
qd_status qd_rate_attention_run(const qd_rate_attention *attention, qd_device *device, double seconds[2][QD_RATE_CUTS]);
#endif
