/* libFuzzer target of cluster files: any bytes are a cluster or one clear error. */
#include "sim/cluster.h"

#include <assert.h>
#include <quadrille/sim.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static qd_options *fresh; /* copied for each input: cheaper than validating the table */
    qd_options *options = NULL;
    qd_option_table table = qd_cluster_table();
    qd_cluster cluster;
    assert(fresh || qd_options_create(&table, 1, &fresh) == QD_OK);
    assert(qd_options_copy(fresh, &options) == QD_OK);
    qd_status status = qd_options_load_text(options, "fuzz", (const char *)data, size);
    assert(status == QD_OK || status == QD_USAGE);
    if (status == QD_OK)
        status = qd_cluster_resolve(options, &cluster);
    assert(status == QD_OK || status == QD_USAGE || status == QD_UNSUPPORTED);
    qd_options_destroy(options);
    return 0;
}
