/* Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with a tensor
 * base_model.model.<module>.lora_A.weight and one .lora_B.weight per layer. */
#include "ckpt/peft.h"

#include "base/file.h"
#include "base/half.h"
#include "base/text/json.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/safetensors.h"

#include <quadrille/json_writer.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "base_model.model."
enum { NAME_MOST = 160 };

/* The name of a factor of the adapter of their tensor. */
static void name_factor(const qd_hf_tensor *t, char factor, char name[NAME_MOST])
{
    size_t length = strlen(t->name);
    snprintf(name, NAME_MOST, PREFIX "%.*s.lora_%c.weight", (int)(length > 7 ? length - 7 : length), t->name, factor);
}

/* The last part of a module's name: what target_modules lists. */
static void name_target(const qd_hf_tensor *t, char name[NAME_MOST])
{
    size_t length = strlen(t->name) - 7, at = length;
    while (at > 0 && t->name[at - 1] != '.')
        at--;
    snprintf(name, NAME_MOST, "%.*s", (int)(length - at), t->name + at);
}

/* Their tensors that have adapters. Where several of our layers are one of theirs (q, k and v of
 * GPT-2), theirs has one adapter and ours have one each. */
static qd_status adapted(const qd_ledger *l, const qd_hf_tensor *t, bool *has)
{
    *has = false;
    for (int i = 0; i < t->param_count; i++)
        *has = *has || qd_ledger_adapter(l, &l->params[qd_hf_param(l, t, i)], 'A') != NULL;
    if (*has && t->param_count > 1)
        return QD_FAIL(QD_UNSUPPORTED, "PEFT has one adapter for '%s', and this run one for each of its %d parts: export the merged model",
                       t->name, t->param_count);
    return QD_OK;
}

static qd_status put_config(const char *folder, const qd_ledger *l, const qd_hf_tensor *tensors, int count, const char *base)
{
    const qd_lora *lora = &l->model.lora;
    char targets[32][NAME_MOST];
    int target_count = 0;
    bool transposed = false;
    for (int i = 0; i < count; i++) {
        bool has, known = false;
        char name[NAME_MOST];
        QD_TRY(adapted(l, &tensors[i], &has));
        if (!has)
            continue;
        transposed = transposed || tensors[i].transposed;
        name_target(&tensors[i], name);
        for (int k = 0; k < target_count; k++)
            known = known || strcmp(targets[k], name) == 0;
        if (!known && target_count < 32)
            memcpy(targets[target_count++], name, sizeof name);
    }
    qd_strbuf text = {0};
    qd_json_writer json = qd_json_writer_on(&text);
    qd_json_object_begin(&json, NULL);
    qd_json_put_string(&json, "peft_type", "LORA");
    qd_json_put_string(&json, "task_type", "CAUSAL_LM");
    qd_json_put_string(&json, "base_model_name_or_path", base);
    qd_json_put_int(&json, "r", lora->rank);
    qd_json_put_double(&json, "lora_alpha", lora->alpha);
    qd_json_put_double(&json, "lora_dropout", lora->dropout);
    qd_json_put_bool(&json, "use_rslora", lora->rslora);
    qd_json_put_bool(&json, "fan_in_fan_out", transposed);
    qd_json_put_string(&json, "bias", "none");
    qd_json_put_bool(&json, "inference_mode", true);
    qd_json_list_begin(&json, "target_modules");
    for (int k = 0; k < target_count; k++)
        qd_json_put_string(&json, NULL, targets[k]);
    qd_json_end(&json);
    qd_json_end(&json);
    qd_strbuf_puts(&text, "\n");
    char *path = qd_ckpt_path(folder, QD_PEFT_CONFIG), *taken = NULL;
    size_t length = text.length;
    qd_status status = path ? qd_strbuf_take(&text, &taken) : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", folder);
    if (status == QD_OK)
        status = qd_file_replace(path, taken, length);
    qd_strbuf_free(&text);
    free(taken);
    free(path);
    return status;
}

