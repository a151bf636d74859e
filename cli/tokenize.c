/* quadrille tokenize: converts text to token shards. */
#include "progress.h"

#include <quadrille/data.h>
#include <stdlib.h>
#include <string.h>

static bool on_training(void *context, const char *phase, int64_t done, int64_t total)
{
    char text[96];
    snprintf(text, sizeof text, "tokenizer: %s", phase);
    progress_show(context, total > 0 ? (double)done / (double)total : 0.0, text);
    return !progress_stopped();
}

static bool on_progress(void *context, const qd_tokenize_progress *p)
{
    char text[128], bytes[32], total[32], tokens[32];
    qd_text_bytes(p->bytes, bytes, sizeof bytes);
    qd_text_bytes(p->bytes_total, total, sizeof total);
    qd_text_count((double)p->tokens, tokens, sizeof tokens);
    snprintf(text, sizeof text, "%s of %s  %.1f MB/s  %s tokens", bytes, total,
             p->seconds > 0.0 ? (double)p->bytes * 1e-6 / p->seconds : 0.0, tokens);
    progress_show(context, p->bytes_total > 0 ? (double)p->bytes / (double)p->bytes_total : 1.0, text);
    return !progress_stopped();
}

static qd_status train(const cli_call *call, int threads, progress_line *line, qd_tokenizer **tokenizer)
{
    qd_tokenizer_training t = qd_tokenizer_training_for_run((int32_t)qd_options_int(call->options, "train"));
    t.paths = call->words;
    t.path_count = (size_t)call->word_count;
    if (qd_options_string(call->options, "field")[0])
        t.field = qd_options_string(call->options, "field");
    t.separator = qd_options_string(call->options, "separator");
    t.threads = threads;
    t.progress = on_training;
    t.progress_context = line;
    return qd_tokenizer_train(&t, tokenizer);
}

static qd_status check_arguments(const cli_call *call)
{
    const qd_options *o = call->options;
    bool given = qd_options_string(o, "tokenizer")[0], trained = qd_options_int(o, "train") > 0;
    if (call->word_count < 1)
        return QD_FAIL(QD_USAGE, "tokenize: give at least one text file or folder");
    if (!qd_options_string(o, "output")[0])
        return QD_FAIL(QD_USAGE, "tokenize: set the folder for the shards with --output");
    if (given == trained)
        return QD_FAIL(QD_USAGE, "tokenize: %s: use one of --tokenizer FILE, --tokenizer bytes and --train ENTRIES",
                       given ? "two tokenizers are given" : "no tokenizer is given");
    if (trained && qd_options_int(o, "train") < 257)
        return QD_FAIL(QD_USAGE, "tokenize: --train %lld: a tokenizer needs more than 256 entries, one for each byte and the end "
                                 "of documents", (long long)qd_options_int(o, "train"));
    if (qd_options_string(o, "encoding")[0] && (trained || strcmp(qd_options_string(o, "tokenizer"), "bytes") == 0))
        return QD_FAIL(QD_USAGE, "tokenize: --encoding is for a tiktoken file: name it with --tokenizer, or leave out --encoding");
    if (!trained && qd_options_string(o, "save")[0])
        return QD_FAIL(QD_USAGE, "tokenize: --save is for the tokenizer of --train: add --train, or leave out --save");
    return QD_OK;
}

/* Sets up the encoder of the options. With --tokenizer bytes, *tokenizer stays NULL. */
static qd_status make_encoder(const cli_call *call, int threads, progress_line *line, qd_tokenizer **tokenizer,
                              qd_text_encoder *encoder)
{
    const qd_options *o = call->options;
    const char *named = qd_options_string(o, "tokenizer"), *kept = qd_options_string(o, "save");
    if (strcmp(named, "bytes") == 0) {
        *encoder = qd_text_encoder_bytes();
        return QD_OK;
    }
    const char *encoding = qd_options_string(o, "encoding");
    qd_special_policy special;
    QD_TRY(qd_special_policy_parse(qd_options_string(o, "special"), &special));
    QD_TRY(named[0] ? qd_tokenizer_load(named, encoding[0] ? encoding : NULL, tokenizer) : train(call, threads, line, tokenizer));
    if (kept[0])
        QD_TRY(qd_tokenizer_save(*tokenizer, kept));
    QD_TRY(qd_text_encoder_create(*tokenizer, NULL, encoder));
    qd_text_encoder_set_special(encoder, special);
    return QD_OK;
}

static qd_status print_json(const char *folder, const qd_text_encoder *encoder, const qd_tokenize_report *r)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "output", folder);
    qd_json_put_int(&w, "vocab", encoder->vocab);
    qd_json_put_int(&w, "files", r->files);
    qd_json_put_int(&w, "skipped", r->skipped);
    qd_json_put_int(&w, "documents", r->documents);
    qd_json_put_int(&w, "bytes", r->bytes);
    qd_json_put_int(&w, "tokens", r->tokens);
    qd_json_put_int(&w, "token_bytes", r->token_bytes);
    qd_json_put_int(&w, "shards", r->shards);
    qd_json_put_int(&w, "shard_bytes", r->shard_bytes);
    qd_json_put_double(&w, "seconds", r->seconds);
    qd_json_end(&w);
    return cli_print_json(&text);
}

