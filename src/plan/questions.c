/* The planner's other questions: how many accelerators, how large a model, and the plan as a
 * file. */
#include "plan/search_impl.h"

#include "base/text/strbuf.h"

#include <quadrille/config.h>
#include <stdlib.h>
#include <string.h>

static qd_status with_ranks(const qd_options *options, int gpus, qd_options **out)
{
    char text[32];
    QD_TRY(qd_options_copy(options, out));
    snprintf(text, sizeof text, "%d", gpus);
    return qd_options_set(*out, "parallel.ranks", text);
}

static qd_status find_gpus(const qd_options *options, double tokens, double days, int most, int *gpus, double *days_taken,
                           qd_plan_draft *report)
{
    qd_cluster cluster;
    QD_TRY(qd_cluster_resolve(options, &cluster));
    int first = cluster.node_size > 1 && cluster.node_size <= 16 ? cluster.node_size : 8, best_gpus = 0;
    double best_days = 0.0;
    if (most < first)
        return QD_FAIL(QD_USAGE, "plan: --most is %d, but the search starts at %d accelerators and doubles",
                       most, first);
    for (*gpus = first; *gpus <= most; *gpus *= 2) {
        qd_options *own = NULL;
        qd_status status = with_ranks(options, *gpus, &own);
        if (status == QD_OK)
            status = qd_plan_search(own, NULL, false, NULL, report);
        qd_options_destroy(own);
        if (status == QD_NO_MEMORY || status == QD_USAGE) { /* too few for the model, or the batch does not divide */
            if (best_gpus == 0 && *gpus > most / 2)
                return status;
            qd_error_clear();
            continue;
        }
        QD_TRY(status);
        double batch = (double)(qd_options_int(options, "train.global_batch") * qd_options_int(options, "data.seq"));
        *days_taken = tokens / batch * report->choices[0].step_seconds / 86400.0;
        if (*days_taken <= days)
            return QD_OK;
        if (best_gpus == 0 || *days_taken < best_days) {
            best_gpus = *gpus;
            best_days = *days_taken;
        }
    }
    return QD_FAIL(QD_USAGE,
                   "no number of accelerators up to %d trains %.3g tokens in %.3g days: %d of them come closest, with "
                   "%.3g days; a larger train.global_batch "
                   "would occupy more",
                   most, tokens, days, best_gpus, best_days);
}

qd_status qd_plan_gpus(const qd_options *options, double tokens, double days, int most, int *gpus, double *days_taken,
                       qd_plan_report **report)
{
    qd_plan_draft *draft = NULL;
    *report = NULL;
    QD_TRY(qd_plan_draft_create(&draft));
    return qd_plan_publish(find_gpus(options, tokens, days, most, gpus, days_taken, draft), draft, report);
}

/* found: memory for the plans of all presets, one after another. */
static qd_status find_largest(const qd_options *options, const char **name, qd_plan_draft *report, qd_plan_draft *found)
{
    const char *const *names;
    int64_t largest = 0;
    QD_TRY(qd_config_presets(true, &names));
    for (; *names; names++) {
        qd_model model;
        QD_TRY(qd_preset_find(*names, &model));
        if (qd_model_parameters(&model) <= largest)
            continue;
        qd_options *own = NULL;
        QD_TRY(qd_options_copy(options, &own));
        qd_status status = qd_options_set(own, "model.preset", *names);
        if (status == QD_OK)
            status = qd_plan_search(own, NULL, false, NULL, found);
        qd_options_destroy(own);
        if (status == QD_OK) {
            largest = qd_model_parameters(&model);
            *name = *names;
            *report = *found;
        } else if (status != QD_NO_MEMORY && status != QD_USAGE && status != QD_UNSUPPORTED) {
            return status;
        }
        qd_error_clear();
    }
    return *name ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no preset fits on these accelerators");
}

qd_status qd_plan_largest(const qd_options *options, const char **name, qd_plan_report **report)
{
    qd_plan_draft *draft = NULL, *found = NULL;
    *name = NULL;
    *report = NULL;
    QD_TRY(qd_plan_draft_create(&draft));
    qd_status status = qd_plan_draft_create(&found);
    if (status == QD_OK)
        status = find_largest(options, name, draft, found);
    qd_plan_draft_destroy(found);
    return qd_plan_publish(status, draft, report);
}

/* Writes keys of the configuration that were set, by the user or by the plan: cluster keys are not
 * part of a run, and explicit defaults would override a preset. */
static bool is_written(const qd_options *options, const char *section, const char *line)
{
    char key[160];
    qd_option_table table = qd_config_table();
    snprintf(key, sizeof key, "%s.%.*s", section, (int)strcspn(line + 2, ":"), line + 2);
    for (int i = 0; i < table.count; i++)
        if (strcmp(table.options[i].key, key) == 0)
            return qd_options_is_set(options, key);
    return false;
}

qd_status qd_plan_yaml(const qd_options *options, char **yaml)
{
    char *text, section[64] = "", written[64] = "";
    qd_strbuf kept = {0};
    *yaml = NULL;
    QD_TRY(qd_options_to_yaml(options, &text));
    for (char *line = text, *end; *line; line = end) {
        end = strchr(line, '\n');
        end = end ? end + 1 : line + strlen(line);
        if (line[0] != ' ') {
            snprintf(section, sizeof section, "%.*s", (int)strcspn(line, ":\n"), line);
        } else if (is_written(options, section, line)) {
            if (strcmp(section, written) != 0)
                qd_strbuf_printf(&kept, "%s:\n", section);
            snprintf(written, sizeof written, "%s", section);
            qd_strbuf_append(&kept, line, (size_t)(end - line));
        }
    }
    free(text);
    return qd_strbuf_take(&kept, yaml);
}

qd_status qd_plan_write(const qd_options *options, const char *path)
{
    char *text;
    QD_TRY(qd_plan_yaml(options, &text));
    qd_status status = qd_file_replace(path, text, strlen(text));
    free(text);
    return status;
}
