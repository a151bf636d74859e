/* The Unigram model: the most probable sequence of tokens for a piece of text. */
#ifndef QD_DATA_TOKENIZER_UNIGRAM_H
#define QD_DATA_TOKENIZER_UNIGRAM_H

#include "data/tokenizer/vocab.h"

typedef struct qd_unigram {
    double *scores; /* (tokens): log probabilities */
    uint32_t count;
    double lowest;
    bool floats; /* sums are rounded to fp32, as SentencePiece does */
    /* A trie of the tokens: the children of a node are neighbours, sorted by byte. */
    struct qd_unigram_node {
        uint32_t child, id; /* id: QD_NO_TOKEN if no token ends here */
        uint16_t children;
        uint8_t byte;
    } *nodes;
    uint32_t node_count;
    uint32_t first[256]; /* node of the first byte; 0: none */
} qd_unigram;

void qd_unigram_free(qd_unigram *unigram);
/* Builds the trie of the tokens with ids below `count`, which have scores. */
qd_status qd_unigram_build(qd_unigram *unigram, const qd_vocab *vocab);

struct qd_tokenizer;
/* Buffers of one thread, initialized with {0}. */
typedef struct qd_unigram_work {
    struct qd_unigram_step {
        double score;
        uint32_t start, id; /* of the best token that ends here; start UINT32_MAX: none does */
    } *steps;
    uint32_t *ids;
    size_t capacity;
} qd_unigram_work;
void qd_unigram_work_free(qd_unigram_work *work);

/* *ids (count) belongs to `work` and is valid until the next call. The text is valid UTF-8. */
qd_status qd_unigram_encode(const struct qd_tokenizer *tokenizer, qd_unigram_work *work, const uint8_t *text, size_t length,
                            const uint32_t **ids, size_t *count);

#endif
