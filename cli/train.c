/* quadrille train: what the user sees of a run; the run itself is qd_train(). */
#include "curve.h"
#include "plan.h"
#include "progress.h"

#include <ctype.h>
#include <quadrille/config.h>
#include <quadrille/train.h>
#include <signal.h>
#include <string.h>
#include <time.h>

enum { MOST_LOSSES = 8192 }; /* even */

typedef struct view {
    const qd_options *options;
    int columns; /* of the terminal; 0: not a terminal, each step is printed on its own line */
    int64_t log_every;
    bool line_open; /* the cursor is on a progress line */
    double begin, shown; /* seconds: first step, last time the line was drawn */
    int64_t first_step;  /* 1, or later in a resumed run; 0: none yet */
    double validation;   /* the last loss; 0: none yet */
    double losses[MOST_LOSSES]; /* for the curve: means over `every` steps each */
    double pending, first_loss; /* sum of the steps that make up the next value; loss of the first step */
    int64_t count, every, waiting, last_step;
} view;

static const char NOTHING_KEPT[] = "nothing of this run is kept; --dir FOLDER keeps checkpoints, metrics and configuration";

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void close_line(view *v)
{
    if (v->line_open)
        putchar('\n');
    v->line_open = false;
    fflush(stdout);
}

static void print_ranks(const qd_train_summary *s)
{
    printf("ranks    %s", s->ranks_as);
    if (s->machines > 1)
        printf(" on %d machines%s%s", s->machines, s->hosts[0] ? ": " : "", s->hosts);
    printf("%s backend %s\n", s->hosts[0] ? ";" : ",", s->backend);
}

static void on_start(void *context, const qd_train_summary *s)
{
    view *v = context;
    const char *dir = qd_options_string(v->options, "run.dir");
    char samples[32];
    close_line(v);
    qd_text_count((double)s->samples, samples, sizeof samples);
    plan_print_head(s->plan);
    plan_print_memory(s->plan);
    plan_print_host(s->plan);
    if (s->warning[0])
        cli_say("note", 9, "%s", s->warning);
    printf("data     %s: %s sequences\n", qd_options_string(v->options, "data.path"), samples);
    if (s->plan->world > 1)
        print_ranks(s);
    if (!dir[0])
        printf("folder   none: %s\n", NOTHING_KEPT);
    else
        printf("folder   %s%s\n", dir, qd_options_bool(v->options, "run.save") ? "" : ", without checkpoints (run.save=false)");
    putchar('\n');
    fflush(stdout);
    v->begin = now();
}

/* In constant memory: when the list is full, pairs of values become one. */
static void keep_loss(view *v, int64_t step, double loss)
{
    v->last_step = step;
    v->pending += loss;
    if (++v->waiting < v->every)
        return;
    v->losses[v->count++] = v->pending / (double)v->every;
    v->pending = 0.0;
    v->waiting = 0;
    if (v->count < MOST_LOSSES)
        return;
    v->count /= 2;
    v->every *= 2;
    for (int64_t i = 0; i < v->count; i++)
        v->losses[i] = 0.5 * (v->losses[2 * i] + v->losses[2 * i + 1]);
}

/* A line in several lengths: shorter forms drop MFU, the norm, the speed, the validation loss and
 * at last the learning rate. */
enum { STEP_FORMS = 6, STEP_TEXT = 192 };
typedef struct step_text {
    char forms[STEP_FORMS][STEP_TEXT];
} step_text;

/* "step 12/200  loss 3.1234  val 3.2345  lr 1.00e-03  norm 0.91  41.2 k tokens/s  MFU 31 %".
 * validation: 0: none. */
