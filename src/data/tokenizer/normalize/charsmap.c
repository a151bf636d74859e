/* Reads and applies SentencePiece's character map. Every index of the double array is checked, so
 * that a damaged map cannot make a lookup leave it. */
#include "data/tokenizer/normalize/charsmap.h"

#include "base/text/strbuf.h"
#include "data/tokenizer/normalize/grapheme.h"
#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

struct qd_charsmap {
    uint32_t *units; /* (count): Darts-clone's double array */
    size_t count;
    char *texts;     /* NUL-terminated replacements */
    size_t size;
};

qd_status qd_charsmap_create(const char *where, const void *data, size_t length, qd_charsmap **map)
{
    const uint8_t *bytes = data;
    uint32_t size = 0;
    if (length >= 4)
        size = (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
    if (length < 4 || size > length - 4 || size % 4 != 0 || size == 0 || (size < length - 4 && bytes[length - 1] != 0))
        return QD_FAIL(QD_USAGE, "%s: precompiled_charsmap of %zu bytes is damaged: it must hold a trie and texts that end with "
                                 "NUL", where, length);
    if (qd_utf8_valid((const char *)bytes + 4 + size, length - 4 - size) != length - 4 - size)
        return QD_FAIL(QD_USAGE, "%s: the texts of precompiled_charsmap are not UTF-8", where);
    qd_charsmap *made = calloc(1, sizeof *made);
    if (made) {
        made->count = size / 4;
        made->size = length - 4 - size;
        made->units = malloc(size);
        made->texts = malloc(made->size + 1);
    }
    if (!made || !made->units || !made->texts) {
        qd_charsmap_destroy(made);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its character map", where);
    }
    for (size_t i = 0; i < made->count; i++) {
        const uint8_t *unit = bytes + 4 + 4 * i;
        made->units[i] = (uint32_t)unit[0] | (uint32_t)unit[1] << 8 | (uint32_t)unit[2] << 16 | (uint32_t)unit[3] << 24;
    }
    memcpy(made->texts, bytes + 4 + size, made->size);
    made->texts[made->size] = '\0';
    *map = made;
    return QD_OK;
}

void qd_charsmap_destroy(qd_charsmap *map)
{
    if (!map)
        return;
    free(map->units);
    free(map->texts);
    free(map);
}

static size_t offset_of(uint32_t unit)
{
    return (size_t)(unit >> 10) << ((unit & (1u << 9)) >> 6);
}

/* The replacement of the shortest or longest key that starts the text; NULL: none. */
static const char *search(const qd_charsmap *map, const uint8_t *text, size_t length, bool longest, size_t *key)
{
    const char *found = NULL;
    size_t node = offset_of(map->units[0]);
    for (size_t i = 0; i < length && text[i]; i++) {
        node ^= text[i];
        if (node >= map->count)
            break;
        uint32_t unit = map->units[node];
        if ((unit & (0x80000000u | 0xff)) != text[i])
            break;
        node ^= offset_of(unit);
        if (node >= map->count)
            break;
        if (!(unit >> 8 & 1))
            continue;
        uint32_t value = map->units[node] & 0x7fffffff;
        if (value > map->size)
            continue;
        found = map->texts + value;
        *key = i + 1;
        if (!longest)
            break;
    }
    return found;
}

static const char *find(const qd_charsmap *map, const uint8_t *text, size_t length)
{
    size_t key;
    return search(map, text, length, false, &key);
}

const char *qd_charsmap_longest(const qd_charsmap *map, const uint8_t *text, size_t length, size_t *key)
{
    return search(map, text, length, true, key);
}

void qd_charsmap_apply(const qd_charsmap *map, const uint8_t *text, size_t length, size_t *zero, size_t most, qd_strbuf *out)
{
    const uint8_t *end = text + length;
    const size_t zero_in = *zero;
    *zero = 0;
    for (const uint8_t *at = text; at < end && out->length <= most;) {
        size_t cluster = qd_grapheme(at, end);
        const char *found = cluster < 6 ? find(map, at, cluster) : NULL;
        if (found) {
            qd_strbuf_append(out, found, strlen(found));
        } else {
            for (size_t i = 0, size; i < cluster; i += size) {
                uint32_t c;
                size = at[i] < 0x80 ? 1 : qd_utf8_read(at + i, end, &c);
                const char *single = find(map, at + i, size);
                qd_strbuf_append(out, single ? single : (const char *)at + i, single ? strlen(single) : size);
            }
        }
        if ((size_t)(at - text) < zero_in)
            *zero = out->length;
        at += cluster;
    }
}
