/* qd_convert(): converts a Hugging Face folder to a run folder, or a checkpoint to a Hugging Face
 * folder, with configuration and tokenizer. */
#include "base/sized.h"
#include "base/text/strbuf.h"
#include "ckpt/folder.h"
#include "ckpt/hf_companions.h"
#include "ckpt/huggingface.h"
#include "ckpt/peft.h"
#include "data/files.h"
#include "model/field_table.h"
#include "train/exec/model_run.h"
#include "train/run/run.h"
#include "train/generate/model_text.h"

#include <quadrille/convert.h>
#include <quadrille/json_writer.h>
#include <quadrille/tokenizer.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_TOKENIZER = 256 << 20, USUAL_SEQ = 2048 };
typedef char file_path[PATH_MAX];

static qd_status path_in(const char *folder, const char *name, file_path path)
{
    int n = snprintf(path, sizeof(file_path), "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "the name of a folder is too long: %.64s…", folder);
}

static bool exists(const char *folder, const char *name)
{
    file_path path;
    return path_in(folder, name, path) == QD_OK && access(path, F_OK) == 0;
}

static qd_status put_text(const char *folder, const char *name, qd_strbuf *text)
{
    file_path path;
    char *taken = NULL;
    size_t length = text->length;
    QD_TRY(qd_strbuf_take(text, &taken));
    qd_status status = path_in(folder, name, path);
    if (status == QD_OK)
        status = qd_file_replace(path, taken, length);
    free(taken);
    return status;
}

/* Copied unchanged, including the parts that we do not read. */
static qd_status copy_tokenizer(const char *from, const char *folder)
{
    file_path path;
    QD_TRY(path_in(folder, QD_HF_TOKENIZER, path));
    return qd_file_copy(from, path, MOST_TOKENIZER);
}

/* A tokenizer that we cannot read is not copied: it would make the model unusable. */
static qd_status import_tokenizer(const qd_convert_options *o, const char *aside, int64_t vocab, qd_convert_report *report)
{
    file_path path;
    qd_tokenizer *tokenizer = NULL;
    const char *name = exists(o->from, QD_HF_TOKENIZER) ? QD_HF_TOKENIZER : QD_HF_SENTENCEPIECE;
    QD_TRY(path_in(o->from, name, path));
    if (access(path, F_OK) != 0) {
        qd_strbuf_puts(&report->notes, "there is no tokenizer.json: to use text, put one into the new folder\n");
        return QD_OK;
    }
    qd_status status = qd_tokenizer_load(path, NULL, &tokenizer);
    if (status == QD_USAGE) {
        qd_strbuf_printf(&report->notes, "%s was not copied: %s\n", name, qd_error_message());
        return QD_OK;
    }
    QD_TRY(status);
    int32_t size = qd_tokenizer_size(tokenizer);
    qd_tokenizer_destroy(tokenizer);
    if (size > vocab) {
        qd_strbuf_printf(&report->notes, "%s was not copied: it has %d tokens, the model %lld\n", name, size, (long long)vocab);
        return QD_OK;
    }
    report->tokenizer = true;
    return copy_tokenizer(path, aside);
}

/* Adapters that are imported; peft NULL: none. */
typedef struct adapters {
    qd_peft_source *peft;
    file_path base;
    char hash[QD_CKPT_BASE_TEXT];
} adapters;

/* Sets the options of a run with these adapters. */
static qd_status set_adapters(const adapters *a, const qd_config *plain, qd_options *options)
{
    const qd_peft_config *c = qd_peft_settings(a->peft);
    qd_arena *arena = NULL;
    qd_program *program;
    unsigned targets = 0;
    char words[128] = "", rank[16], alpha[32], dropout[32];
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build(plain, 0, arena, &program);
    if (status == QD_OK)
        status = qd_peft_targets(a->peft, program->ledger, &targets);
    qd_arena_destroy(arena);
    QD_TRY(status);
    for (int i = 0; i < QD_LORA_TARGET_COUNT; i++)
        if (targets & 1u << i)
            snprintf(words + strlen(words), sizeof words - strlen(words), "%s%s", words[0] ? "," : "", qd_lora_word((qd_lora_target)i));
    snprintf(rank, sizeof rank, "%d", c->rank);
    snprintf(alpha, sizeof alpha, "%.17g", c->alpha);
    snprintf(dropout, sizeof dropout, "%.17g", c->dropout);
    const char *const values[][2] = {{"lora.rank", rank}, {"lora.alpha", alpha}, {"lora.dropout", dropout},
                                     {"lora.rslora", c->rslora ? "true" : "false"}, {"lora.targets", words}, {"run.weights", a->base}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        QD_TRY(qd_options_set(options, values[i][0], values[i][1]));
    return QD_OK;
}

/* The configuration of a run that could continue to train this model. */
static qd_status make_config(const qd_convert_options *o, qd_hf_source *source, const adapters *a, qd_arena *arena, qd_program **program,
                             char **asked, char **text)
{
    qd_option_table table = qd_config_table();
    qd_options *options = NULL;
    qd_config config;
    char seq[32];
    int64_t positions = qd_hf_positions(source), wanted = o->seq > 0 ? o->seq : positions < USUAL_SEQ ? positions : USUAL_SEQ;
    const qd_model *model = qd_hf_model(source);
    if (model->position == QD_POSITION_LEARNED && wanted > positions)
        return QD_FAIL(QD_USAGE, "sequences of %lld tokens are longer than the model's %lld positions", (long long)wanted,
                       (long long)positions);
    QD_TRY(qd_options_create(&table, 1, &options));
    snprintf(seq, sizeof seq, "%lld", (long long)wanted);
    qd_status status = qd_options_set(options, "data.seq", seq);
    if (status == QD_OK)
        status = qd_config_resolve(options, 0, &config);
    if (status == QD_OK && a->peft) {
        config.model = *model;
        status = set_adapters(a, &config, options);
        if (status == QD_OK)
            status = qd_model_put(model, options);
        if (status == QD_OK)
            status = qd_config_resolve(options, 0, &config);
    }
    if (status == QD_OK) {
        const qd_lora lora = config.model.lora;
        config.model = *model;
        config.model.lora = lora;
        status = qd_config_build(&config, 0, arena, program);
    }
    if (status == QD_OK)
        status = qd_run_config_text(options, &config, NULL, asked);
    if (status == QD_OK)
        status = qd_run_config_text(options, &config, *program, text);
    qd_options_destroy(options);
    return status;
}

static qd_status fill_run(const qd_convert_options *o, const char *aside, qd_hf_source *source, const adapters *a, qd_arena *arena,
                          qd_convert_report *report)
{
    qd_program *program;
    qd_state_pieces pieces;
    char *asked = NULL, *text = NULL;
    file_path path;
    qd_status status = make_config(o, source, a, arena, &program, &asked, &text);
    if (status == QD_OK)
        status = qd_hf_check(source, program->ledger, arena);
    if (status == QD_OK && a->peft)
        status = qd_peft_check(a->peft, program->ledger, arena);
    if (status == QD_OK)
        status = path_in(aside, "config.yaml", path);
    if (status == QD_OK)
        status = qd_file_replace(path, asked, strlen(asked));
    if (status == QD_OK)
        status = import_tokenizer(o, aside, program->ledger->model.vocab, report);
    if (status == QD_OK)
        status = qd_hf_keep_model(o->from, aside);
    if (status == QD_OK && report->tokenizer)
        status = qd_hf_keep_text(o->from, aside);
    if (status == QD_OK)
        status = path_in(aside, "checkpoints", path);
    if (status == QD_OK)
        status = qd_pieces_plan(program, 1u << QD_CKPT_VALUE, arena, &pieces);
    const qd_ckpt_meta meta = {.config = text, .seed = 1, .base = a->peft ? a->base : "", .base_hash = a->hash};
    if (status == QD_OK)
        status = qd_store_save(path, program->ledger, &meta, &pieces, 0, a->peft ? qd_peft_fetch : qd_hf_fetch,
                               a->peft ? (void *)a->peft : (void *)source);
    report->bytes = status == QD_OK ? pieces.elements * (int64_t)sizeof(float) : 0;
    if (status == QD_NOT_FINITE) /* the source file is damaged */
        status = qd_error_prefix(QD_CORRUPT, "%s: ", o->from);
    free(asked);
    free(text);
    return status;
}

/* Opens adapters in PEFT's format, and finds the folder of their base model. */
static qd_status open_adapters(const qd_convert_options *o, adapters *a)
{
    QD_TRY(qd_peft_open(o->from, &a->peft));
    const char *base = o->base ? o->base : qd_peft_settings(a->peft)->base;
    if (!base || !realpath(base, a->base) || !exists(a->base, QD_HF_CONFIG))
        return QD_FAIL(QD_USAGE, "%s: its base model '%s' is not a Hugging Face folder here: name one with --base (convert writes one "
                                 "from a run)", o->from, base ? base : "");
    char *whole = NULL;
    qd_status status = qd_ckpt_base_fingerprint(a->base, a->hash, &whole);
    free(whole);
    return status;
}

static qd_status import(const qd_convert_options *o, const char *aside, qd_convert_report *report)
{
    qd_hf_source *source = NULL;
    qd_arena *arena = NULL;
    adapters a = {0};
    qd_convert_options model = *o; /* adapters: with the folder of their base model */
    qd_status status = qd_peft_is_folder(o->from) ? open_adapters(o, &a) : QD_OK;
    model.from = a.peft ? a.base : o->from;
    if (status == QD_OK)
        status = qd_hf_open(model.from, &report->notes, &source);
    if (status == QD_OK)
        status = qd_arena_create(&arena);
    if (status == QD_OK)
        status = fill_run(&model, aside, source, &a, arena, report);
    if (status == QD_OK) {
        snprintf(report->model, sizeof report->model, "%s", qd_arch_name(qd_hf_model(source)->arch));
        report->parameters = qd_model_parameters(qd_hf_model(source));
        report->files = 1;
    }
    qd_arena_destroy(arena);
    qd_hf_close(source);
    qd_peft_close(a.peft);
    return status;
}

static void put_token_name(qd_json_writer *json, const char *key, const qd_tokenizer *tokenizer, int32_t token)
{
    size_t length = 0;
    const char *bytes = token >= 0 ? qd_tokenizer_bytes(tokenizer, token, &length) : NULL;
    char name[64];
    if (!bytes)
        return;
    snprintf(name, sizeof name, "%.*s", (int)length, bytes);
    qd_json_put_string(json, key, name);
}

/* If the tokenizer adds no token before a text, the token that ends documents also begins them.
 * settings: tokenizer_config.json exists already. */
static qd_status export_tokenizer(const qd_config *c, const char *aside, int64_t positions, bool settings, int32_t *begin, int32_t *end,
                                  qd_convert_report *report)
{
    *begin = *end = -1;
    if (c->data.tokenizer[0] == '\0' || strcmp(c->data.tokenizer, "bytes") == 0) {
        qd_strbuf_puts(&report->notes, c->data.tokenizer[0] ? "the model's tokens are bytes: there is no tokenizer.json\n"
                                                            : "the model's tokenizer is unknown: there is no tokenizer.json\n");
        return QD_OK;
    }
    qd_model_text text;
    qd_status status = qd_model_text_open(c, false, &text);
    file_path path;
    qd_strbuf config = {0};
    if (status == QD_OK) {
        *end = text.encoder.document_end;
        int32_t before = qd_tokenizer_before(text.tokenizer, 0);
        *begin = before >= 0 ? before : *end;
        qd_strbuf content = {0}; /* a SentencePiece model is saved as one */
        status = qd_tokenizer_save_text(text.tokenizer, &content);
        bool plain = content.length > 0 && content.data[strspn(content.data, " \t\r\n")] == '{';
        qd_strbuf_free(&content);
        qd_json_writer json = qd_json_writer_on(&config);
        qd_json_object_begin(&json, NULL);
        qd_json_put_string(&json, "tokenizer_class", plain ? "PreTrainedTokenizerFast" : "LlamaTokenizer");
        if (!plain) {
            qd_json_put_bool(&json, "add_bos_token", false); /* prompts begin without it here */
            qd_strbuf_puts(&report->notes, "tokenizer.model is a SentencePiece model, which transformers converts: some texts become other "
                                           "tokens there; the package sentencepiece encodes as Quadrille does\n");
        }
        qd_json_put_int(&json, "model_max_length", positions);
        put_token_name(&json, "bos_token", text.tokenizer, *begin);
        put_token_name(&json, "eos_token", text.tokenizer, *end);
        qd_json_end(&json);
        qd_strbuf_puts(&config, "\n");
        if (status == QD_OK)
            status = path_in(aside, plain ? QD_HF_TOKENIZER : QD_HF_SENTENCEPIECE, path);
    }
    if (status == QD_OK)
        status = qd_tokenizer_save(text.tokenizer, path); /* also if it was read from another format */
    if (status == QD_OK && !settings)
        status = put_text(aside, "tokenizer_config.json", &config);
    report->tokenizer = status == QD_OK;
    qd_strbuf_free(&config);
    qd_model_text_close(&text);
    return status;
}

static qd_status write_model(const qd_convert_options *o, const char *aside, qd_model_run *run, qd_arena *arena,
                             qd_convert_report *report)
{
    qd_program *program;
    qd_strbuf text = {0};
    const qd_model *m = &run->config.model;
    qd_hf_export options = {.dtype = o->dtype, .shard_bytes = o->shard_bytes, .positions = run->config.strategy.seq};
    int64_t positions = m->max_seq > 0 ? m->max_seq : options.positions;
    QD_TRY(qd_config_build(&run->config, 0, arena, &program));
    bool settings, restored;
    if (o->adapter) {
        const char *base = qd_checkpoint_meta(run->checkpoint)->base;
        report->files = 1;
        if (m->lora.rank > 0 && !qd_hf_is_folder(base))
            qd_strbuf_printf(&report->notes, "base_model_name_or_path is %s, which PEFT cannot load: convert the base, and name its folder "
                                             "there\n", base[0] != '\0' ? base : "empty (the frozen weights are in this run)");
        return qd_peft_write(aside, program->ledger, run->checkpoint, base, &report->bytes);
    }
    QD_TRY(qd_hf_restore(run->folder, aside, &settings));
    QD_TRY(export_tokenizer(&run->config, aside, positions, settings, &options.begin_token, &options.end_token, report));
    qd_status status = qd_hf_restore_config(run->folder, m, o->dtype, &text, &restored);
    if (status == QD_OK && !restored)
        status = qd_hf_config_text(m, &options, &report->notes, &text);
    if (status == QD_OK)
        status = put_text(aside, QD_HF_CONFIG, &text);
    qd_strbuf_free(&text);
    QD_TRY(status);
    return qd_hf_write(aside, program->ledger, run->checkpoint, &options, &report->bytes, &report->files);
}

static qd_status export(const qd_convert_options *o, const char *aside, qd_convert_report *report)
{
    qd_model_run run;
    qd_arena *arena = NULL;
    qd_status status = qd_model_run_open(&(qd_model_source){.path = o->from}, NULL, &run);
    if (status == QD_OK)
        status = qd_arena_create(&arena);
    if (status == QD_OK && run.warning[0] != '\0')
        qd_strbuf_printf(&report->notes, "%s\n", run.warning);
    if (status == QD_OK)
        status = write_model(o, aside, &run, arena, report);
    if (status == QD_OK) {
        snprintf(report->model, sizeof report->model, "%s", qd_arch_name(run.config.model.arch));
        report->parameters = qd_model_parameters(&run.config.model);
        report->step = run.step;
    }
    qd_arena_destroy(arena);
    qd_model_run_close(&run);
    return status;
}

static qd_status check_folders(const qd_convert_options *o)
{
    struct stat info;
    if (stat(o->from, &info) != 0)
        return QD_FAIL(QD_USAGE, "%s: %s; give a run folder, a checkpoint or a Hugging Face folder", o->from, strerror(errno));
    if (lstat(o->to, &info) == 0)
        return QD_FAIL(QD_USAGE, "%s: exists already; name a new folder", o->to);
    return QD_OK;
}

/* Options of the other direction would be ignored. */
static qd_status check_adapter_options(const qd_convert_options *o, bool imported)
{
    if (o->adapter && imported)
        return QD_FAIL(QD_USAGE, "%s: is not a run: --adapter exports the adapters of one", o->from);
    if (o->adapter && o->dtype != QD_F32)
        return QD_FAIL(QD_USAGE, "--adapter writes fp32: omit --dtype %s", qd_dtype_name(o->dtype));
    if (o->base && !(imported && qd_peft_is_folder(o->from)))
        return QD_FAIL(QD_USAGE, "%s: has no adapter_config.json: --base is for the import of adapters", o->from);
    return QD_OK;
}

static qd_status convert(const qd_convert_options *o, qd_convert_report *report)
{
    file_path aside;
    QD_TRY(check_folders(o));
    if (snprintf(aside, sizeof aside, "%s.part", o->to) >= (int)sizeof aside)
        return QD_FAIL(QD_USAGE, "the name of a folder is too long: %.64s…", o->to);
    report->imported = exists(o->from, QD_HF_CONFIG) || qd_peft_is_folder(o->from);
    QD_TRY(check_adapter_options(o, report->imported));
    QD_TRY(qd_ckpt_remove_folder(aside)); /* left by a killed conversion */
    QD_TRY(qd_folder_make(aside));
    qd_status status = report->imported ? import(o, aside, report) : export(o, aside, report);
    if (status == QD_OK)
        status = qd_ckpt_sync_folder(aside);
    if (status == QD_OK && rename(aside, o->to) != 0)
        status = QD_FAIL(QD_IO, "%s: the result cannot be moved there: %s", o->to, strerror(errno));
    if (status != QD_OK) {
        char message[1024];
        snprintf(message, sizeof message, "%s", qd_error_message());
        qd_ckpt_remove_folder(aside);
        status = QD_FAIL(status, "%s", message);
    }
    return status;
}

qd_status qd_convert(const qd_convert_options *options, qd_convert_report *report)
{
    qd_convert_options o = qd_convert_options_default();
    qd_convert_report r = qd_convert_report_default();
    QD_TRY(QD_SIZED_READ(options, qd_convert_options, &o));
    QD_TRY(QD_SIZED_CHECK(report, qd_convert_report));
    if (!o.from || !o.to)
        return QD_FAIL(QD_USAGE, "qd_convert: two folders are needed, from and to");
    qd_status status = convert(&o, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
