/* The table of ways (ways.h): defaults, and its form as text. */
#include "comm/local/ways.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The copies of a message by name; other members are numbers. */
static const char *const copies[QD_COPY_WAYS] = {"near", "page", "pages", "lines"};

typedef struct member {
    const char *name;
    size_t at;
    int64_t least;
    bool copy;
} member;
#define MEMBER(name, ...) {#name, offsetof(qd_local_ways, name), __VA_ARGS__}
static const member members[] = {
    MEMBER(stream_bytes, .least = 0),     MEMBER(stream_from, .least = -1),     MEMBER(stream_copy, .copy = true),
    MEMBER(far_copy, .copy = true),       MEMBER(far_bytes, .least = 0),        MEMBER(common_from, .least = 0),
    MEMBER(pass_from, .least = 1),        MEMBER(rooted_from, .least = 1),      MEMBER(placed_from, .least = 1),
    MEMBER(reach_from, .least = 1),       MEMBER(reach_most, .least = -1),      MEMBER(send_placed_from, .least = 1),
    MEMBER(send_reach_from, .least = 1),  MEMBER(send_share_from, .least = 1),
};
enum { MEMBERS = sizeof members / sizeof *members };
_Static_assert(MEMBERS * sizeof(int64_t) == sizeof(qd_local_ways), "every member has a name");

static int64_t *value_of(const member *m, qd_local_ways *ways)
{
    return (int64_t *)((char *)ways + m->at);
}

qd_local_ways qd_local_ways_default(void)
{
    /* Measured on two cores of an Intel Xeon (docs/notes/collectives.md), like the limits by
     * kind. */
    return (qd_local_ways){.stream_bytes = 0,
                           .stream_from = -1,
                           .stream_copy = QD_COPY_PAGE,
                           .far_copy = QD_COPY_PAGES,
                           .far_bytes = 8 << 20,
                           .common_from = 384 << 10,
                           .pass_from = 64 << 10,
                           .rooted_from = 4 << 10,
                           .placed_from = 32 << 10,
                           .reach_from = (64 << 10) + 1,
                           .reach_most = -1,
                           .send_placed_from = 16 << 10,
                           .send_reach_from = 16 << 10,
                           .send_share_from = 128 << 10};
}

static qd_status read_one(const char *name, size_t length, const char *value, size_t value_length, qd_local_ways *ways)
{
    for (int i = 0; i < MEMBERS; i++) {
        const member *m = &members[i];
        if (strlen(m->name) != length || memcmp(m->name, name, length) != 0) continue;
        for (int way = 0; m->copy && way < QD_COPY_WAYS; way++) {
            if (strlen(copies[way]) != value_length || memcmp(copies[way], value, value_length) != 0) continue;
            *value_of(m, ways) = way;
            return QD_OK;
        }
        char digits[24], *end;
        snprintf(digits, sizeof digits, "%.*s", (int)value_length, value);
        errno = 0;
        long long number = strtoll(digits, &end, 10);
        if (m->copy || value_length == 0 || value_length >= sizeof digits || *end || errno || number < m->least)
            return QD_FAIL(QD_USAGE, "ways of collectives: %s cannot be '%.*s'; it must be %s", m->name, (int)value_length, value,
                           m->copy ? "near, page, pages or lines" : "a number of bytes");
        *value_of(m, ways) = number;
        return QD_OK;
    }
    return QD_FAIL(QD_USAGE, "ways of collectives: there is no '%.*s'", (int)length, name);
}

qd_status qd_local_ways_read(const char *text, qd_local_ways *ways)
{
    qd_local_ways read = *ways;
    for (const char *at = text ? text : ""; *at;) {
        size_t length = strcspn(at, " ="), whole = strcspn(at, " ");
        if (whole > 0 && at[length] != '=') return QD_FAIL(QD_USAGE, "ways of collectives: '%.*s' is not name=value", (int)whole, at);
        if (whole > 0) QD_TRY(read_one(at, length, at + length + 1, whole - length - 1, &read));
        at += whole + strspn(at + whole, " ");
    }
    *ways = read;
    return QD_OK;
}

qd_status qd_local_ways_check(const char *text)
{
    qd_local_ways ways = qd_local_ways_default();
    return qd_local_ways_read(text, &ways);
}

void qd_local_ways_write(const qd_local_ways *ways, char *text, size_t size)
{
    qd_local_ways copy = *ways;
    size_t length = 0;
    for (int i = 0; i < MEMBERS && length < size; i++) {
        int64_t value = *value_of(&members[i], &copy);
        const char *gap = i > 0 ? " " : "";
        int more = members[i].copy ? snprintf(text + length, size - length, "%s%s=%s", gap, members[i].name, copies[value])
                                   : snprintf(text + length, size - length, "%s%s=%lld", gap, members[i].name, (long long)value);
        length += (size_t)more;
    }
}

uint64_t qd_local_ways_mark(const qd_local_ways *ways)
{
    char text[QD_LOCAL_WAYS_MOST];
    uint64_t mark = 0xcbf29ce484222325u; /* FNV-1a */
    qd_local_ways_write(ways, text, sizeof text);
    for (const char *at = text; *at; at++) mark = (mark ^ (unsigned char)*at) * 0x100000001b3u;
    return mark;
}
