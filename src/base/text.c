#include "base/text.h"

#include <stdio.h>

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
