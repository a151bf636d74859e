/* Reads the token that ends texts from the files next to a tokenizer. tokenizer.json has special
 * tokens, but does not state what they are for. */
#include "data/tokenizer/files/settings.h"

#include "base/text/strbuf.h"
#include "spec/config/config.h"

#include <string.h>
#include <unistd.h>

qd_status qd_settings_token(const qd_json *document, const char *name, const char **text)
{
    const qd_json_node *node = qd_json_member(qd_json_root(document), name);
    *text = NULL;
    if (!node || qd_json_kind_of(node) == QD_JSON_NULL)
        return QD_OK;
    if (qd_json_kind_of(node) == QD_JSON_OBJECT)
        node = qd_json_member(node, "content");
    *text = qd_json_as_string(node);
    return *text ? QD_OK
                 : QD_FAIL(QD_USAGE, "%s: '%s' must be a string or an object with \"content\"", qd_json_name(document), name);
}

/* Many programs have a config.json: one that is not a model's states nothing. Of a list, the first:
 * generation may end at the others too. */
static qd_status read_model(const char *file, int64_t *id)
{
    qd_json *document = NULL;
    qd_status status = qd_json_load(file, &document);
    if (status != QD_OK)
        return status == QD_USAGE ? QD_OK : status;
    const qd_json_node *node = qd_json_member(qd_json_root(document), "eos_token_id");
    if (node && qd_json_kind_of(node) == QD_JSON_LIST)
        node = qd_json_item(node, 0);
    if (!qd_json_as_int(node, id))
        *id = -1;
    qd_json_destroy(document);
    return QD_OK;
}

static qd_status read_settings(const char *file, qd_strbuf *name)
{
    qd_json *document = NULL;
    const char *text = NULL;
    QD_TRY(qd_json_load(file, &document));
    qd_status status = qd_settings_token(document, "eos_token", &text);
    if (status == QD_OK && text)
        qd_strbuf_puts(name, text);
    qd_json_destroy(document);
    return status;
}

qd_status qd_settings_end(const char *path, qd_strbuf *name, int64_t *id, qd_strbuf *file)
{
    static const char *const folders[] = {"", QD_RUN_HUGGINGFACE "/"};
    static const char *const files[] = {"tokenizer_config.json", "special_tokens_map.json", "config.json"};
    const char *slash = strrchr(path, '/');
    *id = -1;
    for (int i = 0; i < 6; i++) {
        qd_strbuf_clear(file);
        qd_strbuf_append(file, path, slash ? (size_t)(slash - path) + 1 : 0);
        qd_strbuf_printf(file, "%s%s", folders[i / 3], files[i % 3]);
        if (file->failed || name->failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory for a path");
        if (access(file->data, F_OK) == 0)
            QD_TRY(i % 3 == 2 ? read_model(file->data, id) : read_settings(file->data, name));
        if (name->length > 0 || *id >= 0)
            return QD_OK;
    }
    qd_strbuf_clear(file);
    return QD_OK;
}
