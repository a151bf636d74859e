/* Writes Hugging Face folders with one tensor in memory at a time. */
#include "base/half.h"
#include "base/text/strbuf.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/huggingface_impl.h"
#include "ckpt/safetensors.h"

#include <quadrille/json_writer.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct exporter {
    const char *folder;
    const qd_ledger *ledger;
    qd_checkpoint *checkpoint;
    const qd_hf_export *options;
    qd_hf_tensor *tensors;
    int *file_of; /* per tensor, ascending */
    int tensor_count, file_count;
    int64_t bytes;
    float *ours, *theirs; /* one tensor of ours, one of theirs */
} exporter;

/* The type on disk: biases of experts stay fp32, because rounding them would change choices. */
static qd_dtype dtype_of(const exporter *x, const qd_hf_tensor *t)
{
    return t->param_count > 0 && x->ledger->params[t->first].counts ? QD_F32 : x->options->dtype;
}

static void file_name(const exporter *x, int file, char *name, size_t size)
{
    if (x->file_count == 1)
        snprintf(name, size, QD_HF_FILE);
    else
        snprintf(name, size, "model-%05d-of-%05d.safetensors", file + 1, x->file_count);
}

static void share_out(exporter *x)
{
    int64_t filled = 0, most = x->options->shard_bytes;
    x->file_count = 1;
    for (int t = 0; t < x->tensor_count; t++) {
        int64_t bytes = qd_hf_tensor_count(&x->tensors[t]) * (int64_t)qd_dtype_size(dtype_of(x, &x->tensors[t]));
        if (most > 0 && filled > 0 && filled + bytes > most) {
            x->file_count++;
            filled = 0;
        }
        filled += bytes;
        x->bytes += bytes;
        x->file_of[t] = x->file_count - 1;
    }
}

/* theirs (cols, total)[:, first:first + rows] = ours (rows, cols), in tiles that fit the cache. */
static void put_transposed(const float *ours, int64_t rows, int64_t cols, int64_t first, int64_t total, float *theirs)
{
    enum { TILE = 32 };
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t c0 = 0; c0 < cols; c0 += TILE)
            for (int64_t c = c0; c < cols && c < c0 + TILE; c++)
                for (int64_t r = r0; r < rows && r < r0 + TILE; r++)
                    theirs[c * total + first + r] = ours[r * cols + c];
}

/* W += scale · B·A, in double; nothing if the layer has no adapter. */
static qd_status merge_adapter(const exporter *x, const qd_param *p, float *values)
{
    const qd_lora *lora = &x->ledger->model.lora;
    const qd_param *a = qd_ledger_adapter(x->ledger, p, 'A'), *b = qd_ledger_adapter(x->ledger, p, 'B');
    if (!a || !b)
        return QD_OK;
    const int64_t rows = p->shape[0], cols = p->shape[1], rank = lora->rank;
    const qd_atom whole_a = {{0, 0}, {rank, cols}}, whole_b = {{0, 0}, {rows, rank}};
    float *factors = malloc((size_t)(rank * (rows + cols)) * sizeof *factors);
    double *sum = malloc((size_t)cols * sizeof *sum);
    qd_status status = factors && sum ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to merge the adapter of '%s'", p->name);
    if (status == QD_OK)
        status = qd_checkpoint_read(x->checkpoint, a, QD_CKPT_VALUE, &whole_a, factors);
    if (status == QD_OK)
        status = qd_checkpoint_read(x->checkpoint, b, QD_CKPT_VALUE, &whole_b, factors + rank * cols);
    for (int64_t row = 0; row < rows && status == QD_OK; row++) {
        const float *left = factors + rank * cols + row * rank;
        memset(sum, 0, (size_t)cols * sizeof *sum);
        for (int64_t k = 0; k < rank; k++)
            for (int64_t i = 0; i < cols; i++)
                sum[i] += (double)left[k] * (double)factors[k * cols + i];
        for (int64_t i = 0; i < cols; i++)
            values[row * cols + i] = (float)((double)values[row * cols + i] + qd_lora_scale(lora) * sum[i]);
    }
    free(factors);
    free(sum);
    return status;
}

