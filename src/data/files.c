/* Lists the files of a path, hashes them, and writes files and folders durably. */
#include "data/files.h"

#include "base/text/strbuf.h"
#include "data/shard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { DEEPEST = 64 };

static const char *const text_extensions[] = {
    "txt", "text", "md",   "markdown", "rst",  "org", "tex", "html", "htm", "xml",  "json", "jsonl",
    "csv", "tsv",  "yaml", "yml",      "toml", "ini", "c",   "h",    "cc",  "cpp",  "hpp",  "cu",
    "py",  "rs",   "go",   "java",     "js",   "ts",  "sh",  "pl",   "rb",  "lisp",
};

static char *concatenate(const char *a, const char *b, const char *c)
{
    size_t size = strlen(a) + strlen(b) + strlen(c) + 1;
    char *text = malloc(size);
    if (text)
        snprintf(text, size, "%s%s%s", a, b, c);
    return text;
}

char *qd_path_with(const char *path, const char *suffix)
{
    return concatenate(path, suffix, "");
}

char *qd_path_join(const char *folder, const char *name)
{
    size_t length = strlen(folder);
    return concatenate(folder, length > 0 && folder[length - 1] == '/' ? "" : "/", name);
}

static const char *extension_of(const char *path)
{
    const char *name = strrchr(path, '/');
    const char *dot = strrchr(name ? name : path, '.');
    return dot ? dot + 1 : "";
}

static bool is_shard_name(const char *path)
{
    return strcmp(extension_of(path), &QD_SHARD_SUFFIX[1]) == 0;
}

static qd_status look_like_text(const char *path, bool *text)
{
    for (size_t i = 0; i < sizeof text_extensions / sizeof text_extensions[0]; i++)
        if (strcasecmp(extension_of(path), text_extensions[i]) == 0) {
            *text = true;
            return QD_OK;
        }
    char *bytes;
    size_t length;
    bool whole;
    QD_TRY(qd_file_head(path, &bytes, &length, &whole));
    /* The last character may be cut off at the end of the bytes that were read. */
    const size_t cut = whole ? 1u : 4u;
    *text = length - qd_utf8_valid(bytes, length) < cut && !memchr(bytes, '\0', length);
    free(bytes);
    return QD_OK;
}

static qd_status push(qd_file_list *list, const char *path, int64_t bytes, qd_file_kind kind)
{
    if (list->count == list->capacity) {
        int64_t capacity = list->capacity ? list->capacity * 2 : 16;
        qd_file *items = realloc(list->items, (size_t)capacity * sizeof *items);
        if (!items)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for the list of files", path);
        list->items = items;
        list->capacity = capacity;
    }
    char *copy = strdup(path);
    if (!copy)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for the list of files", path);
    list->items[list->count++] = (qd_file){.path = copy, .bytes = bytes, .kind = kind};
    list->bytes += bytes;
    return QD_OK;
}

static qd_file_kind text_kind(const char *path)
{
    return strcasecmp(extension_of(path), "jsonl") == 0 ? QD_FILE_LINES : QD_FILE_TEXT;
}

size_t qd_byte_order_mark(const void *text, size_t length)
{
    static const unsigned char mark[] = {0xef, 0xbb, 0xbf};
    return length >= sizeof mark && memcmp(text, mark, sizeof mark) == 0 ? sizeof mark : 0;
}

size_t qd_line_length(const char *text, size_t length, size_t *inner)
{
    const char *line_end = memchr(text, '\n', length);
    size_t whole = line_end ? (size_t)(line_end - text) + 1 : length;
    *inner = line_end ? whole - 1 : whole;
    if (*inner > 0 && text[*inner - 1] == '\r')
        (*inner)--;
    return whole;
}

static qd_status walk(qd_file_list *found, const char *folder, int depth);

static qd_status visit(qd_file_list *found, const char *path, bool link_to_folder_is_fine, int depth)
{
    struct stat info, own;
    if (lstat(path, &own) != 0 || stat(path, &info) != 0) {
        /* A dangling symlink, or a file that was removed meanwhile. */
        found->skipped++;
        return QD_OK;
    }
    if (S_ISDIR(info.st_mode))
        return S_ISLNK(own.st_mode) && !link_to_folder_is_fine ? QD_OK : walk(found, path, depth + 1);
    if (!S_ISREG(info.st_mode))
        return QD_OK;
    if (is_shard_name(path))
        return push(found, path, info.st_size, QD_FILE_SHARD);
    bool text = false;
    if (info.st_size > 0)
        QD_TRY(look_like_text(path, &text));
    if (text)
        return push(found, path, info.st_size, text_kind(path));
    found->skipped++;
    return QD_OK;
}

