/* Reads Hugging Face folders: finds the files with the tensors, checks them against the model, and
 * converts the values to fp32. */
#include "base/half.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/huggingface_impl.h"
#include "ckpt/safetensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct qd_hf_source {
    char *folder;
    qd_hf_config config;
    char **file_names;
    qd_safetensors **files;
    int file_count;
    const qd_ledger *ledger;
    qd_hf_tensor *tensors;
    int tensor_count;
    int *tensor_of; /* per parameter */
    const qd_safetensors_entry **entries; /* per tensor of theirs */
    const qd_safetensors_entry **scales;  /* of an fp8 matrix, or of MXFP4 blocks; NULL: it is stored as it is */
};

static bool has(const char *folder, const char *name)
{
    char *path = qd_ckpt_path(folder, name);
    bool found = path && access(path, F_OK) == 0;
    free(path);
    return found;
}

bool qd_hf_is_folder(const char *path)
{
    return has(path, QD_HF_CONFIG) && !has(path, "manifest.json") && !has(path, "checkpoints");
}

static qd_status add_file(qd_hf_source *s, const char *name)
{
    for (int i = 0; i < s->file_count; i++)
        if (strcmp(s->file_names[i], name) == 0)
            return QD_OK;
    if (strchr(name, '/') || name[0] == '.' || name[0] == '\0')
        return QD_FAIL(QD_USAGE, "%s/" QD_HF_INDEX ": names a file outside the folder: %s", s->folder, name);
    char **names = realloc(s->file_names, (size_t)(s->file_count + 1) * sizeof *names);
    if (names)
        s->file_names = names;
    qd_safetensors **files = realloc(s->files, (size_t)(s->file_count + 1) * sizeof *files);
    if (files)
        s->files = files;
    char *path = qd_ckpt_path(s->folder, name), *kept = strdup(name);
    qd_status status = names && files && path && kept ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", s->folder);
    if (status == QD_OK)
        status = qd_safetensors_open(path, &s->files[s->file_count]);
    if (status == QD_OK)
        s->file_names[s->file_count++] = kept;
    else
        free(kept);
    free(path);
    return status;
}

static const qd_safetensors_entry *find(const qd_hf_source *s, const char *name)
{
    const qd_safetensors_entry *entry = NULL;
    for (int i = 0; i < s->file_count && !entry; i++)
        entry = qd_safetensors_find(s->files[i], name);
    return entry;
}

/* The tensor by name, or without the prefix that folders of models without a head omit. */
static const qd_safetensors_entry *find_either(const qd_hf_source *s, const char *name)
{
    const char *prefix = qd_hf_prefix(s->config.model.arch);
    const qd_safetensors_entry *entry = find(s, name);
    if (!entry && strncmp(name, prefix, strlen(prefix)) == 0)
        entry = find(s, name + strlen(prefix));
    return entry;
}

/* Stacked experts, or their MXFP4 blocks, whose scales are *scales. NULL: neither exists. */
static const qd_safetensors_entry *find_stacked(const qd_hf_source *s, const char *name, const qd_safetensors_entry **scales)
{
    char blocks[128], exponents[128];
    const qd_safetensors_entry *entry = find_either(s, name);
    *scales = NULL;
    if (entry || !s->config.blocks.fp4)
        return entry;
    snprintf(blocks, sizeof blocks, "%s" QD_HF_FP4_BLOCKS, name);
    snprintf(exponents, sizeof exponents, "%s" QD_HF_FP4_SCALES, name);
    *scales = find_either(s, exponents);
    return find_either(s, blocks);
}

