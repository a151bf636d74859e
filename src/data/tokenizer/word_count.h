/* Counts the words of text files with all threads of a pool, for training a tokenizer. */
#ifndef QD_DATA_TOKENIZER_WORD_COUNT_H
#define QD_DATA_TOKENIZER_WORD_COUNT_H

#include "base/thread.h"
#include "data/files.h"
#include "data/tokenizer/tokenizer_impl.h"

typedef struct qd_word_entry {
    uint64_t hash;
    uint64_t offset; /* of its bytes */
    uint32_t length; /* 0: empty slot */
    int64_t count;
} qd_word_entry;

typedef struct qd_word_counts {
    qd_word_entry *slots;
    size_t slot_count, used;
    uint8_t *bytes;
    size_t bytes_used, bytes_capacity;
} qd_word_counts;

void qd_word_counts_free(qd_word_counts *counts);

/* `cutter` defines how text is split; it has no vocabulary yet. The counts do not depend on the
 * number of threads. */
qd_status qd_word_count(const qd_file_list *files, const qd_tokenizer *cutter, const qd_tokenizer_training *training,
                        qd_pool *pool, qd_word_counts *counts);

#endif
