/* Splitting strings as Python does, and searching in them. */
#include "data/chat/chat_impl.h"

#include <string.h>

size_t qd_chat_search_steps(qd_chat_value s, qd_chat_value part, bool last)
{
    return (size_t)s.length / 16 * (last ? 1 + part.length / 16 : 1);
}

const char *qd_chat_search_last(const char *text, size_t length, qd_chat_value part)
{
    for (size_t at = length - part.length + 1; length >= part.length && at-- > 0;)
        if (memcmp(text + at, part.text, part.length) == 0)
            return text + at;
    return NULL;
}

typedef struct pieces {
    qd_chat_value list;
    size_t count;
} pieces;

static qd_status add_piece(qd_chat_run *run, pieces *p, const char *text, size_t length)
{
    if (!p->list.sequence)
        QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, 8, &p->list));
    if (p->count == p->list.sequence->count) {
        qd_chat_value larger;
        QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, 2 * p->count, &larger));
        memcpy(larger.sequence->items, p->list.sequence->items, p->count * sizeof larger);
        p->list = larger;
    }
    p->list.sequence->items[p->count++] = qd_chat_string(text, length);
    return qd_chat_spend(run, 1 + length / 64);
}

static qd_status finish_pieces(qd_chat_run *run, pieces *p, bool reversed, qd_chat_value *result)
{
    if (!p->list.sequence)
        return qd_chat_sequence_new(run, QD_CHAT_LIST, 0, result);
    qd_chat_value *items = p->list.sequence->items;
    p->list.sequence->count = p->count;
    for (size_t i = 0; reversed && i < p->count / 2; i++) {
        qd_chat_value item = items[i];
        items[i] = items[p->count - 1 - i];
        items[p->count - 1 - i] = item;
    }
    *result = p->list;
    return QD_OK;
}

static qd_status split_space(qd_chat_run *run, qd_chat_value s, int64_t most, pieces *p)
{
    size_t at = 0, bytes;
    for (;;) {
        at += qd_chat_space_length(s.text + at, s.length - at);
        if (at == s.length)
            return QD_OK;
        if (most-- == 0)
            return add_piece(run, p, s.text + at, s.length - at);
        size_t end = at;
        while (end < s.length && !qd_chat_is_space(qd_chat_code_point(s.text + end, s.length - end, &bytes)))
            end += bytes;
        QD_TRY(add_piece(run, p, s.text + at, end - at));
        at = end;
    }
}

static qd_status rsplit_space(qd_chat_run *run, qd_chat_value s, int64_t most, pieces *p)
{
    size_t end = s.length;
    for (;;) {
        end = qd_chat_without_space(s.text, end);
        if (!end)
            return QD_OK;
        if (most-- == 0)
            return add_piece(run, p, s.text, end);
        size_t start = end;
        while (start > 0 && qd_chat_without_space(s.text, start) == start) {
            start--;
            while (start > 0 && ((unsigned char)s.text[start] & 0xc0) == 0x80)
                start--;
        }
        QD_TRY(add_piece(run, p, s.text + start, end - start));
        end = start;
    }
}

qd_status qd_chat_split(qd_chat_run *run, qd_chat_value s, qd_chat_value separator, int64_t most, bool from_right, qd_chat_value *result)
{
    pieces p = {0};
    if (separator.type == QD_CHAT_NONE) {
        QD_TRY(qd_chat_spend(run, s.length / 16));
        QD_TRY((from_right ? rsplit_space : split_space)(run, s, most, &p));
        return finish_pieces(run, &p, from_right, result);
    }
    QD_TRY(qd_chat_spend(run, qd_chat_search_steps(s, separator, from_right)));
    const char *text = s.text, *end = s.text + s.length;
    for (; most != 0; most--) {
        const char *found = from_right ? qd_chat_search_last(text, (size_t)(end - text), separator)
                                       : qd_chat_search(text, (size_t)(end - text), separator.text, separator.length);
        if (!found)
            break;
        if (from_right) {
            QD_TRY(add_piece(run, &p, found + separator.length, (size_t)(end - found) - separator.length));
            end = found;
        } else {
            QD_TRY(add_piece(run, &p, text, (size_t)(found - text)));
            text = found + separator.length;
        }
    }
    QD_TRY(add_piece(run, &p, text, (size_t)(end - text)));
    return finish_pieces(run, &p, from_right, result);
}

qd_status qd_chat_split_lines(qd_chat_run *run, qd_chat_value s, bool with_ends, qd_chat_value *result)
{
    pieces p = {0};
    for (size_t at = 0, all; at < s.length; at += all) {
        size_t length = qd_chat_line(s.text + at, s.length - at, &all);
        QD_TRY(add_piece(run, &p, s.text + at, with_ends ? all : length));
    }
    return finish_pieces(run, &p, false, result);
}