/* Declares the tensors, or writes them: factors A and B of each adapted layer, in order. */
static qd_status put_factors(const qd_ledger *l, const qd_hf_tensor *tensors, int count, qd_checkpoint *checkpoint,
                             qd_safetensors_writer *writer, float *values, int64_t *bytes)
{
    for (int i = 0; i < count; i++)
        for (const char *factor = "AB"; *factor; factor++) {
            const qd_param *p = tensors[i].param_count == 1 ? qd_ledger_adapter(l, &l->params[tensors[i].first], *factor) : NULL;
            const qd_atom all = {{0, 0}, {p ? p->shape[0] : 0, p ? p->shape[1] : 0}};
            char name[NAME_MOST];
            uint64_t hash;
            if (!p)
                continue;
            name_factor(&tensors[i], *factor, name);
            if (!values) {
                QD_TRY(qd_safetensors_declare(writer, name, QD_F32, 2, p->shape));
                *bytes += p->shape[0] * p->shape[1] * 4;
                continue;
            }
            QD_TRY(qd_checkpoint_read(checkpoint, p, QD_CKPT_VALUE, &all, values));
            QD_TRY(qd_safetensors_write(writer, values, &hash));
        }
    return QD_OK;
}

static qd_status put_tensors(const char *folder, const qd_ledger *l, const qd_hf_tensor *tensors, int count, qd_checkpoint *checkpoint,
                             int64_t *bytes)
{
    int64_t largest = 1;
    for (int i = 0; i < l->param_count; i++)
        if (l->params[i].adapter && l->params[i].shape[0] * l->params[i].shape[1] > largest)
            largest = l->params[i].shape[0] * l->params[i].shape[1];
    float *values = malloc((size_t)largest * sizeof *values);
    char *path = qd_ckpt_path(folder, QD_PEFT_TENSORS);
    qd_safetensors_writer *writer = NULL;
    qd_status status = values && path ? qd_safetensors_create(path, &writer) : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", folder);
    free(path);
    if (status == QD_OK) {
        status = qd_safetensors_note(writer, "format", "pt");
        if (status == QD_OK)
            status = put_factors(l, tensors, count, checkpoint, writer, NULL, bytes);
        if (status == QD_OK)
            status = put_factors(l, tensors, count, checkpoint, writer, values, bytes);
        if (status == QD_OK)
            status = qd_safetensors_finish(writer, NULL);
        else
            qd_safetensors_abandon(writer);
    }
    free(values);
    return status;
}

qd_status qd_peft_write(const char *folder, const qd_ledger *ledger, qd_checkpoint *checkpoint, const char *base, int64_t *bytes)
{
    qd_arena *arena = NULL;
    qd_hf_tensor *tensors;
    int count;
    *bytes = 0;
    if (ledger->model.lora.rank == 0)
        return QD_FAIL(QD_USAGE, "%s: has no adapters to export (it was trained without lora.rank)", qd_checkpoint_folder(checkpoint));
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_hf_tensors(ledger, arena, &tensors, &count);
    if (status == QD_OK)
        status = put_config(folder, ledger, tensors, count, base);
    if (status == QD_OK)
        status = put_tensors(folder, ledger, tensors, count, checkpoint, bytes);
    qd_arena_destroy(arena);
    return status;
}

/* Reading. */

struct qd_peft_source {
    char *folder;
    qd_json *config;
    qd_safetensors *file;
    const qd_ledger *ledger;
    qd_hf_tensor *tensors;
    int count;
    qd_peft_config settings;
};

bool qd_peft_is_folder(const char *path)
{
    char *config = qd_ckpt_path(path, QD_PEFT_CONFIG);
    FILE *file = config ? fopen(config, "re") : NULL;
    free(config);
    if (file)
        fclose(file);
    return file != NULL;
}

/* A number that may be left out. Another type is an error: the default would be a wrong result. */
static qd_status read_number(const qd_peft_source *s, const char *key, double otherwise, double *value)
{
    const qd_json_node *node = qd_json_member(qd_json_root(s->config), key);
    *value = otherwise;
    if (node && !qd_json_as_double(node, value))
        return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_CONFIG ": %s must be a number", s->folder, key);
    return QD_OK;
}

static bool is_true(const qd_json_node *root, const char *key)
{
    bool value;
    return qd_json_as_bool(qd_json_member(root, key), &value) && value;
}

/* Some ways to initialize adapters take their first values out of the weights of the base. The
 * adapters are then not those of the base as it is stored. */
