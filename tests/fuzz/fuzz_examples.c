/* libFuzzer target of examples and preferences in .jsonl; the first byte selects one, and what
 * happens to those that are too long. Lines are used or refused with their number. */
#include "memory_file.h"

#include "data/examples/examples.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *path = size < 2 ? NULL : memory_file(data + 1, size - 1);
    if (!path)
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
