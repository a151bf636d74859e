/* libFuzzer target of the safetensors reader: any bytes are refused, or every tensor lies inside the file. */
#include "ckpt/safetensors.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    if (fd < 0) {
        snprintf(path, sizeof path, "/tmp/fuzz-safetensors-XXXXXX");
        fd = mkstemp(path);
        assert(fd >= 0);
        unlink(path);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        return 0;
    qd_safetensors *file = NULL;
    qd_status status = qd_safetensors_open(path, &file);
    assert(status == QD_OK || status == QD_CORRUPT);
    if (status != QD_OK)
        return 0;
    unsigned sum = 0;
    for (int i = 0; i < qd_safetensors_count(file); i++) {
        const qd_safetensors_entry *e = qd_safetensors_at(file, i);
        assert(qd_safetensors_find(file, e->name) != NULL);
        const unsigned char *bytes = e->data;
        for (size_t b = 0; b < (size_t)e->count * qd_dtype_size(e->dtype); b++)
            sum += bytes[b];
    }
    qd_safetensors_close(file);
    volatile unsigned read = sum;
    (void)read;
    return 0;
}
