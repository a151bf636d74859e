/* Compares what the ranks of a run have with rank 0: program, configuration, run folder and
 * data. */
#define _GNU_SOURCE /* mkostemp */
#include "train/ranks/common.h"

#include "train/launch/launch.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <quadrille/version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { HOST_BYTES = 256, SAMPLES = 16 };

/* What rank 0 sends to the others: its host, and a file it has created (PATH_MAX is enough for
 * both). */
typedef struct mark {
    int32_t status; /* of creating it */
    char host[HOST_BYTES], path[PATH_MAX];
} mark;

static void find_host(char host[HOST_BYTES])
{
    if (gethostname(host, HOST_BYTES) != 0)
        snprintf(host, HOST_BYTES, "?");
    host[HOST_BYTES - 1] = '\0';
}

qd_status qd_agree(qd_comm *comm, qd_status mine, bool *agreed)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm);
    int64_t vote = mine == QD_OK ? 0 : ((int64_t)(size - rank) << 8) | (int64_t)mine;
    int64_t worst = 0;
    QD_TRY(qd_comm_all_reduce(comm, &vote, &worst, 1, QD_I64, QD_MAX, NULL));
    *agreed = worst != 0;
    if (worst == 0 || worst == vote)
        return mine;
    qd_error_clear();
    return (qd_status)(worst & 0xff);
}

static bool names_rank(const char *message, int rank)
{
    char own[24];
    int length = snprintf(own, sizeof own, "rank %d", rank);
    const char *at = strstr(message, own);
    return at && !isdigit((unsigned char)at[length]);
}

qd_status qd_agree_alone(qd_comm *comm, qd_status mine, bool *agreed)
{
    char host[HOST_BYTES];
    find_host(host);
    if (mine != QD_OK && qd_comm_rank(comm) > 0 && !names_rank(qd_error_message(), qd_comm_rank(comm)))
        qd_error_prefix(mine, "rank %d on host %s: ", qd_comm_rank(comm), host);
    return qd_agree(comm, mine, agreed);
}

/* What rank 0 sends to the others; its configuration follows. The size is the same in all versions,
 * so that different versions can compare themselves. */
typedef struct setup {
    char version[32];
    unsigned char build[32]; /* the linker's build id; zeros: none */
    int64_t length;
} setup;

typedef struct object {
    const void *address; /* of something in it */
    unsigned char *build;
    size_t bytes;
} object;

static bool holds(const struct dl_phdr_info *info, const void *address)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + part->p_vaddr, at = (uintptr_t)address;
        if (part->p_type == PT_LOAD && at >= from && at - from < part->p_memsz)
            return true;
    }
    return false;
}

/* ELF notes follow each other: header, name, value, each padded to 4 bytes. */
static void read_notes(const unsigned char *note, size_t bytes, const object *o)
{
    ElfW(Nhdr) head;
    while (bytes > sizeof head) {
        memcpy(&head, note, sizeof head);
        size_t named = (head.n_namesz + (size_t)3) & ~(size_t)3, whole = sizeof head + named + ((head.n_descsz + (size_t)3) & ~(size_t)3);
        const unsigned char *name = note + sizeof head, *value = name + named;
        if (whole > bytes)
            return;
        if (head.n_type == NT_GNU_BUILD_ID && head.n_namesz == 4 && memcmp(name, "GNU", 4) == 0)
            memcpy(o->build, value, head.n_descsz < o->bytes ? head.n_descsz : o->bytes);
        note += whole;
        bytes -= whole;
    }
}

/* Finds the build id of the program or shared library that contains the address; 1 ends the
 * search. */
static int find_build(struct dl_phdr_info *info, size_t size, void *context)
{
    const object *o = context;
    (void)size;
    if (!holds(info, o->address))
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_NOTE && info->dlpi_phdr[i].p_align <= 4)
            read_notes((const unsigned char *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr), info->dlpi_phdr[i].p_memsz, o);
    return 1;
}

static void find_setup(setup *s)
{
    static const char here = 0;
    *s = (setup){.version = QD_VERSION};
    dl_iterate_phdr(find_build, &(object){&here, s->build, sizeof s->build});
}

/* root: the rank whose setup `first` is. */
static qd_status compare_programs(const setup *own, const setup *first, int root, int rank, const char *host)
{
    if (memcmp(own->version, first->version, sizeof own->version) != 0)
        return QD_FAIL(
            QD_USAGE, "rank %d on host %s runs quadrille %.31s, rank %d runs %.31s: install one version on all machines",
            rank, host, own->version, root, first->version);
    if (memcmp(own->build, first->build, sizeof own->build) != 0)
        return QD_FAIL(
            QD_USAGE,
            "rank %d on host %s runs another build of quadrille %.31s than rank %d: install one build on all machines",
            rank, host, own->version, root);
    return QD_OK;
}