static qd_status walk(qd_file_list *found, const char *folder, int depth)
{
    if (depth > DEEPEST)
        return QD_FAIL(QD_USAGE, "%s: folders nested more than %d deep", folder, DEEPEST);
    DIR *dir = opendir(folder);
    if (!dir)
        return QD_FAIL(QD_USAGE, "%s: the folder cannot be read: %s", folder, strerror(errno));
    qd_status status = QD_OK;
    for (struct dirent *entry; status == QD_OK && (entry = readdir(dir));) {
        if (entry->d_name[0] == '.')
            continue;
        char *path = qd_path_join(folder, entry->d_name);
        status = path ? visit(found, path, false, depth) : QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", folder);
        free(path);
    }
    closedir(dir);
    return status;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const qd_file *)a)->path, ((const qd_file *)b)->path);
}

/* Moves the files of one folder into the list. Text next to shards is skipped: the shards were made
 * from it. */
static qd_status take_found(qd_file_list *list, const char *folder, qd_file_list *found)
{
    int64_t shards = 0;
    for (int64_t i = 0; i < found->count; i++)
        shards += found->items[i].kind == QD_FILE_SHARD;
    if (found->count == 0)
        return QD_FAIL(QD_USAGE, "%s: the folder contains no text: none of its %lld files is text or a shard", folder,
                       (long long)found->skipped);
    qsort(found->items, (size_t)found->count, sizeof found->items[0], by_path);
    list->skipped += found->skipped;
    for (int64_t i = 0; i < found->count; i++) {
        const qd_file *file = &found->items[i];
        if (shards > 0 && file->kind != QD_FILE_SHARD)
            list->skipped++;
        else
            QD_TRY(push(list, file->path, file->bytes, file->kind));
    }
    return QD_OK;
}

qd_status qd_file_list_add(qd_file_list *list, const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0)
        return QD_FAIL(QD_USAGE, "%s: cannot be opened: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) {
        qd_file_list found = {0};
        qd_status status = visit(&found, path, true, 0);
        if (status == QD_OK)
            status = take_found(list, path, &found);
        qd_file_list_free(&found);
        return status;
    }
    if (!S_ISREG(info.st_mode))
        return QD_FAIL(QD_USAGE, "%s: neither a file nor a folder", path);
    if (info.st_size == 0)
        return QD_FAIL(QD_USAGE, "%s: the file is empty", path);
    bool shard = is_shard_name(path) || qd_shard_recognise(path);
    return push(list, path, info.st_size, shard ? QD_FILE_SHARD : text_kind(path));
}

void qd_file_list_free(qd_file_list *list)
{
    for (int64_t i = 0; i < list->count; i++)
        free(list->items[i].path);
    free(list->items);
    *list = (qd_file_list){0};
}

qd_status qd_file_hash(const char *path, uint64_t seed, uint64_t *hash)
{
    enum { BUFFER = 1 << 18 };
    int fd = -1;
    int64_t size;
    QD_TRY(qd_file_open(path, &fd, &size));
    char *buffer = malloc(BUFFER);
    XXH3_state_t *state = XXH3_createState();
    qd_status status = buffer && state ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", path);
    if (status == QD_OK)
        XXH3_64bits_reset_withSeed(state, seed);
    for (int64_t at = 0, bytes; at < size && status == QD_OK; at += bytes) {
        bytes = size - at < BUFFER ? size - at : BUFFER;
        status = qd_file_read_at(path, fd, at, buffer, (size_t)bytes);
        if (status == QD_OK)
            XXH3_64bits_update(state, buffer, (size_t)bytes);
    }
    if (status == QD_OK)
        *hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    free(buffer);
    close(fd);
    return status;
}


qd_status qd_folder_make(const char *path)
{
    char *partial = strdup(path);
    if (!partial)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory", path);
    qd_status status = QD_OK;
    for (char *at = partial + 1; status == QD_OK; at++) {
        char end = *at;
        if (end != '/' && end != '\0')
            continue;
        *at = '\0';
        struct stat info;
        bool made = mkdir(partial, 0755) == 0;
        if (made)
            status = qd_folder_sync_of(partial);
        else if (errno != EEXIST || stat(partial, &info) != 0 || !S_ISDIR(info.st_mode))
            status = QD_FAIL(QD_USAGE, "%s: the folder cannot be created: %s", partial, strerror(errno));
        *at = end;
        if (end == '\0')
            break;
    }
    free(partial);
    return status;
}

void qd_folder_empty(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        return;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
}
