/* Context parallelism: the zigzag assignment of positions to ranks, the selection of a rank's rows,
 * and the communication volume of each mode. */
#include "spec/layout/context.h"

#include <string.h>

int qd_context_runs(int64_t seq, int cp, int coord, qd_row_run runs[QD_CONTEXT_RUNS])
{
    int count = 0;
    int64_t row = 0;
    for (int i = 0; i < 2; i++) {
        int64_t position, length;
        qd_slice(seq, 2 * cp, i == 0 ? coord : 2 * cp - 1 - coord, &position, &length);
        if (length > 0 && count > 0 && runs[count - 1].position + runs[count - 1].count == position)
            runs[count - 1].count += length;
        else if (length > 0)
            runs[count++] = (qd_row_run){row, position, length};
        row += length;
    }
    return count;
}

int64_t qd_context_rows(int64_t seq, int cp, int coord)
{
    qd_row_run runs[QD_CONTEXT_RUNS];
    int64_t rows = 0;
    for (int i = qd_context_runs(seq, cp, coord, runs) - 1; i >= 0; i--)
        rows += runs[i].count;
    return rows;
}

int64_t qd_context_most_rows(int64_t seq, int cp)
{
    int64_t most = 0;
    for (int coord = 0; coord < cp; coord++) {
        int64_t rows = qd_context_rows(seq, cp, coord);
        most = rows > most ? rows : most;
    }
    return most;
}

/* Area between the diagonal that starts at (c, c) and the axis, for queries from `from` to `to`. */
static double triangle(int64_t from, int64_t to, int64_t c)
{
    double low = from > c ? (double)(from - c) : 0.0, high = to > c ? (double)(to - c) : 0.0;
    return (high * high - low * low) / 2.0;
}

double qd_context_pairs(int64_t seq, int cp, int coord, int of, int64_t window)
{
    qd_row_run queries[QD_CONTEXT_RUNS], keys[QD_CONTEXT_RUNS];
    int rows = qd_context_runs(seq, cp, coord, queries), cols = qd_context_runs(seq, cp, of, keys);
    double pairs = 0.0;
    for (int i = 0; i < rows; i++) {
        int64_t from = queries[i].position, to = from + queries[i].count;
        for (int j = 0; j < cols; j++) {
            int64_t first = keys[j].position, end = first + keys[j].count;
            pairs += triangle(from, to, first) - triangle(from, to, end); /* keys up to the query */
            if (window > 0)
                pairs -= triangle(from, to, first + window) - triangle(from, to, end + window); /* those before the window */
        }
    }
    return pairs;
}

/* Whether a query of rank `coord` has a key of rank `of` in its window. */
static bool meets(int64_t seq, int cp, int coord, int of, int64_t window)
{
    qd_row_run queries[QD_CONTEXT_RUNS], keys[QD_CONTEXT_RUNS];
    int rows = qd_context_runs(seq, cp, coord, queries), cols = qd_context_runs(seq, cp, of, keys);
    bool met = false;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            int64_t nearest = queries[i].position - (keys[j].position + keys[j].count - 1);
            int64_t farthest = queries[i].position + queries[i].count - 1 - keys[j].position;
            met = met || (farthest >= 0 && nearest < window); /* distances are all numbers between the two */
        }
    return met;
}

int qd_context_next_round(int64_t seq, int cp, int64_t window, int round)
{
    for (int t = round + 1; t < cp; t++)
        for (int coord = 0; coord < cp; coord++)
            if (window == 0 || meets(seq, cp, coord, (coord + cp - t) % cp, window))
                return t;
    return cp;
}

int qd_context_rounds(int64_t seq, int cp, int64_t window, int round)
{
    int count = 0;
    if (window == 0)
        return round;
    for (int t = 0; t < round; t = qd_context_next_round(seq, cp, window, t))
        count++;
    return count;
}

int64_t qd_context_input(int64_t batch, int64_t seq, int cp, int coord, bool whole)
{
    return batch * ((cp > 1 ? 4 : 3) * qd_context_rows(seq, cp, coord) + (whole ? seq : 0));
}