/* Paths to what is compared by content, and settings that change no result. */
bool qd_common_may_differ(const char *entry)
{
    static const char *const keys[] = {
        "data.path=", "data.tokenizer=", "data.cache=", "run.gpu=", "run.threads=", "run.tuning=", "run.collectives=",
        "run.secret_file=", "run.interface="};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strncmp(entry, keys[i], strlen(keys[i])) == 0)
            return true;
    return false;
}

static bool is_of_start(const char *entry)
{
    return strncmp(entry, "run.resume=", 11) == 0 || strncmp(entry, "run.overwrite=", 14) == 0;
}

/* The value that the list of "key=value" texts has for the entry's key; NULL: none. */
static const char *find_value(const char *list, size_t length, const char *entry)
{
    size_t key = strcspn(entry, "=") + 1;
    for (size_t at = 0; at < length; at += strlen(list + at) + 1)
        if (strncmp(list + at, entry, key) == 0)
            return list + at + key;
    return NULL;
}

/* The first entry of `list` that `other` does not have, or has with another value; NULL: none. */
static const char *find_other(const char *list, size_t length, const char *other, size_t other_length, bool rejoins)
{
    for (size_t at = 0; at < length; at += strlen(list + at) + 1) {
        const char *value = find_value(other, other_length, list + at);
        if (!qd_common_may_differ(list + at) && !(rejoins && is_of_start(list + at)) &&
            (!value || strcmp(value, strchr(list + at, '=') + 1) != 0))
            return list + at;
    }
    return NULL;
}

static qd_status compare_configurations(const qd_strbuf *own, const char *first, size_t length, bool rejoins, int root, int rank,
                                        const char *host)
{
    const char *entry = find_other(own->data, own->length, first, length, rejoins);
    if (!entry)
        entry = find_other(first, length, own->data, own->length, rejoins);
    if (!entry)
        return QD_OK;
    const char *mine = find_value(own->data, own->length, entry), *theirs = find_value(first, length, entry);
    return QD_FAIL(QD_USAGE,
                   "%.*s: rank %d on host %s was given %.80s, rank %d %.80s: all ranks must have the same "
                   "configuration; check that its file is the same on all machines",
                   (int)strcspn(entry, "="), entry, rank, host, mine ? mine : "nothing", root, theirs ? theirs : "nothing");
}

qd_status qd_common_setup(qd_comm *comm, const qd_options *options, bool rejoins, int root, bool *agreed)
{
    setup own, first;
    qd_strbuf text = {0};
    char *theirs = NULL, host[HOST_BYTES];
    int rank = qd_comm_rank(comm);
    find_host(host);
    find_setup(&own);
    qd_launch_config_put(options, &text);
    own.length = (int64_t)text.length;
    qd_status status = text.failed ? QD_FAIL(QD_NO_MEMORY, "no memory to compare configurations") : QD_OK;
    QD_TRY_DONE(qd_agree(comm, status, agreed));
    first = own;
    QD_TRY_DONE(qd_comm_broadcast(comm, &first, sizeof first, QD_U8, root, NULL));
    QD_TRY_DONE(qd_agree(comm, compare_programs(&own, &first, root, rank, host), agreed));
    theirs = calloc(1, (size_t)first.length + 1);
    status = theirs ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to compare configurations");
    QD_TRY_DONE(qd_agree(comm, status, agreed));
    if (rank == root && first.length > 0)
        memcpy(theirs, text.data, (size_t)first.length);
    QD_TRY_DONE(qd_comm_broadcast(comm, theirs, first.length, QD_U8, root, NULL));
    status = qd_agree(comm, compare_configurations(&text, theirs, (size_t)first.length, rejoins, root, rank, host), agreed);
done:
    free(theirs);
    qd_strbuf_free(&text);
    return status;
}

qd_status qd_path_existing(char *path)
{
    struct stat info;
    while (stat(path, &info) != 0) {
        char *slash = strrchr(path, '/');
        if (errno != ENOENT && errno != ENOTDIR)
            return QD_FAIL(QD_USAGE, "run.dir: %s: %s", path, strerror(errno));
        if (!slash || slash == path)
            snprintf(path, PATH_MAX, "%s", slash ? "/" : ".");
        else
            *slash = '\0';
    }
    return QD_OK;
}

/* Uses a name that no rank has looked up before: network file systems cache failed lookups. */
static qd_status make_mark(const char *folder, mark *m)
{
    char existing[PATH_MAX];
    find_host(m->host);
    snprintf(existing, sizeof existing, "%s", folder);
    QD_TRY(qd_path_existing(existing));
    int n = snprintf(m->path, sizeof m->path, "%s/.quadrille-XXXXXX", existing);
    int fd = n > 0 && n < PATH_MAX ? mkostemp(m->path, O_CLOEXEC) : -1;
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "run.dir: %s is not writable: %s", existing, strerror(errno));
    close(fd);
    return QD_OK;
}

