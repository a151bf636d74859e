/* Evaluates declarations (model/declare.h) op by op, in double and on whole tensors: the loss of a
 * model as its family declares it, sharing no code with the passes and kernels that train it. */
#ifndef QD_TESTS_SUPPORT_REFERENCE_MODEL_H
#define QD_TESTS_SUPPORT_REFERENCE_MODEL_H

#include "spec/layout/ledger.h"

typedef struct reference_model {
    const qd_ledger *ledger;
    double **params; /* per parameter of the ledger; NULL for tied ones, which use the values of another */
    int64_t batch, seq;
    const int32_t *tokens, *targets, *doc_start; /* (batch, seq) each; doc_start NULL: no documents */
    uint64_t seed, step;                         /* for dropout masks */
    int **choices; /* per module: (batch · seq, experts per token), made in the first evaluation and kept in later ones */
} reference_model;

/* All parameters are 0. */
void reference_create(reference_model *r, const qd_ledger *ledger);
void reference_destroy(reference_model *r);

/* The mean loss over the tokens. *auxiliary: losses of routers and of prediction modules, which are
 * part of the gradients but not of the loss. */
double reference_loss(reference_model *r, double *auxiliary);
#endif
