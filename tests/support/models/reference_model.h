/* Declarations (model/declare.h) evaluated one op after another, in double and over whole tensors:
 * the loss of a model as its family says it, with nothing in common with the passes and kernels
 * that train it. */
#ifndef QD_TESTS_SUPPORT_REFERENCE_MODEL_H
#define QD_TESTS_SUPPORT_REFERENCE_MODEL_H

#include "spec/layout/ledger.h"

typedef struct reference_model {
    const qd_ledger *ledger;
    double **params; /* per parameter of the ledger; NULL of tied ones, which use the values of another */
    int64_t batch, seq;
    const int32_t *tokens, *targets, *doc_start; /* (batch, seq) each; doc_start NULL: no documents */
    uint64_t seed, step;                         /* of dropout masks */
    int **choices; /* per module: (batch · seq, experts per token), chosen in the first evaluation and kept in later ones */
} reference_model;

/* All parameters 0. */
void reference_create(reference_model *r, const qd_ledger *ledger);
void reference_destroy(reference_model *r);

/* The mean loss over the tokens. *auxiliary: losses of routers, which are not part of it but of the
 * gradients. */
double reference_loss(reference_model *r, double *auxiliary);
#endif
