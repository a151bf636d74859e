/* A byte trie with first-child and next-sibling links. */
#include "data/tokenizer/trie.h"

#include <stdlib.h>
#include <string.h>

void qd_trie_free(qd_trie *trie)
{
    free(trie->nodes);
    *trie = (qd_trie){0};
}

static qd_status new_node(qd_trie *trie, uint8_t byte, uint32_t sibling, uint32_t *node)
{
    if (trie->count == trie->capacity) {
        uint32_t capacity = trie->capacity ? trie->capacity * 2 : 64;
        void *nodes = realloc(trie->nodes, capacity * sizeof *trie->nodes);
        if (!nodes)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the added tokens");
        trie->nodes = nodes;
        trie->capacity = capacity;
    }
    if (trie->count == 0) { /* index 0 means none */
        trie->only_first = -1;
        trie->count = 1;
    }
    *node = trie->count++;
    trie->nodes[*node] = (struct qd_trie_node){.sibling = sibling, .value = -1, .byte = byte};
    return QD_OK;
}

static uint32_t find_child(const qd_trie *trie, uint32_t node, uint8_t byte)
{
    uint32_t child = trie->nodes[node].child;
    while (child && trie->nodes[child].byte != byte)
        child = trie->nodes[child].sibling;
    return child;
}

qd_status qd_trie_add(qd_trie *trie, const void *text, size_t length, int32_t value)
{
    const uint8_t *bytes = text;
    uint32_t node = trie->first[bytes[0]];
    if (!node) {
        bool none = trie->count == 0;
        QD_TRY(new_node(trie, bytes[0], 0, &node));
        trie->first[bytes[0]] = node;
        trie->only_first = none ? bytes[0] : -1;
    }
    for (size_t i = 1; i < length; i++) {
        uint32_t child = find_child(trie, node, bytes[i]);
        if (!child) {
            QD_TRY(new_node(trie, bytes[i], trie->nodes[node].child, &child));
            trie->nodes[node].child = child;
        }
        node = child;
    }
    trie->nodes[node].value = value;
    return QD_OK;
}

size_t qd_trie_longest(const qd_trie *trie, const uint8_t *at, const uint8_t *end, int32_t *value)
{
    size_t length = 0;
    uint32_t node = trie->count > 0 && at < end ? trie->first[*at] : 0;
    for (const uint8_t *place = at + 1; node; place++) {
        if (trie->nodes[node].value >= 0) {
            *value = trie->nodes[node].value;
            length = (size_t)(place - at);
        }
        if (place == end)
            break;
        node = find_child(trie, node, *place);
    }
    return length;
}

const uint8_t *qd_trie_find(const qd_trie *trie, const uint8_t *at, const uint8_t *end, size_t *length, int32_t *value)
{
    if (trie->count == 0)
        return NULL;
    for (; at < end; at++) {
        if (trie->only_first >= 0) {
            at = memchr(at, trie->only_first, (size_t)(end - at));
            if (!at)
                return NULL;
        }
        *length = qd_trie_longest(trie, at, end, value);
        if (*length > 0)
            return at;
    }
    return NULL;
}
