/* The file layout of a token shard. */
#ifndef QD_DATA_SHARD_IMPL_H
#define QD_DATA_SHARD_IMPL_H

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shards are little endian and are read without conversion"
#endif

#define SHARD_MAGIC "QDTOKENS"
enum { SHARD_VERSION = 1, SHARD_HEADER_BYTES = 128, SHARD_CHUNK_BYTES = 1 << 20 };

/* At offset 0. It is followed by the tokens, zero padding to a multiple of 8, the documents and the
 * checksum table (u64 each). */
typedef struct shard_header {
    char magic[8];
    uint32_t version, token_bytes;
    uint64_t vocab, token_count, document_count, tokenizer_hash;
    uint64_t chunk_bytes;      /* of the body, everything between header and table; the last chunk may be shorter */
    uint64_t documents_offset; /* file offsets */
    uint64_t table_offset;
    uint64_t file_bytes;
    uint64_t table_hash;  /* XXH3-64 of the table */
    uint64_t reserved[4]; /* all 0 */
    uint64_t header_hash; /* XXH3-64 of the preceding 120 bytes */
} shard_header;

_Static_assert(sizeof(shard_header) == SHARD_HEADER_BYTES, "the header has no padding");

#endif
