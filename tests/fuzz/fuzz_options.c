/* libFuzzer target of the configuration reader: any bytes are a configuration or one clear error;
 * an accepted configuration is saved and read back to the same text. */
#include "spec/config/config.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static qd_options *fresh; /* copied for each input: cheaper than validating the table */
    qd_options *options = NULL, *again = NULL;
    qd_option_table table = qd_config_table();
    char *first = NULL, *second = NULL;
    assert(fresh || qd_options_create(&table, 1, &fresh) == QD_OK);
    assert(qd_options_copy(fresh, &options) == QD_OK);
    qd_status status = qd_options_load_text(options, "fuzz", (const char *)data, size);
    assert(status == QD_OK || status == QD_USAGE);
    if (status == QD_OK) {
        qd_config config;
        assert(qd_options_to_yaml(options, &first) == QD_OK);
        assert(qd_options_copy(fresh, &again) == QD_OK);
        assert(qd_options_load_text(again, "again", first, strlen(first)) == QD_OK);
        assert(qd_options_to_yaml(again, &second) == QD_OK);
        assert(strcmp(first, second) == 0);
        status = qd_config_resolve(options, 0, &config);
        assert(status == QD_OK || status == QD_USAGE || status == QD_UNSUPPORTED);
    }
    free(first);
    free(second);
    qd_options_destroy(options);
    qd_options_destroy(again);
    return 0;
}