static qd_status open_indexed(qd_hf_source *s, const char *index)
{
    qd_json *document = NULL;
    const qd_json_node *map, *value;
    const char *name;
    QD_TRY(qd_json_load(index, &document));
    qd_status status = qd_json_get_node(document, qd_json_root(document), "weight_map", QD_JSON_OBJECT, &map);
    if (status == QD_OK)
        for (qd_json_iterator it = qd_json_begin(map); status == QD_OK && qd_json_next(&it, &name, &value);) {
            const char *file = qd_json_as_string(value);
            status = file ? add_file(s, file) : QD_FAIL(QD_USAGE, "%s: '%s' has no file name", index, name);
            for (int i = 0; status == QD_OK && i < s->file_count; i++)
                if (strcmp(s->file_names[i], file) == 0 && !qd_safetensors_find(s->files[i], name))
                    status = QD_FAIL(QD_CORRUPT, "%s/%s: does not contain tensor '%s', which " QD_HF_INDEX " lists there", s->folder,
                                     file, name);
        }
    qd_json_destroy(document);
    return status;
}

static qd_status open_files(qd_hf_source *s)
{
    char *index = qd_ckpt_path(s->folder, QD_HF_INDEX), *single = qd_ckpt_path(s->folder, QD_HF_FILE);
    qd_status status = index && single ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", s->folder);
    if (status == QD_OK && access(single, F_OK) == 0)
        status = add_file(s, QD_HF_FILE);
    else if (status == QD_OK && access(index, F_OK) == 0)
        status = open_indexed(s, index);
    else if (status == QD_OK)
        status = QD_FAIL(QD_USAGE, "%s: contains neither " QD_HF_FILE " nor " QD_HF_INDEX "; save other formats as safetensors "
                                   "first (save_pretrained)", s->folder);
    free(index);
    free(single);
    return status;
}

static inline float element(const void *data, int64_t index, qd_dtype dtype)
{
    uint16_t half;
    float single;
    double wide;
    switch (dtype) { /* data may be unaligned */
    case QD_F8E4M3: return qd_e4m3_to_f32(((const uint8_t *)data)[index]);
    case QD_BF16: memcpy(&half, (const char *)data + index * 2, 2); return qd_bf16_to_f32(half);
    case QD_F16: memcpy(&half, (const char *)data + index * 2, 2); return qd_f16_to_f32(half);
    case QD_F64: memcpy(&wide, (const char *)data + index * 8, 8); return (float)wide;
    default: memcpy(&single, (const char *)data + index * 4, 4); return single;
    }
}

/* Elements [first, first + count) of a tensor, as stored; freed by the caller. */
static qd_status read_elements(const qd_safetensors_entry *e, int64_t first, int64_t count, void **data)
{
    *data = malloc((size_t)count * qd_dtype_size(e->dtype) + 1);
    if (!*data)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld elements of '%s'", (long long)count, e->name);
    qd_status status = qd_safetensors_read(e, first, count, *data);
    if (status != QD_OK) {
        free(*data);
        *data = NULL;
    }
    return status;
}

/* Checks that the blocks and experts that config.json counts exist, before anything is built for
 * them. */
static qd_status check_counts(const qd_hf_source *s)
{
    const qd_model *m = &s->config.model;
    char name[96];
    for (int layer = 0; layer < m->layers; layer++) {
        qd_hf_block_tensor(m, layer, name, sizeof name);
        if (!find_either(s, name))
            return QD_FAIL(QD_USAGE, "%s: there is no tensor '%s', but config.json says %d layers", s->folder, name, m->layers);
    }
    if (s->config.family->stacked) {
        const qd_safetensors_entry *scales, *entry;
        qd_hf_expert_tensor(m, 0, 0, name, sizeof name);
        entry = find_stacked(s, name, &scales);
        if (!entry || entry->dims < 1 || entry->shape[0] != m->moe.experts)
            return QD_FAIL(QD_USAGE, "%s: tensor '%s' %s, but config.json says %d experts", s->folder, name,
                           entry ? "has another number of them" : "is missing", m->moe.experts);
        return QD_OK;
    }
    for (int expert = 0; qd_hf_expert_layers(m) > 0 && expert < m->moe.experts; expert++) {
        qd_hf_expert_tensor(m, m->moe.first_dense, expert, name, sizeof name);
        if (!find_either(s, name))
            return QD_FAIL(QD_USAGE, "%s: there is no tensor '%s', but config.json says %d experts", s->folder, name, m->moe.experts);
    }
    return QD_OK;
}

