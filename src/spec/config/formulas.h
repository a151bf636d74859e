/* Closed formulas for the traffic of model parallelism, computed from shapes alone. `check` prints
 * them next to the program's figures, and tests compare both with the bytes that the backend
 * counts. */
#ifndef QD_SPEC_CONFIG_FORMULAS_H
#define QD_SPEC_CONFIG_FORMULAS_H

#include "spec/program/program.h"

#include <quadrille/check.h>

/* Activations that the ranks of tp exchange inside the modules of the program's stage in one step,
 * summed over all ranks of the stage. False: tp is 1, or blocks have experts, whose traffic depends
 * on the tokens. */
bool qd_formula_tensor(const qd_program *program, qd_check_formula *formula);
/* Keys, values, heads and their gradients that the ranks of cp exchange. False: cp is 1. */
bool qd_formula_context(const qd_program *program, qd_check_formula *formula);
#endif