static void format_step(const qd_train_step *s, double validation, step_text *text)
{
    char rate[32], head[96], norm[40], speed[48], mfu[32] = "", val[96] = "", lr[32];
    int used = s->pairs > 0 ? snprintf(val, sizeof val, "  margin %.3f  right %.0f %%", s->reward_margin, 100.0 * s->reward_accuracy) : 0;
    if (validation != 0.0)
        snprintf(val + used, sizeof val - (size_t)used, "  val %.4f", validation);
    snprintf(lr, sizeof lr, "  lr %.2e", s->lr);
    /* Three digits with trailing zeros, so that columns stay aligned; not "123." */
    snprintf(norm, sizeof norm, s->grad_norm >= 0.001 && s->grad_norm < 99.9 ? "  norm %#.3g" : "  norm %.3g", s->grad_norm);
    qd_text_count(s->tokens_per_second, rate, sizeof rate);
    snprintf(speed, sizeof speed, "  %s tokens/s", rate);
    if (s->mfu > 0.0)
        snprintf(mfu, sizeof mfu, "  MFU %.0f %%", 100.0 * s->mfu);
    snprintf(head, sizeof head, "step %*lld/%lld  loss %.4f", snprintf(NULL, 0, "%lld", (long long)s->steps), (long long)s->step,
             (long long)s->steps, s->loss);
    const char *const parts[STEP_FORMS][5] = {{val, lr, norm, speed, mfu}, {val, lr, norm, speed, ""}, {val, lr, "", speed, ""},
                                              {val, lr, "", "", ""},       {"", lr, "", "", ""},       {"", "", "", "", ""}};
    for (int i = 0; i < STEP_FORMS; i++)
        snprintf(text->forms[i], STEP_TEXT, "%s%s%s%s%s%s", head, parts[i][0], parts[i][1], parts[i][2], parts[i][3], parts[i][4]);
}

static progress_times times_of(const view *v, const qd_train_step *s)
{
    double elapsed = now() - v->begin, each = elapsed / (double)(s->step - v->first_step + 1);
    return (progress_times){elapsed, s->step == s->steps ? -1.0 : each * (double)(s->steps - s->step)};
}

static void rewrite_line(view *v, const qd_train_step *s)
{
    step_text text;
    double at = now();
    bool last = s->step == s->steps;
    if (v->line_open && !last && at - v->shown < 0.1)
        return;
    format_step(s, v->validation, &text);
    const char *forms[STEP_FORMS];
    for (int i = 0; i < STEP_FORMS; i++)
        forms[i] = text.forms[i];
    progress_draw_first(stdout, (double)s->step / (double)s->steps, forms, STEP_FORMS, times_of(v, s));
    v->line_open = true;
    v->shown = at;
}

static void on_step(void *context, const qd_train_step *s)
{
    view *v = context;
    if (v->first_step == 0 || s->step < v->first_step) { /* the latter after a restart from an older checkpoint */
        v->begin = v->first_step == 0 ? v->begin : now();
        v->first_step = s->step;
        v->first_loss = s->loss;
    }
    keep_loss(v, s->step, s->loss);
    bool validated = s->validation_tokens > 0;
    if (validated)
        v->validation = s->validation_loss;
    if (v->columns > 0) {
        rewrite_line(v, s);
    } else if (s->step % v->log_every == 0 || s->step == 1 || s->step == s->steps || validated) {
        step_text text;
        char times[96];
        format_step(s, validated ? s->validation_loss : 0.0, &text);
        printf("%s  %s\n", text.forms[0], progress_times_text(times_of(v, s), times, sizeof times));
        fflush(stdout);
    }
}

/* Progress of tokenization, on a terminal only. */
static void on_prepare(void *context, const char *what, int64_t done, int64_t total)
{
    view *v = context;
    double at = now();
    if (v->columns == 0 || total <= 0 || (v->line_open && at - v->shown < 0.1 && done < total))
        return;
    char line[320];
    snprintf(line, sizeof line, "reading text: %.0f %% of %s", 100.0 * (double)done / (double)total, what);
    progress_draw(stdout, (double)done / (double)total, line, (progress_times){-1.0, -1.0});
    v->line_open = true;
    v->shown = at;
}

static void on_note(void *context, const char *text)
{
    view *v = context;
    close_line(v);
    cli_say("note", 9, "%s", text);
    fflush(stdout);
}

/* Under MPI the rank that reports a failure may not be the one that prints the steps. */
static void on_failure(void *context, const char *message)
{
    view *v = context;
    close_line(v);
    cli_on_failure(NULL, message);
}