/* theirs (experts, in, outputs): one of our matrices (rows, cols), or vectors, of an expert. Its
 * outputs are every parts-th from `part` on. */
static void put_stacked(const float *ours, int64_t rows, int64_t cols, int64_t expert, int part, int parts, float *theirs)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            theirs[(expert * cols + c) * rows * parts + r * parts + part] = ours[r * cols + c];
}

static qd_status assemble(exporter *x, const qd_hf_tensor *t)
{
    int64_t first = 0;
    const int parts = t->experts > 0 ? t->param_count / t->experts : 1;
    if (t->param_count == 0)
        memset(x->theirs, 0, (size_t)qd_hf_tensor_count(t) * sizeof *x->theirs);
    for (int i = 0; i < t->param_count; i++) {
        const qd_param *p = &x->ledger->params[qd_hf_param(x->ledger, t, i)];
        const qd_atom all = {{0, 0}, {p->shape[0], p->shape[1]}};
        float *to = t->transposed || t->columns || t->experts > 0 ? x->ours : x->theirs + first * p->shape[1];
        QD_TRY(qd_checkpoint_read(x->checkpoint, p, QD_CKPT_VALUE, &all, to));
        QD_TRY(merge_adapter(x, p, to));
        if (t->experts > 0)
            put_stacked(x->ours, p->shape[0], p->shape[1], i / parts, i % parts, parts, x->theirs);
        else if (t->transposed)
            put_transposed(x->ours, p->shape[0], p->shape[1], first, t->shape[1], x->theirs);
        for (int64_t r = 0; r < p->shape[0] && t->columns; r++)
            memcpy(x->theirs + r * t->shape[1] + first, x->ours + r * p->shape[1], (size_t)p->shape[1] * sizeof *x->ours);
        first += p->shape[t->columns];
    }
    return QD_OK;
}

/* In place: a 16-bit value is written at or before the 32 bits it is read from. */
static qd_status narrow(const qd_hf_tensor *t, qd_dtype dtype, float *values)
{
    for (int64_t i = 0; dtype != QD_F32 && i < qd_hf_tensor_count(t); i++) {
        float value = values[i];
        uint16_t half = dtype == QD_BF16 ? qd_f32_to_bf16(value) : qd_f32_to_f16(value);
        if (dtype == QD_F16 && isfinite(value) && (half & 0x7fffu) >= 0x7c00u)
            return QD_FAIL(QD_USAGE, "'%s' contains %g, which overflows fp16: use bf16 or fp32", t->name, (double)value);
        memcpy((char *)values + i * 2, &half, 2);
    }
    return QD_OK;
}

static qd_status write_tensors(exporter *x, int file, qd_safetensors_writer *writer)
{
    uint64_t hash;
    QD_TRY(qd_safetensors_note(writer, "format", "pt")); /* required by transformers */
    for (int t = 0; t < x->tensor_count; t++)
        if (x->file_of[t] == file)
            QD_TRY(qd_safetensors_declare(writer, x->tensors[t].name, dtype_of(x, &x->tensors[t]),
                                          x->tensors[t].dims, x->tensors[t].shape));
    for (int t = 0; t < x->tensor_count; t++) {
        if (x->file_of[t] != file)
            continue;
        QD_TRY(assemble(x, &x->tensors[t]));
        QD_TRY(narrow(&x->tensors[t], dtype_of(x, &x->tensors[t]), x->theirs));
        QD_TRY(qd_safetensors_write(writer, x->theirs, &hash));
    }
    return QD_OK;
}

static qd_status write_file(exporter *x, int file)
{
    char name[64];
    qd_safetensors_writer *writer = NULL;
    file_name(x, file, name, sizeof name);
    char *path = qd_ckpt_path(x->folder, name);
    qd_status status = path ? qd_safetensors_create(path, &writer) : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", x->folder);
    free(path);
    QD_TRY(status);
    status = write_tensors(x, file, writer);
    if (status == QD_OK)
        return qd_safetensors_finish(writer, NULL);
    qd_safetensors_abandon(writer);
    return status;
}

