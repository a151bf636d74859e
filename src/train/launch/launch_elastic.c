/* Chooses the number of ranks and the layout of a run with run.elastic: as many ranks as are
 * available and as a layout can use. Model-parallel degrees stay as they were given where that is
 * possible, because they were chosen for memory and speed; the data-parallel degree takes the rest.
 * The global batch never changes, so neither do the samples of a step. */
#include "train/launch/launch_elastic.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"

#include <quadrille/check.h>
#include <quadrille/train.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

qd_status qd_elastic_check(const qd_config *c)
{
    if (c->elastic_most > QD_LOCAL_MAX_RANKS && c->launcher[0] == '\0')
        return QD_FAIL(QD_USAGE, "run.elastic allows %d ranks, and one machine starts at most %d local ranks", c->elastic_most,
                       QD_LOCAL_MAX_RANKS);
    return QD_OK;
}

void qd_elastic_begin(qd_elastic *e, const qd_config *c)
{
    *e = (qd_elastic){.least = c->elastic_least, .most = c->elastic_most, .available = c->elastic_most, .asked_at = qd_clock_now()};
    e->limit = -1;
    snprintf(e->reason, sizeof e->reason, "%d ranks are available", e->most);
    if (c->available[0] != '\0')
        snprintf(e->path, sizeof e->path, "%s", c->available);
    else
        snprintf(e->path, sizeof e->path, "%.*s/" QD_AVAILABLE_FILE, PATH_MAX - 16, c->run_dir);
}

void qd_elastic_forget(const qd_elastic *e, const qd_config *c)
{
    if (e->most > 0 && c->available[0] == '\0')
        unlink(e->path);
}

void qd_elastic_end(qd_elastic *e)
{
    qd_options_destroy(e->options);
    e->options = NULL;
}

/* How many ranks are available. A file that is empty, because it is just being written, or that has
 * no number, changes nothing. */
static void read_available(qd_elastic *e)
{
    char *text = NULL;
    size_t length = 0;
    int number = e->most, used = 0;
    qd_status status = qd_file_read(e->path, 4096, &text, &length);
    bool there = status == QD_OK, numeric = there && sscanf(text, " %9d%n", &number, &used) == 1 && number >= 0 &&
                                            strspn(text + used, " \t\r\n") == length - (size_t)used;
    qd_error_clear();
    free(text);
    if ((there && !numeric) || number == e->available)
        return;
    e->available = number;
    e->lost = 0; /* whoever says how many there are knows better */
    e->asked_at = qd_clock_now();
    snprintf(e->reason, sizeof e->reason, "%d rank%s available", number, number == 1 ? " is" : "s are");
}

void qd_elastic_limit(qd_elastic *e, int ranks, const char *reason)
{
    if (ranks == e->limit)
        return;
    e->limit = ranks;
    e->asked_at = qd_clock_now();
    snprintf(e->reason, sizeof e->reason, "%s", reason);
}

static qd_status set_int(qd_options *options, const char *key, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return qd_options_set(options, key, text);
}

static bool runs(const qd_options *options)
{
    qd_config config;
    qd_check_report report = qd_check_report_default();
    return qd_config_resolve(options, 0, &config) == QD_OK && qd_check(options, 0, &report) == QD_OK;
}

/* Degrees of tp, cp and pp. */
enum { MODEL_AXES = 3 };
static const char *const model_axes[MODEL_AXES] = {"parallel.tp", "parallel.cp", "parallel.pp"};

/* The layout that was given, for so many ranks, in up to three forms: as it is; with the
 * data-parallel degree open; and without what belongs to that degree. NULL in *options: none of
 * them can run, and the error record says why. */
static qd_status try_ranks(const qd_options *given, int ranks, const int64_t *degrees, qd_options **options)
{
    static const char *const open[][2] = {{"parallel.dp", "-1"}, {"parallel.dp_shard", "-1"}, {"train.micro_batch", "0"},
                                          {"parallel.ep", "1"}, {"parallel.etp", "1"}, {"parallel.nodes", "1"}};
    static const int forms[] = {0, 1, 3, 6}; /* of these keys */
    for (size_t form = 0; form < sizeof forms / sizeof *forms; form++) {
        qd_options *o = NULL;
        QD_TRY(qd_options_copy(given, &o));
        qd_status status = set_int(o, "parallel.ranks", ranks);
        for (int i = 0; degrees && i < MODEL_AXES && status == QD_OK; i++)
            status = set_int(o, model_axes[i], degrees[i]);
        for (int i = 0; i < forms[form] && status == QD_OK; i++)
            status = qd_options_is_set(o, open[i][0]) ? qd_options_set(o, open[i][0], open[i][1]) : QD_OK;
        if (status == QD_OK && runs(o)) {
            *options = o;
            return QD_OK;
        }
        qd_options_destroy(o);
        QD_TRY(status);
    }
    return QD_OK;
}

/* With divisors of the given degrees, the largest product first. */
static qd_status try_smaller(const qd_options *given, int ranks, qd_options **options)
{
    int64_t all[MODEL_AXES], d[MODEL_AXES], product = 1;
    for (int i = 0; i < MODEL_AXES; i++) {
        all[i] = qd_options_int(given, model_axes[i]);
        product *= all[i] = all[i] > 0 ? all[i] : 1;
    }
    for (int64_t wanted = product < ranks ? product : ranks; wanted >= 1 && !*options; wanted--)
        for (d[0] = all[0]; d[0] >= 1 && ranks % wanted == 0; d[0]--)
            for (d[1] = all[1]; d[1] >= 1; d[1]--) {
                d[2] = wanted / (d[0] * d[1]);
                const bool divides = all[0] % d[0] == 0 && all[1] % d[1] == 0 && d[2] > 0 && all[2] % d[2] == 0;
                if (!*options && divides && d[0] * d[1] * d[2] == wanted)
                    QD_TRY(try_ranks(given, ranks, d, options));
            }
    return QD_OK;
}

