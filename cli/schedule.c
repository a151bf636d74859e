/* quadrille schedule: who computes what, when, in a pipeline. */
#include "cli.h"

#include <quadrille/check.h>

#include <errno.h>
#include <string.h>

static qd_status run(cli_call *call)
{
    bool csv = qd_options_bool(call->options, "csv"), svg = qd_options_bool(call->options, "svg");
    const char *path = qd_options_string(call->options, "out");
    if (csv && svg)
        return QD_FAIL(QD_USAGE, "schedule: --csv and --svg do not go together");
    FILE *out = path[0] ? fopen(path, "w") : stdout;
    if (!out)
        return QD_FAIL(QD_IO, "%s: %s", path, strerror(errno));
    qd_status status = qd_check_schedule(call->options, 0, csv ? QD_DRAWING_CSV : svg ? QD_DRAWING_SVG : QD_DRAWING_TEXT, out);
    if (path[0] && fclose(out) != 0 && status == QD_OK)
        status = QD_FAIL(QD_IO, "%s: %s", path, strerror(errno));
    return status;
}

static const qd_option own[] = {
    {"csv", QD_OPTION_BOOL, "false", 0, 0, NULL, "writes the lines that parallel.schedule_file reads", NULL},
    {"svg", QD_OPTION_BOOL, "false", 0, 0, NULL, "draws it in SVG", NULL},
    {"out", QD_OPTION_STRING, "", 0, 0, NULL, "file to write; empty: standard output", NULL},
};

const cli_command cli_schedule = {
    .name = "schedule",
    .arguments = "[CONFIG] [key=value …] [--csv | --svg] [--out FILE]",
    .summary = "Draws the schedule of a pipeline, or writes it for others to change",
    .details = "A row for each rank of the pipeline, a column for each unit of time. F: forward, B: backward, I and W: its halves\n"
               "(gradients of inputs, of weights), with the number of the micro-batch; small letters: a rank's further stages; a dot:\n"
               "the rank waits. Bubble and activations in flight are for stages that take equally long.",
    CLI_OPTIONS(own),
    .configuration = true,
    .run = run,
};
