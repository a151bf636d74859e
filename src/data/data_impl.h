/* Internals of a data set: sources, and the parts (shards, text) they consist of. */
#ifndef QD_DATA_DATA_IMPL_H
#define QD_DATA_DATA_IMPL_H

#include "data/data.h"
#include "data/examples/packing.h"
#include "data/shard.h"
#include "data/stored.h"

/* A stretch of consecutive tokens: a shard, a text whose bytes are the tokens, or text encoded in
 * memory. */
typedef struct qd_token_part {
    char *path; /* for messages */
    int token_bytes;      /* 1, 2 or 4 */
    int64_t count, first; /* first: position of its first token in the source */
    int64_t document_count;
    /* Storage: one of the three. */
    qd_shard shard;
    qd_stored *text;     /* one document */
    void *tokens;        /* tokens in memory */
    uint64_t *documents; /* for tokens in memory, (document_count): as in a shard */
} qd_token_part;

/* Tokens [first, first + count) of a part, as stored: token_bytes each. */
qd_status qd_token_part_read(const qd_token_part *part, int64_t first, int64_t count, void *out);
void qd_token_part_free(qd_token_part *part);

/* Concatenated parts: one stream of tokens. */
typedef struct qd_token_source {
    char *path;
    double weight; /* share of the samples; 0 while unknown */
    qd_token_part *parts;
    int64_t part_count, part_capacity;
    int64_t tokens, documents, files, skipped;
    int64_t windows, validation_windows; /* training windows, and the held-out ones after them */
    /* A source of examples, which are packed into windows whole. */
    uint8_t *counted;  /* (tokens): whether the loss counts the prediction of a token; NULL: all of them */
    int64_t *examples; /* (documents + 1): where each begins */
    qd_packing packing, validation_packing;
    int64_t validation_examples, cut_examples, skipped_examples;
} qd_token_source;

struct qd_data {
    int64_t seq, vocab;
    bool document_mask;
    bool pairs; /* examples 2 p and 2 p + 1 of a source are a pair: the chosen completion and the rejected one */
    const double *reference; /* of pairs, by sequence (qd_data_sequences): log-probability for the reference model; NULL: 0 */
    qd_token_source *sources;
    int source_count;
    int64_t *mixture_windows, *mixture_bounds; /* arrays of `mixture` */
    qd_mixture mixture;
    int64_t windows, validation_windows; /* totals over all sources */
    uint64_t tokenizer_hash;             /* of all tokens; 0: unknown */
    char *tokenizer_from;                /* the source of tokenizer_hash, for messages */
};

/* Tokens [first, first + count) of a source, checked against the vocabulary. */
qd_status qd_token_source_read(const qd_token_source *source, int64_t vocab, int64_t first, int64_t count,
                               int32_t *out);

/* The first document of the source that begins at or after `position`; source->tokens if there is
 * none. */
qd_status qd_token_source_document(const qd_token_source *source, int64_t position, int64_t *document);

/* The examples of window number `window` of a source: begins[0] is where the first begins,
 * begins[1] where it ends. The next call continues. */
typedef struct qd_window_walk {
    const qd_token_source *source;
    const qd_packing *packing;
    int64_t first_example, item, end;
    int each, part; /* examples that are packed together, and which of them is next */
} qd_window_walk;
qd_window_walk qd_window_examples(const qd_data *data, const qd_token_source *source, int64_t window);
const int64_t *qd_window_next(qd_window_walk *walk); /* NULL: there are no more */

/* examples/pairs.c: the values of pairs of one window, of parts that have `stride` elements each.
 * With reference and mean as in qd_batch_source.fill_pairs. */
void qd_pairs_fill(const qd_data *data, const qd_token_source *source, int64_t window, const double *reference, bool mean, int64_t stride,
                   int32_t *parts);
void qd_pairs_clear(int64_t seq, int64_t stride, int32_t *parts);
qd_status qd_pairs_fill_training(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts);
qd_status qd_pairs_fill_validation(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts);
/* data.c: tokens, targets and document starts of a window. */
qd_status qd_data_fill_window(const qd_data *data, int source, int64_t window, int32_t *tokens, int32_t *targets, int32_t *doc_start);
/* Source and window of held-out window `index`. */
int qd_data_held_out(const qd_data *data, int64_t *index);

/* Adds the files of `path` (not a mixture) to the source. */
qd_status qd_token_source_add(const qd_data_options *options, const char *path, qd_data *data, qd_token_source *source);

#endif
