/* Formats byte counts, durations and numbers for people, and wraps text for a terminal. */
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
