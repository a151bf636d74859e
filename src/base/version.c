/* The version of the loaded library, which may differ from that of a program's headers. */
#include <quadrille/version.h>

const char *qd_version(void)
{
    return QD_VERSION;
}
