/* BPE: merges the symbols of one piece of text into tokens. WordPiece: finds them in it. */
#ifndef QD_DATA_TOKENIZER_BPE_H
#define QD_DATA_TOKENIZER_BPE_H

#include "data/tokenizer/tokenizer_impl.h"

/* Buffers that one thread reuses between calls. Initialize with {0}. */
typedef struct qd_bpe_work {
    uint32_t *ids, *ranks, *next, *previous; /* per symbol */
    uint64_t *heap;
    size_t capacity, heap_capacity;
} qd_bpe_work;
void qd_bpe_work_free(qd_bpe_work *work);

/* Reserves space for as many symbols. */
qd_status qd_bpe_reserve(qd_bpe_work *work, size_t length);
/* Merges work->ids (count). */
qd_status qd_bpe_merge(const qd_vocab *vocab, qd_bpe_work *work, size_t *count);

/* Merges the pair with the lowest rank, the leftmost of equals, until no pair can be merged. *ids
 * (count) belongs to `work` and is valid until the next call. Short pieces are scanned, long ones
 * use a heap: O(n log n). */
qd_status qd_bpe(const qd_tokenizer *tokenizer, qd_bpe_work *work, const uint8_t *piece, size_t length,
                 const uint32_t **ids, size_t *count);

/* WordPiece: the longest token at each position. Words have at most QD_MOST_WORD_PIECE
 * characters. */
enum { QD_MOST_WORD_PIECE = 1024 };
qd_status qd_word_piece(const qd_tokenizer *tokenizer, qd_bpe_work *work, const uint8_t *piece, size_t length,
                        const uint32_t **ids, size_t *count);

#endif
