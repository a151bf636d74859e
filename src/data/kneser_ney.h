/* An interpolated Kneser-Ney trigram model over tokens, with the modified discounts of Chen and
 * Goodman (1998):
 *
 *   P3(w|u,v) = (c(uvw) - D3(c)) / c(uv·) + g(uv) P2(w|v)      c: counts
 *   P2(w|v)   = (n(vw)  - D2(n)) / n(v·)  + g(v)  P1(w)        n(vw): different tokens seen before vw
 *   P1(w)     = (m(w)   - D1(m)) / m(·)   + g     / vocab      m(w): different tokens seen before w
 *
 * A discount depends on the count (1, 2, 3 and more) and is estimated from the counts of counts of
 * its order; g is the part it sets free, so that each sums to 1 over the vocabulary. Before the
 * first token of a document stands QD_KN_START, twice; it is a context and never predicted. */
#ifndef QD_DATA_KNESER_NEY_H
#define QD_DATA_KNESER_NEY_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_kn qd_kn;

enum { QD_KN_START = -1 };

/* vocab below 2^21 - 1. Then qd_kn_add() any number of times, qd_kn_finish() once, and only then
 * the rest. */
qd_status qd_kn_create(int64_t vocab, qd_kn **model);
void qd_kn_destroy(qd_kn *model); /* NULL is legal */

/* Counts `count` tokens that go on where the last call ended; 16 bytes of memory per token until
 * qd_kn_finish(). */
qd_status qd_kn_add(qd_kn *model, const int32_t *tokens, int64_t count);
/* The next token begins a document. */
void qd_kn_break(qd_kn *model);
qd_status qd_kn_finish(qd_kn *model);

/* P3(w|u,v); u and v may be QD_KN_START. Above 0 for each w of the vocabulary. */
double qd_kn_probability(const qd_kn *model, int32_t u, int32_t v, int32_t w);

typedef struct qd_kn_info {
    int64_t tokens, trigrams, bigrams; /* counted; different ones */
    double discounts[3][3];            /* of P1, P2, P3; for counts of 1, 2 and more */
} qd_kn_info;
qd_kn_info qd_kn_describe(const qd_kn *model);

#endif