/* Modules for multi-token prediction are part of the model if the folder has their tensors; folders
 * that transformers has saved count them, but lack the tensors. */
static void find_predictors(qd_hf_source *s, qd_strbuf *notes)
{
    qd_hf_config *c = &s->config;
    const char *why = c->model.moe.experts > 0 && c->predicted > 1 ? "this program trains one in models with experts" : NULL;
    char name[96];
    for (int k = 0; k < c->predicted && !why; k++) {
        qd_hf_ahead_tensor(&c->model, k, name, sizeof name);
        why = find_either(s, name) ? NULL : "the folder does not have their tensors";
    }
    if (!why)
        c->model.mtp_modules = c->predicted;
    else if (c->predicted > 0)
        qd_strbuf_printf(notes, "num_nextn_predict_layers was %d: the modules for multi-token prediction behind block %d are left out, "
                                "%s\n", c->predicted, c->model.layers - 1, why);
}

qd_status qd_hf_open(const char *folder, qd_strbuf *notes, qd_hf_source **source)
{
    qd_hf_source *s = calloc(1, sizeof *s);
    if (!s || !(s->folder = strdup(folder))) {
        free(s);
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", folder);
    }
    char *path = qd_ckpt_path(folder, QD_HF_CONFIG);
    qd_status status = path ? qd_hf_config_read(path, notes, &s->config) : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", folder);
    free(path);
    if (status == QD_OK)
        status = open_files(s);
    if (status == QD_OK)
        status = check_counts(s);
    if (status == QD_OK)
        find_predictors(s, notes);
    if (status != QD_OK) {
        qd_hf_close(s);
        return status;
    }
    *source = s;
    return QD_OK;
}

void qd_hf_close(qd_hf_source *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->file_count; i++) {
        qd_safetensors_close(s->files[i]);
        free(s->file_names[i]);
    }
    free(s->file_names);
    free(s->files);
    free(s->folder);
    free(s);
}

const qd_model *qd_hf_model(const qd_hf_source *s)
{
    return &s->config.model;
}

int64_t qd_hf_positions(const qd_hf_source *s)
{
    return s->config.positions;
}

/* The first few names of a list, for a message. */
typedef struct names {
    char text[400];
    int count;
} names;

static void add_name(names *n, const char *name)
{
    size_t used = strlen(n->text);
    if (n->count++ < 4)
        snprintf(n->text + used, sizeof n->text - used, "%s%s", used ? ", " : "", name);
    else if (n->count == 6)
        snprintf(n->text + used, sizeof n->text - used, ", …");
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

/* Tables that older versions of transformers saved with the weights: masks, rotary frequencies. */
static bool is_constant(const char *name)
{
    return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias") || ends_with(name, ".rotary_emb.inv_freq");
}

static qd_status check_shape(const qd_hf_source *s, const qd_hf_tensor *t, const qd_safetensors_entry *e)
{
    if (e->dtype == QD_F8E4M3 && s->config.blocks.rows == 0)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' has type %s, but config.json has no quantization_config", s->folder, e->name,
                       qd_dtype_name(e->dtype));
    if (e->dtype != QD_F32 && e->dtype != QD_BF16 && e->dtype != QD_F16 && e->dtype != QD_F64 && e->dtype != QD_F8E4M3)
        return QD_FAIL(QD_UNSUPPORTED, "%s: tensor '%s' has type %s: it must be fp32, bf16, fp16 or fp64", s->folder, e->name,
                       qd_dtype_name(e->dtype));
    bool same = e->dims == t->dims;
    for (int d = 0; d < t->dims && same; d++)
        same = e->shape[d] == t->shape[d];
    if (same)
        return QD_OK;
    if (t->dims > 2 || e->dims > 2)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' has %d dimensions and %lld elements; config.json requires %d, %lld x %lld x %lld",
                       s->folder, e->name, e->dims, (long long)e->count, t->dims, (long long)t->shape[0], (long long)t->shape[1],
                       (long long)t->shape[2]);
    return QD_FAIL(QD_USAGE, "%s: tensor '%s' has %d dimensions, %lld x %lld; config.json requires %d, %lld x %lld", s->folder, e->name,
                   e->dims, (long long)(e->dims > 0 ? e->shape[0] : 1), (long long)(e->dims > 1 ? e->shape[1] : 1), t->dims,
                   (long long)t->shape[0], (long long)t->shape[1]);
}