static qd_status write_index(const exporter *x)
{
    qd_strbuf text = {0};
    char name[64], *taken = NULL, *path = qd_ckpt_path(x->folder, QD_HF_INDEX);
    qd_json_writer json = qd_json_writer_on(&text);
    qd_json_object_begin(&json, NULL);
    qd_json_object_begin(&json, "metadata");
    qd_json_put_int(&json, "total_size", x->bytes);
    qd_json_end(&json);
    qd_json_object_begin(&json, "weight_map");
    for (int t = 0; t < x->tensor_count; t++) {
        file_name(x, x->file_of[t], name, sizeof name);
        qd_json_put_string(&json, x->tensors[t].name, name);
    }
    qd_json_end(&json);
    qd_json_end(&json);
    size_t length = text.length;
    qd_status status = qd_strbuf_take(&text, &taken);
    if (status == QD_OK)
        status = path ? qd_file_replace(path, taken, length) : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", x->folder);
    free(path);
    free(taken);
    return status;
}

/* Whether transformers loads this tensor. Biases without a key in the family's config.json would be
 * ignored. Zero biases have no effect and are omitted. */
static bool is_held(const qd_hf_family *f, const char *name)
{
    size_t length = strlen(name);
    if (f->arch != QD_ARCH_LLAMA || length < 5 || strcmp(name + length - 5, ".bias") != 0)
        return true;
    bool always = f->defaults.qkv_bias && !strstr(name, ".o_proj.");
    return strstr(name, ".mlp.") ? f->mlp_bias || f->stacked : always || f->attention_bias;
}

static qd_status drop_unheld(exporter *x)
{
    const qd_hf_family *f = qd_hf_family_of(&x->ledger->model);
    int kept = 0;
    for (int t = 0; t < x->tensor_count; t++) {
        const qd_hf_tensor *tensor = &x->tensors[t];
        if (!is_held(f, tensor->name)) {
            QD_TRY(assemble(x, tensor));
            for (int64_t i = 0; i < qd_hf_tensor_count(tensor); i++)
                if (x->theirs[i] != 0.0f)
                    return QD_FAIL(QD_UNSUPPORTED, "transformers' %s has no tensor '%s', and '%s' is not zero: only a model with "
                                                   "model.%s=false can be exported", f->kind, tensor->name,
                                   x->ledger->params[tensor->first].name, strstr(tensor->name, ".mlp.") ? "mlp_bias" : "out_bias");
            continue;
        }
        x->tensors[kept++] = *tensor;
    }
    x->tensor_count = kept;
    return QD_OK;
}

static qd_status write_files(exporter *x)
{
    int64_t largest = 1;
    for (int t = 0; t < x->tensor_count; t++)
        largest = qd_hf_tensor_count(&x->tensors[t]) > largest ? qd_hf_tensor_count(&x->tensors[t]) : largest;
    x->theirs = malloc((size_t)largest * sizeof *x->theirs);
    x->ours = malloc((size_t)largest * sizeof *x->ours);
    if (!x->ours || !x->theirs)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a tensor of %lld values", (long long)largest);
    QD_TRY(drop_unheld(x));
    share_out(x);
    for (int file = 0; file < x->file_count; file++)
        QD_TRY(write_file(x, file));
    return x->file_count > 1 ? write_index(x) : QD_OK;
}

qd_status qd_hf_write(const char *folder, const qd_ledger *ledger, qd_checkpoint *checkpoint, const qd_hf_export *options,
                      int64_t *bytes, int *files)
{
    exporter x = {.folder = folder, .ledger = ledger, .checkpoint = checkpoint, .options = options};
    qd_arena *arena = NULL;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_checkpoint_attach(checkpoint, ledger);
    if (status == QD_OK)
        status = qd_hf_tensors(ledger, arena, &x.tensors, &x.tensor_count);
    if (status == QD_OK && !(x.file_of = QD_ARENA_NEW(arena, int, x.tensor_count + 1)))
        status = QD_NO_MEMORY;
    if (status == QD_OK)
        status = write_files(&x);
    *bytes = x.bytes;
    *files = x.file_count;
    free(x.ours);
    free(x.theirs);
    qd_arena_destroy(arena);
    return status;
}
