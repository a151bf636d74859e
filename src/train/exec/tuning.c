/* Tunes GEMMs on rank 0, caches the choices in a file, and broadcasts them. */
#include "train/exec/tuning.h"

#include "base/text/strbuf.h"
#include "train/run/cache_folder.h"
#include "train/ranks/long_work.h"
#include "train/exec/gemm_list.h"

#include <quadrille/log.h>

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct search {
    const qd_config *config;
    qd_device *device;
    qd_products gemms;   /* of all ranks */
    char path[PATH_MAX]; /* of the cache file; "": none */
    void *scratch;       /* lent to searches */
    int64_t scratch_bytes;
    int left;            /* searches that remain */
} search;

/* The largest allowed value means no limit. */
static bool no_limit(const qd_config *config)
{
    return config->tuning_seconds >= 3600;
}

/* Printed before the search, because the user has to wait for it. */
static void tell(void *context, int searches)
{
    const search *s = context;
    char limit[32] = "without a time limit";
    if (!no_limit(s->config))
        snprintf(limit, sizeof limit, "about %.3g s", s->config->tuning_seconds);
    qd_log(QD_LOG_INFO, "tuning", "searching for the fastest algorithms of %d GEMMs, %s%s%s", searches, limit,
           s->path[0] ? ", once: the results are stored in " : " (in every run, because run.tuning=none)", s->path);
}

static void find_file(search *s)
{
    if (strcmp(s->config->tuning, "none") != 0)
        qd_cache_file(s->config->tuning, "products", s->path, sizeof s->path);
}

/* A cache file that cannot be read or written costs time but does not fail the run. */
static void load_choices(search *s)
{
    enum { MOST = 4 << 20 };
    char *text = NULL;
    size_t length;
    if (s->path[0] != '\0' && qd_file_read(s->path, MOST, &text, &length) == QD_OK)
        (void)qd_device_tuning_set(s->device, text);
    free(text);
    qd_error_clear();
}

static qd_status store_choices(search *s)
{
    qd_strbuf all = {0};
    if (s->path[0] == '\0')
        return QD_OK;
    if (!qd_cache_may_replace(s->path, "quadrille tuning ")) {
        qd_log(QD_LOG_WARN, "tuning", "%s is not a file of run.tuning and stays: results are not stored", s->path);
        return QD_OK;
    }
    qd_status status = qd_device_tuning_get(s->device, &all);
    if (status == QD_OK && all.data && qd_file_replace(s->path, all.data, all.length) != QD_OK)
        qd_error_clear();
    qd_strbuf_free(&all);
    return status;
}

static qd_tune_args searches_of(search *s)
{
    return (qd_tune_args){.calls = s->gemms.items, .times = s->gemms.times, .count = s->gemms.count,
                          .seconds = no_limit(s->config) ? INFINITY : s->config->tuning_seconds, .begin = tell, .context = s,
                          .scratch = s->scratch, .scratch_bytes = s->scratch_bytes};
}

/* Rank 0. */
static qd_status search_gemms(void *context)
{
    search *s = context;
    bool searched = false;
    find_file(s);
    load_choices(s);
    const qd_tune_args tune = searches_of(s);
    QD_TRY(qd_device_tune(s->device, &tune, &searched));
    return searched ? store_choices(s) : QD_OK;
}

/* Rank 0. */
static qd_status search_one_more(void *context)
{
    search *s = context;
    find_file(s);
    const qd_tune_args tune = searches_of(s);
    QD_TRY(qd_device_tune_more(s->device, &tune, &s->left));
    return store_choices(s);
}

/* Collective: distributes rank 0's choices. */
static qd_status share_choices(qd_device *device, qd_comm *world)
{
    qd_strbuf text = {0};
    int64_t length = 0;
    if (qd_comm_rank(world) == 0) {
        QD_TRY(qd_device_tuning_get(device, &text));
        length = text.data ? (int64_t)text.length : 0;
    }
    qd_status status = qd_comm_broadcast(world, &length, 1, QD_I64, 0, NULL);
    char *copy = status == QD_OK ? calloc((size_t)length + 1, 1) : NULL;
    if (status == QD_OK && !copy)
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the tuning results");
    if (status == QD_OK && qd_comm_rank(world) == 0 && length > 0)
        memcpy(copy, text.data, (size_t)length);
    if (status == QD_OK)
        status = qd_comm_broadcast(world, copy, length, QD_U8, 0, NULL);
    if (status == QD_OK && qd_comm_rank(world) != 0)
        status = qd_device_tuning_set(device, copy);
    qd_strbuf_free(&text);
    free(copy);
    return status;
}

/* Collective: `work` on rank 0 with the GEMMs of all ranks; all get its choices. */
static qd_status tune(search *s, const qd_program *program, qd_comm *world, qd_long_work work)
{
    if (qd_device_get_caps(s->device)->host_memory)
        return QD_OK;
    qd_status status = qd_products_collect(program, world, &s->gemms);
    if (status == QD_OK)
        status = qd_long_work_run(world, work, s);
    if (status == QD_OK && qd_comm_size(world) > 1)
        status = share_choices(s->device, world);
    qd_products_free(&s->gemms);
    return status;
}

qd_status qd_tune_products(const qd_config *config, const qd_program *program, qd_device *device, qd_comm *world)
{
    search s = {.config = config, .device = device};
    return tune(&s, program, world, search_gemms);
}

qd_status qd_tune_one_more(const qd_config *config, const qd_bound *bound, int *left)
{
    search s = {.config = config, .device = bound->device, .scratch = bound->dynamic, .scratch_bytes = bound->program->dynamic_bytes};
    qd_status status = tune(&s, bound->program, bound->world, search_one_more);
    *left = s.left;
    return status;
}