/* Bitwise comparison; both have the same type and size. */
static qd_status same_data(const qd_safetensors_entry *a, const qd_safetensors_entry *b, bool *same)
{
    enum { MOST = 1 << 20 };
    *same = true;
    for (int64_t first = 0, count; first < a->count && *same; first += count) {
        void *x = NULL, *y = NULL;
        count = a->count - first < MOST ? a->count - first : MOST;
        qd_status status = read_elements(a, first, count, &x);
        if (status == QD_OK)
            status = read_elements(b, first, count, &y);
        *same = status == QD_OK && memcmp(x, y, (size_t)count * qd_dtype_size(a->dtype)) == 0;
        free(x);
        free(y);
        QD_TRY(status);
    }
    return QD_OK;
}

/* A tied head may be stored in addition to the embedding it repeats. */
static qd_status check_tied(const qd_hf_source *s, const qd_safetensors_entry *head)
{
    const qd_safetensors_entry *table = s->entries[0];
    bool same = table && head->dtype == table->dtype && head->count == table->count;
    if (same)
        QD_TRY(same_data(head, table, &same));
    return same ? QD_OK : QD_FAIL(QD_USAGE, "%s: config.json says that the head is tied to the token table, but lm_head.weight differs",
                                  s->folder);
}

/* The tables of prediction modules repeat those of the model. */
static qd_status check_copy(const qd_hf_source *s, int tensor)
{
    const qd_safetensors_entry *copy = s->entries[tensor], *of = s->entries[s->tensor_of[s->tensors[tensor].first]];
    bool same = copy->dtype == of->dtype && copy->count == of->count;
    if (same)
        QD_TRY(same_data(copy, of, &same));
    return same ? QD_OK : QD_FAIL(QD_UNSUPPORTED, "%s: tensor '%s' differs from '%s', and prediction modules share it (model.mtp_modules)",
                                  s->folder, copy->name, of->name);
}

static int by_pointer(const void *a, const void *b)
{
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    return x < y ? -1 : x > y;
}

/* Modules for multi-token prediction that are left out, also on request (model.mtp_modules=0). They
 * are numbered as if they were further blocks. */
static bool is_predictor(const qd_hf_source *s, const char *name)
{
    int layer = -1;
    return s->config.predicted > 0 && s->ledger->model.mtp_modules == 0 && sscanf(name, "model.layers.%d.", &layer) == 1 &&
           layer >= s->config.model.layers && layer < s->config.model.layers + s->config.predicted;
}

/* Every tensor of the files must be used, or known to be unused. */
static qd_status check_unknown(const qd_hf_source *s, qd_arena *arena)
{
    const size_t count = 2 * (size_t)s->tensor_count;
    const void **used = QD_ARENA_NEW(arena, const void *, count + 1);
    names unknown = {0};
    if (!used)
        return QD_NO_MEMORY;
    for (int t = 0; t < s->tensor_count; t++) {
        used[2 * t] = s->entries[t];
        used[2 * t + 1] = s->scales[t];
    }
    qsort(used, count, sizeof *used, by_pointer);
    for (int f = 0; f < s->file_count; f++)
        for (int i = 0; i < qd_safetensors_count(s->files[f]); i++) {
            const qd_safetensors_entry *e = qd_safetensors_at(s->files[f], i);
            if (bsearch(&e, used, count, sizeof *used, by_pointer) || is_constant(e->name) || is_predictor(s, e->name))
                continue;
            if (s->config.model.tied && strcmp(e->name, "lm_head.weight") == 0)
                QD_TRY(check_tied(s, e));
            else
                add_name(&unknown, e->name);
        }
    if (unknown.count == 0)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "%s: %d tensors do not belong to the model that config.json describes: %s", s->folder, unknown.count,
                   unknown.text);
}

