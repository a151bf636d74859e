/* What the derivative*.c files share: value numbers, and what is known of slots and ops. */
#ifndef QD_SPEC_PROOF_DERIVATIVE_IMPL_H
#define QD_SPEC_PROOF_DERIVATIVE_IMPL_H

#include "spec/proof/proof_impl.h"

enum { TERMS_MOST = 8 };

/* What is known of a slot. */
typedef struct known {
    uint64_t value; /* value number; of a gradient: that of the value it is the gradient of. 0: unknown */
    bool gradient;
    uint64_t terms[TERMS_MOST]; /* of a gradient: results of the uses whose terms it contains */
    int count;
    uint8_t part; /* gradients of queries, keys and values: 1 queries, 2 keys and values; 0: all of them */
} known;

typedef enum fact_kind {
    FACT_LINEAR,
    FACT_NORM,
    FACT_SUM,
    FACT_ACT,
    FACT_DROP,
    FACT_HEAD_NORM,
    FACT_QK_NORM,
    FACT_CLIP,
    FACT_SCALE,
    FACT_GATE,
    FACT_ROPE,
    FACT_LATENT,
    FACT_ATTENTION,
    FACT_ROUTE,
    FACT_PERMUTE,
    FACT_COMBINE,
    FACT_EMBED,
    FACT_HEAD_LOSS
} fact_kind;
/* An op of the forward pass. */
typedef struct fact {
    fact_kind kind;
    uint64_t key; /* which parameter, dropout site or list */
    uint64_t x, add, weight, y;
    uint64_t more; /* LATENT: the third operand */
    /* LINEAR: which parameter; 0: none, or another rank adds it. ATTENTION: the sinks, 0: none. */
    uint64_t bias;
    bool trains; /* LINEAR, EMBED, HEAD_LOSS: an op adds its part of the gradient of the parameter `key` */
} fact;

typedef struct use {
    uint64_t value, result;
} use;

typedef struct derivation {
    proof_walk *w;
    known *slots;
    fact *facts;
    use *uses;
    int fact_count, fact_capacity, use_count, use_capacity;
    uint64_t rows; /* the table with the number of rows per expert */
} derivation;

#define LOSS_TERM UINT64_C(1) /* reserved terms */
#define PORT_TERM UINT64_C(2)

static inline uint64_t number(uint64_t kind, uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t hash = 1469598103934665603u;
    const uint64_t parts[] = {kind + 3, a, b, c};
    for (int i = 0; i < 4; i++) {
        hash = (hash ^ parts[i]) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return hash | 4; /* never equal to a reserved term */
}

/* Numbers for what is not a value of the model. Lists of rows (by expert, by node, relayed rows by
 * expert) have places, sources and counts. */
enum {
    INPUTS = 90,
    ROPE_TABLE,
    PORT_IN,
    EMBEDDED,
    BY_EXPERT_LIST,
    BY_NODE_LIST,
    RELAY_LIST,
    CHOICES,
    LOADS,
    NODE_TABLE,
    RELAY_TABLE,
    ROW_MAXIMA,
    ROW_SUMS,
    ROW_LOSSES,
    PAIR_SCORES,
    PAIR_FACTORS,
    NORM_STATE,
    NORM_DOTS,
    LOG_SUMS,
    DELTAS,
    LARGEST
};
enum { LIST_PLACE = 1, LIST_FROM, LIST_COUNTS };

static inline uint64_t thing(int what)
{
    return number((uint64_t)what, 0, 0, 0);
}

static inline uint64_t list_part(int list, int part)
{
    return number((uint64_t)list, (uint64_t)part, 0, 0);
}

/* The list that an operand is a part of; 0: none. */
static inline uint64_t list_of(uint64_t value, int part)
{
    for (int list = BY_EXPERT_LIST; list <= RELAY_LIST; list++)
        if (value == list_part(list, part))
            return (uint64_t)list;
    return 0;
}

void qd_known_set(const derivation *d, proof_operand operand, known k);
void qd_known_set_value(const derivation *d, proof_operand operand, uint64_t value);
known qd_known_gradient(uint64_t value, uint64_t term);
uint64_t qd_known_param(const derivation *d, proof_operand operand);
qd_status qd_derivation_uses(derivation *d, uint64_t value, uint64_t result);
qd_status qd_derivation_note(derivation *d, fact f);
const fact *qd_derivation_find(const derivation *d, fact_kind kind, uint64_t key);
const fact *qd_derivation_find_result(const derivation *d, fact_kind kind, uint64_t y);
void qd_derivation_trains(derivation *d, fact_kind kind, uint64_t y);
qd_status qd_derivation_fail(const derivation *d, proof_operand operand, const char *why);
bool qd_derivation_has_all(const derivation *d, const known *g, uint64_t value);
bool qd_derivation_as_gradient(const derivation *d, const known *g, uint64_t value, known *out);
qd_status qd_derivation_join(const derivation *d, proof_operand operand, known from, uint64_t value, known *to);
qd_status qd_derivation_whole(const derivation *d, proof_operand operand, uint64_t value);
/* Bias gradients: the row sums of a gradient of what the bias was added to. */
qd_status qd_derivation_bias_sums(const derivation *d, known g, proof_operand operand);
/* BIAS_GRAD. Where partial sums are summed one rank adds the bias, and all have its gradient. */
qd_status qd_derivation_bias_grad(const derivation *d, known g);
qd_status qd_derivation_pairs(derivation *d, bool sums); /* PAIR_SUMS, or PAIR_LOSS */
qd_status qd_derivation_is_value(const derivation *d, proof_operand operand, uint64_t value);
qd_status qd_derivation_no_fact(const derivation *d);
qd_status qd_derivation_op(derivation *d);
qd_status qd_derivation_fp8(derivation *d); /* rules_fp8.c */
known qd_known_at(const derivation *d, proof_operand operand);
#endif
