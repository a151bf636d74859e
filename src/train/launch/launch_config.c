/* Passes the configuration from the launcher to its ranks: the keys that the user set, as
 * zero-terminated "key=value" texts. Ranks do not read the configuration file again, because it may
 * be a pipe or have changed. */
#define _GNU_SOURCE
#include "train/launch/launch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void put_list(const qd_options *options, const char *key, qd_strbuf *text)
{
    const int64_t *values;
    int count = qd_options_int_list(options, key, &values);
    for (int i = 0; i < count; i++)
        qd_strbuf_printf(text, "%s%lld", i ? "," : "", (long long)values[i]);
}

static void put_real_list(const qd_options *options, const char *key, qd_strbuf *text)
{
    char number[QD_DOUBLE_TEXT];
    const double *values;
    int count = qd_options_float_list(options, key, &values);
    for (int i = 0; i < count; i++) {
        qd_double_shortest(values[i], number);
        qd_strbuf_printf(text, "%s%s", i ? "," : "", number);
    }
}

static void put_value(const qd_options *options, const qd_option *option, qd_strbuf *text)
{
    char number[QD_DOUBLE_TEXT];
    switch (option->type) {
    case QD_OPTION_INT: qd_strbuf_printf(text, "%lld", (long long)qd_options_int(options, option->key)); break;
    case QD_OPTION_BOOL: qd_strbuf_puts(text, qd_options_bool(options, option->key) ? "true" : "false"); break;
    case QD_OPTION_FLOAT:
        qd_double_shortest(qd_options_float(options, option->key), number);
        qd_strbuf_puts(text, number);
        break;
    case QD_OPTION_STRING:
    case QD_OPTION_ENUM: qd_strbuf_puts(text, qd_options_string(options, option->key)); break;
    case QD_OPTION_INT_LIST: put_list(options, option->key, text); break;
    case QD_OPTION_FLOAT_LIST: put_real_list(options, option->key, text); break;
    }
}

void qd_launch_config_put(const qd_options *options, qd_strbuf *text)
{
    qd_option_table table = qd_config_table();
    const char *overridden = qd_config_by_epochs(options) ? "train.steps" : "train.epochs"; /* origins are lost on the way */
    for (int i = 0; i < table.count; i++) {
        if (!qd_options_is_set(options, table.options[i].key) || strcmp(table.options[i].key, overridden) == 0)
            continue;
        qd_strbuf_printf(text, "%s=", table.options[i].key);
        put_value(options, &table.options[i], text);
        qd_strbuf_append(text, "", 1);
    }
}

qd_status qd_launch_config_write(const qd_options *options, int *fd)
{
    qd_strbuf text = {0};
    qd_launch_config_put(options, &text);
    size_t length = text.length;
    bool written = !text.failed && (*fd = memfd_create("quadrille configuration", MFD_CLOEXEC)) >= 0 &&
                   (length == 0 || write(*fd, text.data, length) == (ssize_t)length);
    int error = errno;
    qd_strbuf_free(&text);
    return written ? QD_OK : QD_FAIL(QD_SYSTEM, "the configuration cannot be handed to the ranks: %s", strerror(error));
}

qd_status qd_launch_config_parse(const char *text, size_t length, qd_options **options)
{
    qd_option_table table = qd_config_table();
    QD_TRY(qd_options_create(&table, 1, options));
    for (size_t at = 0; at < length; at += strlen(text + at) + 1)
        QD_TRY(qd_options_assign(*options, text + at));
    return QD_OK;
}

qd_status qd_launch_config_read(int fd, qd_options **options)
{
    char path[32], *text = NULL;
    size_t length = 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    QD_TRY(qd_file_read(path, (size_t)16 << 20, &text, &length));
    qd_status status = qd_launch_config_parse(text, length, options);
    free(text);
    return status;
}
