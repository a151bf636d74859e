/* quadrille eval: loss and perplexity of a trained model. */
#include "progress.h"

#include <math.h>
#include <quadrille/evaluate.h>

static bool on_pass(void *context, int64_t done, int64_t all)
{
    char text[64];
    snprintf(text, sizeof text, "%lld of %lld windows", (long long)done, (long long)all);
    progress_show(context, (double)done / (double)all, text);
    return !progress_stopped();
}

static qd_status print_json(const qd_evaluate_options *o, const qd_evaluate_report *r)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "model", o->model);
    qd_json_put_int(&w, "step", r->step);
    qd_json_put_string(&w, "text", r->data);
    qd_json_put_bool(&w, "held_out", r->held_out);
    qd_json_put_double(&w, "loss", r->loss);
    qd_json_put_double(&w, "perplexity", exp(r->loss));
    if (r->bytes > 0)
        qd_json_put_double(&w, "bits_per_byte", r->bits_per_byte);
    else
        qd_json_put_null(&w, "bits_per_byte");
    qd_json_put_int(&w, "tokens", r->tokens);
    qd_json_put_int(&w, "bytes", r->bytes);
    qd_json_put_int(&w, "windows", r->windows);
    qd_json_put_int(&w, "seq", r->seq);
    qd_json_put_double(&w, "seconds", r->seconds);
    qd_json_put_double(&w, "tokens_per_second", (double)r->tokens / r->seconds);
    if (o->baseline) {
        qd_json_object_begin(&w, "trigram");
        qd_json_put_double(&w, "loss", r->baseline_loss);
        qd_json_put_double(&w, "perplexity", exp(r->baseline_loss));
        qd_json_put_int(&w, "trained_tokens", r->baseline_trained);
        qd_json_put_int(&w, "tokens", r->baseline_scored);
        qd_json_put_int(&w, "trigrams", r->baseline_trigrams);
        qd_json_put_double(&w, "seconds", r->baseline_seconds);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    return cli_print_json(&text);
}

/* "loss     3.1234 nats per token  perplexity 22.71" without the line end */
static void print_loss(const char *name, double loss)
{
    printf("%-8s %.4f nats per token  perplexity %.2f", name, loss, exp(loss));
}

static void print_report(const qd_evaluate_options *o, const qd_evaluate_report *r)
{
    char tokens[32], rate[32], trained[32];
    qd_text_count((double)r->tokens, tokens, sizeof tokens);
    qd_text_count((double)r->tokens / r->seconds, rate, sizeof rate);
    qd_text_count((double)r->baseline_trained, trained, sizeof trained);
    printf("model    %s, step %lld\n", o->model, (long long)r->step);
    printf("text     %s%s: %s tokens in windows of %lld\n", r->held_out ? "held-out part of " : "", r->data, tokens, (long long)r->seq);
    print_loss("loss", r->loss);
    if (r->bytes > 0)
        printf("  %.3f bits per byte", r->bits_per_byte);
    putchar('\n');
    if (o->baseline) {
        double better = r->baseline_loss - r->loss;
        print_loss("trigram", r->baseline_loss);
        printf("  Kneser-Ney, of the %s training tokens\n", trained);
        printf("         %s by %.4f nats per token\n", better > 0 ? "the model is better" : "the trigram is better", fabs(better));
    }
    printf("speed    %s tokens/s\n", rate);
}

static qd_status run(cli_call *call)
{
    progress_line line = progress_start();
    qd_evaluate_report report = qd_evaluate_report_default();
    qd_evaluate_options o = {
        .size = sizeof o,
        .seq = qd_options_int(call->options, "seq"),
        .per_pass = qd_options_int(call->options, "per-pass"),
        .device = qd_options_string(call->options, "device"),
        .windows = qd_options_int(call->options, "windows"),
        .threads = (int)qd_options_int(call->options, "threads"),
        .tp = (int)qd_options_int(call->options, "tp"),
        .pp = (int)qd_options_int(call->options, "pp"),
        .ep = (int)qd_options_int(call->options, "ep"),
        .baseline = qd_options_bool(call->options, "baseline"),
        .progress = on_pass,
        .context = &line,
    };
    if (call->word_count < 1 || call->word_count > 2)
        return QD_FAIL(QD_USAGE, "eval: give a run folder or a checkpoint, and at most one text: quadrille eval MODEL [TEXT]");
    o.model = call->words[0];
    o.text = call->word_count > 1 ? call->words[1] : NULL;
    if (qd_options_string(call->options, "logits")[0])
        o.logits = qd_options_string(call->options, "logits");
    progress_catch_signals();
    qd_status status = qd_evaluate(&o, &report);
    progress_clear(&line);
    QD_TRY(status);
    if (report.warning[0] != '\0')
        fprintf(stderr, "quadrille: warning: %s\n", report.warning);
    if (qd_options_bool(call->options, "json"))
        return print_json(&o, &report);
    print_report(&o, &report);
    return QD_OK;
}

static const qd_option own[] = {
    {"seq", QD_OPTION_INT, "0", 0, 1e8, NULL, "tokens of a window; 0: as in training", NULL},
    {"per-pass", QD_OPTION_INT, "0", 0, 1e6, NULL,
     "windows per forward pass; 0: about 4096 tokens, or a global batch if the run validated while it trained", NULL},
    {"windows", QD_OPTION_INT, "0", 0, 1e12, NULL, "windows to evaluate, evenly spaced; 0: all", NULL},
    {"baseline", QD_OPTION_BOOL, "false", 0, 0, NULL, "also scores a Kneser-Ney trigram model of the same training tokens", NULL},
    {"logits", QD_OPTION_STRING, "", 0, 0, NULL, "safetensors file to write: tokens and logits of the first window", NULL},
    CLI_OPTION_DEVICE,
    CLI_OPTION_THREADS,
    CLI_OPTIONS_RANKS,
    CLI_OPTION_JSON,
};

const cli_command cli_eval = {
    .name = "eval",
    .arguments = "MODEL [TEXT] [--seq N] [--windows N] [--baseline] [--logits FILE] [--device D] [--threads N] "
                 "[--tp N] [--pp N] [--ep N] [--json]",
    .summary = "Computes loss and perplexity of a trained model on a text",
    .details = "  quadrille eval runs/first notes.txt\n"
               "  quadrille eval runs/first --baseline\n\n"
               "MODEL is a checkpoint, or a run folder, whose newest valid checkpoint is used. TEXT is a file, a folder or token\n"
               "shards; without it, data.eval_path of the run or the held-out part of its training data is used (data.validation).\n"
               "Relative paths of the run are relative to the current folder, as in training.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
