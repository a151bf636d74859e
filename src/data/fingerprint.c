/* What identifies the tokens of a source, so that a resumed run notices others in their place. */
#include "data/data_impl.h"
#include "data/shard_impl.h"

#include <xxhash.h>

enum { BLOCK = 64 << 10, BLOCKS = 4096 };
static const int64_t most_whole = INT64_C(1) << 30; /* bytes; about 0.1 s from memory */

/* Bytes of text, or of tokens in memory. Of more than 1 GiB, blocks spread evenly, the first and the last among them. */
static void add_bytes(XXH3_state_t *state, const char *bytes, int64_t size, bool *sampled)
{
    if (size <= most_whole) {
        XXH3_64bits_update(state, bytes, (size_t)size);
        return;
    }
    *sampled = true;
    for (int64_t i = 0; i < BLOCKS; i++)
        XXH3_64bits_update(state, bytes + (size - BLOCK) / (BLOCKS - 1) * i, BLOCK);
    XXH3_64bits_update(state, bytes + size - BLOCK, BLOCK);
}

/* A shard's header has the hash of a table of the hashes of all else: it stands for all tokens and documents. */
static void add_part(XXH3_state_t *state, const qd_token_part *part, bool *sampled)
{
    const shard_header *header = part->shard.mapping;
    const uint64_t size = (uint64_t)part->count;
    XXH3_64bits_update(state, &size, sizeof size);
    if (header)
        XXH3_64bits_update(state, &header->header_hash, sizeof header->header_hash);
    else
        add_bytes(state, part->tokens, part->count * part->token_bytes, sampled);
}

qd_status qd_data_fingerprint(const qd_data *data, int source, uint64_t *hash, bool *sampled)
{
    const qd_token_source *s = &data->sources[source];
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to hash it", s->path);
    XXH3_64bits_reset(state);
    *sampled = false;
    for (int64_t i = 0; i < s->part_count; i++)
        add_part(state, &s->parts[i], sampled);
    *hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return QD_OK;
}
