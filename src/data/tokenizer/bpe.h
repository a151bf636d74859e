/* Merges the tokens of one piece of text. */
#ifndef QD_DATA_TOKENIZER_BPE_H
#define QD_DATA_TOKENIZER_BPE_H

#include "data/tokenizer/tokenizer_impl.h"

/* Memory that one thread keeps between calls. Start with {0}. */
typedef struct qd_bpe_work {
    uint32_t *ids, *ranks, *next, *previous; /* per symbol */
    uint64_t *heap;
    size_t capacity, heap_capacity;
} qd_bpe_work;
void qd_bpe_work_free(qd_bpe_work *work);

/* Always the pair of the lowest rank, the leftmost of equals, until no pair is left. *ids (count)
 * belongs to `work` and holds until the next call. Short pieces are searched, long ones use a heap:
 * n log n. */
qd_status qd_bpe(const qd_tokenizer *tokenizer, qd_bpe_work *work, const uint8_t *piece, size_t length,
                 const uint32_t **ids, size_t *count);

#endif
