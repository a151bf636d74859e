/* Models to and from Hugging Face folders. */
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

/* By default all is zero, which means what is said of 0. */
typedef struct qd_convert_options {
    size_t size;
    const char *from; /* a Hugging Face folder (config.json, safetensors, tokenizer.json), a run folder or a checkpoint */
    const char *to;   /* a new folder: a run folder from the first, a Hugging Face folder from the others */
    qd_dtype dtype;   /* export: fp32, bf16 or fp16 */
    int64_t shard_bytes; /* export: a file ends before it grows beyond this; 0: one file */
    int64_t seq;         /* import: data.seq of the run; 0: the model's positions, at most 2048 */
} qd_convert_options;
QD_SIZED_DEFAULT(qd_convert_options)

typedef struct qd_convert_report {
    size_t size;
    bool imported;     /* else exported */
    char model[16];    /* "gpt2" or "llama" */
    int64_t parameters;
    int64_t step;      /* export: of the checkpoint */
    int64_t bytes;     /* of the tensors written */
    int files;         /* that hold them */
    bool tokenizer;    /* tokenizer.json was taken along */
    qd_strbuf notes;   /* what the user should know, a line each; the caller frees it, after a failure too */
} qd_convert_report;
QD_SIZED_DEFAULT(qd_convert_report)

/* Works tensor by tensor: memory for the largest, not for the model. The folder appears when it is
 * complete. QD_USAGE names tensors that are missing, unknown or of another shape, QD_UNSUPPORTED
 * what the other side has no place for. */
QD_API qd_status qd_convert(const qd_convert_options *options, qd_convert_report *report);

#ifdef __cplusplus
}
#endif
#endif
