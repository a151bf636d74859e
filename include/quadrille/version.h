/* Versions of the headers that a program was compiled with, and of the library that it runs with.
 * The build reads the numbers from here. */
#ifndef QUADRILLE_VERSION_H
#define QUADRILLE_VERSION_H

#include <quadrille/export.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QD_VERSION_MAJOR 0
#define QD_VERSION_MINOR 1
#define QD_VERSION_PATCH 0
#define QD_VERSION "0.1.0"

/* QD_VERSION of the loaded library, for comparison with that of the program. Static. */
QD_API const char *qd_version(void);

#ifdef __cplusplus
}
#endif
#endif
