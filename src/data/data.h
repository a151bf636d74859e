/* Where tokens come from, and which sample belongs to which step.
 *
 * The sampler is a pure function of (seed, sample index): sample g of a run, g = step ·
 * global_batch + i, is a window of a source, in an order permuted per epoch (data/sampler.h). No
 * state, no dependence on the layout: any rank can compute any sample, and a run can go on
 * anywhere. Windows cut the documents of a source, one after another, every seq tokens; each needs
 * one token more, its last target. */
#ifndef QD_DATA_DATA_H
#define QD_DATA_DATA_H

#include <quadrille/data.h>
#include <quadrille/types.h>

#include "data/files.h"
#include "data/sampler.h"

/* Fills `count` samples that start at index `first` of the run: tokens, targets (the next token;
 * -1: not counted) and document starts, (count, seq) each. */
typedef struct qd_batch_source {
    qd_status (*fill)(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start);
    void *context;
    bool documents; /* document starts differ from 0 */
} qd_batch_source;

/* A data set of one file whose bytes are the tokens. QD_USAGE when it is missing, empty or too
 * short for one window of seq + 1. */
qd_status qd_data_open_bytes(const char *path, int64_t seq, uint64_t seed, qd_data **data);

/* The text files behind `path` (file, folder or mixture), without shards: what a tokenizer is
 * trained on. */
qd_status qd_data_text_files(const char *path, qd_file_list *files);

/* Of the tokenizer that made the tokens, as in qd_text_encoder; 0: unknown. */
uint64_t qd_data_tokenizer_hash(const qd_data *data);

/* A hash of a source's content: of shards, whose headers hold the hashes of their chunks, of all of
 * it; of text in memory or mapped, of all bytes up to 1 GiB, beyond that of 4096 blocks of 64 KiB
 * (*sampled). */
qd_status qd_data_fingerprint(const qd_data *data, int source, uint64_t *hash, bool *sampled);

/* Training samples, without end: after one epoch comes the next. `seq` of fill is the data
 * set's. */
qd_batch_source qd_data_source(qd_data *data);
/* The held-out windows in their order, source after source; index qd_data_validation_windows() is
 * the first again. */
qd_batch_source qd_data_validation_source(qd_data *data);

/* Tokens [first, first + count) of a source, count at least 1, with the token after each as its
 * target (-1 where the mask forbids it) and document starts relative to `first`. One more token
 * must follow them. */
qd_status qd_data_window(const qd_data *data, int source, int64_t first, int64_t count, int32_t *tokens,
                         int32_t *targets, int32_t *doc_start);

/* Random tokens, a pure function of (seed, sample): for benchmarks and tests. Every `ignored`-th
 * target is -1 (0: none); documents > 0 cuts each sequence into that many documents. */
typedef struct qd_random_tokens {
    uint64_t seed;
    int64_t vocab;
    int ignored, documents;
} qd_random_tokens;
qd_batch_source qd_random_source(qd_random_tokens *random);

#endif
