/* The token pipeline: sources of tokens, and the mapping from steps to samples.
 *
 * The sampler is a pure function of (seed, sample index): sample g of a run, g = step ·
 * global_batch + i, is a window of a source, in an order permuted per epoch (data/sampler.h). It
 * has no state and does not depend on the layout: any rank can compute any sample, and a run can
 * resume at any step. The documents of a source are concatenated and cut into windows of seq
 * tokens; each window also reads the token after it, its last target. */
#ifndef QD_DATA_DATA_H
#define QD_DATA_DATA_H

#include <quadrille/data.h>
#include <quadrille/types.h>

#include "data/files.h"
#include "data/sampler.h"

/* Fills `count` samples starting at index `first` of the run: tokens, targets (the next token; -1:
 * not counted) and document starts, (count, seq) each. */
typedef struct qd_batch_source {
    qd_status (*fill)(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start);
    /* Of a data set of pairs, otherwise NULL: what else the rows of the same samples have,
     * (QD_PAIR_PARTS, count, seq), see base/preference.h. mean: rows are weighted by 1 / the
     * counted tokens of their sequence. */
    qd_status (*fill_pairs)(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts);
    void *context;
    bool documents; /* document starts are not all 0 */
} qd_batch_source;

/* A data set of one file whose bytes are the tokens. QD_USAGE if it is missing, empty or shorter
 * than one window of seq + 1. */
qd_status qd_data_open_bytes(const char *path, int64_t seq, uint64_t seed, qd_data **data);

/* The text files of `path` (file, folder or mixture), without shards: the training text of a
 * tokenizer. */
qd_status qd_data_text_files(const char *path, qd_file_list *files);

/* Hash of the tokenizer that made the tokens, as in qd_text_encoder; 0: unknown. */
uint64_t qd_data_tokenizer_hash(const qd_data *data);

/* A hash of a source's content. For shards it covers everything, because their headers contain the
 * hashes of their chunks. For text, on disk or encoded in memory, it covers all bytes up to 1 GiB,
 * and beyond that 4096 blocks of 64 KiB (*sampled). */
qd_status qd_data_fingerprint(const qd_data *data, int source, uint64_t *hash, bool *sampled);

/* Training samples; endless, epoch after epoch. `seq` of fill must be the data set's. */
qd_batch_source qd_data_source(qd_data *data);
/* The held-out windows in order, source after source; index qd_data_validation_windows() wraps
 * around to the first. */
qd_batch_source qd_data_validation_source(qd_data *data);

/* Data sets of pairs (qd_data_options.pairs). A pair is two sequences, chosen and rejected; they
 * are numbered in the order of the files. */
int64_t qd_data_sequences(const qd_data *data); /* of all sources */
/* Sums of the log-probabilities that the reference model gives each sequence's completion,
 * (qd_data_sequences), which must outlive the data set. Without them they are 0. */
void qd_data_set_reference(qd_data *data, const double *reference);
/* All windows in order, training and held out: qd_data_windows() + qd_data_validation_windows()
 * samples, and empty ones after them. Their pairs have no reference. */
qd_batch_source qd_data_every_window(qd_data *data);
/* Sets the reference of the sequences in one of these windows to the negative of its scores (as
 * of kernel pair_sums). */
void qd_data_keep_scores(const qd_data *data, int64_t window, const double *scores, double *reference);

/* Tokens [first, first + count) of a source, count >= 1, with the following token of each as its
 * target (-1 where the mask forbids it) and document starts relative to `first`. At least one more
 * token must follow them. */
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
