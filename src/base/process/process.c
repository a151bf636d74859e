/* Reads /proc/PID/stat and /proc/PID/status. */
#include "base/process/process.h"

#include <stdio.h>
#include <string.h>

/* Fields of /proc/PID/stat, counted from 1. The second, the name, may contain anything. */
enum { FIELD_STATE = 3, FIELD_STARTED = 22, FIELD_EXIT_CODE = 52 };

static size_t read_text(pid_t pid, const char *name, char *text, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/%s", (long)pid, name);
    FILE *file = fopen(path, "re");
    size_t length = file ? fread(text, 1, bytes - 1, file) : 0;
    text[length] = '\0';
    if (file)
        fclose(file);
    return length;
}

static bool is_traced(pid_t pid)
{
    char text[2048];
    long tracer = 0;
    read_text(pid, "status", text, sizeof text);
    const char *line = strstr(text, "\nTracerPid:");
    return line && sscanf(line, "\nTracerPid: %ld", &tracer) == 1 && tracer != 0;
}

void qd_process_look(pid_t pid, qd_process_state *state)
{
    char text[1024], kind = 'X';
    *state = (qd_process_state){0};
    read_text(pid, "stat", text, sizeof text);
    const char *at = strrchr(text, ')');
    for (int field = FIELD_STATE; at && (at = strchr(at, ' ')) != NULL; field++) {
        at++;
        if (field == FIELD_STATE)
            kind = *at;
        else if (field == FIELD_STARTED)
            sscanf(at, "%llu", (unsigned long long *)&state->started);
        else if (field == FIELD_EXIT_CODE)
            sscanf(at, "%d", &state->wait_status);
    }
    state->ended = kind == 'Z' || kind == 'X' || kind == 'x';
    state->stopped = kind == 'T';
    state->traced = !state->ended && is_traced(pid);
}
