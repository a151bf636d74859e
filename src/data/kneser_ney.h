/* An interpolated Kneser-Ney trigram model over tokens, with the modified discounts of Chen and
 * Goodman (1998):
 *
 *   P3(w|u,v) = (c(uvw) - D3(c)) / c(uv·) + g(uv) P2(w|v)      c: counts
 *   P2(w|v)   = (n(vw)  - D2(n)) / n(v·)  + g(v)  P1(w)        n(vw): distinct tokens before vw
 *   P1(w)     = (m(w)   - D1(m)) / m(·)   + g     / vocab      m(w): distinct tokens before w
 *
 * A discount depends on the count (1, 2, 3 and more) and is estimated from the counts of counts of
 * its order. g is the probability mass that the discounts free, so that each distribution sums to 1
 * over the vocabulary. Each document is preceded by two QD_KN_START symbols, which are context only
 * and never predicted. */
#ifndef QD_DATA_KNESER_NEY_H
#define QD_DATA_KNESER_NEY_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_kn qd_kn;

enum { QD_KN_START = -1 };

/* vocab below 2^21 - 1. Call qd_kn_add() any number of times, then qd_kn_finish() once, before the
 * functions below. */
qd_status qd_kn_create(int64_t vocab, qd_kn **model);
void qd_kn_destroy(qd_kn *model); /* NULL is legal */

/* Counts `count` tokens that continue where the last call ended; takes 16 bytes of memory per token
 * until qd_kn_finish(). */
qd_status qd_kn_add(qd_kn *model, const int32_t *tokens, int64_t count);
/* The next token begins a document. */
void qd_kn_break(qd_kn *model);
qd_status qd_kn_finish(qd_kn *model);

/* P3(w|u,v); u and v may be QD_KN_START. Positive for each w of the vocabulary. */
double qd_kn_probability(const qd_kn *model, int32_t u, int32_t v, int32_t w);

typedef struct qd_kn_info {
    int64_t tokens, trigrams, bigrams; /* tokens counted; distinct n-grams */
    double discounts[3][3];            /* of P1, P2, P3; for counts of 1, 2, and 3 or more */
} qd_kn_info;
qd_kn_info qd_kn_describe(const qd_kn *model);

#endif