/* The most of the allowed ranks that a layout can use. */
static qd_status fit(qd_elastic *e, const qd_options *given, int allowed)
{
    qd_error_record record;
    if (e->allowed == allowed && e->options)
        return QD_OK;
    qd_error_keep(&record);
    qd_options_destroy(e->options);
    e->options = NULL;
    e->allowed = allowed;
    qd_status status = QD_OK;
    for (int ranks = allowed; ranks >= e->least && !e->options && status == QD_OK; ranks--) {
        e->ranks = ranks;
        status = try_ranks(given, ranks, NULL, &e->options);
    }
    for (int ranks = allowed; ranks >= e->least && !e->options && status == QD_OK; ranks--) {
        e->ranks = ranks;
        status = try_smaller(given, ranks, &e->options);
    }
    if (status == QD_OK)
        qd_error_put_back(&record);
    return status;
}

/* Without regard to ranks that fail again and again. */
static int most_now(const qd_elastic *e)
{
    const int most = e->available < e->most ? e->available : e->most;
    return e->limit >= 0 && e->limit < most ? e->limit : most;
}

static int allowed_now(qd_elastic *e)
{
    read_available(e);
    return most_now(e) - e->lost;
}

/* Why the run cannot continue with so few; NULL: it can. */
static bool too_few(qd_elastic *e, int allowed)
{
    if (allowed >= e->least && e->options)
        return false;
    if (allowed < e->least)
        snprintf(e->reason, sizeof e->reason, "%d rank%s available, and run.elastic needs at least %d", allowed > 0 ? allowed : 0,
                 allowed == 1 ? " is" : "s are", e->least);
    else
        snprintf(e->reason, sizeof e->reason, "no number of ranks from %d to %d makes a layout of this model and batch (run.elastic)",
                 e->least, allowed);
    return true;
}

int qd_elastic_wanted(qd_elastic *e, const qd_options *given, int ranks)
{
    if (e->most == 0)
        return 0;
    const int allowed = allowed_now(e);
    if (e->allowed == allowed && e->options)
        return e->ranks == ranks ? 0 : e->ranks;
    if (fit(e, given, allowed) != QD_OK) {
        qd_error_clear();
        return 0;
    }
    if (too_few(e, allowed))
        return -1;
    const size_t length = strlen(e->reason);
    if (e->ranks < allowed)
        snprintf(e->reason + length, sizeof e->reason - length, ", of which a layout can use %d", e->ranks);
    return e->ranks == ranks ? 0 : e->ranks;
}

qd_status qd_elastic_options(qd_elastic *e, const qd_options *given, qd_options **options)
{
    if (e->most == 0)
        return qd_options_copy(given, options);
    const int allowed = allowed_now(e);
    QD_TRY(fit(e, given, allowed));
    if (too_few(e, allowed))
        return QD_FAIL(QD_SYSTEM, "%s", e->reason);
    return qd_options_copy(e->options, options);
}

bool qd_elastic_exclude(qd_elastic *e, const qd_options *given, int ranks)
{
    const int most = most_now(e);
    if (e->most == 0 || ranks - 1 < e->least)
        return false;
    qd_error_record record;
    qd_error_keep(&record);
    e->lost = most - (ranks - 1);
    bool can = fit(e, given, most - e->lost) == QD_OK && e->options;
    qd_error_put_back(&record);
    e->asked_at = qd_clock_now();
    snprintf(e->reason, sizeof e->reason, "a rank fails again and again");
    return can;
}

/* The configuration of a run folder. */
static qd_status load_run(const char *folder, qd_options **options)
{
    char path[PATH_MAX];
    qd_option_table table = qd_config_table();
    if (snprintf(path, sizeof path, "%s/config.yaml", folder) >= (int)sizeof path)
        return QD_FAIL(QD_USAGE, "the name of the run folder is too long");
    QD_TRY(qd_options_create(&table, 1, options));
    return qd_options_load(*options, path);
}

qd_status qd_train_resize(const char *folder, int ranks)
{
    qd_options *options = NULL;
    qd_config config = {0};
    qd_elastic e;
    char text[24];
    qd_status status = QD_OK;
    QD_TRY_DONE(load_run(folder, &options));
    QD_TRY_DONE(qd_elastic_resolve(options, &config));
    if (config.elastic_most == 0)
        QD_TRY_DONE(QD_FAIL(QD_USAGE, "%s: the number of ranks of this run is fixed: resume it with run.elastic=FEWEST..MOST (with "
                                      "run.launcher: write the number to %s/" QD_AVAILABLE_FILE ")", folder, folder));
    if (config.available[0] != '\0')
        QD_TRY_DONE(QD_FAIL(QD_USAGE, "%s: this run reads the number of ranks from %s (run.available): write it there", folder,
                            config.available));
    if (ranks > config.elastic_most)
        QD_TRY_DONE(QD_FAIL(QD_USAGE, "%s: run.elastic allows %d to %d ranks, not %d", folder, config.elastic_least, config.elastic_most,
                            ranks));
    config.run_dir = folder;
    qd_elastic_begin(&e, &config);
    status = qd_file_replace(e.path, text, (size_t)snprintf(text, sizeof text, "%d\n", ranks));
done:
    qd_options_destroy(options);
    return status;
}