/* Prints a command on a folder, whose name is quoted where the shell needs it. */
static void print_command(const char *label, const char *command, const char *dir, const char *rest)
{
    bool plain = true;
    for (const char *at = dir; *at; at++)
        plain = plain && ((unsigned char)*at >= 0x80 || isalnum((unsigned char)*at) || strchr("_./+-@:,%=", *at));
    printf("%-9squadrille %s %s", label, command, plain ? dir : "'");
    for (const char *at = plain ? "" : dir; *at; at++)
        if (*at == '\'')
            fputs("'\\''", stdout);
        else
            putchar(*at);
    printf("%s%s\n", plain ? "" : "'", rest);
}

/* What can be done with the run now. */
static void print_next(const view *v, const qd_train_end *e)
{
    const char *dir = qd_options_string(v->options, "run.dir");
    if (!dir[0])
        return;
    print_command("next", "report", dir, "");
    if (e->saved < 0)
        return;
    const bool pairs = strcmp(qd_options_string(v->options, "data.format"), "preferences") == 0; /* eval has no reference model */
    if (!pairs && (qd_options_float(v->options, "data.validation") > 0.0 || qd_options_string(v->options, "data.eval_path")[0]))
        print_command("", "eval", dir, "");
    print_command("", "generate", dir, "");
    if (e->interrupted)
        print_command("", "train --dir", dir, " --resume");
}

static void on_end(void *context, const qd_train_end *e)
{
    view *v = context;
    char rate[32], seconds[32], allocated[32], resident[32];
    close_line(v);
    putchar('\n');
    int columns = cli_columns(stdout);
    curve_draw(stdout, v->losses, v->count, v->first_step, v->last_step, columns > 0 && columns < 84 ? columns - 14 : 70, 8);
    qd_text_count(e->seconds > 0.0 ? e->tokens / e->seconds : 0.0, rate, sizeof rate);
    qd_text_seconds(e->seconds, seconds, sizeof seconds);
    qd_text_bytes(e->allocated_bytes, allocated, sizeof allocated);
    qd_text_bytes(e->resident_bytes, resident, sizeof resident);
    printf("\nloss     %.4f after step %lld (first %.4f)\n", e->loss, (long long)e->steps, v->first_loss);
    if (e->best >= 0)
        printf("best     validation loss %.4f after step %lld\n", e->best_loss, (long long)e->best);
    printf("speed    %s tokens/s over %s\n", rate, seconds);
    if (e->saved >= 0)
        printf("saved    %s/checkpoints, the newest after step %lld\n", qd_options_string(v->options, "run.dir"), (long long)e->saved);
    if (e->across_flat_bytes > 0 && e->steps > 0) {
        char across[32], flat[32];
        qd_text_bytes(e->across_bytes, across, sizeof across);
        qd_text_bytes(e->across_flat_bytes, flat, sizeof flat);
        printf("experts  %s sent between nodes, there and back", across);
        if (e->across_bytes < e->across_flat_bytes)
            printf("; flat dispatch %s, %.2f times as much", flat, (double)e->across_flat_bytes / (double)e->across_bytes);
        putchar('\n');
    }
    cli_say("memory", 9, "%s per rank as planned; resident peak of the largest process %s", allocated, resident);
    if (e->host_bytes > 0) {
        qd_text_bytes(e->host_bytes, allocated, sizeof allocated);
        printf("host     %s of host memory per rank as planned: optimizer state\n", allocated);
    }
    print_next(v, e);
    fflush(stdout);
}

/* With --json, each line is an object. */

static void put_line(qd_strbuf *line)
{
    if (!line->failed)
        puts(line->data);
    fflush(stdout);
    qd_strbuf_free(line);
}

static void on_step_json(void *context, const qd_train_step *s)
{
    (void)context;
    qd_strbuf line = {0};
    qd_json_writer w = qd_json_writer_on(&line);
    qd_json_object_begin(&w, NULL);
    qd_train_put_step(&w, s);
    qd_json_end(&w);
    put_line(&line);
}