/* The scales of an fp8 matrix. */
static qd_status find_scale(const qd_hf_source *s, const qd_hf_tensor *tensor, const qd_safetensors_entry *weight,
                            const qd_safetensors_entry **scale)
{
    char name[256];
    if (tensor->transposed)
        return QD_FAIL(QD_UNSUPPORTED, "%s: tensor '%s' is fp8 and stored as (inputs, outputs): use the original weights", s->folder,
                       weight->name);
    *scale = qd_hf_scale_name(weight->name, name, sizeof name) ? find(s, name) : NULL;
    if (!*scale)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' is fp8, and its scales, '%s_scale_inv', are missing", s->folder, weight->name,
                       weight->name);
    return qd_hf_scale_check(s->folder, weight, *scale, s->config.blocks);
}

static qd_status check_tensor(const qd_hf_source *s, int tensor)
{
    const qd_safetensors_entry *entry = s->entries[tensor];
    if (s->tensors[tensor].experts > 0 && s->scales[tensor])
        return qd_hf_fp4_check(s->folder, &s->tensors[tensor], entry, s->scales[tensor]);
    if (s->tensors[tensor].dims > 2 && entry->dtype == QD_U8)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' is MXFP4, and its exponents, '%s" QD_HF_FP4_SCALES "', are missing", s->folder,
                       entry->name, s->tensors[tensor].name);
    QD_TRY(check_shape(s, &s->tensors[tensor], entry));
    return entry->dtype == QD_F8E4M3 ? find_scale(s, &s->tensors[tensor], entry, &s->scales[tensor]) : QD_OK;
}

qd_status qd_hf_check(qd_hf_source *s, const qd_ledger *ledger, qd_arena *arena)
{
    names missing = {0};
    s->ledger = ledger;
    QD_TRY(qd_hf_tensors(ledger, arena, &s->tensors, &s->tensor_count));
    s->tensor_of = QD_ARENA_NEW(arena, int, ledger->param_count);
    s->entries = QD_ARENA_NEW(arena, const qd_safetensors_entry *, s->tensor_count + 1);
    s->scales = QD_ARENA_NEW(arena, const qd_safetensors_entry *, s->tensor_count + 1);
    if (!s->tensor_of || !s->entries || !s->scales)
        return QD_NO_MEMORY;
    for (int t = 0; t < s->tensor_count; t++) {
        const qd_hf_tensor *tensor = &s->tensors[t];
        const qd_safetensors_entry *entry =
            tensor->dims > 2 ? find_stacked(s, tensor->name, &s->scales[t]) : find_either(s, tensor->name);
        for (int i = 0; i < tensor->param_count && !tensor->copy; i++)
            s->tensor_of[qd_hf_param(ledger, tensor, i)] = t;
        s->entries[t] = entry;
        if (entry)
            QD_TRY(check_tensor(s, t));
        else if (tensor->param_count > 0 && !tensor->copy)
            add_name(&missing, tensor->name);
    }
    if (missing.count > 0)
        return QD_FAIL(QD_USAGE, "%s: %d tensors of the model that config.json describes are missing: %s", s->folder, missing.count,
                       missing.text);
    for (int t = 0; t < s->tensor_count; t++)
        if (s->tensors[t].copy && s->entries[t])
            QD_TRY(check_copy(s, t));
    return check_unknown(s, arena);
}

/* ours (rows, cols) = theirs (inputs, outputs)[left:left + cols, first:first + rows] transposed, in
 * tiles that fit the cache. */
static void copy_transposed(const qd_safetensors_entry *e, const void *data, int64_t first, int64_t left, int64_t rows, int64_t cols,
                            float *out)
{
    enum { TILE = 32 };
    int64_t total = e->shape[1];
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t c0 = 0; c0 < cols; c0 += TILE)
            for (int64_t r = r0; r < rows && r < r0 + TILE; r++)
                for (int64_t c = c0; c < cols && c < c0 + TILE; c++)
                    out[r * cols + c] = element(data, (left + c) * total + first + r, e->dtype);
}

