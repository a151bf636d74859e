/* Finds the shared memory of an MPI library in this process's mappings, stores its names in the run
 * folder, and removes it after a kill. */
#include "train/ranks/leftovers.h"

#include "base/text/json.h"
#include "base/text/strbuf.h"

#include <quadrille/json_writer.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDER "/dev/shm/"
static const char *const prefixes[] = {"vader_segment.", "sm_segment."}; /* Open MPI 4, Open MPI 5 */

typedef struct entry {
    char host[64], path[192]; /* path: "" if there is none */
} entry;

static void find_host(char host[64])
{
    if (gethostname(host, 64) != 0)
        snprintf(host, 64, "?");
    host[63] = '\0';
}

static bool is_segment(const char *path)
{
    if (strncmp(path, FOLDER, strlen(FOLDER)) != 0 || strchr(path + strlen(FOLDER), '/'))
        return false;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (strncmp(path + strlen(FOLDER), prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    return false;
}

/* The segment that this rank created: its name ends with the rank. The rank has mapped those of its
 * peers too, which are not its own. */
static void find_own(int rank, entry *own)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], end[16];
    snprintf(end, sizeof end, ".%d", rank);
    find_host(own->host);
    while (maps && own->path[0] == '\0' && fgets(line, sizeof line, maps)) {
        char *path = strchr(line, '/');
        line[strcspn(line, "\n")] = '\0';
        size_t length = path ? strlen(path) : 0;
        if (path && is_segment(path) && length < sizeof own->path && strcmp(path + length - strlen(end), end) == 0)
            memcpy(own->path, path, length + 1);
    }
    if (maps)
        fclose(maps);
}

static qd_status write_list(const entry *entries, int count, const char *path)
{
    qd_strbuf text = {0};
    qd_json_writer json = qd_json_writer_on(&text);
    char *taken;
    bool any = false;
    qd_json_list_begin(&json, NULL);
    for (int i = 0; i < count; i++) {
        if (entries[i].path[0] == '\0')
            continue;
        any = true;
        qd_json_object_begin(&json, NULL);
        qd_json_put_string(&json, "host", entries[i].host);
        qd_json_put_string(&json, "path", entries[i].path);
        qd_json_end(&json);
    }
    qd_json_end(&json);
    qd_json_newline(&json);
    size_t length = text.length;
    QD_TRY(qd_strbuf_take(&text, &taken));
    qd_status status = any ? qd_file_replace(path, taken, length) : QD_OK;
    free(taken);
    return status;
}

qd_status qd_leftovers_note(qd_comm *comm, const char *path)
{
    int size = qd_comm_size(comm), rank = qd_comm_rank(comm);
    entry own = {0}, *all = rank == 0 ? calloc((size_t)size, sizeof *all) : NULL;
    int32_t ready = rank != 0 || all;
    find_own(rank, &own);
    qd_status status = qd_comm_broadcast(comm, &ready, 1, QD_I32, 0, NULL);
    if (status == QD_OK && ready)
        status = qd_comm_gather(comm, &own, all, (int64_t)sizeof own * size, QD_U8, 0, NULL);
    if (status == QD_OK && rank == 0)
        status = all ? write_list(all, size, path) : QD_FAIL(QD_NO_MEMORY, "no memory for %s", path);
    free(all);
    return status;
}

static void add(char *warning, size_t size, const char *host, const char *path, const char *why)
{
    size_t used = strlen(warning);
    snprintf(warning + used, size - used, "%s%s on host %s%s%s", used ? ", " : "shared memory of the previous run was not removed: ",
             path, host, why[0] ? ": " : "", why);
}

void qd_leftovers_clear(const char *path, char *warning, size_t size)
{
    enum { MOST_BYTES = 16 << 20 };
    char host[64], *text = NULL;
    size_t length;
    qd_json *document = NULL;
    warning[0] = '\0';
    find_host(host);
    if (access(path, F_OK) != 0)
        return;
    if (qd_file_read(path, MOST_BYTES, &text, &length) == QD_OK && qd_json_load_text(path, text, length, &document) == QD_OK &&
        qd_json_kind_of(qd_json_root(document)) == QD_JSON_LIST)
        for (size_t i = 0; i < qd_json_count(qd_json_root(document)); i++) {
            const qd_json_node *node = qd_json_item(qd_json_root(document), i);
            const char *where = qd_json_as_string(qd_json_member(node, "host")), *file = qd_json_as_string(qd_json_member(node, "path"));
            struct stat info;
            if (!where || !file || !is_segment(file))
                continue;
            if (strcmp(where, host) != 0)
                add(warning, size, where, file, "");
            else if (lstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() && unlink(file) != 0 && errno != ENOENT)
                add(warning, size, where, file, strerror(errno));
        }
    qd_json_destroy(document);
    free(text);
    qd_error_clear();
    unlink(path);
}
