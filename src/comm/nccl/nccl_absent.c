/* Stands in for NCCL in builds without it. */
#include "comm/comm_impl.h"
#include "comm/device.h"

static qd_status create(qd_comm *comm)
{
    return QD_FAIL(QD_UNSUPPORTED, "group %s: this build has no NCCL; install it (libnccl-dev) and build again, or run the ranks "
                                   "as threads of one process (run.ranks_as=threads, run.backend=local)", comm->name);
}

const qd_comm_device_ops qd_comm_device_nccl = {.name = "nccl", .create = create};

bool qd_nccl_version(char *text, size_t size)
{
    (void)text;
    (void)size;
    return false;
}
