/* quadrille schedule: who computes what, when, in a pipeline. */
#include "cli.h"

#include <quadrille/check.h>

#include <stdlib.h>

static qd_status run(cli_call *call)
{
    bool csv = qd_options_bool(call->options, "csv"), svg = qd_options_bool(call->options, "svg");
    const char *path = qd_options_string(call->options, "out");
    if (csv && svg)
        return QD_FAIL(QD_USAGE, "schedule: --csv and --svg do not go together");
    /* In memory first: the file may be the one that parallel.schedule_file names, and stays as it
     * is when something is wrong. */
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (!out)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the drawing");
    qd_status status = qd_check_schedule(call->options, 0, csv ? QD_DRAWING_CSV : svg ? QD_DRAWING_SVG : QD_DRAWING_TEXT, out);
    fclose(out);
    if (status == QD_OK)
        status = cli_write(path, text, length);
    free(text);
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
