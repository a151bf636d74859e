/* quadrille generate: streams text from a trained model. */
#include "cli.h"

#include <errno.h>
#include <quadrille/generate.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct view {
    bool json, terminal;
    qd_status status; /* of printing */
    bool line_ended;
    qd_strbuf text; /* JSON only */
    const qd_generate_options *options;
} view;

/* A model may generate any byte. The output is always valid UTF-8, and a terminal gets no control
 * characters. */
static void put_text(view *v, const char *text, size_t length)
{
    qd_strbuf shown = {0};
    qd_strbuf_append_utf8(&shown, text, length);
    for (size_t i = 0; i < shown.length; i++) {
        unsigned char byte = (unsigned char)shown.data[i];
        bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F;
        putchar(v->terminal && control ? '?' : byte);
    }
    qd_strbuf_free(&shown);
    if (length > 0)
        v->line_ended = text[length - 1] == '\n';
    fflush(stdout);
}

static const char *shown_token(const char *text)
{
    return strcmp(text, "\n") == 0 ? "a line end" : text;
}

static void on_start(void *context, const qd_generate_report *r)
{
    view *v = context;
    if (r->warning[0] != '\0' && r->prompt == 0)
        fprintf(stderr, "quadrille: warning: %s\n", r->warning);
    if (v->json)
        return;
    if (r->start[0])
        fprintf(stderr, "the prompt is empty: the text begins after %s\n", shown_token(r->start));
    if (r->prompt_cut)
        fprintf(stderr, "the prompt has %lld tokens, the context %lld: only the end of the prompt is used\n", (long long)r->prompt_tokens,
                (long long)r->context);
    if (r->prompt > 0)
        putchar('\n'); /* an empty line between texts */
    if (r->prompt_kind == QD_PROMPT_TEXT)
        put_text(v, r->prompt_text, r->prompt_length);
}

static bool on_text(void *context, const char *text, size_t length)
{
    view *v = context;
    if (v->json)
        qd_strbuf_append(&v->text, text, length);
    else
        put_text(v, text, length);
    return v->json || !ferror(stdout);
}

/* One object per prompt, on a line of its own. */
static qd_status print_json(view *v, const qd_generate_report *r)
{
    static const char *const ends[] = {[QD_GENERATE_TOKENS] = "tokens", [QD_GENERATE_DOCUMENT] = "document",
                                       [QD_GENERATE_STOPPED] = "stopped", [QD_GENERATE_STOP_TEXT] = "stop"};
    const qd_generate_options *o = v->options;
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "model", o->model);
    qd_json_put_int(&w, "step", r->step);
    qd_json_put_bytes(&w, "prompt", r->prompt_text, r->prompt_length);
    qd_json_put_string(&w, "start", r->start[0] ? r->start : NULL);
    qd_json_put_bytes(&w, "text", v->text.data, v->text.length);
    qd_json_put_int(&w, "prompt_tokens", r->prompt_tokens);
    qd_json_put_int(&w, "tokens", r->tokens);
    qd_json_put_string(&w, "end", ends[r->end]);
    qd_json_put_int(&w, "context", r->context);
    qd_json_put_bool(&w, "prompt_cut", r->prompt_cut);
    qd_json_put_int(&w, "slides", r->slides);
    qd_json_put_double(&w, "temperature", o->temperature);
    qd_json_put_int(&w, "top_k", o->top_k);
    qd_json_put_double(&w, "top_p", o->top_p);
    qd_json_put_double(&w, "min_p", o->min_p);
    qd_json_put_double(&w, "repetition_penalty", o->repetition_penalty);
    qd_json_put_int(&w, "seed", (int64_t)o->seed);
    qd_json_put_double(&w, "prompt_seconds", r->prompt_seconds);
    qd_json_put_double(&w, "seconds", r->seconds);
    qd_json_put_double(&w, "tokens_per_second", r->seconds > 0.0 ? (double)r->tokens / r->seconds : 0.0);
    qd_json_end(&w);
    qd_strbuf_clear(&v->text);
    return cli_print_json(&text);
}

/* Notes go to standard error: standard output has the text only. */
static void print_end(view *v, const qd_generate_report *r)
{
    char rate[32];
    if (!v->line_ended)
        putchar('\n');
    v->line_ended = true;
    fflush(stdout);
    if (r->slides > 0)
        fprintf(stderr, "the context of %lld tokens was full %lld time%s; the text continued from its last half\n",
                (long long)r->context, (long long)r->slides, r->slides > 1 ? "s" : "");
    if (!v->terminal)
        return;
    qd_text_count(r->seconds > 0.0 ? (double)r->tokens / r->seconds : 0.0, rate, sizeof rate);
    fprintf(stderr, "%lld tokens%s, %s tokens/s\n", (long long)r->tokens,
            r->end == QD_GENERATE_DOCUMENT ? ", then the end of the document" : "", rate);
}

