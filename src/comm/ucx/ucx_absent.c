/* Stands in for the UCX backend in builds without UCX. */
#include <quadrille/comm.h>

bool qd_ucx_built(void)
{
    return false;
}

qd_status qd_ucx_comm_create(const qd_comm_config *config, const qd_comm_join *join, qd_comm **comm)
{
    (void)config, (void)join;
    *comm = NULL;
    return QD_FAIL(QD_UNSUPPORTED, "this build has no UCX, which ranks without MPI need; install UCX and libsodium (Debian: "
                                   "libucx-dev and libsodium-dev) and build again, or use mpirun");
}
