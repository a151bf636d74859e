/* The reference model of a run on preferences: the model before the first step. What it gives the
 * completions does not change, so it is computed once, by the forward-only program on the layout of
 * the run, and kept in reference.safetensors of the run folder. */
#include "train/run/run_state.h"

#include "base/clock.h"
#include "ckpt/safetensors.h"
#include "train/ranks/common.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#define REFERENCE_FILE "reference.safetensors"
#define REFERENCE_TENSOR "log_probabilities"

/* What the values depend on. */
typedef struct key {
    char data[17];                   /* fingerprint of the pairs */
    char weights[QD_CKPT_BASE_TEXT + 32]; /* of the reference model */
} key;

static qd_status data_key(const qd_data *data, char text[17])
{
    uint64_t all = 0;
    for (int i = 0; i < qd_data_source_count(data); i++) {
        uint64_t hash[2] = {all, 0};
        bool sampled;
        QD_TRY(qd_data_fingerprint(data, i, &hash[1], &sampled));
        all = XXH3_64bits(hash, sizeof hash);
    }
    snprintf(text, 17, "%016llx", (unsigned long long)all);
    return QD_OK;
}

/* Weights are drawn from the seed, or come from run.weights. */
static qd_status weights_key(const qd_config *c, char text[QD_CKPT_BASE_TEXT + 32])
{
    char found[QD_CKPT_BASE_TEXT], *folder = NULL;
    if (c->weights[0] == '\0') {
        snprintf(text, QD_CKPT_BASE_TEXT + 32, "seed %llu", (unsigned long long)c->seed);
        return QD_OK;
    }
    QD_TRY(qd_ckpt_base_fingerprint(c->weights, found, &folder));
    free(folder);
    snprintf(text, QD_CKPT_BASE_TEXT + 32, "weights %s", found);
    return QD_OK;
}

static bool same_note(const qd_safetensors *file, const char *name, const char *wanted)
{
    const char *text = qd_safetensors_metadata(file, name);
    return text && strcmp(text, wanted) == 0;
}

/* Reads the values if the file has those of the same pairs and, unless the run is resumed, of the
 * same weights: those of a resumed run are no longer there to compare. */
static qd_status read_file(const qd_rank_run *s, const char *path, const key *wanted, bool resumed, bool *found)
{
    qd_safetensors *file = NULL;
    const int64_t count = qd_data_sequences(s->corpus.data);
    char hash[17];
    *found = false;
    if (access(path, F_OK) != 0)
        return QD_OK;
    QD_TRY(qd_safetensors_load(path, &file));
    const qd_safetensors_entry *e = qd_safetensors_find(file, REFERENCE_TENSOR);
    bool fits = e && e->dtype == QD_F64 && e->count == count && same_note(file, "data", wanted->data) &&
                (resumed || same_note(file, "weights", wanted->weights));
    if (fits) {
        memcpy(s->reference, e->data, (size_t)count * sizeof *s->reference);
        snprintf(hash, sizeof hash, "%016llx", (unsigned long long)XXH3_64bits(s->reference, (size_t)count * sizeof *s->reference));
        *found = same_note(file, "xxh3", hash);
    }
    qd_safetensors_close(file);
    if (fits && !*found)
        return QD_FAIL(QD_CORRUPT, "%s: its checksum does not match: remove it, and start the run again", path);
    return QD_OK;
}

static qd_status write_file(const qd_rank_run *s, const char *path, const key *k)
{
    qd_safetensors_writer *w = NULL;
    qd_run_file part;
    char hash[17];
    const int64_t count = qd_data_sequences(s->corpus.data);
    uint64_t written;
    QD_TRY(qd_run_path(&s->run->config, REFERENCE_FILE ".part", part));
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)XXH3_64bits(s->reference, (size_t)count * sizeof *s->reference));
    QD_TRY(qd_safetensors_create(part, &w));
    qd_status status = qd_safetensors_note(w, "data", k->data);
    if (status == QD_OK)
        status = qd_safetensors_note(w, "weights", k->weights);
    if (status == QD_OK)
        status = qd_safetensors_note(w, "xxh3", hash);
    if (status == QD_OK)
        status = qd_safetensors_declare(w, REFERENCE_TENSOR, QD_F64, 1, &count);
    if (status == QD_OK)
        status = qd_safetensors_write(w, s->reference, &written);
    if (status != QD_OK) {
        qd_safetensors_abandon(w);
        return status;
    }
    QD_TRY(qd_safetensors_finish(w, NULL));
    return rename(part, path) == 0 ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be renamed to %s", part, path);
}

