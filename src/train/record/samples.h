/* Sample texts while training (run.sample_every): continuations of prompts with the weights of the
 * moment, on the training layout, in samples.jsonl. */
#ifndef QD_TRAIN_RECORD_SAMPLES_H
#define QD_TRAIN_RECORD_SAMPLES_H

#include "train/exec/trainer.h"
#include "train/run/run_corpus.h"

typedef struct qd_samples qd_samples;

/* Collective over the trainer's world, as is the write. For a run that samples
 * (config->samples.every > 0), whose folder exists. The lines of steps up to the trainer's stay.
 * Takes memory for a KV cache of data.seq tokens, and its programs, in addition to the plan.
 * QD_USAGE if there is no tokenizer. */
/* QD_USAGE if the data has no tokenizer to write texts with. To be called before a run is
 * replaced. */
qd_status qd_samples_check(const qd_config *config, const qd_run_corpus *corpus);
qd_status qd_samples_create(const qd_config *config, const qd_run_corpus *corpus, qd_trainer *trainer, qd_samples **samples);
void qd_samples_destroy(qd_samples *samples); /* before the trainer; NULL is legal */

/* Rank 0: drops the lines of steps after `step`; NULL is legal. */
qd_status qd_samples_rewind(qd_samples *samples, int64_t step);
/* The same for a resumed run that no longer samples. Not collective. */
qd_status qd_samples_cut(const char *run_dir, int64_t step);

/* Whether samples are due after `step`. */
bool qd_samples_due(const qd_config *config, int64_t step);
/* Continues the prompts and adds a line for each. A text that cannot be generated or written is
 * missing, and does not fail the run. note: rank 0: the beginning of the first text, or what is
 * missing. */
qd_status qd_samples_write(qd_samples *samples, int64_t step, char *note, size_t size);
#endif
