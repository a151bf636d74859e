/* Copies and reads the files that belong to a model of a Hugging Face folder. */
#include "ckpt/hf_companions.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "ckpt/folder.h"
#include "ckpt/huggingface_impl.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_BYTES = 256 << 20 };
#define GENERATION "generation_config.json"
#define TOKENIZER_SETTINGS "tokenizer_config.json"
#define TEMPLATE "chat_template.jinja"
#define MORE_TEMPLATES "additional_chat_templates"
typedef char file_path[PATH_MAX];

static const char *const model_files[] = {QD_HF_CONFIG, GENERATION, NULL};
static const char *const template_files[] = {TOKENIZER_SETTINGS, "special_tokens_map.json", TEMPLATE, "chat_template.json", NULL};
/* Vocabularies of older formats: tokenizer.json has them too, but other programs read these. */
static const char *const vocabulary_files[] = {"added_tokens.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt",
                                               "vocab.txt", NULL};

static qd_status join(const char *folder, const char *name, file_path path)
{
    int n = snprintf(path, sizeof(file_path), "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "the name of a folder is too long: %.64s…", folder);
}

static qd_status make_folder(const char *path)
{
    return mkdir(path, 0777) == 0 || errno == EEXIST ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be created: %s", path, strerror(errno));
}

static qd_status copy_existing(const char *from, const char *to, const char *name)
{
    file_path source, target;
    QD_TRY(join(from, name, source));
    QD_TRY(join(to, name, target));
    if (access(source, F_OK) != 0)
        return QD_OK;
    QD_TRY(make_folder(to));
    return qd_file_copy(source, target, MOST_BYTES);
}

static qd_status copy_list(const char *from, const char *to, const char *const *names)
{
    for (; *names; names++)
        QD_TRY(copy_existing(from, to, *names));
    return QD_OK;
}

/* Templates that are not the default are files of a folder of their own. */
static qd_status copy_templates(const char *from, const char *to)
{
    file_path source, target;
    QD_TRY(copy_list(from, to, template_files));
    QD_TRY(join(from, MORE_TEMPLATES, source));
    QD_TRY(join(to, MORE_TEMPLATES, target));
    DIR *folder = opendir(source);
    qd_status status = QD_OK;
    for (struct dirent *entry; folder && status == QD_OK && (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        if (length <= 6 || entry->d_name[0] == '.' || strcmp(entry->d_name + length - 6, ".jinja") != 0)
            continue;
        status = make_folder(to);
        if (status == QD_OK)
            status = copy_existing(source, target, entry->d_name);
    }
    if (folder)
        closedir(folder);
    return status;
}

/* The folder with the files: `from` itself, or what it keeps if it is a run. */
static qd_status find_files(const char *from, const char *run, file_path source, file_path target)
{
    QD_TRY(join(run, QD_RUN_HUGGINGFACE, target));
    QD_TRY(join(from, QD_RUN_HUGGINGFACE, source));
    if (access(source, F_OK) != 0)
        snprintf(source, sizeof(file_path), "%s", from);
    return QD_OK;
}

qd_status qd_hf_keep_model(const char *from, const char *run)
{
    file_path source, target;
    QD_TRY(find_files(from, run, source, target));
    return copy_list(source, target, model_files);
}

qd_status qd_hf_keep_text(const char *from, const char *run)
{
    file_path source, target;
    QD_TRY(find_files(from, run, source, target));
    QD_TRY(copy_list(source, target, vocabulary_files));
    return copy_templates(source, target);
}

qd_status qd_hf_keep_template(const char *from, const char *run)
{
    file_path source, target, file;
    struct stat info;
    QD_TRY(find_files(from, run, source, target));
    if (stat(from, &info) != 0 || S_ISDIR(info.st_mode))
        return copy_templates(source, target);
    QD_TRY(make_folder(target));
    QD_TRY(join(target, TEMPLATE, file));
    return qd_file_copy(from, file, MOST_BYTES);
}

qd_status qd_hf_forget(const char *run)
{
    file_path target;
    QD_TRY(join(run, QD_RUN_HUGGINGFACE, target));
    return access(target, F_OK) == 0 ? qd_ckpt_remove_folder(target) : QD_OK;
}

qd_status qd_hf_restore(const char *run, const char *to, bool *settings)
{
    file_path source, config;
    QD_TRY(join(run, QD_RUN_HUGGINGFACE, source));
    QD_TRY(join(source, TOKENIZER_SETTINGS, config));
    *settings = access(config, F_OK) == 0;
    QD_TRY(copy_existing(source, to, GENERATION));
    QD_TRY(copy_list(source, to, vocabulary_files));
    return copy_templates(source, to);
}

static bool same_model(const qd_model *a, const qd_model *b)
{
    int count;
    const qd_model_field *fields = qd_model_fields(&count);
    for (const qd_model_field *f = fields; f < fields + count; f++) {
        char one[QD_FIELD_TEXT], other[QD_FIELD_TEXT];
        qd_field_text(f, a, one);
        qd_field_text(f, b, other);
        if (qd_field_counts(f, a) && strcmp(one, other) != 0)
            return false;
    }
    return a->arch == b->arch;
}

/* The text of a string that is the value of a top-level member; 0 length: there is none. The text
 * is valid JSON. */
static size_t find_string(const char *text, const char *key, const char **value)
{
    size_t length = strlen(key);
    int depth = 0;
    for (const char *at = text; *at; at++) {
        if (*at == '{' || *at == '[')
            depth++;
        if (*at == '}' || *at == ']')
            depth--;
        if (*at != '"')
            continue;
        const char *begin = ++at;
        for (; *at && *at != '"'; at++)
            at += *at == '\\' && at[1] != '\0';
        const char *after = *at ? at + 1 : at;
        after += strspn(after, " \t\r\n");
        bool found = depth == 1 && *after == ':' && (size_t)(at - begin) == length && memcmp(begin, key, length) == 0;
        after += *after == ':' ? 1 + strspn(after + 1, " \t\r\n") : 0;
        if (found && *after == '"') {
            *value = after + 1;
            return strcspn(after + 1, "\"");
        }
        if (*at == '\0')
            return 0;
    }
    return 0;
}

/* Older folders have torch_dtype, newer ones dtype. */
static void write_with_type(const char *text, const char *type, qd_strbuf *out)
{
    static const char *const keys[] = {"torch_dtype", "dtype"};
    for (int i = 0; i < 2; i++) {
        const char *value = NULL;
        size_t length = find_string(text, keys[i], &value);
        if (length == 0)
            continue;
        qd_strbuf_append(out, text, (size_t)(value - text));
        qd_strbuf_puts(out, type);
        text = value + length;
        break;
    }
    qd_strbuf_puts(out, text);
}

const char *qd_hf_dtype_name(qd_dtype dtype)
{
    return dtype == QD_F32 ? "float32" : dtype == QD_BF16 ? "bfloat16" : "float16";
}

qd_status qd_hf_restore_config(const char *run, const qd_model *model, qd_dtype dtype, qd_strbuf *out, bool *restored)
{
    file_path folder, path;
    qd_hf_config kept;
    qd_strbuf notes = {0};
    char *text;
    size_t length;
    *restored = false;
    QD_TRY(join(run, QD_RUN_HUGGINGFACE, folder));
    QD_TRY(join(folder, QD_HF_CONFIG, path));
    if (access(path, F_OK) != 0)
        return QD_OK;
    qd_status status = qd_hf_config_read(path, &notes, &kept);
    qd_strbuf_free(&notes);
    QD_TRY(status);
    if (kept.blocks.rows > 0 || !same_model(&kept.model, model)) /* quantized weights are written as numbers */
        return QD_OK;
    QD_TRY(qd_file_read(path, MOST_BYTES, &text, &length));
    write_with_type(text, qd_hf_dtype_name(dtype), out);
    free(text);
    *restored = true;
    return out->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for config.json") : QD_OK;
}

static qd_status read_ends(const qd_json *document, int64_t *ids, int most, int *count)
{
    const qd_json_node *node = qd_json_member(qd_json_root(document), "eos_token_id");
    bool list = node && qd_json_kind_of(node) == QD_JSON_LIST;
    if (!node || qd_json_kind_of(node) == QD_JSON_NULL)
        return QD_OK;
    size_t there = list ? qd_json_count(node) : 1;
    if (there > (size_t)most)
        return QD_FAIL(QD_USAGE, "%s: 'eos_token_id' has %zu ids: at most %d are supported", qd_json_name(document), there, most);
    for (size_t i = 0; i < there; i++)
        if (!qd_json_as_int(list ? qd_json_item(node, i) : node, &ids[(*count)++]))
            return QD_FAIL(QD_USAGE, "%s: 'eos_token_id' must be an integer or a list of integers", qd_json_name(document));
    return QD_OK;
}

qd_status qd_hf_end_tokens(const char *run, int64_t *ids, int most, int *count)
{
    *count = 0;
    for (int i = 0; i < 2 && *count == 0; i++) {
        file_path path;
        qd_json *document;
        int n = snprintf(path, sizeof path, "%s/" QD_RUN_HUGGINGFACE "/%s", run, model_files[1 - i]);
        if (n < 0 || n >= PATH_MAX || access(path, F_OK) != 0)
            continue;
        QD_TRY(qd_json_load(path, &document));
        qd_status status = read_ends(document, ids, most, count);
        qd_json_destroy(document);
        QD_TRY(status);
    }
    return QD_OK;
}
