/* Compares published layouts with our own choices. */
#include "plan/search_impl.h"

#include "base/text/json.h"

#include <stdlib.h>
#include <string.h>

static qd_status read_text(const qd_json *document, const qd_json_node *node, size_t row, const char *key, char *text, size_t size)
{
    const char *value = qd_json_as_string(qd_json_member(node, key));
    if (!value || strlen(value) >= size)
        return QD_FAIL(QD_USAGE, "%s: row %zu needs \"%s\", a text of at most %zu bytes", qd_json_name(document), row, key, size - 1);
    snprintf(text, size, "%s", value);
    return QD_OK;
}

static qd_status read_rows(const qd_json *document, qd_plan_row **rows, int *count)
{
    const qd_json_node *root = qd_json_root(document);
    size_t total = qd_json_count(root);
    if (qd_json_kind_of(root) != QD_JSON_LIST)
        return QD_FAIL(QD_USAGE, "%s: it must be a list of layouts, as data/published/layouts.json is", qd_json_name(document));
    *rows = calloc(total + 1, sizeof **rows);
    if (!*rows)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %zu layouts", total);
    for (size_t i = 0; i < total; i++) {
        const qd_json_node *node = qd_json_item(root, i);
        qd_plan_row *r = &(*rows)[i];
        QD_TRY(read_text(document, node, i, "name", r->name, sizeof r->name));
        QD_TRY(read_text(document, node, i, "cluster", r->cluster, sizeof r->cluster));
        QD_TRY(read_text(document, node, i, "run", r->run, sizeof r->run));
        QD_TRY(read_text(document, node, i, "layout", r->layout, sizeof r->layout));
        QD_TRY(read_text(document, node, i, "source", r->source, sizeof r->source));
        (*count)++;
    }
    return QD_OK;
}

qd_status qd_plan_rows(const char *path, qd_plan_row **rows, int *count)
{
    qd_json *document = NULL;
    *rows = NULL;
    *count = 0;
    QD_TRY(qd_json_load(path, &document));
    qd_status status = read_rows(document, rows, count);
    qd_json_destroy(document);
    if (status != QD_OK) {
        free(*rows);
        *rows = NULL;
        *count = 0;
    }
    return status;
}

static qd_status assign(qd_options *options, const char *words)
{
    char copy[sizeof((qd_plan_row *)0)->run], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        QD_TRY(qd_options_assign(options, word));
    return QD_OK;
}

static qd_status run(const qd_plan_row *row, qd_options *options, qd_plan_draft *draft)
{
    char note[256];
    qd_options *layout = NULL;
    QD_TRY(qd_cluster_load(options, row->cluster));
    QD_TRY(assign(options, row->run));
    QD_TRY(qd_simulate_nearest(options, note, sizeof note));
    QD_TRY(qd_options_copy(options, &layout));
    qd_status status = assign(layout, row->layout);
    if (status == QD_OK)
        status = qd_plan_search(options, layout, true, NULL, draft);
    snprintf(draft->nearest, sizeof draft->nearest, "%s", note);
    qd_options_destroy(layout);
    return status;
}

qd_status qd_plan_row_run(const qd_plan_row *row, qd_plan_report **report)
{
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    qd_options *options = NULL;
    qd_plan_draft *draft = NULL;
    *report = NULL;
    QD_TRY(qd_plan_draft_create(&draft));
    qd_status status = qd_options_create(tables, 2, &options);
    if (status == QD_OK)
        status = run(row, options, draft);
    qd_options_destroy(options);
    status = qd_plan_publish(status, draft, report);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "%s: ", row->name);
}