static qd_status read_prompt_file(const char *path, qd_strbuf *text)
{
    char part[1 << 16];
    size_t got;
    struct stat info;
    /* Opening a named pipe would block until it has a writer. Those of a shell, "<(command)", have
     * one. */
    if (strncmp(path, "/dev/", 5) != 0 && stat(path, &info) == 0 && S_ISFIFO(info.st_mode))
        return QD_FAIL(QD_USAGE, "--prompt-file: %s: is a named pipe; a file is needed, or - for standard input", path);
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!file)
        return QD_FAIL(QD_USAGE, "--prompt-file: %s: %s", path, strerror(errno));
    while ((got = fread(part, 1, sizeof part, file)) > 0)
        qd_strbuf_append(text, part, got);
    qd_status status = ferror(file) ? QD_FAIL(QD_USAGE, "--prompt-file: %s: cannot be read", path) : QD_OK;
    if (file != stdin)
        fclose(file);
    if (status == QD_OK && text->failed)
        status = QD_FAIL(QD_NO_MEMORY, "--prompt-file: %s: no memory for it", path);
    return status;
}

static void on_end(void *context, const qd_generate_report *r)
{
    view *v = context;
    if (!v->json)
        print_end(v, r);
    else if (v->status == QD_OK)
        v->status = v->text.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the text") : print_json(v, r);
    fflush(stdout);
}

/* Stop texts, separated by |; a backslash before a character is that character, or a line end or
 * tab (\n, \t). */
typedef struct stops {
    char *text;
    const char **list;
    size_t count;
} stops;

static qd_status read_stops(const char *option, stops *s)
{
    *s = (stops){.text = calloc(strlen(option) + 1, 1), .list = calloc(strlen(option) + 1, sizeof *s->list)};
    if (!s->text || !s->list)
        return QD_FAIL(QD_NO_MEMORY, "no memory for --stop");
    char *to = s->text;
    if (option[0] != '\0')
        s->list[s->count++] = to;
    for (const char *at = option; *at; at++) {
        if (*at == '|') {
            *to++ = '\0';
            s->list[s->count++] = to;
        } else if (*at == '\\' && at[1] != '\0') {
            at++;
            *to++ = *at == 'n' ? '\n' : *at == 't' ? '\t' : *at;
        } else {
            *to++ = *at;
        }
    }
    return QD_OK;
}

