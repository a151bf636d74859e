/* The files of run.dir: checks whether the folder can be used, and writes its first files when a
 * run starts. */
#include "train/run/run_state.h"

#include "base/text/strbuf.h"
#include "ckpt/hf_companions.h"
#include "ckpt/huggingface.h"
#include "train/ranks/common.h"
#include "train/record/starts.h"
#include "train/ranks/leftovers.h"
#include "train/run/run_data.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_WAIT 10.0 /* seconds for another run to leave the folder */

qd_status qd_run_path(const qd_config *c, const char *name, qd_run_file path)
{
    int n = snprintf(path, sizeof(qd_run_file), "%s/%s", c->run_dir, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "run.dir is too long: %.64s…", c->run_dir);
}

/* The deepest existing part of the path must be a writable folder. */
static qd_status check_place(const char *folder)
{
    qd_run_file path;
    struct stat info;
    snprintf(path, sizeof path, "%s", folder);
    QD_TRY(qd_path_existing(path));
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode))
        return QD_FAIL(QD_USAGE, "run.dir: %s is a file; it must be a folder or a new name", path);
    if (access(path, W_OK | X_OK) != 0)
        return QD_FAIL(QD_USAGE, "run.dir: %s is not writable: %s", path, strerror(errno));
    return QD_OK;
}

/* A saved data.tokenizer may be missing, since the run has stored its own. One given on the command
 * line must exist. */
static qd_status check_named_now(const qd_options *options, const qd_config *c)
{
    const char *named = c->data.tokenizer;
    bool given = strcmp(qd_options_origin(options, "data.tokenizer"), "command line") == 0;
    if (!given || named[0] == '\0' || strcmp(named, "bytes") == 0 || access(named, F_OK) == 0)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "data.tokenizer: %s: %s; omit it to use the run's own", named, strerror(errno));
}

/* A new run clears its folder, and the weights it starts from with it. A folder that does not exist
 * holds none. */
static qd_status check_weights(const qd_config *c)
{
    char weights[PATH_MAX], folder[PATH_MAX];
    if (c->resume || c->weights[0] == '\0' || c->run_dir[0] == '\0' || !realpath(c->weights, weights) || !realpath(c->run_dir, folder))
        return QD_OK;
    const size_t length = strlen(folder);
    if (strncmp(weights, folder, length) != 0 || (weights[length] != '/' && weights[length] != '\0'))
        return QD_OK;
    return QD_FAIL(QD_USAGE, "run.weights: %s is in run.dir, %s, which this run would replace: name another run.dir, or resume the run "
                             "with --resume", c->weights, c->run_dir);
}

qd_status qd_run_folder_check(const qd_options *options, const qd_config *c, const atomic_int *stop)
{
    qd_run_file path;
    struct stat info;
    if (c->run_dir[0] == '\0')
        return QD_OK;
    QD_TRY(qd_run_path(c, "metrics.jsonl", path));
    QD_TRY(check_weights(c));
    QD_TRY(check_place(c->run_dir));
    qd_run_file checkpoints;
    QD_TRY(qd_run_path(c, "checkpoints", checkpoints));
    bool held = stat(path, &info) == 0 || qd_store_holds(checkpoints);
    if (c->resume && qd_options_bool(options, "run.overwrite"))
        return QD_FAIL(QD_USAGE, "run.resume and run.overwrite are both set: resume the run in %s, or replace it", c->run_dir);
    if (held && !c->resume && !qd_options_bool(options, "run.overwrite"))
        return QD_FAIL(QD_USAGE, "run.dir: %s holds another run: name another folder, resume that run with --resume, or "
                                 "replace it with --overwrite", c->run_dir);
    if (!held && c->resume)
        return QD_FAIL(QD_USAGE, "run.resume: %s holds no run to resume", c->run_dir);
    /* Longer than a killed run takes to exit, but not so long that other ranks time out. */
    double wait = c->deadline / 2 < MOST_WAIT ? c->deadline / 2 : MOST_WAIT;
    QD_TRY(qd_metrics_wait_free(path, wait, stop));
    return c->resume ? check_named_now(options, c) : QD_OK;
}

/* Removes a file of an earlier run, if it exists. */
static qd_status clear_file(const qd_config *c, const char *name)
{
    qd_run_file path;
    QD_TRY(qd_run_path(c, name, path));
    return unlink(path) == 0 || errno == ENOENT ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be replaced: %s", path, strerror(errno));
}

static qd_status write_asked(const qd_rank_run *s)
{
    qd_run_file path;
    char *text = NULL;
    QD_TRY(qd_run_path(&s->run->config, "config.yaml", path));
    QD_TRY(qd_run_config_text(s->run->options, &s->run->config, NULL, &text));
    qd_status status = qd_file_replace(path, text, strlen(text));
    free(text);
    return status;
}

