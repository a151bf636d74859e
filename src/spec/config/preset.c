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
    if (m->moe.shared_ffn == m->moe.shared * m->moe.ffn)
        m->moe.shared_ffn = 0; /* follows model.expert_ffn if the user sets it */
    return QD_OK;
}

/* How presets are compared: in lower case, without the organisation (meta-llama/), the company
 * (Meta-Llama-3-8B) and what separates words. dots: 3.1 and 31 differ. */
static void plain_name(const char *name, bool dots, char *out, size_t size)
{
    const char *slash = strrchr(name, '/');
    size_t used = 0;
    for (const char *at = slash ? slash + 1 : name; *at && used + 1 < size; at++) {
        char c = *at >= 'A' && *at <= 'Z' ? (char)(*at + 32) : *at;
        if (c != '-' && c != '_' && c != ' ' && (dots || c != '.'))
            out[used++] = c;
    }
    out[used] = '\0';
    if (strncmp(out, "meta", 4) == 0)
        memmove(out, out + 4, used - 4 + 1);
}

/* Names that their authors use and that do not contain the size. */
static const char *alias(const char *plain)
{
    static const char *const aliases[][2] = {{"gpt2", "gpt2-124M"},       {"gpt2small", "gpt2-124M"}, {"gpt2medium", "gpt2-355M"},
                                             {"gpt2large", "gpt2-774M"},  {"gpt2xl", "gpt2-1558M"},   {"gpt21.5b", "gpt2-1558M"},
                                             {"gpt3", "gpt3-175b"}};
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (strcmp(aliases[i][0], plain) == 0)
            return aliases[i][1];
    return NULL;
}

enum { PLAIN_NAME = 128 };

/* The preset of that name, whatever its case and separators; *own is its name here. NULL: none. */
static const qd_json_node *find(const qd_json_node *presets, const char *name, const char **own)
{
    char wanted[PLAIN_NAME], plain[PLAIN_NAME];
    plain_name(name, true, wanted, sizeof wanted);
    const char *known = alias(wanted);
    if (known)
        plain_name(known, true, wanted, sizeof wanted);
    for (size_t i = 0; wanted[0] && i < qd_json_count(presets); i++) {
        const qd_json_node *preset = qd_json_item(presets, i);
        *own = qd_json_as_string(qd_json_member(preset, "name"));
        plain_name(*own ? *own : "", true, plain, sizeof plain);
        if (strcmp(plain, wanted) == 0)
            return preset;
    }
    return NULL;
}

/* The known name that shares the most letters with `name` at its beginning, at least three of them,
 * and its end; presets differ in the middle (version) and at the end (size). NULL: none. */
static const char *nearest(const qd_json_node *presets, const char *name)
{
    const char *best = NULL;
    char wanted[PLAIN_NAME], plain[PLAIN_NAME];
    size_t best_length = 2;
    plain_name(name, false, wanted, sizeof wanted);
    for (size_t i = 0; i < qd_json_count(presets); i++) {
        const char *other = qd_json_as_string(qd_json_member(qd_json_item(presets, i), "name"));
        plain_name(other ? other : "", false, plain, sizeof plain);
        size_t head = 0, tail = 0, length = strlen(wanted), own = strlen(plain);
        while (wanted[head] && wanted[head] == plain[head])
            head++;
        while (head >= 3 && head + tail < length && head + tail < own && wanted[length - tail - 1] == plain[own - tail - 1])
            tail++;
        if (head + tail > best_length) {
            best = other;
            best_length = head + tail;
        }
    }
    return best;
}

qd_status qd_preset_find(const char *name, qd_model *model)
{
    qd_json *document = NULL;
    QD_TRY(load(&document));
    const char *own = NULL;
    const qd_json_node *presets = qd_json_root(document), *found = find(presets, name, &own);
    const char *like = found ? NULL : nearest(presets, name);
    qd_status status =
        found ? read_preset(document, found, own, model)
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

/* Sets the nearest model that this version can express. Norms are those of the architecture; gated
 * activations become SwiGLU, others GELU. If only some blocks have experts, all blocks after the
 * dense ones get them. Chunked attention and sinks are dropped, and there are as many learned
 * positions as the data needs. */
static qd_status set_nearest(qd_options *o, const qd_json_node *p)
{
    bool gated = is(p, "activation", "swiglu") || is(p, "activation", "geglu"), tied = false;
    qd_json_as_bool(qd_json_member(p, "tied"), &tied);
    QD_TRY(qd_options_set(o, "model.preset", ""));
    QD_TRY(set_word(o, "model.arch", gated || is(p, "position", "rope") ? "llama" : "gpt2"));
    QD_TRY(set_word(o, "model.activation", gated ? "swiglu" : "gelu_tanh"));
    QD_TRY(set_word(o, "model.tied", tied ? "true" : "false"));
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
    qd_json *document = NULL;
    qd_status status = QD_OK;
    differences[0] = '\0';
    QD_TRY(load(&document));
    const char *own = NULL;
    const qd_json_node *preset = find(qd_json_root(document), qd_options_string(options, "model.preset"), &own);
    bool supported = true;
    if (preset)
        qd_json_as_bool(qd_json_member(preset, "supported"), &supported);
    if (!supported) {
        const char *reason = qd_json_as_string(qd_json_member(preset, "unsupported"));
        snprintf(differences, size, "%s cannot be trained by this version (%s): using the nearest model that can", own,
                 reason ? reason : "");
        status = set_nearest(options, preset);
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
    char kv[40] = "", experts[64] = "", window[64] = "";
    QD_TRY(qd_preset_find(name, &m));
    *parameters = qd_model_parameters(&m);
    if (m.kv_heads != m.heads)
        snprintf(kv, sizeof kv, ", %d of keys and values", m.kv_heads);
    if (m.moe.experts > 0)
        snprintf(experts, sizeof experts, ", %d of %d experts%s", m.moe.per_token, m.moe.experts,
                 m.moe.shared > 0 ? " and shared ones" : "");
    if (m.window > 0)
        snprintf(window, sizeof window, ", windows of %lld", (long long)m.window);
    snprintf(text, size, "%d blocks of %lld, %d heads%s%s%s", m.layers, (long long)m.hidden, m.heads, kv, experts, window);
    return QD_OK;
}
