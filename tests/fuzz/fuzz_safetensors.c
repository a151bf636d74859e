/* libFuzzer target of the safetensors reader: any bytes are refused, or every tensor is inside
 * them.
 *
 * The first eight bytes, the length of the header, would stop nearly every mutation. So each input
 * is tried as it is, and once more as a header alone, with its length in front and `last byte`
 * bytes of data behind. */
#include "ckpt/safetensors.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_bytes(const void *bytes, size_t size)
{
    qd_safetensors *file = NULL;
    qd_status status = qd_safetensors_view("fuzz", bytes, size, &file);
    assert(status == QD_OK || status == QD_CORRUPT);
    if (status != QD_OK)
        return;
    unsigned sum = 0;
    for (int i = 0; i < qd_safetensors_count(file); i++) {
        const qd_safetensors_entry *e = qd_safetensors_at(file, i);
        assert(qd_safetensors_find(file, e->name) != NULL);
        const unsigned char *values = e->data;
        for (size_t b = 0; b < (size_t)e->count * qd_dtype_size(e->dtype); b++)
            sum += values[b];
    }
    const char *format = qd_safetensors_metadata(file, "format");
    volatile size_t read = sum + (format ? strlen(format) : 0);
    (void)read;
    qd_safetensors_close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_bytes(data, size);
    if (size == 0)
        return 0;
    /* A block of exactly this length, so that ASan sees an access outside it. */
    size_t header = size - 1, behind = data[size - 1], whole = 8 + header + behind;
    unsigned char *bytes = calloc(1, whole);
    assert(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)header >> (8 * i));
    memcpy(bytes + 8, data, header);
    try_bytes(bytes, whole);
    free(bytes);
    return 0;
}
