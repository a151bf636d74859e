/* A set of strings with leftmost-longest search, for added tokens. */
#ifndef QD_DATA_TOKENIZER_TRIE_H
#define QD_DATA_TOKENIZER_TRIE_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_trie {
    struct qd_trie_node {
        uint32_t child, sibling; /* 0: none */
        int32_t value;           /* -1: no string ends here */
        uint8_t byte;
    } *nodes;
    uint32_t count, capacity;
    uint32_t first[256]; /* node of the first byte; 0: none */
    int only_first;      /* the first byte shared by all strings, or -1 */
} qd_trie;

void qd_trie_free(qd_trie *trie);
/* Adding a string again replaces its value. length > 0. */
qd_status qd_trie_add(qd_trie *trie, const void *text, size_t length, int32_t value);
/* The leftmost, then longest string in [at, end): its position, *length and *value; NULL if there
 * is none. */
const uint8_t *qd_trie_find(const qd_trie *trie, const uint8_t *at, const uint8_t *end, size_t *length, int32_t *value);
/* The longest string that [at, end) starts with: its length and *value; 0 if there is none. */
size_t qd_trie_longest(const qd_trie *trie, const uint8_t *at, const uint8_t *end, int32_t *value);

#endif
