/* quadrille verify: compares two layouts of one configuration, step by step. */
#include "cli.h"

#include <quadrille/verify.h>
#include <stdlib.h>
#include <string.h>

static qd_status print_report_json(const qd_verify_report *r)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_int(&w, "steps", r->steps);
    qd_json_put_bool(&w, "equal_within_tolerance", r->first_step == 0);
    qd_json_put_bool(&w, "bit_equal", r->bit_equal);
    qd_json_put_double(&w, "worst_loss", r->worst_loss);
    qd_json_put_double(&w, "worst_gradient", r->worst_gradient);
    qd_json_put_string(&w, "worst_gradient_name", r->worst_gradient_name);
    qd_json_put_double(&w, "worst_weight", r->worst_weight);
    qd_json_put_string(&w, "worst_weight_name", r->worst_weight_name);
    if (r->eps > 0.0)
        qd_json_put_double(&w, "eps", r->eps);
    if (r->first_step > 0) {
        qd_json_put_int(&w, "first_step", r->first_step);
        qd_json_put_string(&w, "first_difference", r->first_what);
    }
    qd_json_end(&w);
    return cli_print_json(&text);
}

static void print_report(const qd_verify_report *r, const char *against)
{
    char eps[96] = "";
    if (r->eps > 0.0)
        snprintf(eps, sizeof eps, "; train.eps %g in both, so that AdamW does not amplify rounding errors (--eps)", r->eps);
    cli_say("", 0, "%lld step%s against %s%s", (long long)r->steps, r->steps == 1 ? "" : "s", against, eps);
    printf("  loss       largest relative difference %.2e\n", r->worst_loss);
    printf("  gradients  %.2e%s%s\n", r->worst_gradient, r->worst_gradient_name[0] ? "  " : "", r->worst_gradient_name);
    printf("  weights    %.2e%s%s\n", r->worst_weight, r->worst_weight_name[0] ? "  " : "", r->worst_weight_name);
    puts(r->bit_equal ? "bit-equal" : r->first_step == 0 ? "equal within the tolerance" : "different");
}

static qd_status run(cli_call *call)
{
    enum { STEPS = 5 };
    qd_options *against = NULL;
    qd_verify_report report = qd_verify_report_default();
    const char *words = qd_options_string(call->options, "against");
    /* --steps is the length of the comparison; train.steps of a file is that of the run. */
    bool given = strcmp(qd_options_origin(call->options, "train.steps"), "command line") == 0;
    int64_t steps = given ? qd_options_int(call->options, "train.steps") : STEPS;
    if (words[0] == '\0')
        return QD_FAIL(QD_USAGE, "verify: set the layout to compare with, for example --against \"ranks=1 dp=1\"");
    QD_TRY(qd_options_copy(call->options, &against));
    qd_status status = cli_assign_words(against, words);
    if (status == QD_OK)
        status = qd_verify(call->options, against, steps, qd_options_float(call->options, "tolerance"),
                           qd_options_float(call->options, "eps"), &report);
    qd_options_destroy(against);
    if (status != QD_OK && status != QD_DIFFERENT)
        return status;
    if (!qd_options_bool(call->options, "json"))
        print_report(&report, words);
    else
        QD_TRY(print_report_json(&report));
    return status;
}

static const qd_option own[] = {
    {"against", QD_OPTION_STRING, "", 0, 0, NULL, "assignments for the other layout, for example \"ranks=1 dp=1\"", NULL},
    {"tolerance", QD_OPTION_FLOAT, "1e-5", 0, 1, NULL, "largest relative difference that counts as equal", NULL},
    {"eps", QD_OPTION_FLOAT, "1e-3", 0, 1, NULL,
     "lower bound of train.eps in both runs: with the usual eps, AdamW makes full steps for gradients that are only rounding errors; "
     "0: train.eps unchanged",
     NULL},
    CLI_OPTION_JSON,
};

const cli_command cli_verify = {
    .name = "verify",
    .arguments = "[CONFIG] [key=value …] --against \"key=value …\" [--steps N] [--tolerance T] [--eps E] [--json]",
    .summary = "Runs two layouts and compares loss, gradients and weights step by step",
    .details = "  quadrille verify run.yaml --ranks 4 --against \"ranks=1 dp=1\"\n\n"
               "Ranks are threads of this process. Without --steps, 5 steps are compared. The exit status is 1 if they differ by\n"
               "more than the tolerance.",
    CLI_OPTIONS(own),
    .configuration = true,
    .run = run,
};
