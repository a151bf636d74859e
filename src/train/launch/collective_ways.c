/* Keeps the measured ways of local collectives in a file: one line for each kind of machine, since
 * machines may share a home folder. */
#include "train/launch/collective_ways.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/text/strbuf.h"
#include "base/thread.h"
#include "train/run/cache_folder.h"

#include <quadrille/log.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "quadrille collectives "
#define HEADER MAGIC "1\n"
#define MEASURE_SECONDS 0.2
#define ATTEMPTS 3
enum { FILE_MOST = 64 << 10, MACHINE_BYTES = 320 };

static bool read_word(const char *path, char *word, size_t size)
{
    FILE *file = fopen(path, "re");
    bool read = file && fgets(word, (int)size, file);
    if (file)
        fclose(file);
    if (read)
        word[strcspn(word, "\n")] = '\0';
    return read;
}

/* "<processor> <family> <model>, 2 cores, caches 32K 512K 32768K": what the best ways depend on.
 * Has no colon. */
static void name_machine(char *name, size_t size)
{
    static const char *const keys[] = {"model name", "cpu family", "model\t", "CPU implementer", "CPU part"};
    char line[512], path[96], word[32];
    size_t length = 0;
    FILE *file = fopen("/proc/cpuinfo", "re");
    name[0] = '\0';
    while (file && fgets(line, sizeof line, file) && line[0] != '\n')
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            char *value = strchr(line, ':');
            if (strncmp(line, keys[k], strlen(keys[k])) != 0 || !value || length >= size)
                continue;
            value += 1 + strspn(value + 1, " ");
            value[strcspn(value, "\n")] = '\0';
            length += (size_t)snprintf(name + length, size - length, "%s ", value);
        }
    if (file)
        fclose(file);
    if (length < size)
        length += (size_t)snprintf(name + length, size - length, "%d cores, caches", qd_cores_allowed());
    for (int i = 0; i < 8 && length < size; i++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/type", i);
        if (!read_word(path, word, sizeof word) || strcmp(word, "Instruction") == 0)
            continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
        if (read_word(path, word, sizeof word))
            length += (size_t)snprintf(name + length, size - length, " %s", word);
    }
    for (char *at = name; *at; at++)
        if (*at == ':')
            *at = ' ';
}

/* One line "machine: ways" of the file. False: it is damaged. */
static bool take_line(const char *line, const char *machine, qd_collective_ways *ways, qd_strbuf *others)
{
    const char *colon = strstr(line, ": ");
    if (!colon || strlen(colon + 2) >= sizeof ways->text || qd_local_ways_check(colon + 2) != QD_OK || colon[2] == '\0') {
        qd_error_clear();
        return false;
    }
    if (strlen(machine) == (size_t)(colon - line) && memcmp(line, machine, strlen(machine)) == 0) {
        snprintf(ways->text, sizeof ways->text, "%s", colon + 2);
        ways->kept = true;
    } else {
        qd_strbuf_printf(others, "%s\n", line);
    }
    return true;
}

/* others: the lines of other machines. */
static void read_file(const char *machine, qd_collective_ways *ways, qd_strbuf *others)
{
    char *text = NULL;
    size_t length = 0;
    bool good;
    if (qd_file_read(ways->path, FILE_MOST, &text, &length) != QD_OK) {
        const int error = errno;
        if (error != ENOENT)
            qd_log(QD_LOG_WARN, "collectives", "%s cannot be read: measuring again", ways->path);
        qd_error_clear();
        return;
    }
    good = strlen(text) == length && strncmp(text, HEADER, strlen(HEADER)) == 0;
    for (char *line = good ? text + strlen(HEADER) : NULL; line && *line;) {
        char *end = strchr(line, '\n');
        if (end)
            *end = '\0';
        good = end && take_line(line, machine, ways, others) && good;
        line = end ? end + 1 : NULL;
    }
    if (!good)
        qd_log(QD_LOG_WARN, "collectives", "%s is damaged: %s", ways->path,
               ways->kept ? "using the line of this machine" : "measuring again");
    free(text);
}

static void write_file(const char *machine, qd_collective_ways *ways, const qd_strbuf *others)
{
    qd_strbuf all = {0};
    if (!qd_cache_may_replace(ways->path, MAGIC)) {
        qd_log(QD_LOG_WARN, "collectives", "%s is not a file of run.collectives and stays: what was measured is not stored", ways->path);
        return;
    }
    qd_strbuf_printf(&all, HEADER "%s%s: %s\n", others->data ? others->data : "", machine, ways->text);
    ways->kept = all.data && qd_file_replace(ways->path, all.data, all.length) == QD_OK;
    if (!ways->kept)
        qd_error_clear();
    qd_strbuf_free(&all);
}

void qd_collective_ways_find(const char *given, bool may_measure, qd_collective_ways *ways)
{
    char machine[MACHINE_BYTES];
    qd_strbuf others = {0};
    memset(ways, 0, sizeof *ways);
    if (strcmp(given, "none") == 0)
        return;
    qd_cache_file(given, "collectives", ways->path, sizeof ways->path);
    name_machine(machine, sizeof machine);
    if (ways->path[0] != '\0')
        read_file(machine, ways, &others);
    if (!ways->kept && may_measure) {
        bool settled = false;
        const double begin = qd_clock_now();
        for (int attempt = 0; attempt < ATTEMPTS && !settled; attempt++) /* what disturbs one is often gone in the next */
            qd_local_ways_measure(MEASURE_SECONDS, ways->text, sizeof ways->text, &settled);
        ways->seconds = qd_clock_now() - begin;
        if (settled && ways->path[0] != '\0')
            write_file(machine, ways, &others);
        ways->disturbed = !settled;
        qd_log(QD_LOG_DEBUG, "collectives", "measured in %.2f s%s%s: %s", ways->seconds,
               ways->kept ? ", stored in " : settled ? "" : ", disturbed by other programs and not used", ways->kept ? ways->path : "",
               ways->text);
        if (!settled)
            ways->text[0] = '\0';
    }
    qd_strbuf_free(&others);
}