static qd_status check_initial(const qd_peft_source *s, const char *way)
{
    static const char *const changing[] = {"pissa", "olora", "corda", "loftq"};
    for (size_t i = 0; way && i < sizeof changing / sizeof *changing; i++)
        if (strncmp(way, changing[i], strlen(changing[i])) == 0)
            return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_CONFIG ": init_lora_weights is %s, which changes the weights of the base: save "
                                           "the adapters as plain LoRA (path_initial_model_for_weight_conversion)", s->folder, way);
    return QD_OK;
}

static qd_status read_config(qd_peft_source *s)
{
    const qd_json_node *root = qd_json_root(s->config);
    const char *type = qd_json_as_string(qd_json_member(root, "peft_type")), *bias = qd_json_as_string(qd_json_member(root, "bias"));
    if (!type || strcmp(type, "LORA") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_CONFIG ": peft_type is %s: LORA is supported", s->folder, type ? type : "missing");
    bool flag;
    static const char *const flags[] = {"use_rslora", "use_dora"};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (qd_json_member(root, flags[i]) && !qd_json_as_bool(qd_json_member(root, flags[i]), &flag))
            return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_CONFIG ": %s must be true or false", s->folder, flags[i]);
    if (bias && strcmp(bias, "none") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_CONFIG ": bias is %s: none is supported", s->folder, bias);
    if (is_true(root, "use_dora"))
        return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_CONFIG ": use_dora is not supported", s->folder);
    static const char *const patterns[] = {"rank_pattern", "alpha_pattern"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (qd_json_count(qd_json_member(root, patterns[i])) > 0)
            return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_CONFIG ": %s: layers with ranks or factors of their own are not supported",
                           s->folder, patterns[i]);
    static const char *const others[] = {"modules_to_save", "layer_replication", "alora_invocation_tokens"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (qd_json_count(qd_json_member(root, others[i])) > 0)
            return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_CONFIG ": %s is not supported", s->folder, others[i]);
    QD_TRY(check_initial(s, qd_json_as_string(qd_json_member(root, "init_lora_weights"))));
    double rank, alpha, dropout;
    QD_TRY(read_number(s, "r", 0.0, &rank));
    QD_TRY(read_number(s, "lora_alpha", 8.0, &alpha));
    QD_TRY(read_number(s, "lora_dropout", 0.0, &dropout));
    if (!(rank >= 1.0 && rank <= 65536.0) || rank != (int)rank)
        return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_CONFIG ": r must be the rank of the adapters", s->folder);
    if (!(alpha > 0.0)) /* 0 is the rank in our own options */
        return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_CONFIG ": lora_alpha is %g: it must be above 0", s->folder, alpha);
    s->settings = (qd_peft_config){.rank = (int)rank, .alpha = alpha, .dropout = dropout, .rslora = is_true(root, "use_rslora"),
                                   .base = qd_json_as_string(qd_json_member(root, "base_model_name_or_path"))};
    return QD_OK;
}

qd_status qd_peft_open(const char *folder, qd_peft_source **source)
{
    qd_peft_source *s = calloc(1, sizeof *s);
    char *config = qd_ckpt_path(folder, QD_PEFT_CONFIG), *tensors = qd_ckpt_path(folder, QD_PEFT_TENSORS);
    bool there = s && config && tensors && (s->folder = strdup(folder));
    qd_status status = there ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", folder);
    if (status == QD_OK)
        status = qd_json_load(config, &s->config);
    if (status == QD_OK)
        status = read_config(s);
    if (status == QD_OK)
        status = qd_safetensors_open(tensors, &s->file);
    free(config);
    free(tensors);
    if (status != QD_OK) {
        qd_peft_close(s);
        return status;
    }
    *source = s;
    return QD_OK;
}

void qd_peft_close(qd_peft_source *s)
{
    if (!s)
        return;
    qd_safetensors_close(s->file);
    qd_json_destroy(s->config);
    free(s->folder);
    free(s);
}

const qd_peft_config *qd_peft_settings(const qd_peft_source *s)
{
    return &s->settings;
}

