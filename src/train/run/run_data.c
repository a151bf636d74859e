/* Writes data.json, and compares it with the data of a resumed run. */
#include "train/run/run_data.h"

#include "base/text/json.h"
#include "base/text/strbuf.h"

#include <quadrille/json_writer.h>

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *method(bool sampled)
{
    return sampled ? "4096 blocks of 64 KiB" : "all";
}

qd_status qd_run_data_write(const char *path, const qd_data *data)
{
    qd_strbuf text = {0};
    char hash[32];
    qd_json_writer w = qd_json_writer_on(&text);
    snprintf(hash, sizeof hash, "%016" PRIx64, qd_data_tokenizer_hash(data));
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "tokenizer", hash);
    qd_json_list_begin(&w, "sources");
    for (int i = 0; i < qd_data_source_count(data); i++) {
        qd_data_source_info source = qd_data_source_info_default();
        qd_data_source_describe(data, i, &source);
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "path", source.path);
        qd_json_put_int(&w, "files", source.files);
        qd_json_put_int(&w, "documents", source.documents);
        qd_json_put_int(&w, "tokens", source.tokens);
        bool sampled;
        uint64_t content;
        qd_status hashed = qd_data_fingerprint(data, i, &content, &sampled);
        if (hashed != QD_OK) {
            qd_strbuf_free(&text);
            return hashed;
        }
        snprintf(hash, sizeof hash, "%016" PRIx64, content);
        qd_json_put_string(&w, "xxh3", hash);
        qd_json_put_string(&w, "xxh3_of", method(sampled));
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_end(&w);
    qd_strbuf_puts(&text, "\n");
    qd_status status = text.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for %s", path) : qd_file_replace(path, text.data, text.length);
    qd_strbuf_free(&text);
    return status;
}

/* 0: unknown. */
static qd_status compare_tokenizer(const qd_json *file, const qd_data *data)
{
    const char *then;
    QD_TRY(qd_json_get_string(file, qd_json_root(file), "tokenizer", &then));
    const uint64_t before = strtoull(then, NULL, 16), now = qd_data_tokenizer_hash(data);
    if (before == 0 || now == 0 || before == now)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "run.resume: data.path has tokens of another tokenizer (%016" PRIx64 ") than the run was trained with (%s, "
                             "according to %s): make the shards with the same one ('quadrille tokenize --tokenizer')", now, then,
                   qd_json_name(file));
}

/* Whether the content is unchanged; true if that is unknown: files of earlier versions have no
 * hash. */
static qd_status same_content(const qd_json_node *then, const qd_data *data, int source, bool *same)
{
    const char *hash = qd_json_as_string(qd_json_member(then, "xxh3")), *of = qd_json_as_string(qd_json_member(then, "xxh3_of"));
    bool sampled;
    uint64_t now;
    *same = true;
    if (!hash || !of)
        return QD_OK;
    QD_TRY(qd_data_fingerprint(data, source, &now, &sampled));
    *same = strcmp(of, method(sampled)) != 0 || strtoull(hash, NULL, 16) == now;
    return QD_OK;
}

static void add_warning(char warning[QD_RUN_DATA_WARNING], const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_warning(char warning[QD_RUN_DATA_WARNING], const char *format, ...)
{
    size_t used = strlen(warning);
    va_list args;
    va_start(args, format);
    used += (size_t)snprintf(warning + used, QD_RUN_DATA_WARNING - used, "%s", used > 0 ? "; " : "");
    if (used < QD_RUN_DATA_WARNING)
        vsnprintf(warning + used, QD_RUN_DATA_WARNING - used, format, args);
    va_end(args);
}

/* Of a source that still has its path. */
static qd_status compare_source(const qd_json *file, const qd_json_node *then, const qd_data *data, char warning[QD_RUN_DATA_WARNING])
{
    const char *path;
    int64_t tokens;
    QD_TRY(qd_json_get_string(file, then, "path", &path));
    QD_TRY(qd_json_get_int(file, then, "tokens", &tokens));
    for (int i = 0; i < qd_data_source_count(data); i++) {
        qd_data_source_info now = qd_data_source_info_default();
        qd_data_source_describe(data, i, &now);
        bool same = true;
        if (strcmp(now.path, path) != 0)
            continue;
        if (now.tokens == tokens)
            QD_TRY(same_content(then, data, i, &same));
        if (now.tokens != tokens)
            add_warning(warning, "%s had %lld tokens and has %lld: samples, including held-out ones, differ from here on", path,
                       (long long)tokens, (long long)now.tokens);
        else if (!same)
            add_warning(warning,
                        "%s has %lld tokens as before, but its content has changed since the run was last started: samples, including "
                        "held-out ones, differ from here on", path, (long long)tokens);
        break;
    }
    return QD_OK;
}

qd_status qd_run_data_compare(const char *path, const qd_data *data, char warning[QD_RUN_DATA_WARNING])
{
    struct stat info;
    qd_json *file;
    const qd_json_node *sources;
    warning[0] = '\0';
    if (stat(path, &info) != 0) {
        add_warning(warning, "%s is missing: whether the data is what it was is not known", path);
        return QD_OK;
    }
    QD_TRY(qd_json_load(path, &file));
    qd_status status = compare_tokenizer(file, data);
    if (status == QD_OK)
        status = qd_json_get_node(file, qd_json_root(file), "sources", QD_JSON_LIST, &sources);
    for (size_t i = 0; status == QD_OK && i < qd_json_count(sources); i++)
        status = compare_source(file, qd_json_item(sources, i), data, warning);
    qd_json_destroy(file);
    return status;
}
