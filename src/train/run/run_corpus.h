/* The training text of a run, as its configuration describes it: tokenizer and data set. */
#ifndef QD_TRAIN_RUN_RUN_CORPUS_H
#define QD_TRAIN_RUN_RUN_CORPUS_H

#include "data/data.h"
#include "spec/config/config.h"

typedef struct qd_run_corpus {
    qd_tokenizer *tokenizer; /* NULL: tokens are bytes, or come from shards */
    qd_text_encoder encoder;
    qd_data *data;
} qd_run_corpus;

typedef struct qd_run_corpus_progress {
    /* May be NULL. `what`: "tokenizer" or "tokens"; done and total in bytes of text, or merges.
     * Returning false ends the work with QD_INTERRUPTED. */
    bool (*report)(void *context, const char *what, int64_t done, int64_t total);
    void *context;
} qd_run_corpus_progress;

/* Loads or trains the tokenizer and opens the data set. The first process trains (stored in
 * run.dir) and tokenizes (stored in the cache); processes that open the same run concurrently wait
 * for it. Not collective. */
qd_status qd_run_corpus_open(const qd_config *config, const qd_run_corpus_progress *progress, qd_run_corpus *corpus);
/* Opens data.eval_path with the tokenizer of an open corpus, which must outlive it, as a source of
 * all of its tokens. *data is NULL if there is no such text. */
qd_status qd_run_corpus_open_evaluation(const qd_config *config, const qd_run_corpus *corpus, const qd_run_corpus_progress *progress,
                                        qd_data **data);
void qd_run_corpus_close(qd_run_corpus *corpus); /* also after a failed open */

/* Whether tokens are bytes if the run has stored no tokenizer. */
bool qd_run_corpus_is_bytes(const qd_config *config);

/* The hash that shards carry for this tokenizer: a file, or "bytes". */
qd_status qd_run_corpus_tokenizer_hash(const char *tokenizer, uint64_t *hash);

/* In run.dir, while it still holds the run that is being replaced: the new run's tokenizer, and the
 * key of what it was trained on. */
#define QD_RUN_NEW_TOKENIZER "tokenizer.new.json"
#define QD_RUN_NEW_TOKENIZER_KEY "tokenizer.new.key"

#endif