static bool has_file(const char *folder, const char *name)
{
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* Files of Hugging Face folders that belong to weights, tokenizer and chat template. A tokenizer
 * that the run trains has none. */
static qd_status keep_companions(const qd_config *c)
{
    qd_run_file folder;
    const char *tokenizer = c->data.tokenizer, *slash = strrchr(tokenizer, '/');
    QD_TRY(qd_hf_forget(c->run_dir));
    if (c->weights[0] != '\0') {
        snprintf(folder, sizeof folder, "%.*s/../..", PATH_MAX - 8, c->weights); /* a checkpoint of a run */
        bool checkpoint = has_file(folder, "config.yaml") && !has_file(c->weights, "config.yaml") && !qd_hf_is_folder(c->weights);
        QD_TRY(qd_hf_keep_model(checkpoint ? folder : c->weights, c->run_dir));
    }
    if (tokenizer[0] != '\0' && strcmp(tokenizer, "bytes") != 0) {
        snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - tokenizer) : 1, slash ? tokenizer : ".");
        QD_TRY(qd_hf_keep_text(folder, c->run_dir));
    }
    return c->data.chat_template[0] != '\0' ? qd_hf_keep_template(c->data.chat_template, c->run_dir) : QD_OK;
}

/* The files other than the metrics. */
static qd_status write_files(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_run_file path;
    QD_TRY(qd_run_path(c, "starts.jsonl", path));
    QD_TRY(qd_starts_note(path, qd_trainer_position(s->trainer).step, qd_trainer_program(s->trainer)));
    QD_TRY(qd_recorder_create(c, qd_trainer_position(s->trainer).step, &s->recorder));
    QD_TRY(clear_file(c, "trace.json"));
    QD_TRY(clear_file(c, "memory.json"));
    QD_TRY(qd_run_config_text(s->run->options, c, qd_trainer_program(s->trainer), &s->config_text));
    QD_TRY(write_asked(s));
    QD_TRY(qd_run_path(c, "effective.yaml", path));
    QD_TRY(qd_file_replace(path, s->config_text, strlen(s->config_text)));
    QD_TRY(qd_run_path(c, "data.json", path));
    QD_TRY(qd_run_data_write(path, s->corpus.data));
    QD_TRY(qd_run_path(c, "tokenizer.json", path));
    if (c->resume && access(path, F_OK) == 0) /* the checkpoints depend on it */
        return QD_OK;
    QD_TRY(keep_companions(c)); /* also without a tokenizer: config.json, and not those of a replaced run */
    if (!s->corpus.tokenizer)
        return clear_file(c, "tokenizer.json");
    QD_TRY(qd_tokenizer_save(s->corpus.tokenizer, path)); /* a model is useless without the tokenizer it was trained with */
    qd_run_file key, new_key;
    QD_TRY(qd_run_path(c, "tokenizer.key", key));
    QD_TRY(qd_run_path(c, QD_RUN_NEW_TOKENIZER_KEY, new_key));
    if (rename(new_key, key) != 0 && errno != ENOENT)
        return QD_FAIL(QD_IO, "%s: cannot be replaced: %s", key, strerror(errno));
    return clear_file(c, QD_RUN_NEW_TOKENIZER);
}

/* Rank 0, after everything else is ready. The metrics come first, because they are locked: of two
 * runs that start concurrently, one gets the folder. */
qd_status qd_run_folder_open(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_run_file path;
    if (c->run_dir[0] == '\0' || qd_comm_rank(s->world) != 0)
        return QD_OK;
    QD_TRY(qd_folder_make(c->run_dir));
    QD_TRY(qd_run_path(c, "metrics.jsonl", path));
    if (c->resume && access(path, F_OK) != 0)
        qd_rank_note(s, "metrics.jsonl is missing: the lines of earlier steps are lost, and a new file is started");
    QD_TRY(qd_metrics_create(path, qd_trainer_position(s->trainer).step, &s->metrics));
    qd_run_file shared;
    char warning[512];
    QD_TRY(qd_run_path(c, QD_LEFTOVERS_FILE, shared));
    qd_leftovers_clear(shared, warning, sizeof warning);
    if (warning[0] != '\0')
        qd_rank_note(s, warning);
    if (c->resume && s->kept >= 0) {
        qd_run_file root;
        QD_TRY(qd_run_path(c, "checkpoints", root));
        qd_store_repair_latest(root, s->kept);
    }
    qd_status status = write_files(s);
    if (status != QD_OK && !c->resume)
        unlink(path); /* otherwise the folder would seem to hold a run */
    return status;
}

qd_status qd_run_folder_clear(const qd_config *c)
{
    /* metrics.jsonl is truncated when it is opened */
    static const char *const files[] = {"config.yaml", "effective.yaml", "trace.json", "memory.json", "evaluations.jsonl",
                                        "restarts.jsonl", "starts.jsonl", "samples.jsonl", "spikes.jsonl", "stacks.txt"};
    qd_run_file path;
    QD_TRY(qd_run_path(c, "metrics.jsonl", path));
    QD_TRY(qd_metrics_check_free(path)); /* again: tokenizing may have taken hours */
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        QD_TRY(clear_file(c, files[i]));
    QD_TRY(qd_recorder_clear(c));
    QD_TRY(qd_run_path(c, "checkpoints", path));
    return qd_store_clear(path);
}
