/* quadrille schedule: draws the schedule of a pipeline. */
#include "cli.h"

#include <quadrille/check.h>

#include <stdlib.h>

static qd_status run(cli_call *call)
{
    bool csv = qd_options_bool(call->options, "csv"), svg = qd_options_bool(call->options, "svg");
    const char *path = qd_options_string(call->options, "out");
    if (csv && svg)
        return QD_FAIL(QD_USAGE, "schedule: --csv and --svg do not go together");
    /* In memory first: the output may be the file of parallel.schedule_file, which must not change
     * if something fails. */
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
    {"svg", QD_OPTION_BOOL, "false", 0, 0, NULL, "draws the schedule as SVG", NULL},
    {"out", QD_OPTION_STRING, "", 0, 0, NULL, "file to write; empty: standard output", NULL},
};

const cli_command cli_schedule = {
    .name = "schedule",
    .arguments = "[CONFIG] [key=value …] [--csv | --svg] [--out FILE]",
    .summary = "Draws the schedule of a pipeline, or writes it to a file to be edited",
    .details = "One row per pipeline rank, one column per unit of time. F: forward, B: backward, I and W: the halves of backward\n"
               "(gradients of inputs and of weights), with the number of the micro-batch; lower case: other stages of the rank; a\n"
               "dot: the rank waits. Bubble and activations in flight assume stages of equal duration.",
    CLI_OPTIONS(own),
    .configuration = true,
    .run = run,
};
