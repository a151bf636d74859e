/* quadrille report: one page that shows a run. */
#include "cli.h"

#include <quadrille/report.h>
#include <stdlib.h>

static qd_status run(cli_call *call)
{
    const char *output = qd_options_string(call->options, "output"), *simulated = qd_options_string(call->options, "simulated");
    char *written;
    if (call->word_count != 1)
        return QD_FAIL(QD_USAGE, "report: name the folder of one run: quadrille report %s", call->command->arguments);
    QD_TRY(qd_report_run(call->words[0], simulated[0] ? simulated : NULL, output[0] ? output : NULL, &written));
    printf("%s\n", written);
    free(written);
    return QD_OK;
}

static const qd_option own[] = {
    {"output", QD_OPTION_STRING, "", 0, 0, NULL, "where the page is written; empty: report.html in the run's folder", "o"},
    {"simulated", QD_OPTION_STRING, "", 0, 0, NULL, "a trace of the same run from the simulator, to be drawn beside the measured one",
     NULL},
};

const cli_command cli_report = {
    .name = "report",
    .arguments = "RUN [-o FILE] [--simulated FILE]",
    .summary = "Draws a run as one HTML page: curves, memory, timeline",
    .details = "Reads config.yaml, effective.yaml, metrics.jsonl, memory.json and, of a run with --trace, trace.json of the\n"
               "folder. The page needs nothing but a browser, and can be sent as one file. A run that has not ended is shown as far\n"
               "as it has come.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
