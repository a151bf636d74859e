/* Context parallelism: the positions of a sequence are shared out over the ranks of cp. This is the
 * one place that says which rank holds which; loading, rotary and learned positions, dropout,
 * attention and communication go by it. */
#ifndef QD_SPEC_LAYOUT_CONTEXT_H
#define QD_SPEC_LAYOUT_CONTEXT_H

#include "base/runs.h"

#include <quadrille/status.h>
#include <quadrille/types.h>

/* A sequence is cut into 2·cp chunks (qd_slice: uneven where they do not divide it). Rank r holds
 * chunks r and 2·cp - 1 - r, an early and a late one, so that all see about the same number of
 * earlier positions (zigzag). */
#define QD_CONTEXT_RUNS 2

/* The positions of rank `coord`, in ascending order: fills runs and returns how many there are
 * (chunks that touch are one). */
int qd_context_runs(int64_t seq, int cp, int coord, qd_row_run runs[QD_CONTEXT_RUNS]);

/* Rows of one sequence on rank `coord`. */
int64_t qd_context_rows(int64_t seq, int cp, int coord);

/* The most rows of one sequence that any rank holds. */
int64_t qd_context_most_rows(int64_t seq, int cp);

/* How a rank's queries meet the keys of the others: keys and values pass from rank to rank; all
 * ranks get all of them; or heads are exchanged for positions. */
typedef enum qd_cp_mode { QD_CP_RING, QD_CP_GATHER, QD_CP_ULYSSES } qd_cp_mode;

/* Ulysses: columns of keys that each rank gets of `kv`: its share of the heads, or the one that it
 * reads together with others. */
int64_t qd_context_kv_share(int cp, int64_t kv, int64_t head_dim);

/* What LOAD makes of `batch` whole sequences. in: (3, batch, seq) tokens, targets, document starts.
 * out: the rank's rows of each, their positions, and if `whole`, the document starts of whole
 * sequences. */
void qd_context_select(int64_t batch, int64_t seq, int cp, int coord, bool whole, const int32_t *in, int32_t *out);
/* int32 of out. */
int64_t qd_context_input(int64_t batch, int64_t seq, int cp, int coord, bool whole);

/* Bytes that the ranks of one group send for one layer and micro-batch of `tokens` tokens, by the
 * closed formula, forward and backward. q, kv: columns of queries and of keys on a rank of tp;
 * size: bytes of an activation. text: the formula of a step. */
typedef struct qd_context_theory {
    int64_t forward, backward;
    const char *text;
} qd_context_theory;
qd_context_theory qd_context_bytes(qd_cp_mode mode, int cp, int64_t tokens, int64_t q, int64_t kv, int64_t head_dim, int64_t size);

/* QD_USAGE when a sequence is too short to be shared out. */
qd_status qd_context_check(int64_t seq, int cp);
#endif
