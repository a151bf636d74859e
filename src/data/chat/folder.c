/* Reads the chat template and the special tokens of a tokenizer folder, in the order of precedence
 * of transformers. */
#include "data/chat/chat_impl.h"
#include "data/tokenizer/files/settings.h"
#include "spec/config/config.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const token_names[] = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

static qd_status set_tokens(qd_chat *chat, const qd_json *document)
{
    for (size_t i = 0; i < sizeof token_names / sizeof *token_names; i++) {
        const char *text;
        QD_TRY(qd_settings_token(document, token_names[i], &text));
        if (text)
            QD_TRY(qd_chat_set_token(chat, token_names[i], text));
    }
    return QD_OK;
}

/* The text of the template `which` in tokenizer_config.json. */
static qd_status find_template(const qd_json *config, const char *which, const char **text)
{
    const qd_json_node *node = qd_json_member(qd_json_root(config), "chat_template");
    const char *wanted = which ? which : "default";
    if (!node || qd_json_kind_of(node) == QD_JSON_NULL)
        return QD_FAIL(QD_USAGE, "%s has no 'chat_template', and there is no chat_template.jinja next to it", qd_json_name(config));
    if (qd_json_kind_of(node) == QD_JSON_STRING) {
        *text = qd_json_as_string(node);
        return !which || strcmp(which, "default") == 0
                   ? QD_OK
                   : QD_FAIL(QD_USAGE, "%s has one chat template without a name, so '%s' cannot be selected", qd_json_name(config), which);
    }
    if (qd_json_kind_of(node) != QD_JSON_LIST)
        return QD_FAIL(QD_USAGE, "%s: 'chat_template' must be a string or a list of named templates", qd_json_name(config));
    *text = NULL;
    for (size_t i = 0; i < qd_json_count(node); i++) {
        const char *name, *body;
        QD_TRY(qd_json_get_string(config, qd_json_item(node, i), "name", &name));
        QD_TRY(qd_json_get_string(config, qd_json_item(node, i), "template", &body));
        if (strcmp(name, wanted) == 0)
            *text = body;
    }
    return *text ? QD_OK : QD_FAIL(QD_USAGE, "%s: 'chat_template' has no template named '%s'", qd_json_name(config), wanted);
}

/* chat_template.jinja, or additional_chat_templates/WHICH.jinja. *chat stays NULL if there is
 * none. */
static qd_status load_file(const char *folder, const char *which, qd_chat **chat)
{
    qd_strbuf path = {0};
    char *text = NULL;
    size_t length;
    qd_status status = QD_OK;
    if (which && strcmp(which, "default") != 0)
        qd_strbuf_printf(&path, "%s/additional_chat_templates/%s.jinja", folder, which);
    else
        qd_strbuf_printf(&path, "%s/chat_template.jinja", folder);
    if (which && (strchr(which, '/') || !*which))
        QD_TRY_DONE(QD_FAIL(QD_USAGE, "'%s' is not the name of a chat template", which));
    if (path.failed)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for a path"));
    if (access(path.data, F_OK) == 0) {
        QD_TRY_DONE(qd_file_read(path.data, QD_CHAT_MOST_TEXT, &text, &length));
        QD_TRY_DONE(qd_chat_load_text(path.data, text, length, chat));
    }
done:
    free(text);
    qd_strbuf_free(&path);
    return status;
}

static qd_status load_json(const char *folder, const char *file, qd_json **document)
{
    qd_strbuf path = {0};
    qd_strbuf_printf(&path, "%s/%s", folder, file);
    *document = NULL;
    qd_status status = path.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for a path") : QD_OK;
    if (status == QD_OK && access(path.data, F_OK) == 0)
        status = qd_json_load(path.data, document);
    qd_strbuf_free(&path);
    return status;
}

static qd_status load(const char *folder, const char *which, qd_chat **chat, qd_json **config, qd_json **tokens)
{
    QD_TRY(load_json(folder, "tokenizer_config.json", config));
    if (!*config)
        return QD_FAIL(QD_USAGE, "%s has no tokenizer_config.json, which names the special tokens of a chat template", folder);
    QD_TRY(load_file(folder, which, chat));
    if (!*chat) {
        const char *text = NULL;
        QD_TRY(find_template(*config, which, &text));
        qd_status status = qd_chat_load_text(qd_json_name(*config), text, strlen(text), chat);
        if (status != QD_OK)
            return qd_error_prefix(status, "chat_template of ");
    }
    QD_TRY(set_tokens(*chat, *config));
    if (qd_json_member(qd_json_root(*config), "added_tokens_decoder"))
        return QD_OK;
    QD_TRY(load_json(folder, "special_tokens_map.json", tokens)); /* folders of older versions */
    return *tokens ? set_tokens(*chat, *tokens) : QD_OK;
}

qd_status qd_chat_load_folder(const char *folder, const char *which, qd_chat **chat)
{
    qd_json *config = NULL, *tokens = NULL;
    *chat = NULL;
    qd_status status = load(folder, which, chat, &config, &tokens);
    qd_json_destroy(config);
    qd_json_destroy(tokens);
    if (status != QD_OK) {
        qd_chat_destroy(*chat);
        *chat = NULL;
    }
    return status;
}

qd_status qd_chat_load(const char *path, qd_chat **chat)
{
    struct stat info;
    char *text = NULL;
    size_t length = 0;
    *chat = NULL;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return qd_chat_load_folder(path, NULL, chat);
    QD_TRY(qd_file_read(path, QD_CHAT_MOST_TEXT, &text, &length));
    qd_status status = qd_chat_load_text(path, text, length, chat);
    free(text);
    return status;
}

/* Whether a folder has a template that qd_chat_load() reads; `path` becomes the folder, or the file
 * if there are no settings next to it. */
static bool has_template(const char *folder, char *path)
{
    static const char *const names[] = {"tokenizer_config.json", "chat_template.jinja"};
    for (int i = 0; i < 2; i++) {
        char file[PATH_MAX];
        if ((size_t)snprintf(file, sizeof file, "%s/%s", folder, names[i]) >= sizeof file || access(file, F_OK) != 0)
            continue;
        snprintf(path, PATH_MAX, "%s", i == 0 ? folder : file);
        return true;
    }
    return false;
}

bool qd_chat_find(const char *tokenizer, char *path)
{
    char folder[PATH_MAX], kept[PATH_MAX];
    const char *slash = strrchr(tokenizer, '/');
    if ((size_t)snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - tokenizer) : 1, slash ? tokenizer : ".") >= sizeof folder)
        return false;
    bool fits = (size_t)snprintf(kept, sizeof kept, "%s/" QD_RUN_HUGGINGFACE, folder) < sizeof kept;
    if (has_template(folder, path) || (fits && has_template(kept, path)))
        return true;
    snprintf(path, PATH_MAX, "%s", folder);
    return false;
}
