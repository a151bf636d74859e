/* quadrille convert: imports models from Hugging Face folders and exports them. */
#include "cli.h"

#include <quadrille/convert.h>
#include <stdlib.h>
#include <string.h>

static qd_status print_json(const qd_convert_options *o, qd_convert_report *r)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "from", o->from);
    qd_json_put_string(&w, "to", o->to);
    qd_json_put_string(&w, "direction", r->imported ? "import" : "export");
    qd_json_put_string(&w, "model", r->model);
    qd_json_put_int(&w, "parameters", r->parameters);
    if (!r->imported)
        qd_json_put_int(&w, "step", r->step);
    qd_json_put_int(&w, "bytes", r->bytes);
    qd_json_put_int(&w, "files", r->files);
    qd_json_put_bool(&w, "tokenizer", r->tokenizer);
    qd_json_list_begin(&w, "notes");
    for (char *line = r->notes.data, *end; line && (end = strchr(line, '\n')); line = end + 1) {
        *end = '\0';
        qd_json_put_string(&w, NULL, line);
    }
    qd_json_end(&w);
    qd_json_end(&w);
    return cli_print_json(&text);
}

static void print_report(const qd_convert_options *o, const qd_convert_report *r)
{
    char parameters[32], bytes[32];
    qd_text_count((double)r->parameters, parameters, sizeof parameters);
    qd_text_bytes(r->bytes, bytes, sizeof bytes);
    printf("model    %s, %s parameters", r->model, parameters);
    if (!r->imported)
        printf(", step %lld", (long long)r->step);
    printf("\nfolder   %s: %s in %d file%s%s\n", o->to, bytes, r->files, r->files == 1 ? "" : "s",
           r->tokenizer ? ", with its tokenizer" : "");
    const char *line = r->notes.data;
    for (const char *end; line && (end = strchr(line, '\n')); line = end + 1)
        printf("note     %.*s\n", (int)(end - line), line);
}

static qd_status run(cli_call *call)
{
    static const qd_dtype types[] = {QD_F32, QD_BF16, QD_F16};
    qd_convert_report report = qd_convert_report_default();
    qd_convert_options o = {
        .size = sizeof o,
        .dtype = types[qd_options_enum(call->options, "dtype")],
        .shard_bytes = (int64_t)(qd_options_float(call->options, "shard-mb") * 1024.0 * 1024.0),
        .seq = qd_options_int(call->options, "seq"),
        .adapter = qd_options_bool(call->options, "adapter"),
        .base = qd_options_string(call->options, "base")[0] ? qd_options_string(call->options, "base") : NULL,
    };
    if (call->word_count != 2)
        return QD_FAIL(QD_USAGE, "convert: give the model and the folder to create: quadrille convert FROM TO");
    o.from = call->words[0];
    o.to = call->words[1];
    qd_status status = qd_convert(&o, &report);
    if (status == QD_OK && qd_options_bool(call->options, "json"))
        status = print_json(&o, &report);
    else if (status == QD_OK)
        print_report(&o, &report);
    qd_strbuf_free(&report.notes);
    return status;
}

static const qd_option own[] = {
    {"dtype", QD_OPTION_ENUM, "fp32", 0, 0, "fp32|bf16|fp16", "export: type of the tensors", NULL},
    {"shard-mb", QD_OPTION_FLOAT, "5000", 0, 1e9, NULL, "export: largest safetensors file in MiB (a tensor is never split); 0: one file",
     NULL},
    {"seq", QD_OPTION_INT, "0", 0, 1e8, NULL, "import: data.seq of the run; 0: the model's positions, at most 2048", NULL},
    {"adapter", QD_OPTION_BOOL, "false", 0, 0, NULL, "export: the adapters of a LoRA run in PEFT's format, instead of the merged model",
     NULL},
    {"base", QD_OPTION_STRING, "", 0, 0, NULL, "import of adapters: Hugging Face folder of their base model; empty: the one they name",
     NULL},
    CLI_OPTION_JSON,
};

const cli_command cli_convert = {
    .name = "convert",
    .arguments = "FROM TO [--dtype fp32|bf16|fp16] [--shard-mb N] [--seq N] [--adapter] [--base FOLDER] [--json]",
    .summary = "Converts models from and to Hugging Face folders (GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, OLMo, Gemma, "
               "SmolLM3, Phi-3, DeepSeek, GPT-OSS)",
    .details = "  quadrille convert runs/first hf/first --dtype bf16\n"
               "  quadrille convert Llama-3.2-1B runs/llama\n\n"
               "If FROM has a config.json, it is a Hugging Face folder (tokenizer.json and safetensors, one file or several with an\n"
               "index), and TO becomes a run folder for eval and generate. Otherwise FROM is a run folder or a checkpoint, and TO\n"
               "becomes a Hugging Face folder; adapters are merged into its weights, or written alone (--adapter). A folder with\n"
               "adapter_config.json (PEFT) becomes a run folder that names its base model. TO must not exist; it appears when\n"
               "it is complete. Needs memory for one tensor.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