static const struct {
    const char *option;
    qd_prompt_kind kind;
} kinds[] = {{"chat", QD_PROMPT_MESSAGE}, {"messages", QD_PROMPT_MESSAGES}, {"ids", QD_PROMPT_TOKENS}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static qd_status choose_prompt(const qd_options *options, qd_generate_options *o)
{
    static const char *const sources[] = {"prompt", "prompt-file", "prompts"};
    const char *named = NULL;
    for (int i = 0; i < 3; i++)
        if (qd_options_is_set(options, sources[i])) {
            if (named)
                return QD_FAIL(QD_USAGE, "generate: --%s and --%s are both given: use one of them", named, sources[i]);
            named = sources[i];
        }
    named = NULL;
    for (int i = 0; i < KINDS; i++)
        if (qd_options_bool(options, kinds[i].option)) {
            if (named)
                return QD_FAIL(QD_USAGE, "generate: --%s and --%s are both given: use one of them", named, kinds[i].option);
            named = kinds[i].option;
            o->prompt_kind = kinds[i].kind;
        }
    o->prompt = qd_options_string(options, "prompt");
    o->prompt_length = strlen(o->prompt);
    if (qd_options_string(options, "prompts")[0])
        o->prompt_file = qd_options_string(options, "prompts");
    if (qd_options_string(options, "system")[0])
        o->system = qd_options_string(options, "system");
    if (o->system && o->prompt_kind != QD_PROMPT_MESSAGE)
        return QD_FAIL(QD_USAGE, "generate: --system is for --chat; with --messages, the list has the system's message");
    return QD_OK;
}

static qd_status run(cli_call *call)
{
    const qd_options *options = call->options;
    const char *file = qd_options_string(options, "prompt-file");
    qd_generate_options o = qd_generate_options_default();
    qd_generate_report report = qd_generate_report_default();
    qd_strbuf prompt = {0};
    stops stop = {0};
    view v = {.json = qd_options_bool(options, "json"), .terminal = isatty(STDOUT_FILENO), .line_ended = true, .options = &o};
    if (call->word_count != 1)
        return QD_FAIL(QD_USAGE, "generate: give one run folder or checkpoint: quadrille generate MODEL --prompt TEXT");
    o.model = call->words[0];
    QD_TRY(choose_prompt(options, &o));
    o.tokens = qd_options_int(options, "tokens");
    o.temperature = qd_options_float(options, "temperature");
    o.top_k = (int)qd_options_int(options, "top-k");
    o.top_p = qd_options_float(options, "top-p");
    o.min_p = qd_options_float(options, "min-p");
    o.repetition_penalty = qd_options_float(options, "repetition-penalty");
    o.ignore_end = qd_options_bool(options, "ignore-end");
    o.seed = (uint64_t)qd_options_int(options, "seed");
    o.context = qd_options_int(options, "context");
    QD_TRY(qd_special_policy_parse(qd_options_string(options, "special"), &o.special));
    o.device = qd_options_string(options, "device");
    o.threads = (int)qd_options_int(options, "threads");
    o.tp = (int)qd_options_int(options, "tp");
    o.pp = (int)qd_options_int(options, "pp");
    o.ep = (int)qd_options_int(options, "ep");
    o.precision = qd_options_string(options, "precision");
    o.on_start = on_start;
    o.on_text = on_text;
    o.on_end = on_end;
    o.callback_context = &v;
    qd_status status = read_stops(qd_options_string(options, "stop"), &stop);
    o.stop = stop.list;
    o.stop_count = stop.count;
    if (status == QD_OK && file[0])
        status = read_prompt_file(file, &prompt);
    if (status == QD_OK && file[0]) {
        o.prompt = prompt.data ? prompt.data : "";
        o.prompt_length = prompt.length;
    }
    if (status == QD_OK)
        status = qd_generate(&o, &report);
    if (status == QD_OK)
        status = v.status;
    free(stop.text);
    free(stop.list);
    qd_strbuf_free(&prompt);
    qd_strbuf_free(&v.text);
    return status;
}

static const qd_option own[] = {
    {"prompt", QD_OPTION_STRING, "", 0, 0, NULL, "text to continue", NULL},
    {"prompt-file", QD_OPTION_STRING, "", 0, 0, NULL, "file with the prompt; - is standard input", NULL},
    {"prompts", QD_OPTION_STRING, "", 0, 0, NULL, "file of prompts: one per line, or .jsonl with 'prompt' or 'messages'", NULL},
    {"chat", QD_OPTION_BOOL, "false", 0, 0, NULL, "the prompt is a message of a user, rendered by the chat template", NULL},
    {"messages", QD_OPTION_BOOL, "false", 0, 0, NULL, "the prompt is a JSON list of messages, or an object with 'messages'", NULL},
    {"system", QD_OPTION_STRING, "", 0, 0, NULL, "message of the system before that of --chat", NULL},
    {"ids", QD_OPTION_BOOL, "false", 0, 0, NULL, "prompt and text are token ids: no tokenizer is needed", NULL},
    {"tokens", QD_OPTION_INT, "200", 1, 1e9, NULL, "tokens to generate at most", NULL},
    {"temperature", QD_OPTION_FLOAT, "0.8", 0, 1000, NULL, "0: always the most likely token; 1: the model's own distribution", NULL},
    {"top-k", QD_OPTION_INT, "0", 0, 2147483647, NULL, "samples from the k most likely tokens; 0: all", NULL},
    {"top-p", QD_OPTION_FLOAT, "1", 1e-9, 1, NULL, "samples from the most likely tokens whose probabilities reach this sum", NULL},
    {"min-p", QD_OPTION_FLOAT, "0", 0, 1, NULL, "samples from tokens at least this fraction as likely as the likeliest", NULL},
    {"repetition-penalty", QD_OPTION_FLOAT, "1", 0, 1000, NULL, "above 1: tokens that occurred are less likely", NULL},
    {"stop", QD_OPTION_STRING, "", 0, 0, NULL, "texts that end the generation, separated by |; \\n, \\| and so on are read", NULL},
    {"ignore-end", QD_OPTION_BOOL, "false", 0, 0, NULL, "continues after the end of the document", NULL},
    {"seed", QD_OPTION_INT, "1", 0, 9e18, NULL, "equal seeds give equal text", NULL},
    {"context", QD_OPTION_INT, "0", 0, 1e8, NULL, "tokens the model sees at once; 0: as many as in training", NULL},
    {"precision", QD_OPTION_STRING, "", 0, 0, NULL, "fp32 or bf16: how weights are stored; empty: as in training", NULL},
    CLI_OPTION_SPECIAL,
    CLI_OPTION_DEVICE,
    CLI_OPTION_THREADS,
    CLI_OPTIONS_RANKS,
    {"json", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints one JSON object at the end", NULL},
};

const cli_command cli_generate = {
    .name = "generate",
    .arguments = "MODEL [--prompt TEXT | --prompt-file FILE | --prompts FILE] [--chat [--system TEXT] | --messages | --ids] "
                 "[--tokens N] [--temperature T] [--top-k K] [--top-p P] [--min-p P] [--repetition-penalty R] "
                 "[--stop TEXTS] [--ignore-end] [--seed S] [--context N] [--special parse|plain|refuse] "
                 "[--precision P] [--device D] [--threads N] "
                 "[--tp N] [--pp N] [--ep N] [--json]",
    .summary = "Continues a text with a trained model",
    .details = "  quadrille generate runs/first --prompt \"In the beginning\" --temperature 0.7 --seed 3\n\n"
               "MODEL is a checkpoint, or a run folder, whose newest valid checkpoint is used. Prompt and continuation are streamed\n"
               "to standard output, with invalid UTF-8 as U+FFFD; notes go to standard error. Generation ends after --tokens tokens,\n"
               "at a text of --stop, or when the model ends the document (any of its eos ids). Texts of several prompts are separated\n"
               "by an empty line; with --json, each is an object on a line. When the context is full, the text continues from its\n"
               "last half.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
