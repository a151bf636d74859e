/* Loss and gradient spikes (train.on_spike): steps whose gradient norm or loss is far above that of
 * the steps before. Such an update can throw away days of training, although every number in it is
 * finite.
 *
 * Only the figures of earlier steps decide, and a resumed run reads them again from metrics.jsonl:
 * the same steps are spikes in every layout and however often the run was interrupted. */
#ifndef QD_TRAIN_RECORD_SPIKES_H
#define QD_TRAIN_RECORD_SPIKES_H

#include "spec/config/config.h"
#include "train/exec/interpret.h"

typedef struct qd_spikes {
    const qd_spike_config *config;
    double *norms, *losses, *sorted; /* (window) of the last steps that were no spikes; sorted: room for a median */
    int64_t count; /* such steps so far */
} qd_spikes;

/* `config` must outlive it. Without train.on_spike nothing is kept and nothing is a spike. */
qd_status qd_spikes_open(const qd_spike_config *config, qd_spikes *spikes);
void qd_spikes_close(qd_spikes *spikes); /* also of one that is all zero */

/* What the next step may have; 0: no limit, because too few steps were seen. */
qd_step_limits qd_spikes_limits(const qd_spikes *spikes);
/* Notes the figures of a step that was no spike. */
void qd_spikes_add(qd_spikes *spikes, double norm, double loss);
/* The state after `step`, from the lines of metrics.jsonl. A missing file gives that of a new
 * run. */
qd_status qd_spikes_restore(const char *metrics, int64_t step, qd_spikes *spikes);

/* Says which limit a step has exceeded. */
void qd_spikes_describe(const qd_spikes *spikes, const qd_step_output *output, char *text, size_t size);

/* A line of spikes.jsonl. */
typedef struct qd_spike_record {
    int64_t step, first_sample, samples;
    int64_t back_to; /* step of the checkpoint that the run continues from; -1: the step is skipped */
    double loss, norm;
    qd_step_limits limits;
} qd_spike_record;
qd_status qd_spikes_write(const char *path, const qd_spike_record *record);
#endif
