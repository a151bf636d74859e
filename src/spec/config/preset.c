/* Model presets. data/models.json is embedded in the library, so that it need not be found at run
 * time. */
#include "model/field_table.h"
#include "spec/config/config.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__asm__(".section .rodata\n"
        ".global qd_models_json\n"
        ".global qd_models_json_end\n"
        ".hidden qd_models_json, qd_models_json_end\n"
        "qd_models_json:\n"
        ".incbin \"" QD_MODELS_JSON "\"\n"
        "qd_models_json_end:\n"
        ".byte 0\n"
        ".previous\n");
extern const char qd_models_json[], qd_models_json_end[];

static qd_status load(qd_json **document)
{
    return qd_json_load_text("models.json", qd_models_json, (size_t)(qd_models_json_end - qd_models_json), document);
}

static bool is(const qd_json_node *preset, const char *key, const char *value)
{
    const char *text = qd_json_as_string(qd_json_member(preset, key));
    return text && strcmp(text, value) == 0;
}

static qd_status read_preset(const qd_json *d, const qd_json_node *preset, const char *name, qd_model *m)
{
    bool supported = false;
    qd_json_as_bool(qd_json_member(preset, "supported"), &supported);
    if (!supported) {
        const char *reason = qd_json_as_string(qd_json_member(preset, "unsupported"));
        return QD_FAIL(QD_UNSUPPORTED, "model.preset: %s cannot be trained by this version%s%s", name, reason ? ": it needs " : "",
                       reason ? reason : "");
    }
    const char *arch;
    QD_TRY(qd_json_get_string(d, preset, "arch", &arch));
    *m = qd_model_default(qd_arch_find(arch));
    snprintf(m->name, sizeof m->name, "%s", name);
    QD_TRY(qd_model_read(d, preset, m));
    m->moe.bias = m->moe.bias || m->moe.bias_rate > 0.0;
    return QD_OK;
}

/* The known name that shares the longest prefix of at least three letters with `name`, because
 * presets differ at the end. NULL: none. */
static const char *nearest(const qd_json_node *presets, const char *name)
{
    const char *best = NULL;
    size_t best_length = 2;
    for (size_t i = 0; i < qd_json_count(presets); i++) {
        const char *other = qd_json_as_string(qd_json_member(qd_json_item(presets, i), "name"));
        size_t length = 0;
        while (other && name[length] && name[length] == other[length])
            length++;
        if (length > best_length) {
            best = other;
            best_length = length;
        }
    }
    return best;
}

qd_status qd_preset_find(const char *name, qd_model *model)
{
    qd_json *document = NULL;
    QD_TRY(load(&document));
    const qd_json_node *presets = qd_json_root(document), *found = NULL;
    for (size_t i = 0; i < qd_json_count(presets) && !found; i++)
        if (is(qd_json_item(presets, i), "name", name))
            found = qd_json_item(presets, i);
    const char *like = found ? NULL : nearest(presets, name);
    qd_status status =
        found ? read_preset(document, found, name, model)
        : like
            ? QD_FAIL(QD_USAGE, "model.preset: there is no model '%s'; did you mean '%s'? 'quadrille help models' lists them", name, like)
            : QD_FAIL(QD_USAGE, "model.preset: there is no model '%s'; 'quadrille help models' lists them", name);
    qd_json_destroy(document);
    return status;
}

/* Sets an option unless the user has set it. */
static qd_status set_word(qd_options *o, const char *key, const char *value)
{
    return qd_options_is_set(o, key) ? QD_OK : qd_options_set(o, key, value);
}

/* Sets the nearest model that this version can express. Latent attention becomes heads of 128 with
 * eight kv heads, which has about the same parameters and FLOPs. Norms are those of the
 * architecture; gated activations become SwiGLU, others GELU. If only some blocks have experts, all
 * blocks after the dense ones get them. Attention windows and sinks are dropped, and there are as
 * many learned positions as the data needs. */
