/* Context parallelism: how the positions of a sequence are divided over the ranks of cp. Loading,
 * rotary and learned positions, dropout, attention and communication all use the mapping defined
 * here. */
#ifndef QD_SPEC_LAYOUT_CONTEXT_H
#define QD_SPEC_LAYOUT_CONTEXT_H

#include "base/runs.h"

#include <quadrille/status.h>
#include <quadrille/types.h>

/* A sequence is cut into 2·cp chunks (qd_slice; uneven where 2·cp does not divide it). Rank r holds
 * chunks r and 2·cp - 1 - r, one early and one late, so that causal attention costs every rank
 * about the same (zigzag). */
#define QD_CONTEXT_RUNS 2

/* Fills `runs` with the positions of rank `coord`, in ascending order, and returns the number of
 * runs. Adjacent chunks are merged into one run. */
int qd_context_runs(int64_t seq, int cp, int coord, qd_row_run runs[QD_CONTEXT_RUNS]);

/* Rows of one sequence on rank `coord`. */
int64_t qd_context_rows(int64_t seq, int cp, int coord);

/* The largest number of rows of one sequence that any rank holds. */
int64_t qd_context_most_rows(int64_t seq, int cp);

/* Pairs of a query of rank `coord` and a key of rank `of` that attention with this window computes,
 * in one sequence; 0: causal attention without one. Pairs on the borders count half, as in seq² / 2
 * of causal attention. */
double qd_context_pairs(int64_t seq, int cp, int coord, int of, int64_t window);

/* The rounds of a ring. In round t, ranks have the keys of the rank t ranks back. Rounds in which
 * no query of any rank has a key in its window are left out; 0: without a window, all take place.
 * qd_context_next_round: the round after `round`; cp: there is none, and the next stop of a part is
 * its owner. qd_context_rounds: how many rounds there are before `round`. */
int qd_context_next_round(int64_t seq, int cp, int64_t window, int round);
int qd_context_rounds(int64_t seq, int cp, int64_t window, int round);

/* How a rank's queries reach the keys of other ranks. Ring: keys and values pass from rank to rank.
 * Gather: every rank gathers all of them. Ulysses: an all-to-all exchanges heads for positions. */
typedef enum qd_cp_mode { QD_CP_RING, QD_CP_GATHER, QD_CP_ULYSSES } qd_cp_mode;

/* Ulysses: the kv heads that each rank receives: its share of them, or one that it shares with
 * other ranks. */
int qd_context_kv_share(int cp, int kv_heads);

/* Selects what LOAD keeps of `batch` whole sequences. in: (3, batch, seq) tokens, targets, document
 * starts. out: this rank's rows of each, their positions, and if `whole`, the document starts of
 * the whole sequences. */
void qd_context_select(int64_t batch, int64_t seq, int cp, int coord, bool whole, const int32_t *in, int32_t *out);
/* The same for further values of each position: in (parts, batch, seq), out (parts, this rank's
 * rows). */
void qd_context_select_parts(int64_t batch, int64_t seq, int cp, int coord, int parts, const int32_t *in, int32_t *out);
/* Writes the input of module k = 1 .. `ahead` that predicts further tokens, from the same `in`:
 * this rank's rows of tokens k further on, and of targets k further on; -1 where these are in
 * another document, or behind the sequence. out: (ahead, 2, batch, rows). */
void qd_context_ahead(int64_t batch, int64_t seq, int cp, int coord, int ahead, const int32_t *in, int32_t *out);
/* Number of int32 elements in `out` of qd_context_select. */
int64_t qd_context_input(int64_t batch, int64_t seq, int cp, int coord, bool whole);

/* Bytes that the ranks of one group send for one layer and micro-batch of `tokens` tokens, forward
 * and backward, by the closed formula. On a rank of tp, q: columns of queries and results; kv_heads
 * heads with kv_dim columns of keys and values each. size: bytes per activation element. rounds: of
 * the ring. text: the formula for one step. */
typedef struct qd_context_theory {
    int64_t forward, backward;
    const char *text;
} qd_context_theory;
qd_context_theory qd_context_bytes(qd_cp_mode mode, int cp, int rounds, int64_t tokens, int64_t q, int kv_heads, int64_t kv_dim,
                                   int64_t size);

/* QD_USAGE when a sequence is too short to divide over cp ranks. */
qd_status qd_context_check(int64_t seq, int cp);
#endif
