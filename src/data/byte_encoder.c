/* The encoder whose tokens are bytes, and the sanity check of any text encoder. */
#include "data/encode.h"
#include "base/sized.h"

#include <stdlib.h>

static qd_status encode_bytes(void *context, int thread, const char *text, size_t length, qd_tokens *out)
{
    (void)context;
    (void)thread;
    if (out->capacity - out->count < length) {
        size_t capacity = (out->count + length) * 2;
        int32_t *ids = realloc(out->ids, capacity * sizeof *ids);
        if (!ids)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %zu tokens", capacity);
        out->ids = ids;
        out->capacity = capacity;
    }
    for (size_t i = 0; i < length; i++)
        out->ids[out->count + i] = (unsigned char)text[i];
    out->count += length;
    return QD_OK;
}

qd_status qd_tokens_append(qd_tokens *tokens, int32_t id)
{
    if (tokens->count == tokens->capacity) {
        size_t capacity = tokens->capacity ? 2 * tokens->capacity : 64;
        int32_t *ids = realloc(tokens->ids, capacity * sizeof *ids);
        if (!ids)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %zu tokens", capacity);
        tokens->ids = ids;
        tokens->capacity = capacity;
    }
    tokens->ids[tokens->count++] = id;
    return QD_OK;
}

void qd_text_encoder_init_bytes(qd_text_encoder *encoder, size_t size)
{
    /* The hash is the ASCII code of "bytes256". */
    const qd_text_encoder own = {
        .encode = encode_bytes, .vocab = 256, .hash = UINT64_C(0x6279746573323536), .document_end = -1};
    qd_sized_init(encoder, size, &own, sizeof own);
}

qd_status qd_text_encoder_check(const qd_text_encoder *e)
{
    if (!e || !e->encode)
        return QD_FAIL(QD_USAGE, "text needs a tokenizer, and none is set");
    if (e->vocab < 1 || e->vocab > INT32_MAX || e->hash == 0 || e->document_end >= e->vocab)
        return QD_FAIL(QD_USAGE,
                       "unusable tokenizer: vocabulary %lld, hash %016llx, end-of-document token %d",
                       (long long)e->vocab, (unsigned long long)e->hash, e->document_end);
    return QD_OK;
}