static void on_note_json(void *context, const char *text)
{
    (void)context;
    qd_strbuf line = {0};
    qd_json_writer w = qd_json_writer_on(&line);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "note", text);
    qd_json_end(&w);
    put_line(&line);
}

static void on_start_json(void *context, const qd_train_summary *s)
{
    const view *v = context;
    if (s->warning[0])
        on_note_json(context, s->warning);
    if (!qd_options_string(v->options, "run.dir")[0])
        on_note_json(context, NOTHING_KEPT);
}

static void on_end_json(void *context, const qd_train_end *e)
{
    (void)context;
    qd_strbuf line = {0};
    qd_json_writer w = qd_json_writer_on(&line);
    qd_json_object_begin(&w, NULL);
    qd_json_put_int(&w, "steps", e->steps);
    qd_json_put_double(&w, "loss", e->loss);
    qd_json_put_int(&w, "tokens", (int64_t)e->tokens);
    qd_json_put_double(&w, "seconds", e->seconds);
    qd_json_put_int(&w, "allocated_bytes", e->allocated_bytes);
    qd_json_put_int(&w, "host_bytes", e->host_bytes);
    qd_json_put_int(&w, "resident_bytes", e->resident_bytes);
    if (e->saved >= 0)
        qd_json_put_int(&w, "saved", e->saved);
    else
        qd_json_put_null(&w, "saved");
    qd_json_put_bool(&w, "interrupted", e->interrupted);
    if (e->best >= 0) {
        qd_json_put_int(&w, "best", e->best);
        qd_json_put_double(&w, "best_loss", e->best_loss);
    }
    qd_json_end(&w);
    put_line(&line);
}

static qd_status run(cli_call *call)
{
    if (!call->config) /* a CONFIG replaces the saved configuration */
        QD_TRY(qd_train_resume_options(call->options));
    QD_TRY(qd_train_from_options(call->options));
    view v = {.options = call->options, .columns = cli_columns(stdout), .every = 1,
              .log_every = qd_options_int(call->options, "run.log_every")};
    const qd_train_observer text = {.size = sizeof text,
                                    .context = &v,
                                    .on_start = on_start,
                                    .on_step = on_step,
                                    .on_end = on_end,
                                    .on_prepare = on_prepare,
                                    .on_note = on_note,
                                    .on_failure = on_failure},
                            json = {.size = sizeof json,
                                    .context = &v,
                                    .on_start = on_start_json,
                                    .on_step = on_step_json,
                                    .on_note = on_note_json,
                                    .on_end = on_end_json,
                                    .on_failure = cli_on_failure};
    qd_status status = qd_train(call->options, call->argv, qd_options_bool(call->options, "json") ? &json : &text);
    signal(SIGPIPE, SIG_IGN); /* the run has ended: a failed write must not change its exit status */
    close_line(&v);
    return status;
}

static const qd_option own[] = {
    {"json", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints the lines of metrics.jsonl as they are written, and a final object",
     NULL},
};

const cli_command cli_train = {
    .name = "train",
    .arguments = "[CONFIG] [key=value …] [--flag value …]",
    .summary = "Trains a model, on local ranks or on those of mpirun or srun",
    .details = "  quadrille train run.yaml --ranks 4 train.lr=1e-3\n"
               "  mpirun -n 4 quadrille train run.yaml\n\n"
               "CONFIG is a YAML file with the keys below; the command line overrides it. Without it, run.yaml of the current folder\n"
               "is used, unless the arguments name a model or resume a run; quadrille init writes one.\n"
               "With --dir, checkpoints are written every\n"
               "30 minutes (run.save_minutes, run.save_every), at the end, and when the run is stopped. Ctrl-C stops the run after\n"
               "the current step, a second Ctrl-C at once. SIGTERM, SIGUSR1, SIGHUP and SIGPIPE, to this process or any rank, stop it\n"
               "with exit status 75: resume it with --resume. In containers: mpirun --allow-run-as-root --oversubscribe.",
    CLI_OPTIONS(own),
    .configuration = true,
    .run = run,
};
