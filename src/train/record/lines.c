/* Reads the lines of a resumed run again. */
#include "train/record/lines.h"

#include "base/file.h"
#include "base/text/strbuf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

qd_status qd_lines_keep(const char *path, int64_t step, qd_strbuf *out)
{
    char *text = NULL;
    size_t length;
    if (step == 0 || access(path, F_OK) != 0)
        return QD_OK;
    QD_TRY(qd_file_read(path, (size_t)1 << 30, &text, &length));
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        long long number;
        if (sscanf(line, "{\"step\":%lld", &number) == 1 && number <= step)
            qd_strbuf_append(out, line, (size_t)(end + 1 - line));
    }
    free(text);
    return QD_OK;
}

qd_status qd_lines_replace(const char *path, qd_status status, qd_strbuf *lines)
{
    if (status == QD_OK && lines->failed)
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory for a line", path);
    if (status == QD_OK)
        status = qd_file_replace(path, lines->data, lines->length);
    qd_strbuf_free(lines);
    return status;
}

bool qd_line_number(const char *line, const char *key, double *value)
{
    const char *at = strstr(line, key);
    char *end;
    if (!at)
        return false;
    *value = strtod(at + strlen(key), &end);
    return end != at + strlen(key);
}

qd_status qd_lines_each(const char *path, int64_t step, void (*visit)(void *context, const char *line), void *context)
{
    char *text = NULL;
    size_t length;
    if (access(path, F_OK) != 0)
        return QD_OK;
    QD_TRY(qd_file_read(path, SIZE_MAX / 2, &text, &length));
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        double number;
        *end = '\0';
        if (!qd_line_number(line, "{\"step\":", &number) || number > (double)step)
            break;
        visit(context, line);
    }
    free(text);
    return QD_OK;
}
