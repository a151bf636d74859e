/* libFuzzer target of examples and preferences in .jsonl; the first byte selects one, and what
 * happens to those that are too long. Lines are used or refused with their number. */
#define _GNU_SOURCE
#include "data/examples/examples.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        assert(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (size < 2 || ftruncate(fd, 0) != 0 || pwrite(fd, data + 1, size - 1, 0) != (ssize_t)size - 1)
        return 0;
    qd_file file = {.path = path, .bytes = (int64_t)size - 1, .kind = QD_FILE_LINES};
    qd_file_list files = {.items = &file, .count = 1, .capacity = 1, .bytes = file.bytes};
    qd_text_encoder encoder = qd_text_encoder_bytes();
    qd_examples_job job = {.files = &files, .encoder = &encoder, .no_chat = "there is no template", .pairs = data[0] & 1, .most = 64,
                           .overlong = (qd_overlong)(data[0] / 2 % 3), .threads = 1};
    qd_examples examples = {0};
    qd_status status = qd_examples_read(&job, &examples);
    assert(status == QD_OK || (status == QD_USAGE && qd_error_message()[0] != '\0'));
    if (status == QD_OK) {
        assert(examples.count >= 0 && examples.token_count >= 2 * examples.count && (!job.pairs || examples.count % 2 == 0));
        for (int64_t i = 0; i < examples.count; i++) {
            const int64_t end = i + 1 < examples.count ? examples.first[i + 1] : examples.token_count;
            assert(end - examples.first[i] >= 2 && end - examples.first[i] <= job.most);
        }
        qd_examples_free(&examples);
    }
    return 0;
}
