/* A family outside the registry: the worked example of docs/adding-a-model.md. */
#ifndef QD_TESTS_SUPPORT_PARALLEL_FAMILY_H
#define QD_TESTS_SUPPORT_PARALLEL_FAMILY_H

#include "model/family.h"

extern const qd_family parallel_family;
#endif
