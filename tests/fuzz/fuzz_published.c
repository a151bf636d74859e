/* libFuzzer target of files of published layouts (plan --published): rows or one clear error. */
#include "memory_file.h"

#include <quadrille/plan.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    qd_plan_row *rows = NULL;
    int count = 0;
    const char *path = memory_file(data, size);
    if (!path)
        return 0;
    qd_status status = qd_plan_rows(path, &rows, &count);
    assert(status == QD_OK || status == QD_USAGE || status == QD_CORRUPT);
    if (status == QD_OK)
        free(rows);
    return 0;
}