static qd_status see_mark(const mark *m, const char *folder, int rank)
{
    char host[HOST_BYTES];
    struct stat info;
    if (stat(m->path, &info) == 0)
        return QD_OK;
    find_host(host);
    return QD_FAIL(QD_USAGE,
                   "run.dir: %s on host %s, as rank %d sees it, is not the folder of rank 0 on host %s: all ranks write checkpoints there, "
                   "so put it on a file system that all machines mount under the same path",
                   folder, host, rank, m->host);
}

qd_status qd_common_folder(qd_comm *comm, const char *folder, bool *agreed)
{
    mark *m = calloc(1, sizeof *m);
    int rank = qd_comm_rank(comm);
    qd_status status = m ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to compare folders");
    QD_TRY_DONE(qd_agree(comm, status, agreed));
    if (rank == 0)
        m->status = status = make_mark(folder, m);
    bool made = rank == 0 && status == QD_OK;
    qd_status told = qd_comm_broadcast(comm, m, sizeof *m, QD_U8, 0, NULL);
    if (told == QD_OK && rank > 0)
        status = m->status == QD_OK ? see_mark(m, folder, rank) : QD_OK;
    status = told == QD_OK ? qd_agree(comm, status, agreed) : told;
    if (made)
        unlink(m->path);
done:
    free(m);
    return status;
}

/* Hashes the number of windows and the tokens of some of them, spread over the first epoch. */
static qd_status hash_data(qd_data *data, int64_t seq, int64_t *windows, int64_t *hash)
{
    qd_batch_source source = qd_data_source(data);
    int32_t *sample = malloc((size_t)(3 * seq) * sizeof *sample); /* tokens, targets, document starts */
    XXH64_hash_t value = 0;
    qd_status status = sample ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to compare data");
    *windows = qd_data_windows(data);
    for (int i = 0; i < SAMPLES && status == QD_OK; i++) {
        status = source.fill(source.context, *windows / SAMPLES * i, 1, seq, sample, sample + seq, sample + 2 * seq);
        if (status == QD_OK)
            value = XXH3_64bits_withSeed(sample, (size_t)(3 * seq) * sizeof *sample, value);
    }
    free(sample);
    *hash = (int64_t)value;
    return status;
}

qd_status qd_common_data(qd_comm *comm, const char *key, qd_data *data, int64_t seq, bool *agreed)
{
    int64_t own[2] = {0}, first[2];
    char host[HOST_BYTES];
    QD_TRY(qd_agree(comm, hash_data(data, seq, &own[0], &own[1]), agreed));
    memcpy(first, own, sizeof first);
    QD_TRY(qd_comm_broadcast(comm, first, 2, QD_I64, 0, NULL));
    qd_status status = QD_OK;
    find_host(host);
    if (own[0] != first[0])
        status =
            QD_FAIL(QD_USAGE,
                    "%s: rank %d on host %s reads %lld windows of %lld tokens, rank 0 reads %lld: all ranks must read the same data", key,
                    qd_comm_rank(comm), host, (long long)own[0], (long long)seq, (long long)first[0]);
    else if (own[1] != first[1])
        status = QD_FAIL(
            QD_USAGE,
            "%s: rank %d on host %s reads other tokens than rank 0: all ranks must read the same data, with the same tokenizer", key,
            qd_comm_rank(comm), host);
    return qd_agree(comm, status, agreed);
}

/* "alpha 0 to 3 6": the host of the first rank, and all ranks on it, as ranges. */
static void put_host(const qd_comm *comm, int first, qd_strbuf *text)
{
    const char *host = qd_comm_host(comm, first);
    int size = qd_comm_size(comm);
    qd_strbuf_printf(text, "%s%s", first ? ", " : "", host);
    for (int from = first, to; from < size; from = to + 1) {
        to = from;
        if (strcmp(qd_comm_host(comm, from), host) != 0)
            continue;
        while (to + 1 < size && strcmp(qd_comm_host(comm, to + 1), host) == 0)
            to++;
        qd_strbuf_printf(text, to > from ? " %d to %d" : " %d", from, to);
    }
}

void qd_common_hosts(const qd_comm *comm, char *text, size_t bytes)
{
    qd_strbuf list = {0};
    for (int rank = 0; rank < qd_comm_size(comm) && list.length < bytes && qd_comm_locate(comm).machines > 1; rank++) {
        int earlier = 0;
        while (earlier < rank && strcmp(qd_comm_host(comm, earlier), qd_comm_host(comm, rank)) != 0)
            earlier++;
        if (earlier == rank)
            put_host(comm, rank, &list);
    }
    snprintf(text, bytes, "%s", list.data && !list.failed && list.length < bytes ? list.data : "");
    qd_strbuf_free(&list);
}
