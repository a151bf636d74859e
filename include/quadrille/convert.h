/* Conversion of models from and to Hugging Face folders. */
#ifndef QUADRILLE_CONVERT_H
#define QUADRILLE_CONVERT_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <quadrille/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The default of every member is zero. */
typedef struct qd_convert_options {
    size_t size;
    /* a Hugging Face folder (config.json, safetensors, tokenizer.json), adapters in PEFT's format,
     * a run folder or a checkpoint */
    const char *from;
    const char *to;   /* folder to create: a run folder (import), or a Hugging Face folder (export) */
    qd_dtype dtype;   /* export: fp32, bf16 or fp16 */
    int64_t shard_bytes; /* export: largest size of a file (a tensor is never split); 0: one file */
    int64_t seq;         /* import: data.seq of the run; 0: the model's positions, at most 2048 */
    bool adapter;        /* export: only the adapters, in PEFT's format, instead of the merged model */
    const char *base;    /* import of adapters: the Hugging Face folder of their base model; NULL: the one that they name */
} qd_convert_options;
QD_SIZED_DEFAULT(qd_convert_options)

typedef struct qd_convert_report {
    size_t size;
    bool imported;     /* else exported */
    char model[16];    /* "gpt2" or "llama" */
    int64_t parameters;
    int64_t step;      /* export: of the checkpoint */
    int64_t bytes;     /* of the tensors written */
    int files;         /* into which they were written */
    bool tokenizer;    /* it was copied, as tokenizer.json or tokenizer.model */
    qd_strbuf notes;   /* notes for the user, one per line; the caller frees them, also after a failure */
} qd_convert_report;
QD_SIZED_DEFAULT(qd_convert_report)

/* Imports a Hugging Face folder or exports a run. Not collective. Needs memory for the largest
 * tensor, not for the model. The folder appears when it is complete. QD_USAGE names tensors that
 * are missing, unknown or of the wrong shape; QD_UNSUPPORTED names what the target format cannot
 * express. */
QD_API qd_status qd_convert(const qd_convert_options *options, qd_convert_report *report);

#ifdef __cplusplus
}
#endif
#endif
