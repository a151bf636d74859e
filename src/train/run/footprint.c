/* Reads /proc/self/status, and resets its peak. */
#include "train/run/footprint.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

qd_status qd_footprint_read(qd_footprint *footprint)
{
    memset(footprint, 0, sizeof *footprint);
    const struct {
        const char *key;
        int64_t *value;
    } lines[] = {
        {"VmRSS:", &footprint->resident},  {"VmHWM:", &footprint->peak},      {"RssAnon:", &footprint->anonymous},
        {"RssFile:", &footprint->file},    {"RssShmem:", &footprint->shared},
    };
    FILE *status = fopen("/proc/self/status", "r");
    if (!status)
        return QD_FAIL(QD_SYSTEM, "/proc/self/status: %s", strerror(errno));
    char line[256];
    while (fgets(line, sizeof line, status)) {
        for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
            long long kib;
            size_t length = strlen(lines[i].key);
            if (strncmp(line, lines[i].key, length) == 0 && sscanf(line + length, "%lld", &kib) == 1)
                *lines[i].value = kib * 1024;
        }
    }
    fclose(status);
    return QD_OK;
}

bool qd_footprint_reset_peak(void)
{
    FILE *refs = fopen("/proc/self/clear_refs", "w");
    if (!refs)
        return false;
    bool written = fputs("5", refs) >= 0;
    return fclose(refs) == 0 && written;
}
