/* Formats byte counts, durations and numbers for people, wraps text for a terminal, and finds names
 * that are spelt similarly. */
#include "base/text/text.h"

#include <stdio.h>
#include <string.h>

void qd_text_bytes(int64_t bytes, char *text, size_t size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    int unit = 0;
    while (unit < 5 && (value >= 1024.0 || value <= -1024.0)) {
        value /= 1024.0;
        unit++;
    }
    snprintf(text, size,
             unit == 0       ? "%.0f %s"
             : value < 10.0  ? "%.2f %s"
             : value < 100.0 ? "%.1f %s"
                             : "%.0f %s",
             value, units[unit]);
}

void qd_text_seconds(double seconds, char *text, size_t size)
{
    long total = seconds > 0.0 ? (long)(seconds + 0.5) : 0;
    if (seconds > 0.0 && seconds < 0.0995)
        snprintf(text, size, "%.*f ms", seconds < 0.00095 ? 2 : 0, seconds * 1e3);
    else if (seconds > 0.0 && seconds < 9.95)
        snprintf(text, size, "%.1f s", seconds);
    else if (total < 60)
        snprintf(text, size, "%ld s", total);
    else if (total < 3600)
        snprintf(text, size, "%ld min %02ld s", total / 60, total % 60);
    else
        snprintf(text, size, "%ld h %02ld min", total / 3600, total / 60 % 60);
}

void qd_text_count(double count, char *text, size_t size)
{
    static const char *const units[] = {"", " k", " M", " B", " T"};
    int unit = 0;
    while (unit < 4 && count >= 1000.0) {
        count /= 1000.0;
        unit++;
    }
    snprintf(text, size,
             unit == 0       ? "%.0f%s"
             : count < 10.0  ? "%.2f%s"
             : count < 100.0 ? "%.1f%s"
                             : "%.0f%s",
             count, units[unit]);
}

void qd_text_unit(double value, const char *unit, char *text, size_t size)
{
    static const char *const prefixes[] = {"n", "u", "m", "", "k", "M", "G", "T"};
    enum { NONE = 3, LAST = 7 };
    int prefix = NONE, last = strcmp(unit, "s") == 0 ? NONE : LAST;
    for (; prefix < last && value >= 999.95; prefix++)
        value /= 1000.0;
    for (; prefix > 0 && value > 0.0 && value < 0.99995; prefix--)
        value *= 1000.0;
    snprintf(text, size, "%.*f %s%s",
             value < 9.9995   ? 3
             : value < 99.995 ? 2
             : value < 999.95 ? 1
                              : 0,
             value, prefixes[prefix], unit);
}

static int columns(const char *text, size_t length)
{
    int count = 0;
    for (size_t i = 0; i < length; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

int qd_text_columns(const char *text)
{
    return columns(text, strlen(text));
}

void qd_text_wrap(const char *text, int indent, int width, qd_strbuf *out)
{
    int column = indent;
    for (bool first = true; *text; first = false) {
        size_t length = strcspn(text, " ");
        int needed = columns(text, length);
        if (!first && width > 0 && column + 1 + needed > width) {
            qd_strbuf_puts(out, "\n");
            qd_strbuf_pad(out, ' ', indent);
            column = indent;
        } else if (!first) {
            qd_strbuf_puts(out, " ");
            column++;
        }
        qd_strbuf_append(out, text, length);
        column += needed;
        text += length;
        text += strspn(text, " ");
    }
    qd_strbuf_puts(out, "\n");
}

int qd_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length)
{
    enum { MOST = 64 };
    int rows[3][MOST + 1];
    if (a_length > MOST || b_length > MOST)
        return MOST + 1;
    int *before = rows[0], *above = rows[1], *row = rows[2];
    for (size_t j = 0; j <= b_length; j++)
        above[j] = (int)j;
    for (size_t i = 1; i <= a_length; i++) {
        row[0] = (int)i;
        for (size_t j = 1; j <= b_length; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best)
                best = above[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            row[j] = best;
        }
        int *oldest = before;
        before = above;
        above = row;
        row = oldest;
    }
    return above[b_length];
}

int qd_edit_limit(const char *written)
{
    int limit = (int)strlen(written) / 3;
    return limit < 2 ? 2 : limit;
}

bool qd_text_has_word(const char *words, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = words; length > 0 && (at = strstr(at, word)) != NULL; at += length)
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0'))
            return true;
    return false;
}

const char *qd_text_nearest(const char *written, const char *const *names, int count)
{
    const char *nearest = NULL;
    int nearest_distance = qd_edit_limit(written) + 1;
    for (int i = 0; i < count; i++) {
        int distance = qd_edit_distance(written, strlen(written), names[i], strlen(names[i]));
        if (distance < nearest_distance) {
            nearest_distance = distance;
            nearest = names[i];
        }
    }
    return nearest;
}

void qd_text_roff(const char *text, size_t length, qd_strbuf *out)
{
    static const char *const spelt[][2] = {{"-", "\\-"}, {"\\", "\\e"}, {"…", "..."}, {"×", "x"}};
    if (length > 0 && (*text == '.' || *text == '\''))
        qd_strbuf_puts(out, "\\&");
    for (size_t i = 0; i < length;) {
        size_t k = 0, count = sizeof spelt / sizeof *spelt;
        while (k < count && strncmp(text + i, spelt[k][0], strlen(spelt[k][0])) != 0)
            k++;
        if (k < count)
            qd_strbuf_puts(out, spelt[k][1]);
        else
            qd_strbuf_append(out, text + i, 1);
        i += k < count ? strlen(spelt[k][0]) : 1;
    }
}