/* A box of a parameter of an expert: every parts-th output of its part of the stack. */
static qd_status read_stacked(const qd_hf_source *s, int param, const qd_atom *box, float *out)
{
    const int tensor = s->tensor_of[param];
    const qd_hf_tensor *t = &s->tensors[tensor];
    const qd_safetensors_entry *e = s->entries[tensor], *scales = s->scales[tensor];
    const qd_param *own = &s->ledger->params[param];
    const int parts = t->param_count / t->experts, part = (param - t->first) % parts;
    const int64_t expert = (param - t->first) / parts, in = own->ndim > 1 ? own->shape[1] : 1, outputs = own->shape[0] * parts;
    const int64_t rows = box->length[0], cols = own->ndim > 1 ? box->length[1] : 1, left = own->ndim > 1 ? box->begin[1] : 0;
    void *data;
    if (scales)
        return qd_hf_fp4_read(e, scales, expert, box->begin[0] * parts + part, parts, rows, left, cols, out);
    QD_TRY(read_elements(e, (expert * in + left) * outputs, cols * outputs, &data));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            out[r * cols + c] = element(data, c * outputs + (box->begin[0] + r) * parts + part, e->dtype);
    free(data);
    return QD_OK;
}

/* A box of a parameter, from the tensor that contains it. */
static qd_status read_box(const qd_hf_source *s, int param, const qd_atom *box, float *out)
{
    const qd_hf_tensor *t = &s->tensors[s->tensor_of[param]];
    const qd_safetensors_entry *e = s->entries[s->tensor_of[param]];
    const qd_param *own = &s->ledger->params[param];
    const int64_t rows = box->length[0], cols = own->ndim > 1 ? box->length[1] : 1,
                  wide = t->columns ? t->shape[1] : own->ndim > 1 ? own->shape[1] : 1;
    int64_t first = box->begin[0], left = own->ndim > 1 ? box->begin[1] : 0;
    void *data;
    if (t->experts > 0)
        return read_stacked(s, param, box, out);
    for (int i = t->first; i < param; i++)
        *(t->columns ? &left : &first) += s->ledger->params[i].adapter ? 0 : s->ledger->params[i].shape[t->columns];
    QD_TRY(t->transposed ? read_elements(e, 0, e->count, &data) : read_elements(e, first * wide, rows * wide, &data));
    if (t->transposed)
        copy_transposed(e, data, first, left, rows, cols, out);
    else
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++)
                out[r * cols + c] = element(data, r * wide + left + c, e->dtype);
    free(data);
    const qd_safetensors_entry *scale = s->scales[s->tensor_of[param]];
    return scale ? qd_hf_scale_apply(scale, s->config.blocks, first, left, rows, cols, out) : QD_OK;
}

qd_status qd_hf_fetch(void *source, const qd_state_piece *piece, float *out)
{
    const qd_hf_source *s = source;
    if (piece->kind != QD_CKPT_VALUE)
        return QD_FAIL(QD_USAGE, "%s: contains no optimizer state", s->folder);
    return read_box(s, piece->param, &piece->box, out);
}

qd_status qd_hf_read(void *source, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    const qd_hf_source *s = source;
    const int index = (int)(param - s->ledger->params);
    if (kind != QD_CKPT_VALUE)
        return QD_FAIL(QD_USAGE, "%s: contains no optimizer state", s->folder);
    QD_TRY(read_box(s, index, box, out));
    for (int64_t i = 0, count = qd_atom_count(box, param->ndim); i < count; i++)
        if (!isfinite(out[i]))
            return QD_FAIL(QD_CORRUPT, "%s: tensor '%s' has a value that is not finite: the file is damaged, or its training diverged",
                           s->folder, s->entries[s->tensor_of[index]]->name);
    return QD_OK;
}
