/* The windows that a loss is evaluated on: the held-out part of a data set, or all of its tokens,
 * cut into windows in order. `quadrille eval` and validation during training read the same ones. */
#ifndef QD_DATA_WINDOWS_H
#define QD_DATA_WINDOWS_H

#include "data/data.h"

/* Tokens [first, end) of a source; all except the first are predicted. */
typedef struct qd_token_range {
    int64_t first, end, windows;
} qd_token_range;

typedef struct qd_windows {
    qd_data *data;
    const qd_tokenizer *tokenizer; /* NULL: a token is one byte */
    qd_batch_source held;          /* the windows that the data set holds out; fill NULL: `ranges`, cut differently */
    qd_token_range *ranges;        /* per source */
    int count;
    int64_t seq;
    int64_t all;    /* windows of all ranges */
    int64_t chosen; /* windows that are read: all, or this many, evenly spaced */
    int64_t bytes;  /* of the targets that were read so far */
    bool documents;
} qd_windows;

/* held_out: only the held-out part of each source, whose windows have train_seq tokens. seq: tokens
 * of a window; for examples (data.format) it must be train_seq. most: number of windows to read at
 * most; 0: all. `data` must outlive it. */
qd_status qd_windows_open(qd_data *data, const qd_tokenizer *tokenizer, bool held_out, int64_t train_seq, int64_t seq, int64_t most,
                          bool documents, qd_windows *windows);
void qd_windows_close(qd_windows *windows); /* also of one that is all zero */

/* The longest range of predicted tokens: a longer window would only be padded. At least 1. */
int64_t qd_windows_longest(const qd_data *data, bool held_out, int64_t train_seq);

/* Samples 0 .. chosen-1. Positions past the end of a range, and samples past the last, have targets
 * that do not count. */
qd_batch_source qd_windows_source(qd_windows *windows);
#endif
