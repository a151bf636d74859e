/* libFuzzer target of Hugging Face's config.json: any bytes are a model or one clear error. */
#define _GNU_SOURCE
#include "ckpt/huggingface_impl.h"

#include <assert.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    qd_strbuf notes = {0};
    qd_hf_config config;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        assert(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        return 0;
    qd_status status = qd_hf_config_read(path, &notes, &config);
    assert(status == QD_OK || status == QD_USAGE || status == QD_UNSUPPORTED);
    if (status == QD_OK)
        assert(config.family && config.model.layers > 0 && config.model.hidden > 0);
    qd_strbuf_free(&notes);
    return 0;
}