static void print_report(const char *folder, const qd_text_encoder *encoder, const qd_tokenize_report *r)
{
    char bytes[32], tokens[32], size[32], skipped[48] = "";
    qd_text_bytes(r->bytes, bytes, sizeof bytes);
    qd_text_count((double)r->tokens, tokens, sizeof tokens);
    qd_text_bytes(r->shard_bytes, size, sizeof size);
    if (r->skipped > 0)
        snprintf(skipped, sizeof skipped, ", %lld skipped", (long long)r->skipped);
    printf("text     %s in %lld file%s, %lld document%s%s\n", bytes, (long long)r->files, r->files == 1 ? "" : "s",
           (long long)r->documents, r->documents == 1 ? "" : "s", skipped);
    printf("tokens   %s of a vocabulary of %lld, %.2f bytes of text each\n", tokens, (long long)encoder->vocab,
           r->tokens > 0 ? (double)r->bytes / (double)r->tokens : 0.0);
    printf("shards   %lld in %s, %s\n", (long long)r->shards, folder, size);
    printf("speed    %.1f MB/s\n", r->seconds > 0.0 ? (double)r->bytes * 1e-6 / r->seconds : 0.0);
}

/* Saves the tokenizer with the shards: a run on them needs it to generate text. */
static qd_status keep_tokenizer(const char *folder, const qd_tokenizer *tokenizer)
{
    char *path = NULL;
    qd_strbuf text = {0};
    qd_strbuf_printf(&text, "%s/tokenizer.json", folder);
    QD_TRY(qd_strbuf_take(&text, &path));
    qd_status status = qd_tokenizer_save(tokenizer, path);
    free(path);
    return status;
}

static qd_status run(cli_call *call)
{
    const qd_options *options = call->options;
    qd_tokenizer *tokenizer = NULL;
    qd_text_encoder encoder = qd_text_encoder_default();
    qd_tokenize_report report = qd_tokenize_report_default();
    qd_tokenize_options o = qd_tokenize_options_default();
    QD_TRY(check_arguments(call));
    progress_line line = progress_start();
    o.inputs = call->words;
    o.input_count = call->word_count;
    o.output = qd_options_string(options, "output");
    o.encoder = &encoder;
    o.documents = (qd_document_rule){qd_options_string(options, "separator"), qd_options_string(options, "field")};
    o.shard_tokens = qd_options_int(options, "shard-tokens");
    o.threads = (int)qd_options_int(options, "threads");
    o.progress = on_progress;
    o.progress_context = &line;
    progress_catch_signals();
    qd_status status = make_encoder(call, o.threads, &line, &tokenizer, &encoder);
    progress_clear(&line);
    line = progress_start();
    if (status == QD_OK)
        status = qd_tokenize_files(&o, &report);
    progress_clear(&line);
    if (status == QD_OK && tokenizer)
        status = keep_tokenizer(o.output, tokenizer);
    if (status == QD_OK && qd_options_bool(options, "json"))
        status = print_json(o.output, &encoder, &report);
    else if (status == QD_OK)
        print_report(o.output, &encoder, &report);
    if (tokenizer)
        qd_text_encoder_destroy(&encoder);
    qd_tokenizer_destroy(tokenizer);
    return status;
}

static const qd_option own[] = {
    {"output", QD_OPTION_STRING, "", 0, 0, NULL, "folder for the shards; created, or must be empty", NULL},
    {"tokenizer", QD_OPTION_STRING, "", 0, 0, NULL, "tokenizer.json or tiktoken file, or bytes", NULL},
    {"encoding", QD_OPTION_STRING, "", 0, 0, NULL,
     "of a tiktoken file: gpt2, r50k_base, cl100k_base, o200k_base, llama3 or kimi; empty: by its number of ranks", NULL},
    CLI_OPTION_SPECIAL,
    {"train", QD_OPTION_INT, "0", 0, 2147483647, NULL, "trains a tokenizer of this many entries on the text first", NULL},
    {"save", QD_OPTION_STRING, "", 0, 0, NULL, "file to which the trained tokenizer is also saved", NULL},
    {"separator", QD_OPTION_STRING, "", 0, 0, NULL, "a line that ends a document; empty: a file is a document", NULL},
    {"field", QD_OPTION_STRING, "text", 0, 0, NULL, "member of each line of a .jsonl file that is the document", NULL},
    {"shard-tokens", QD_OPTION_INT, "100M", 1, 1e12, NULL, "largest number of tokens in a shard", NULL},
    {"threads", QD_OPTION_INT, "0", 0, 4096, NULL, "threads; 0: all cores", NULL},
    CLI_OPTION_JSON,
};

const cli_command cli_tokenize = {
    .name = "tokenize",
    .arguments = "INPUT … --output FOLDER (--tokenizer FILE [--encoding NAME] | --train ENTRIES [--save FILE]) "
                 "[--special parse|plain|refuse] [--separator LINE] [--field NAME] [--shard-tokens N] [--threads N] [--json]",
    .summary = "Turns text files and folders into token shards to train on",
    .details = "  quadrille tokenize books/ --output tokens --train 8000\n"
               "  quadrille train data.path=tokens data.tokenizer=tokens/tokenizer.json model.vocab=8000\n\n"
               "Uses all cores and a fixed amount of memory; the shards do not depend on the number of threads. The folder appears\n"
               "when it is complete, with the tokenizer next to the shards.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