void qd_context_select_parts(int64_t batch, int64_t seq, int cp, int coord, int parts, const int32_t *in, int32_t *out)
{
    qd_row_run runs[QD_CONTEXT_RUNS];
    int count = qd_context_runs(seq, cp, coord, runs);
    int64_t rows = qd_context_rows(seq, cp, coord);
    for (int64_t line = 0; line < parts * batch; line++)
        for (int i = 0; i < count; i++)
            memcpy(out + line * rows + runs[i].row, in + line * seq + runs[i].position, (size_t)runs[i].count * sizeof *out);
}

void qd_context_select(int64_t batch, int64_t seq, int cp, int coord, bool whole, const int32_t *in, int32_t *out)
{
    qd_row_run runs[QD_CONTEXT_RUNS];
    int count = qd_context_runs(seq, cp, coord, runs);
    int64_t rows = qd_context_rows(seq, cp, coord);
    qd_context_select_parts(batch, seq, cp, coord, 3, in, out);
    for (int64_t b = 0; b < batch; b++)
        for (int i = 0; i < count; i++)
            for (int64_t k = 0; k < runs[i].count; k++)
                out[(3 * batch + b) * rows + runs[i].row + k] = (int32_t)(runs[i].position + k);
    if (whole)
        memcpy(out + 4 * batch * rows, in + 2 * batch * seq, (size_t)(batch * seq) * sizeof *out);
}

void qd_context_ahead(int64_t batch, int64_t seq, int cp, int coord, int ahead, const int32_t *in, int32_t *out)
{
    qd_row_run runs[QD_CONTEXT_RUNS];
    int count = qd_context_runs(seq, cp, coord, runs);
    int64_t rows = qd_context_rows(seq, cp, coord), part = batch * rows;
    for (int64_t b = 0; b < batch; b++) {
        const int32_t *tokens = in + b * seq, *targets = tokens + batch * seq, *start = targets + batch * seq;
        for (int i = 0; i < count; i++)
            for (int64_t r = 0; r < runs[i].count; r++)
                for (int k = 1; k <= ahead; k++) {
                    int64_t own = runs[i].position + r, at = own + k;
                    int32_t *to = out + 2 * (k - 1) * part + b * rows + runs[i].row + r;
                    to[0] = at < seq ? tokens[at] : 0;
                    to[part] = at < seq && start[at] == start[own] ? targets[at] : -1;
                }
    }
}

int qd_context_kv_share(int cp, int kv_heads)
{
    return kv_heads > cp ? kv_heads / cp : 1;
}

qd_context_theory qd_context_bytes(qd_cp_mode mode, int n, int rounds, int64_t tokens, int64_t q, int kv_heads, int64_t kv_dim,
                                   int64_t size)
{
    int64_t keys = tokens * kv_heads * kv_dim, swapped = tokens * (q / n + qd_context_kv_share(n, kv_heads) * kv_dim) * (n - 1) * size;
    switch (mode) {
    case QD_CP_RING:
        return (qd_context_theory){(rounds - 1) * keys * size, (rounds - 1) * keys * size + (rounds > 1 ? rounds : 0) * keys * 4,
                                   rounds == n ? "ring, (k+v)·bs·(n-1)·size forward, the same and (k+v)·bs·4n backward"
                                               : "ring of n rounds with keys in a window, (k+v)·bs·(n-1)·size forward, the same and "
                                                 "(k+v)·bs·4n backward"};
    case QD_CP_GATHER:
        return (qd_context_theory){(n - 1) * keys * size, (n - 1) * keys * (size + 4),
                                   "gather, (k+v)·bs·(n-1)·size forward, the same and (k+v)·bs·4(n-1) backward"};
    case QD_CP_ULYSSES: break;
    }
    return (qd_context_theory){swapped, swapped, "ulysses, (q+o+max(k+v,n·heads))·bs·(n-1)/n·size forward, the same backward"};
}

qd_status qd_context_check(int64_t seq, int cp)
{
    if (cp > 1 && seq < 2 * (int64_t)cp)
        return QD_FAIL(QD_USAGE, "data.seq is %lld and parallel.cp %d: a sequence is cut into two pieces per rank and needs at least %d "
                                 "positions", (long long)seq, cp, 2 * cp);
    return QD_OK;
}