/* Layers are recognized by their tensors: target_modules may be a pattern. */
qd_status qd_peft_targets(const qd_peft_source *s, const qd_ledger *plain, unsigned *targets)
{
    qd_arena *arena = NULL;
    qd_hf_tensor *tensors;
    int count;
    *targets = 0;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_hf_tensors(plain, arena, &tensors, &count);
    for (int i = 0; i < count && status == QD_OK; i++) {
        char name[NAME_MOST], part[NAME_MOST];
        name_factor(&tensors[i], 'A', name);
        if (!qd_safetensors_find(s->file, name))
            continue;
        const char *ours = plain->params[tensors[i].first].name;
        snprintf(part, sizeof part, "%.*s", (int)(strlen(ours) - 7), ours);
        unsigned found = 0;
        for (int k = 0; k < QD_LORA_TARGET_COUNT; k++)
            found |= qd_lora_takes(&(qd_lora){.rank = 1, .targets = 1u << k}, part) ? 1u << k : 0;
        *targets |= found;
        if (found == 0 || tensors[i].param_count > 1)
            status = QD_FAIL(QD_UNSUPPORTED, "%s: an adapter of '%s' is not supported", s->folder, tensors[i].name);
    }
    qd_arena_destroy(arena);
    if (status == QD_OK && *targets == 0)
        return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_TENSORS ": has no adapter of a layer of this model (is it the base it was trained on?)",
                       s->folder);
    return status;
}

qd_status qd_peft_check(qd_peft_source *s, const qd_ledger *ledger, qd_arena *arena)
{
    int used = 0;
    QD_TRY(qd_hf_tensors(ledger, arena, &s->tensors, &s->count));
    s->ledger = ledger;
    for (int i = 0; i < s->count; i++)
        for (const char *factor = "AB"; *factor; factor++) {
            const qd_param *p =
                s->tensors[i].param_count == 1 ? qd_ledger_adapter(ledger, &ledger->params[s->tensors[i].first], *factor) : NULL;
            char name[NAME_MOST];
            if (!p)
                continue;
            name_factor(&s->tensors[i], *factor, name);
            const qd_safetensors_entry *e = qd_safetensors_find(s->file, name);
            if (!e)
                return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_TENSORS ": '%s' is missing", s->folder, name);
            if (e->dims != 2 || e->shape[0] != p->shape[0] || e->shape[1] != p->shape[1])
                return QD_FAIL(QD_USAGE, "%s/" QD_PEFT_TENSORS ": '%s' must be %lld x %lld", s->folder, name, (long long)p->shape[0],
                               (long long)p->shape[1]);
            used++;
        }
    if (used != qd_safetensors_count(s->file))
        return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_TENSORS ": has %d tensors, of which %d belong to adapters of this model", s->folder,
                       qd_safetensors_count(s->file), used);
    return QD_OK;
}

/* Elements of a tensor as fp32. */
static qd_status read_values(const qd_safetensors_entry *e, int64_t first, int64_t count, float *out)
{
    if (e->dtype == QD_F32)
        return qd_safetensors_read(e, first, count, out);
    uint16_t *half = malloc((size_t)count * sizeof *half);
    qd_status status = half ? qd_safetensors_read(e, first, count, half) : QD_FAIL(QD_NO_MEMORY, "no memory to read '%s'", e->name);
    for (int64_t i = 0; i < count && status == QD_OK; i++)
        out[i] = e->dtype == QD_BF16 ? qd_bf16_to_f32(half[i]) : qd_f16_to_f32(half[i]);
    free(half);
    return status;
}

qd_status qd_peft_fetch(void *source, const qd_state_piece *piece, float *out)
{
    const qd_peft_source *s = source;
    const qd_param *wanted = &s->ledger->params[piece->param];
    for (int i = 0; i < s->count; i++)
        for (const char *factor = "AB"; *factor; factor++) {
            char name[NAME_MOST];
            const qd_hf_tensor *t = &s->tensors[i];
            if (t->param_count != 1 || qd_ledger_adapter(s->ledger, &s->ledger->params[t->first], *factor) != wanted)
                continue;
            name_factor(&s->tensors[i], *factor, name);
            const qd_safetensors_entry *e = qd_safetensors_find(s->file, name);
            if (e->dtype != QD_F32 && e->dtype != QD_BF16 && e->dtype != QD_F16)
                return QD_FAIL(QD_UNSUPPORTED, "%s/" QD_PEFT_TENSORS ": '%s' is neither fp32 nor bf16 nor fp16", s->folder, name);
            return read_values(e, piece->box.begin[0] * wanted->shape[1], piece->count, out);
        }
    return QD_FAIL(QD_SYSTEM, "%s: no tensor for '%s'", s->folder, wanted->name);
}
