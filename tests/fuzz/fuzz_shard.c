/* libFuzzer target of the shard reader: any bytes are refused or read without an access outside
 * them.
 *
 * Checksums would stop every mutation early. So each input is tried as it is and, if it is long
 * enough, once more with corrected checksums, so that the code behind them is reached too. */
#include "data/shard.h"
#include "data/shard_impl.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Reads everything a caller may read. */
static void read_all(const qd_shard *s, bool verified)
{
    uint64_t sum = 0;
    assert(s->token_count > 0 && s->vocab > 0 && s->document_count >= 0);
    for (int64_t i = 0; i < s->token_count; i++) {
        uint32_t token = s->token_bytes == 2 ? ((const uint16_t *)s->tokens)[i] : ((const uint32_t *)s->tokens)[i];
        assert(!verified || token < s->vocab);
        sum += token;
    }
    for (int64_t d = 0; d < s->document_count; d++) {
        assert(s->documents[d] < (uint64_t)s->token_count && (d == 0 || s->documents[d - 1] < s->documents[d]));
        sum += s->documents[d];
    }
    volatile uint64_t keep = sum;
    (void)keep;
}

static void try_both(const void *bytes, size_t size)
{
    for (int verify = 0; verify < 2; verify++) {
        qd_shard shard;
        if (qd_shard_view("fuzz", bytes, size, verify, 1, &shard) == QD_OK)
            read_all(&shard, verify);
        else
            assert(strlen(qd_error_message()) > 0);
    }
}

/* Corrects the fixed fields and the checksums, as far as the counts allow. The counts and offsets
 * stay arbitrary or, if the input selects it, become those that fit its size. */
static void repair(unsigned char *bytes, size_t size)
{
    shard_header *h = (shard_header *)bytes;
    memcpy(h->magic, SHARD_MAGIC, sizeof h->magic);
    h->version = SHARD_VERSION;
    h->file_bytes = size;
    memset(h->reserved, 0, sizeof h->reserved);
    if (h->chunk_bytes & 1) {
        h->token_bytes = h->token_bytes & 1 ? 2 : 4;
        h->chunk_bytes = 4096;
        uint64_t body = (size - SHARD_HEADER_BYTES) / 8 * 8, chunks = (body + 4095) / 4096;
        body = body > chunks * 8 ? body - chunks * 8 : 0;
        h->document_count = body / 8 ? h->document_count % (body / 8) : 0;
        uint64_t tokens = body - h->document_count * 8;
        h->token_count = tokens / h->token_bytes;
        h->documents_offset = SHARD_HEADER_BYTES + tokens;
        h->table_offset = SHARD_HEADER_BYTES + body;
        h->file_bytes = h->table_offset + (body + 4095) / 4096 * 8;
    }
    if (h->table_offset >= SHARD_HEADER_BYTES && h->table_offset <= size && h->chunk_bytes >= 4096) {
        uint64_t *table = (uint64_t *)(bytes + h->table_offset / 8 * 8);
        uint64_t room = (size - h->table_offset / 8 * 8) / 8;
        for (uint64_t at = SHARD_HEADER_BYTES, i = 0; at < h->table_offset && i < room; i++) {
            uint64_t left = h->table_offset - at, length = left < h->chunk_bytes ? left : h->chunk_bytes;
            table[i] = XXH3_64bits(bytes + at, length);
            at += length;
        }
        h->table_hash = XXH3_64bits(bytes + h->table_offset, size - h->table_offset);
        if (h->file_bytes <= size && h->file_bytes >= h->table_offset)
            h->table_hash = XXH3_64bits(bytes + h->table_offset, h->file_bytes - h->table_offset);
    }
    h->header_hash = XXH3_64bits(h, offsetof(shard_header, header_hash));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* A copy of exactly this length: aligned, with red zones at both ends. */
    unsigned char *bytes = calloc(1, size ? size : 1);
    assert(bytes);
    if (size > 0)
        memcpy(bytes, data, size);
    try_both(bytes, size);
    if (size >= SHARD_HEADER_BYTES) {
        repair(bytes, size);
        uint64_t length = ((shard_header *)bytes)->file_bytes;
        try_both(bytes, size);
        if (length < size)
            try_both(bytes, (size_t)length);
    }
    free(bytes);
    return 0;
}
