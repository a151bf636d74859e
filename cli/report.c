/* quadrille report: a run as one HTML page. */
#include "cli.h"

#include <quadrille/report.h>
#include <stdlib.h>

static qd_status run(cli_call *call)
{
    const char *output = qd_options_string(call->options, "output"), *simulated = qd_options_string(call->options, "simulated");
    char *written;
    if (call->word_count < 1)
        return QD_FAIL(QD_USAGE, "report: give a run folder, or several to compare: quadrille report %s", call->command->arguments);
    if (call->word_count > 1 && simulated[0])
        return QD_FAIL(QD_USAGE, "report: --simulated is drawn next to one run, but %d are named", call->word_count);
    if (call->word_count > 1)
        QD_TRY(qd_report_compare(call->words, call->word_count, output[0] ? output : NULL, &written));
    else
        QD_TRY(qd_report_run(call->words[0], simulated[0] ? simulated : NULL, output[0] ? output : NULL, &written));
    printf("%s\n", written);
    free(written);
    return QD_OK;
}

static const qd_option own[] = {
    {"output", QD_OPTION_STRING, "", 0, 0, NULL,
     "file to write; empty: report.html in the run folder, or comparison.html next to the first of several", "o"},
    {"simulated", QD_OPTION_STRING, "", 0, 0, NULL, "a simulated trace of the same run, drawn next to the measured one",
     NULL},
};

const cli_command cli_report = {
    .name = "report",
    .arguments = "RUN [RUN …] [-o FILE] [--simulated FILE]",
    .summary = "Draws a run as one HTML page: curves, memory, timeline; or compares several",
    .details = "Reads config.yaml, effective.yaml, metrics.jsonl, memory.json and, for a run with --trace, trace.json from the run\n"
               "folder. The page is one self-contained file. A run that has not ended is shown up to its last step.\n"
               "Several runs are compared: their curves laid over each other, a table, and the differences of their configurations.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
