/* Refuses files that are not text before they are tokenized: archives and compressed files by their
 * first bytes, others by NUL bytes and by invalid UTF-8. A model trains on anything, so nothing
 * later would reveal the mistake. */
#include "base/text/strbuf.h"
#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A file is refused if more than SOME_BROKEN bytes and more than MOST_BROKEN percent are
 * invalid. */
enum { HEAD_BYTES = 64 * 1024, SOME_BROKEN = 32, MOST_BROKEN = 10 /* percent */ };

static const struct signature {
    const char *bytes;
    size_t length, at;
    const char *what, *remedy;
} signatures[] = {
    {"\x1f\x8b", 2, 0, "a gzip file", "unpack it first (gunzip -k)"},
    {"PK\x03\x04", 4, 0, "a zip archive", "unpack it first (unzip)"},
    {"\x28\xb5\x2f\xfd", 4, 0, "a zstd file", "unpack it first (unzstd)"},
    {"\xfd" "7zXZ", 6, 0, "an xz file", "unpack it first (unxz -k)"},
    {"BZh", 3, 0, "a bzip2 file", "unpack it first (bunzip2 -k)"},
    {"\x04\x22\x4d\x18", 4, 0, "an lz4 file", "unpack it first (unlz4)"},
    {"7z\xbc\xaf\x27\x1c", 6, 0, "a 7z archive", "unpack it first (7z x)"},
    {"ustar", 5, 257, "a tar archive", "unpack it first (tar xf)"},
    {"PAR1", 4, 0, "a Parquet file", "write its text as .jsonl first"},
    {"ARROW1", 6, 0, "an Arrow file", "write its text as .jsonl first"},
    {"%PDF-", 5, 0, "a PDF file", "extract its text first (pdftotext)"},
    {"\xff\xfe\0\0", 4, 0, "text in UTF-32", "convert it first (iconv -f UTF-32 -t UTF-8)"},
    {"\0\0\xfe\xff", 4, 0, "text in UTF-32", "convert it first (iconv -f UTF-32 -t UTF-8)"},
    {"\xff\xfe", 2, 0, "text in UTF-16", "convert it first (iconv -f UTF-16 -t UTF-8)"},
    {"\xfe\xff", 2, 0, "text in UTF-16", "convert it first (iconv -f UTF-16 -t UTF-8)"},
};

qd_status qd_file_head(const char *path, char **bytes, size_t *length, bool *whole)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "%s: cannot be opened: %s", path, strerror(errno));
    char *head = malloc(HEAD_BYTES);
    size_t used = 0;
    ssize_t got = head ? 1 : -1;
    while (head && used < HEAD_BYTES && ((got = read(fd, head + used, HEAD_BYTES - used)) > 0 || (got < 0 && errno == EINTR)))
        used += got > 0 ? (size_t)got : 0;
    qd_status status = !head     ? QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", path)
                       : got < 0 ? QD_FAIL(QD_IO, "%s: cannot be read: %s", path, strerror(errno))
                                 : QD_OK;
    close(fd);
    if (status != QD_OK) {
        free(head);
        return status;
    }
    *bytes = head;
    *length = used;
    *whole = used < HEAD_BYTES;
    return QD_OK;
}

/* Bytes that belong to no valid character. The last character may be cut off at the end of the
 * bytes that were read. */
static size_t broken_bytes(const char *bytes, size_t length, bool whole)
{
    size_t broken = 0;
    for (size_t at = 0; (at += qd_utf8_valid(bytes + at, length - at)) < length; at++)
        broken += whole || length - at >= 4;
    return broken;
}

static qd_status check_head(const char *path, const char *bytes, size_t length, bool whole)
{
    static const char as_bytes[] = "data.tokenizer=bytes accepts any file";
    size_t broken = broken_bytes(bytes, length, whole);
    bool nul = memchr(bytes, '\0', length);
    if (!nul && broken == 0) /* valid text, even if it starts like one of the formats below */
        return QD_OK;
    for (size_t i = 0; i < sizeof signatures / sizeof *signatures; i++) {
        const struct signature *s = &signatures[i];
        if (length >= s->at + s->length && memcmp(bytes + s->at, s->bytes, s->length) == 0)
            return QD_FAIL(QD_USAGE, "%s: is %s, not UTF-8 text: %s; %s", path, s->what, s->remedy, as_bytes);
    }
    if (nul)
        return QD_FAIL(QD_USAGE, "%s: contains NUL bytes, so it is not text; %s", path, as_bytes);
    if (broken > SOME_BROKEN && broken * 100 > length * MOST_BROKEN)
        return QD_FAIL(QD_USAGE,
                       "%s: %zu of its first %zu bytes are not UTF-8: convert text in another encoding first (iconv -t UTF-8); %s", path,
                       broken, length, as_bytes);
    return QD_OK;
}

qd_status qd_file_list_check_text(const qd_file_list *list)
{
    qd_status status = QD_OK;
    for (int64_t i = 0; i < list->count && status == QD_OK; i++) {
        char *bytes = NULL;
        size_t length;
        bool whole;
        if (list->items[i].kind == QD_FILE_SHARD)
            continue;
        QD_TRY(qd_file_head(list->items[i].path, &bytes, &length, &whole));
        status = check_head(list->items[i].path, bytes, length, whole);
        free(bytes);
    }
    return status;
}
