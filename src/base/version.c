/* The version of the library that is loaded, which may be another than that of a program's
 * headers. */
#include <quadrille/version.h>

const char *qd_version(void)
{
    return QD_VERSION;
}