/* Collective. A signal ends the computation on all ranks. */
static qd_status check_stop(qd_rank_run *s)
{
    int32_t asked = atomic_load(s->run->stop);
    QD_TRY(qd_comm_all_reduce(s->control, &asked, &asked, 1, QD_I32, QD_MAX, NULL));
    if (asked == 0)
        return QD_OK;
    s->agreed = true;
    return QD_FAIL(asked == SIGINT ? QD_INTERRUPTED : QD_STOPPED,
                   "stopped before the first step, while the log-probabilities of the reference model were computed: start again");
}

/* Collective: a forward pass over all windows. */
static qd_status compute(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_data *data = s->corpus.data;
    const qd_strategy *strategy = &qd_trainer_program(s->trainer)->strategy;
    const int64_t all = qd_data_windows(data) + qd_data_validation_windows(data), count = qd_data_sequences(data);
    const int64_t each = strategy->micro_batch * strategy->micro_batches, seq = strategy->seq;
    qd_batch_source source = qd_data_every_window(data);
    double *scores = malloc((size_t)(each * seq) * sizeof *scores);
    qd_status status = qd_rank_agree(s, scores ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for the scores of pairs"));
    for (int64_t at = 0; at < all && status == QD_OK; at += c->global_batch) {
        qd_step_output output;
        int64_t first = -1;
        status = check_stop(s);
        if (status == QD_OK)
            status = qd_trainer_evaluate(s->trainer, &source, at, &output);
        if (status == QD_OK)
            status = qd_trainer_scores(s->trainer, scores, &first);
        for (int64_t i = 0; i < each && first >= 0 && status == QD_OK; i++)
            qd_data_keep_scores(data, at + first + i, scores + i * seq, s->reference);
    }
    free(scores);
    QD_TRY(status);
    return qd_comm_all_reduce(s->control, s->reference, s->reference, count, QD_F64, QD_SUM, NULL); /* each value is of one rank */
}

static qd_status missing(const qd_rank_run *s, const char *path)
{
    return QD_FAIL(QD_USAGE, "run.resume: %s does not have the log-probabilities of the reference model for the pairs of %s: restore the "
                             "file and the data that the run was started with, or start another run", path, s->run->config.data.path);
}

qd_status qd_run_reference(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    const bool root = qd_comm_rank(s->world) == 0, kept = c->run_dir[0] != '\0', resumed = qd_trainer_position(s->trainer).step > 0;
    qd_run_file path = "";
    key k = {.data = ""};
    if (!c->data.pairs)
        return QD_OK;
    const int64_t count = qd_data_sequences(s->corpus.data);
    double begin = qd_clock_now();
    bool found = false;
    s->reference = calloc((size_t)count, sizeof *s->reference);
    qd_status status = s->reference ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for %lld log-probabilities", (long long)count);
    if (status == QD_OK && root && kept)
        status = qd_run_path(c, REFERENCE_FILE, path);
    if (status == QD_OK && root)
        status = data_key(s->corpus.data, k.data);
    if (status == QD_OK && root && !resumed)
        status = weights_key(c, k.weights);
    if (status == QD_OK && root && kept)
        status = read_file(s, path, &k, resumed, &found);
    if (status == QD_OK && root && resumed && !found)
        status = missing(s, kept ? path : "run.dir");
    QD_TRY(qd_rank_agree(s, status));
    int32_t there = found;
    QD_TRY(qd_comm_broadcast(s->control, &there, 1, QD_I32, 0, NULL));
    if (there) {
        QD_TRY(qd_comm_broadcast(s->control, s->reference, count, QD_F64, 0, NULL));
    } else {
        QD_TRY(compute(s));
        QD_TRY(qd_rank_agree(s, root && kept ? write_file(s, path, &k) : QD_OK));
    }
    qd_data_set_reference(s->corpus.data, s->reference);
    char text[160];
    snprintf(text, sizeof text, "log-probabilities of the reference model: %s for %lld pairs in %.1f s", there ? "read" : "computed",
             (long long)(count / 2), qd_clock_now() - begin);
    qd_rank_note(s, text);
    return QD_OK;
}
