/* Training on preferences (DPO): the loss of a pair of completions, of which one is preferred. The
 * planner counts its ops, kernels compute it. */
#ifndef QD_BASE_PREFERENCE_H
#define QD_BASE_PREFERENCE_H

/* h is how much more the model prefers the chosen completion than the reference model does: the
 * difference of both completions' log-probability ratios. Losses are functions of h:
 *   SIGMOID  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s: label smoothing
 *   ROBUST   (-(1 - s) log sigmoid(beta h) + s log sigmoid(-beta h)) / (1 - 2 s)
 *   HINGE    max(0, 1 - beta h)
 *   IPO      (h - 1 / (2 beta))², with ratios divided by the tokens of their completion */
typedef enum qd_preference_kind {
    QD_PREFERENCE_NONE, /* the model is not trained on preferences */
    QD_PREFERENCE_SIGMOID,
    QD_PREFERENCE_ROBUST,
    QD_PREFERENCE_HINGE,
    QD_PREFERENCE_IPO
} qd_preference_kind;

typedef struct qd_preference {
    qd_preference_kind kind;
    double beta, smoothing;
} qd_preference;

/* What a micro-batch has per row for pairs, in this order, besides tokens, targets and document
 * starts. Sequences of a window are numbered: those of pair p are 2 p (chosen) and 2 p + 1
 * (rejected). */
enum {
    QD_PAIR_SEQUENCE,  /* int32: 2 · number + 1 in the first counted row of a sequence, 2 · number in its others; -1: not counted */
    QD_PAIR_WEIGHT,    /* float: factor of the row's log-probability in the sum of its sequence */
    QD_PAIR_REFERENCE, /* float: in the first row, the sum for the reference model; 0 in others */
    QD_PAIR_REST,      /* float: what the float lacks of that sum */
    QD_PAIR_PARTS
};
#endif