static qd_status set_nearest(qd_options *o, const qd_json_node *p)
{
    bool gated = is(p, "activation", "swiglu") || is(p, "activation", "geglu"), tied = false;
    qd_json_as_bool(qd_json_member(p, "tied"), &tied);
    QD_TRY(qd_options_set(o, "model.preset", ""));
    QD_TRY(set_word(o, "model.arch", gated || is(p, "position", "rope") ? "llama" : "gpt2"));
    QD_TRY(set_word(o, "model.activation", gated ? "swiglu" : "gelu_tanh"));
    QD_TRY(set_word(o, "model.tied", tied ? "true" : "false"));
    if (qd_json_kind_of(qd_json_member(p, "head_dim")) == QD_JSON_NULL) {
        QD_TRY(set_word(o, "model.head_dim", "128"));
        QD_TRY(set_word(o, "model.kv_heads", "8"));
    }
    int count;
    const qd_model_field *fields = qd_model_fields(&count);
    for (const qd_model_field *f = fields; f < fields + count; f++) {
        int64_t value;
        char text[32];
        bool size = f->option.key && f->option.type == QD_OPTION_INT && f->offset != offsetof(qd_model, max_seq);
        if (!size || !qd_json_as_int(qd_json_member(p, qd_field_preset(f)), &value))
            continue;
        snprintf(text, sizeof text, "%lld", (long long)value);
        QD_TRY(set_word(o, f->option.key, text));
    }
    return QD_OK;
}

qd_status qd_preset_nearest(qd_options *options, char *differences, size_t size)
{
    char name[64];
    qd_json *document = NULL;
    qd_status status = QD_OK;
    differences[0] = '\0';
    snprintf(name, sizeof name, "%s", qd_options_string(options, "model.preset"));
    QD_TRY(load(&document));
    const qd_json_node *presets = qd_json_root(document);
    for (size_t i = 0; name[0] && i < qd_json_count(presets); i++) {
        const qd_json_node *p = qd_json_item(presets, i);
        bool supported = true;
        qd_json_as_bool(qd_json_member(p, "supported"), &supported);
        if (!is(p, "name", name) || supported)
            continue;
        const char *reason = qd_json_as_string(qd_json_member(p, "unsupported"));
        snprintf(differences, size, "%s cannot be trained by this version (%s): using the nearest model that can", name,
                 reason ? reason : "");
        status = set_nearest(options, p);
    }
    qd_json_destroy(document);
    return status;
}

/* Two lists that are filled at the first call and never freed. */
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static const char **names_kept[2];

static qd_status collect_names(bool supported_only, const char ***names)
{
    qd_json *document = NULL;
    QD_TRY(load(&document));
    const qd_json_node *presets = qd_json_root(document);
    size_t count = 0, total = qd_json_count(presets);
    const char **list = calloc(total + 1, sizeof *list);
    for (size_t i = 0; list && i < total; i++) {
        bool supported = false;
        qd_json_as_bool(qd_json_member(qd_json_item(presets, i), "supported"), &supported);
        const char *name = qd_json_as_string(qd_json_member(qd_json_item(presets, i), "name"));
        if (name && (supported || !supported_only))
            list[count++] = strdup(name);
    }
    qd_json_destroy(document);
    if (!list)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the list of presets");
    *names = list;
    return QD_OK;
}

qd_status qd_config_presets(bool supported_only, const char *const **names)
{
    qd_status status = QD_OK;
    pthread_mutex_lock(&names_lock);
    if (!names_kept[supported_only])
        status = collect_names(supported_only, &names_kept[supported_only]);
    *names = names_kept[supported_only];
    pthread_mutex_unlock(&names_lock);
    return status;
}

qd_status qd_config_preset_text(const char *name, int64_t *parameters, char *text, size_t size)
{
    qd_model m;
    char kv[40] = "", experts[64] = "";
    QD_TRY(qd_preset_find(name, &m));
    *parameters = qd_model_parameters(&m);
    if (m.kv_heads != m.heads)
        snprintf(kv, sizeof kv, ", %d of keys and values", m.kv_heads);
    if (m.moe.experts > 0)
        snprintf(experts, sizeof experts, ", %d of %d experts%s", m.moe.per_token, m.moe.experts,
                 m.moe.shared > 0 ? " and shared ones" : "");
    snprintf(text, size, "%d blocks of %lld, %d heads%s%s", m.layers, (long long)m.hidden, m.heads, kv, experts);
    return QD_OK;
}
