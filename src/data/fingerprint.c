/* Hashes the tokens of a source, so that a resumed run notices when its data has changed. */
#include "data/data_impl.h"

#include <stdlib.h>
#include <xxhash.h>

enum { BLOCK = 64 << 10, BLOCKS = 4096 }; /* bytes */
static const int64_t most_whole = INT64_C(1) << 30; /* bytes; about 0.1 s from memory */

/* Bytes [first, first + count) of a text, or of tokens in memory. */
static qd_status add_range(XXH3_state_t *state, const qd_token_part *part, int64_t first, int64_t count, char *block)
{
    for (int64_t bytes; count > 0; first += bytes, count -= bytes) {
        bytes = count < BLOCK ? count : BLOCK;
        QD_TRY(qd_token_part_read(part, first / part->token_bytes, bytes / part->token_bytes, block));
        XXH3_64bits_update(state, block, (size_t)bytes);
    }
    return QD_OK;
}

/* Above 1 GiB, hashes evenly spaced blocks, including the first and the last. */
static qd_status add_bytes(XXH3_state_t *state, const qd_token_part *part, bool *sampled)
{
    const int64_t size = part->count * part->token_bytes, apart = (size - BLOCK) / (BLOCKS - 1) / part->token_bytes * part->token_bytes;
    char *block = malloc(BLOCK);
    qd_status status = block ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to hash it", part->path);
    if (status == QD_OK && size <= most_whole) {
        status = add_range(state, part, 0, size, block);
    } else {
        *sampled = true;
        for (int64_t i = 0; i < BLOCKS && status == QD_OK; i++)
            status = add_range(state, part, apart * i, BLOCK, block);
        if (status == QD_OK)
            status = add_range(state, part, size - BLOCK, BLOCK, block);
    }
    free(block);
    return status;
}

/* A shard's header contains the hash of the checksum table, which covers all tokens and
 * documents. */
static qd_status add_part(XXH3_state_t *state, const qd_token_part *part, bool *sampled)
{
    const uint64_t size = (uint64_t)part->count;
    XXH3_64bits_update(state, &size, sizeof size);
    if (!part->shard.file)
        return add_bytes(state, part, sampled);
    XXH3_64bits_update(state, &part->shard.header_hash, sizeof part->shard.header_hash);
    return QD_OK;
}

qd_status qd_data_fingerprint(const qd_data *data, int source, uint64_t *hash, bool *sampled)
{
    const qd_token_source *s = &data->sources[source];
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to hash it", s->path);
    XXH3_64bits_reset(state);
    *sampled = false;
    qd_status status = QD_OK;
    for (int64_t i = 0; i < s->part_count && status == QD_OK; i++)
        status = add_part(state, &s->parts[i], sampled);
    if (s->counted && status == QD_OK)
        XXH3_64bits_update(state, s->counted, (size_t)s->tokens);
    *hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return status;
}
