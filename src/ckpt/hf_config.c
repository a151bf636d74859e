/* Reads config.json of transformers. A missing key has the default of the family's configuration
 * class. A key that has the wrong type, contradicts another, or requires arithmetic that our models
 * lack is refused by name. Sizes have the limits of the corresponding options, so that nothing is
 * allocated from absurd ones. */
#include "ckpt/huggingface_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Keeps the first error, so that the code below reads as a list of members. */
typedef struct reader {
    const qd_json *document;
    const qd_json_node *root;
    qd_strbuf *notes;
    qd_status status;
} reader;

#define REFUSE(r, code, ...) \
    do { \
        if ((r)->status == QD_OK) \
            (r)->status = QD_FAIL(code, __VA_ARGS__); \
    } while (0)
#define FILE_OF(r) qd_json_name((r)->document)

/* NULL also if the member is null, which means "not set" for many keys. */
static const qd_json_node *member(const reader *r, const char *key)
{
    const qd_json_node *node = qd_json_member(r->root, key);
    return node && qd_json_kind_of(node) != QD_JSON_NULL ? node : NULL;
}

/* Whether to read a key that may be missing but not null. */
static bool given(reader *r, const char *key)
{
    const qd_json_node *node = qd_json_member(r->root, key);
    if (node && qd_json_kind_of(node) == QD_JSON_NULL)
        REFUSE(r, QD_USAGE, "%s: '%s' is null: set a value, or remove it for the default", FILE_OF(r), key);
    return node && r->status == QD_OK;
}

static const qd_option *option_of(const char *key)
{
    int count;
    const qd_model_field *f = qd_model_fields(&count);
    while (!f->option.key || strcmp(f->option.key, key) != 0)
        f++;
    return &f->option;
}

/* A size that becomes the option `ours` and has its limits. 0 after an error, so that sizes
 * computed from it stay small. */
static int64_t size_of(reader *r, const char *key, int64_t otherwise, const char *ours)
{
    int64_t value = otherwise, most = (int64_t)option_of(ours)->most;
    if (given(r, key))
        r->status = qd_json_get_int(r->document, r->root, key, &value);
    if (value < 0 || value > most)
        REFUSE(r, QD_USAGE, "%s: '%s' is %lld: it must be at most %lld (%s) and not negative", FILE_OF(r), key, (long long)value,
               (long long)most, ours);
    return r->status == QD_OK ? value : 0;
}

/* A key that may have a second name. */
static int64_t size_named(reader *r, const char *key, const char *other, int64_t otherwise, const char *ours)
{
    int64_t value = size_of(r, key, otherwise, ours);
    if (!other || !given(r, other))
        return value;
    int64_t second = size_of(r, other, otherwise, ours);
    if (given(r, key) && value != second)
        REFUSE(r, QD_USAGE, "%s: '%s' is %lld and '%s' is %lld, which are the same setting: keep the correct one", FILE_OF(r), key,
               (long long)value, other, (long long)second);
    return second;
}

static double number(reader *r, const char *key, double otherwise, const char *ours)
{
    double value = otherwise;
    const qd_option *o = option_of(ours);
    if (given(r, key))
        r->status = qd_json_get_double(r->document, r->root, key, &value);
    if (!(value >= o->least && value <= o->most))
        REFUSE(r, QD_USAGE, "%s: '%s' is %g: it must be from %g to %g (%s)", FILE_OF(r), key, value, o->least, o->most, ours);
    return r->status == QD_OK ? value : otherwise;
}

/* A number without an option: it must be 0, or only affects training. */
static double other_number(reader *r, const char *key, double otherwise)
{
    double value = otherwise;
    if (given(r, key))
        r->status = qd_json_get_double(r->document, r->root, key, &value);
    return r->status == QD_OK ? value : otherwise;
}

static bool flag(reader *r, const char *key, bool otherwise)
{
    bool value = otherwise;
    if (given(r, key))
        r->status = qd_json_get_bool(r->document, r->root, key, &value);
    return r->status == QD_OK ? value : otherwise;
}

static const char *text(reader *r, const char *key, const char *otherwise)
{
    const char *value = otherwise;
    if (given(r, key))
        r->status = qd_json_get_string(r->document, r->root, key, &value);
    return r->status == QD_OK ? value : otherwise;
}

/* A list or an object; NULL if it is missing, null or empty. */
static const qd_json_node *collection(reader *r, const char *key, qd_json_kind kind)
{
    const qd_json_node *node = member(r, key);
    if (!node || r->status != QD_OK)
        return NULL;
    r->status = qd_json_get_node(r->document, r->root, key, kind, &node);
    return r->status == QD_OK && qd_json_count(node) > 0 ? node : NULL;
}

/* A flag that must have the value our models implement. */
static void must_be(reader *r, const char *key, bool ours)
{
    if (flag(r, key, ours) != ours)
        REFUSE(r, QD_UNSUPPORTED, "%s: '%s' is %s: such models cannot be imported", FILE_OF(r), key, ours ? "false" : "true");
}

static void note_attention_dropout(reader *r, const char *key, double otherwise)
{
    double value = member(r, key) ? other_number(r, key, otherwise) : otherwise;
    if (r->status == QD_OK && value != 0.0)
        qd_strbuf_printf(r->notes, "%s was %g: attention has no dropout here, which only affects further training\n", key, value);
}

/* A size that may be derived from other sizes; 0: it is not. */
static int64_t follows(const qd_model_field *f, const qd_model *m)
{
    if (f->offset == offsetof(qd_model, kv_heads))
        return m->heads;
    if (f->offset == offsetof(qd_model, head_dim))
        return m->heads > 0 ? m->hidden / m->heads : 0;
    return f->offset == offsetof(qd_model, ffn) ? 4 * m->hidden : f->offset == offsetof(qd_model, moe.ffn) ? m->ffn : 0;
}

static void read_size(reader *r, const qd_model_field *f, const qd_hf_key *k, const qd_model *defaults, qd_model *m)
{
    int64_t own = follows(f, m), value = qd_field_whole(f, defaults);
    if (k->name) {
        /* null is allowed for sizes that the class derives, and for kv heads in every class. */
        bool open = value == 0, null = qd_json_member(r->root, k->name) && !member(r, k->name);
        bool left = null && (open || f->offset == offsetof(qd_model, kv_heads));
        value = left ? own : size_named(r, k->name, k->other, open ? own : value, f->option.key);
        qd_field_set_whole(f, value, m);
    } else if (own > 0) {
        qd_field_set_whole(f, own, m);
    }
}

/* Sizes are read in the order of the table, in which none depends on a later one. */
static void read_fields(reader *r, qd_hf_config *c)
{
    int count;
    const qd_model_field *fields = qd_model_fields(&count);
    const qd_model *defaults = &c->family->defaults;
    for (const qd_model_field *f = fields; f < fields + count; f++) {
        const qd_hf_key k = qd_hf_key_of(c->family, f);
        if (!qd_field_counts(f, defaults))
            continue;
        if (f->kind == QD_FIELD_INT || f->kind == QD_FIELD_SIZE)
            read_size(r, f, &k, defaults, &c->model);
        else if (f->kind == QD_FIELD_REAL && k.name)
            qd_field_set_real(f, number(r, k.name, qd_field_real(f, defaults), f->option.key), &c->model);
        else if (k.name)
            qd_field_set_whole(f, flag(r, k.name, qd_field_whole(f, defaults) != 0), &c->model);
    }
    c->positions = c->model.max_seq;
    if (c->positions < 1)
        REFUSE(r, QD_USAGE, "%s: the model has no positions ('%s'): there must be at least 1", FILE_OF(r),
               c->family->arch == QD_ARCH_GPT2 ? "n_positions" : "max_position_embeddings");
}

static void read_gpt2(reader *r, qd_hf_config *c)
{
    qd_model *m = &c->model;
    if (m->heads < 1 || m->hidden % m->heads != 0)
        REFUSE(r, QD_USAGE, "%s: 'n_embd' (%lld) is not a multiple of 'n_head' (%d)", FILE_OF(r), (long long)m->hidden, m->heads);
    must_be(r, "scale_attn_weights", true);
    must_be(r, "scale_attn_by_inverse_layer_idx", false);
    must_be(r, "add_cross_attention", false);
    const char *activation = text(r, "activation_function", "gelu_new");
    if (strcmp(activation, "gelu") == 0)
        m->activation = QD_ACT_GELU;
    else if (strcmp(activation, "gelu_new") != 0 && strcmp(activation, "gelu_pytorch_tanh") != 0)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'activation_function' is '%s': only gelu_new, gelu_pytorch_tanh and gelu can be imported",
               FILE_OF(r), activation);
    double embedding = other_number(r, "embd_pdrop", 0.1);
    if (r->status == QD_OK && embedding != m->dropout)
        qd_strbuf_printf(r->notes, "model.dropout is resid_pdrop (%g); embd_pdrop was %g\n", m->dropout, embedding);
    note_attention_dropout(r, "attn_pdrop", 0.1);
}

/* A number that may be given next to rope_scaling or rope_parameters and inside it. */
static double in_either(reader *r, reader *inner, const char *key, double otherwise, const char *ours)
{
    double outside = number(r, key, otherwise, ours), inside = number(inner, key, outside, ours);
    if (given(r, key) && inner->status == QD_OK && inside != outside)
        REFUSE(inner, QD_USAGE, "%s: '%s' is %g, and %g inside the rotary parameters: keep the correct one", FILE_OF(r), key,
               outside, inside);
    return inside;
}

static const char *rope_kind(reader *s, const char *where)
{
    const char *kind = text(s, "rope_type", NULL), *old = text(s, "type", NULL);
    if (kind && old && strcmp(kind, old) != 0)
        REFUSE(s, QD_USAGE, "%s: '%s' has the 'rope_type' '%s' and the 'type' '%s': keep the correct one", FILE_OF(s), where, kind,
               old);
    if (!kind && !old && member(s, "factor"))
        REFUSE(s, QD_USAGE, "%s: '%s' has a 'factor' but no 'rope_type'", FILE_OF(s), where);
    return kind ? kind : old ? old : "default";
}

static double needed(reader *s, const char *where, const char *key, const char *ours)
{
    if (!given(s, key))
        REFUSE(s, QD_USAGE, "%s: '%s' has a kind that needs '%s', which is missing", FILE_OF(s), where, key);
    return number(s, key, option_of(ours)->least, ours);
}

static void read_original(reader *r, reader *s, const char *where, const qd_hf_family *f, int64_t positions, qd_rope *rope)
{
    static const char original[] = "original_max_position_embeddings", ours[] = "model.rope_original_seq";
    /* transformers uses the model's positions if the original training length is not given, but in
     * Phi-3 the value outside of the rotary parameters, whose default is 4096. */
    int64_t outside = size_of(r, original, f->partial ? 4096 : positions, ours);
    rope->original_seq = size_of(s, original, outside, ours);
    if ((given(r, original) || f->partial) && rope->original_seq != outside)
        REFUSE(s, QD_USAGE, "%s: '%s' is %lld, and %lld inside '%s': keep the correct one", FILE_OF(r), original,
               (long long)outside, (long long)rope->original_seq, where);
}

static void read_llama3(reader *s, const char *where, qd_rope *rope)
{
    rope->scaling = QD_ROPE_LLAMA3;
    rope->low_factor = needed(s, where, "low_freq_factor", "model.rope_low_factor");
    rope->high_factor = needed(s, where, "high_freq_factor", "model.rope_high_factor");
}

/* A number for which null and 0 stand for the default. */
static double optional(reader *s, const char *key, double otherwise, const char *ours)
{
    double value = member(s, key) ? other_number(s, key, 0.0) : 0.0;
    return value == 0.0 ? otherwise : number(s, key, otherwise, ours);
}

static void read_yarn(reader *s, bool latent, qd_rope *rope)
{
    rope->scaling = QD_ROPE_YARN;
    rope->beta_fast = optional(s, "beta_fast", 32.0, "model.rope_beta_fast");
    rope->beta_slow = optional(s, "beta_slow", 1.0, "model.rope_beta_slow");
    rope->truncate = flag(s, "truncate", true);
    double one = member(s, "mscale") ? other_number(s, "mscale", 0.0) : 0.0;
    double all = member(s, "mscale_all_dim") ? other_number(s, "mscale_all_dim", 0.0) : 0.0;
    if (latent && all != 0.0) { /* also a factor on scores */
        rope->mscale = optional(s, "mscale", 0.0, "model.rope_mscale");
        rope->mscale_all_dim = optional(s, "mscale_all_dim", 0.0, "model.rope_mscale_all_dim");
    }
    if (member(s, "attention_factor")) {
        rope->attention_factor = number(s, "attention_factor", 0.0, "model.rope_attention_factor");
        if (!(rope->attention_factor > 0.0))
            REFUSE(s, QD_USAGE, "%s: 'attention_factor' is %g: it must be above 0", FILE_OF(s), rope->attention_factor);
    } else if (!latent && one != 0.0 && all != 0.0) {
        rope->attention_factor = (0.1 * one * log(rope->factor) + 1.0) / (0.1 * all * log(rope->factor) + 1.0);
        if (!(rope->attention_factor > 0.0 && rope->attention_factor <= option_of("model.rope_attention_factor")->most))
            REFUSE(s, QD_USAGE, "%s: 'mscale' and 'mscale_all_dim' give an attention factor of %g", FILE_OF(s), rope->attention_factor);
    }
}

/* A list of numbers with the limits of the option `ours`. */
static void read_numbers(reader *s, const char *where, const char *key, const char *ours, qd_number_list *list)
{
    const qd_json_node *node = collection(s, key, QD_JSON_LIST);
    const qd_option *o = option_of(ours);
    const size_t count = node ? qd_json_count(node) : 0;
    if (count == 0 || count > QD_NUMBERS_MOST)
        REFUSE(s, QD_USAGE, "%s: '%s' needs '%s', a list with one number for each pair of rotated elements of a head", FILE_OF(s), where,
               key);
    for (size_t i = 0; s->status == QD_OK && i < count; i++) {
        double *value = &list->at[list->count++];
        if (!qd_json_as_double(qd_json_item(node, i), value) || !(*value >= o->least && *value <= o->most))
            REFUSE(s, QD_USAGE, "%s: number %zu of '%s' must be from %g to %g (%s)", FILE_OF(s), i + 1, key, o->least, o->most, ours);
    }
}

static void read_longrope(reader *r, reader *s, const char *where, const qd_hf_family *f, int64_t positions, qd_rope *rope)
{
    rope->scaling = QD_ROPE_LONG;
    read_numbers(s, where, "short_factor", "model.rope_short_factor", &rope->short_factor);
    read_numbers(s, where, "long_factor", "model.rope_long_factor", &rope->long_factor);
    read_original(r, s, where, f, positions, rope);
    rope->factor = rope->original_seq > 0 ? fmax(1.0, (double)positions / (double)rope->original_seq) : 1.0;
    if (member(s, "factor"))
        rope->factor = number(s, "factor", 1.0, "model.rope_factor");
    if (member(s, "attention_factor"))
        rope->attention_factor = number(s, "attention_factor", 0.0, "model.rope_attention_factor");
    if (member(s, "attention_factor") && !(rope->attention_factor > 0.0))
        REFUSE(s, QD_USAGE, "%s: 'attention_factor' is %g: it must be above 0", FILE_OF(s), rope->attention_factor);
}

/* Kind and scaling of an object of rotary parameters, which may be missing. */
static void read_scaling(reader *r, reader *s, const char *where, const qd_hf_family *f, int64_t positions, qd_rope *rope)
{
    const char *kind = rope_kind(s, where);
    const bool latent = f->arch == QD_ARCH_DEEPSEEK;
    if (f->partial && (strcmp(kind, "su") == 0 || strcmp(kind, "yarn") == 0))
        kind = "longrope"; /* its name in older folders of Phi-3 */
    double outside = other_number(r, "partial_rotary_factor", 1.0), part = other_number(s, "partial_rotary_factor", outside);
    rope->fraction = part; /* the caller knows whether the family rotates parts */
    const bool llama3 = strcmp(kind, "llama3") == 0, yarn = strcmp(kind, "yarn") == 0, linear = strcmp(kind, "linear") == 0,
               dynamic = strcmp(kind, "dynamic") == 0, longrope = strcmp(kind, "longrope") == 0;
    if (llama3 || yarn || linear || dynamic)
        rope->factor = needed(s, where, "factor", "model.rope_factor");
    else if (strcmp(kind, "default") != 0 && !longrope)
        REFUSE(s, QD_UNSUPPORTED, "%s: '%s' is of the kind '%s': only 'default', 'linear', 'dynamic', 'llama3', 'yarn' and 'longrope' can "
                                  "be imported", FILE_OF(r), where, kind);
    if (linear)
        rope->scaling = QD_ROPE_LINEAR;
    if (dynamic) { /* scales from the model's positions on, whatever the original length */
        rope->scaling = QD_ROPE_DYNAMIC;
        rope->original_seq = positions;
    }
    if (llama3)
        read_llama3(s, where, rope);
    if (yarn)
        read_yarn(s, latent, rope);
    else if (latent && member(s, "mscale_all_dim") && strcmp(kind, "default") != 0)
        REFUSE(s, QD_UNSUPPORTED, "%s: '%s' has 'mscale_all_dim' and is of the kind '%s': it can be imported with 'yarn' only", FILE_OF(r),
               where, kind);
    if (llama3 || yarn)
        read_original(r, s, where, f, positions, rope);
    if (longrope)
        read_longrope(r, s, where, f, positions, rope);
    if (r->status == QD_OK)
        r->status = s->status;
}

/* transformers ignores values next to the objects for types of layers. They are refused unless they
 * say the same, or both objects are given. */
static void check_beside_types(reader *r, reader *p, const char *key, bool both, double base, double local_base)
{
    double theta = other_number(p, "rope_theta", base);
    const bool same = strcmp(rope_kind(p, "rope_parameters"), "default") == 0 && theta == base && theta == local_base;
    if (p->status == QD_OK && (both || same))
        qd_strbuf_printf(r->notes, "rope_parameters has %s next to full_attention and sliding_attention: transformers ignores it\n", key);
    else
        REFUSE(r, QD_USAGE, "%s: 'rope_parameters' has '%s', which transformers ignores: it must have 'full_attention' and "
                            "'sliding_attention', with one object of parameters each", FILE_OF(r), key);
}

/* Families with an object for each type of layers. Scaling in the older form, rope_scaling, is that
 * of layers without a window. */
static void read_rope_by_type(reader *r, const qd_hf_family *f, const qd_json_node *parameters, const qd_json_node *scaling,
                              int64_t positions, qd_model *m)
{
    static const char *const types[] = {"full_attention", "sliding_attention"};
    const char *key, *beside = NULL;
    const qd_json_node *value;
    reader p = {r->document, parameters, r->notes, QD_OK};
    if (parameters)
        for (qd_json_iterator it = qd_json_begin(parameters); qd_json_next(&it, &key, &value);)
            if (strcmp(key, types[0]) != 0 && strcmp(key, types[1]) != 0)
                beside = key;
    reader full = {r->document, parameters ? collection(&p, types[0], QD_JSON_OBJECT) : scaling, r->notes, QD_OK};
    reader sliding = {r->document, parameters ? collection(&p, types[1], QD_JSON_OBJECT) : NULL, r->notes, p.status};
    double base = f->defaults.rope.base, local_base = f->defaults.rope.local_base;
    qd_model local = *m;
    m->rope.base = in_either(r, &full, "rope_theta", base, "model.rope_base");
    read_scaling(r, &full, parameters ? types[0] : "rope_scaling", f, positions, &m->rope);
    /* Without an object for them, versions of transformers disagree about layers with windows. */
    if (base == local_base && m->rope.base != base && m->window > 0 && !given(&sliding, "rope_theta"))
        REFUSE(r, QD_USAGE, "%s: 'rope_theta' is %g for layers without windows only: set 'rope_parameters', with 'full_attention' and "
                            "'sliding_attention'", FILE_OF(r), m->rope.base);
    local_base = number(r, "rope_local_base_freq", local_base, "model.rope_local_base");
    local.rope.base = number(&sliding, "rope_theta", local_base, "model.rope_base");
    read_scaling(r, &sliding, types[1], f, positions, &local.rope);
    if (beside && r->status == QD_OK)
        check_beside_types(r, &p, beside, full.root && sliding.root, m->rope.base, local.rope.base);
    if (local.rope.fraction != 1.0)
        m->rope.fraction = local.rope.fraction; /* the caller refuses it */
    if (m->window == 0 || qd_model_equal(m, &local))
        return;
    if (local.rope.scaling != QD_ROPE_NONE)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'rope_parameters' scales 'sliding_attention', other than 'full_attention': such models cannot be "
                                  "imported", FILE_OF(r));
    m->rope.local_base = local.rope.base;
}

/* Newer folders store base and scaling in rope_parameters, older ones in rope_theta and
 * rope_scaling. */
static void read_rope_parameters(reader *r, const qd_hf_family *f, int64_t positions, qd_model *m)
{
    const qd_json_node *parameters = collection(r, "rope_parameters", QD_JSON_OBJECT);
    const qd_json_node *scaling = collection(r, "rope_scaling", QD_JSON_OBJECT);
    const char *where = parameters ? "rope_parameters" : "rope_scaling", *key;
    const qd_json_node *value;
    const qd_rope *own = &f->defaults.rope;
    if (!parameters && !scaling && own->scaling == QD_ROPE_YARN) {
        m->rope.scaling = own->scaling;
        m->rope.factor = own->factor;
        m->rope.beta_fast = own->beta_fast;
        m->rope.beta_slow = own->beta_slow;
        m->rope.truncate = own->truncate;
        m->rope.original_seq = own->original_seq;
    }
    if (parameters && scaling)
        REFUSE(r, QD_USAGE, "%s: 'rope_scaling' and 'rope_parameters' are both set: keep the correct one", FILE_OF(r));
    if (r->status != QD_OK)
        return;
    if (f->defaults.rope.local_base > 0.0) {
        read_rope_by_type(r, f, parameters, scaling, positions, m);
        return;
    }
    reader s = {r->document, parameters ? parameters : scaling, r->notes, QD_OK};
    if (s.root)
        for (qd_json_iterator it = qd_json_begin(s.root); qd_json_next(&it, &key, &value);)
            if (qd_json_kind_of(value) == QD_JSON_OBJECT)
                REFUSE(&s, QD_UNSUPPORTED, "%s: '%s' has separate parameters for '%s': layers that differ cannot be imported",
                       FILE_OF(r), where, key);
    m->rope.base = in_either(r, &s, "rope_theta", f->defaults.rope.base, "model.rope_base");
    read_scaling(r, &s, where, f, positions, &m->rope);
}

static void read_rope(reader *r, const qd_hf_family *f, int64_t positions, qd_model *m)
{
    read_rope_parameters(r, f, positions, m);
    if (!(m->rope.fraction > 0.0 && m->rope.fraction <= 1.0))
        REFUSE(r, QD_USAGE, "%s: 'partial_rotary_factor' is %g: it must be above 0 and at most 1 (model.rope_fraction)", FILE_OF(r),
               m->rope.fraction);
    if (m->rope.fraction != 1.0 && !f->partial)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'partial_rotary_factor' is %g: %s of transformers rotates whole heads, others cannot be imported",
               FILE_OF(r), m->rope.fraction, f->kind);
    if (f->partial && m->rope.scaling != QD_ROPE_NONE && m->rope.scaling != QD_ROPE_LONG)
        REFUSE(r, QD_UNSUPPORTED, "%s: '%s' with rotary embeddings that are scaled in this way cannot be imported, only with those of the "
                                  "kinds 'default' and 'longrope'", FILE_OF(r), f->kind);
    const qd_number_list *lists[] = {&m->rope.short_factor, &m->rope.long_factor};
    for (int i = 0; i < 2 && r->status == QD_OK && m->rope.scaling == QD_ROPE_LONG; i++)
        if (lists[i]->count != qd_rope_dims(m) / 2)
            REFUSE(r, QD_USAGE, "%s: '%s' has %lld numbers: it must have %d, one for each pair of rotated elements of a head", FILE_OF(r),
                   i ? "long_factor" : "short_factor", (long long)lists[i]->count, qd_rope_dims(m) / 2);
}

/* Whether layer_types gives a layer a window. */
static bool is_sliding(reader *r, const qd_json_node *types, int layer)
{
    const char *type = qd_json_as_string(qd_json_item(types, (size_t)layer));
    bool sliding = type && strcmp(type, "sliding_attention") == 0;
    if (!sliding && (!type || strcmp(type, "full_attention") != 0))
        REFUSE(r, QD_UNSUPPORTED, "%s: 'layer_types' has '%s': only full_attention and sliding_attention can be imported", FILE_OF(r),
               type ? type : "?");
    return sliding;
}

/* Finds window_from and full_every that give the layers the windows of the list. False: there are
 * none. */
static bool fits_types(reader *r, const qd_json_node *types, qd_model *m)
{
    m->window_from = 0;
    while (m->window_from < m->layers && !is_sliding(r, types, m->window_from))
        m->window_from++;
    for (m->full_every = 0; m->full_every <= m->layers; m->full_every += m->full_every == 0 ? 2 : 1) {
        int layer = 0;
        while (layer < m->layers && is_sliding(r, types, layer) == qd_model_has_window(m, layer))
            layer++;
        if (layer == m->layers)
            return true;
    }
    return false;
}

/* Which layers have the window: those of layer_types, or by the rule of the family. */
static void read_layer_types(reader *r, const qd_hf_family *f, qd_model *m)
{
    const qd_json_node *types = collection(r, "layer_types", QD_JSON_LIST);
    if (f->window == QD_HF_WINDOW_SWITCH && m->window > 0)
        m->window_from = (int)size_of(r, "max_window_layers", 28, "model.window_from");
    if (f->window == QD_HF_WINDOW_TYPES && !types) {
        m->full_every = f->defaults.full_every;
        if (f->arch == QD_ARCH_GEMMA3)
            m->full_every = (int)size_of(r, "sliding_window_pattern", m->full_every, "model.full_every");
        if (m->full_every < 1)
            REFUSE(r, QD_USAGE, "%s: 'sliding_window_pattern' is 0: it must be at least 1", FILE_OF(r));
        if (m->full_every == 1) /* every layer is full */
            m->window = 0;
        if (m->full_every > m->layers)
            m->full_every = 0;
    }
    if (f->window == QD_HF_WINDOW_SWITCH_EVEN && m->window > 0 && !types) {
        int64_t below = size_of(r, "max_window_layers", 28, "model.layers");
        m->full_every = m->layers > 1 ? 2 : 0;
        if (below < (m->layers - 1) / 2 * 2 + 1)
            REFUSE(r, QD_UNSUPPORTED, "%s: 'max_window_layers' is %lld: windows in every second layer, but not in all of them, cannot be "
                                      "imported", FILE_OF(r), (long long)below);
    }
    if (f->window == QD_HF_WINDOW_SWITCH_LISTED && m->window > 0 && !types)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'use_sliding_window' without 'layer_types': windows in layers without positions only cannot be "
                                  "imported", FILE_OF(r));
    if (types && r->status == QD_OK && qd_json_count(types) != (size_t)m->layers)
        REFUSE(r, QD_USAGE, "%s: 'layer_types' has %zu entries for %d layers", FILE_OF(r), qd_json_count(types), m->layers);
    if (types && r->status == QD_OK) {
        qd_model listed = *m;
        listed.window = m->window > 0 ? m->window : 1;
        bool fits = fits_types(r, types, &listed), none = listed.window_from == m->layers;
        /* Families without layer_types ignore it, and a window that is not set cannot be listed. */
        bool free = qd_hf_lists_windows(f) && m->window > 0;
        bool same = none ? m->window == 0 : m->window > 0 && m->window_from == listed.window_from && m->full_every == listed.full_every;
        if (!fits)
            REFUSE(r, QD_UNSUPPORTED, "%s: 'layer_types' gives windows (sliding_attention) to layers that are neither all from one on nor "
                                      "all but every n-th: such models cannot be imported", FILE_OF(r));
        if (!free && !same)
            REFUSE(r, QD_UNSUPPORTED, "%s: 'layer_types' does not match 'sliding_window': %s layers have sliding_attention in it",
                   FILE_OF(r), none ? "no" : "some");
        m->window_from = listed.window_from;
        m->full_every = listed.full_every;
    }
    if (m->window_from >= m->layers || m->window == 0)
        m->window = m->window_from = m->full_every = 0; /* no layer has it */
}

/* Sliding windows: their size, and the layers that have them. */
static void read_windows(reader *r, const qd_hf_family *f, qd_model *m)
{
    static const char key[] = "sliding_window";
    bool absent = !qd_json_member(r->root, key), off = f->window == QD_HF_WINDOW_NONE;
    if (qd_hf_switches_windows(f))
        off = !flag(r, "use_sliding_window", false);
    if (!off && (absent ? f->window_default > 0 : member(r, key) != NULL)) {
        m->window = size_of(r, key, f->window_default, "model.window");
        if (m->window < 1)
            REFUSE(r, QD_USAGE, "%s: '%s' is 0: it must be at least 1, or null for no window", FILE_OF(r), key);
    }
    read_layer_types(r, f, m);
}

/* A soft-cap; null: none. */
static double softcap(reader *r, const char *key, double otherwise, const char *ours)
{
    return qd_json_member(r->root, key) && !member(r, key) ? 0.0 : number(r, key, otherwise, ours);
}

static void read_gemma(reader *r, qd_model *m)
{
    const char *activation = text(r, "hidden_activation", "gelu_pytorch_tanh");
    if (strcmp(activation, "gelu") == 0)
        m->activation = QD_ACT_GEGLU;
    else if (strcmp(activation, "gelu_pytorch_tanh") != 0)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'hidden_activation' is '%s': only gelu_pytorch_tanh and gelu can be imported", FILE_OF(r),
               activation);
    double scalar = other_number(r, "query_pre_attn_scalar", 256.0);
    if (!(scalar > 0.0))
        REFUSE(r, QD_USAGE, "%s: 'query_pre_attn_scalar' is %g: it must be above 0", FILE_OF(r), scalar);
    m->score_scale = scalar > 0.0 && scalar != m->head_dim ? 1.0 / sqrt(scalar) : 0.0;
    const bool gemma3 = m->arch == QD_ARCH_GEMMA3;
    m->score_softcap = softcap(r, "attn_logit_softcapping", gemma3 ? 0.0 : 50.0, "model.score_softcap");
    m->logit_softcap = softcap(r, "final_logit_softcapping", gemma3 ? 0.0 : 30.0, "model.logit_softcap");
    if (gemma3 && m->score_softcap > 0.0) {
        qd_strbuf_printf(r->notes, "attn_logit_softcapping was %g, which Gemma 3 of transformers does not apply either\n",
                         m->score_softcap);
        m->score_softcap = 0.0;
    }
    if (member(r, "use_bidirectional_attention"))
        must_be(r, "use_bidirectional_attention", false);
}

/* Which layers have no rotary positions: those with 0 in no_rope_layers, or every n-th. */
static void read_layers_without_rope(reader *r, qd_model *m)
{
    const qd_json_node *list = collection(r, "no_rope_layers", QD_JSON_LIST);
    int every = (int)size_of(r, "no_rope_layer_interval", 4, "model.nope_every"), layer = 0;
    if (list && qd_json_count(list) < (size_t)m->layers)
        REFUSE(r, QD_USAGE, "%s: 'no_rope_layers' has %zu entries for %d layers", FILE_OF(r), qd_json_count(list), m->layers);
    if (list)
        every = 0;
    for (int i = 0; list && r->status == QD_OK && i < m->layers; i++) {
        int64_t rotated = -1;
        if (!qd_json_as_int(qd_json_item(list, (size_t)i), &rotated) || (rotated != 0 && rotated != 1))
            REFUSE(r, QD_USAGE, "%s: 'no_rope_layers' must list 0 or 1 for each layer", FILE_OF(r));
        every = rotated == 0 && every == 0 ? i + 1 : every; /* the first without */
    }
    if (!list && every == 0)
        REFUSE(r, QD_USAGE, "%s: 'no_rope_layer_interval' is 0: it must be at least 1", FILE_OF(r));
    m->rope.nope_every = every > m->layers ? 0 : every;
    for (int64_t rotated; list && r->status == QD_OK && layer < m->layers; layer++)
        if (qd_json_as_int(qd_json_item(list, (size_t)layer), &rotated) && qd_model_has_rope(m, layer) != (rotated == 1))
            REFUSE(r, QD_UNSUPPORTED, "%s: 'no_rope_layers' is 0 for layers that are not every n-th: such models cannot be imported",
                   FILE_OF(r));
}

static void read_llama(reader *r, qd_hf_config *c)
{
    qd_model *m = &c->model;
    const qd_hf_family *f = c->family;
    if (m->heads < 1)
        REFUSE(r, QD_USAGE, "%s: 'num_attention_heads' must be at least 1", FILE_OF(r));
    m->qk_norm = f->defaults.qk_norm;
    m->qk_over = f->defaults.qk_over;
    m->hf_type = f->defaults.hf_type;
    m->out_bias = f->attention_bias && flag(r, "attention_bias", f->defaults.out_bias);
    if (!qd_hf_has_key(f, "qkv_bias")) /* else it has been read */
        m->qkv_bias = f->defaults.qkv_bias || m->out_bias;
    m->mlp_bias = m->moe.logit_bias = f->stacked;
    if (f->mlp_bias)
        m->mlp_bias = flag(r, "mlp_bias", false);
    m->sinks = f->defaults.sinks;
    if (f->stacked)
        m->activation = f->defaults.activation;
    m->clip_qkv = f->clips && member(r, "clip_qkv") ? number(r, "clip_qkv", 0.0, "model.clip_qkv") : 0.0;
    const bool gemma = qd_model_is_gemma(m);
    const char *activation = gemma ? "silu" : text(r, "hidden_act", "silu");
    if (gemma)
        read_gemma(r, m);
    if (strcmp(activation, "silu") != 0)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'hidden_act' is '%s': only silu can be imported", FILE_OF(r), activation);
    note_attention_dropout(r, "attention_dropout", 0.0);
    if (f->partial && r->status == QD_OK && (other_number(r, "resid_pdrop", 0.0) != 0.0 || other_number(r, "embd_pdrop", 0.0) != 0.0))
        qd_strbuf_printf(r->notes, "resid_pdrop and embd_pdrop are not read: model.dropout is for further training\n");
    if (f->defaults.rope.nope_every > 0)
        read_layers_without_rope(r, m);
    read_windows(r, f, m);
    read_rope(r, f, c->positions, m);
}

/* Only the first blocks may be dense. */
static void read_dense_blocks(reader *r, qd_moe *e)
{
    const qd_json_node *list = collection(r, "mlp_only_layers", QD_JSON_LIST);
    if (size_of(r, "decoder_sparse_step", 1, "model.layers") != 1)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'decoder_sparse_step' is not 1: such models cannot be imported", FILE_OF(r));
    for (size_t i = 0; r->status == QD_OK && list && i < qd_json_count(list); i++) {
        int64_t layer = -1;
        if (!qd_json_as_int(qd_json_item(list, i), &layer) || layer != (int64_t)i)
            REFUSE(r, QD_UNSUPPORTED, "%s: 'mlp_only_layers' does not list the first layers: such models cannot be imported", FILE_OF(r));
        e->first_dense++;
    }
}

/* transformers adds router_aux_loss_coef · E · Σ over experts of F·P, where F and P are the choices
 * and the probabilities per token, averaged over the tokens of all layers, and only with
 * output_router_logits. We add aux_loss · Σ over layers of E / per_token · Σ F·P of the layer. At a
 * balanced load the first is per_token and the second the number of layers, and with one layer the
 * two are the same function, so the coefficient is multiplied by per_token / layers. With several
 * layers they differ in F, which is pooled over layers there and per layer here. */
static void read_balance(reader *r, const qd_hf_config *c, qd_moe *e)
{
    double theirs = number(r, "router_aux_loss_coef", c->family->balance_default > 0.0 ? c->family->balance_default : 0.001,
                           "model.aux_loss");
    int layers = qd_hf_expert_layers(&c->model);
    double ours = layers > 0 ? theirs * e->per_token / layers : 0.0;
    bool applied = flag(r, "output_router_logits", false);
    e->balance = QD_BALANCE_BATCH;
    e->aux_loss = applied ? ours : 0.0;
    if (r->status != QD_OK || ours == 0.0)
        return;
    if (!applied)
        qd_strbuf_printf(r->notes, "model.aux_loss is 0: transformers applies router_aux_loss_coef (%g) with output_router_logits only; "
                                   "model.aux_loss=%.6g would be equally strong\n", theirs, ours);
    else
        qd_strbuf_printf(r->notes, "model.aux_loss is %.6g: router_aux_loss_coef (%g) x %d experts per token / %d layers with experts%s\n",
                         ours, theirs, e->per_token, layers,
                         layers > 1 ? "; each layer is balanced separately, whereas transformers balances their sum" : "");
}

static void read_experts(reader *r, qd_hf_config *c)
{
    qd_moe *e = &c->model.moe;
    if (c->family->dense_layers)
        read_dense_blocks(r, e);
    if (other_number(r, "router_jitter_noise", 0.0) != 0.0)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'router_jitter_noise' is not 0: such models cannot be imported", FILE_OF(r));
    e->shared = c->family->defaults.moe.shared;
    e->shared_gate = c->family->defaults.moe.shared_gate;
    if (e->shared > 0 && e->shared_ffn < 1)
        REFUSE(r, QD_USAGE, "%s: 'shared_expert_intermediate_size' must be at least 1", FILE_OF(r));
    if (e->shared_ffn == e->shared * e->ffn)
        e->shared_ffn = 0; /* it follows from the others */
    if (e->experts < 1)
        REFUSE(r, QD_USAGE, "%s: the number of experts must be at least 1", FILE_OF(r));
    read_balance(r, c, e);
}

/* Words of the original configuration that the code of transformers does not read: it implements
 * this value of each. */
static void check_word(reader *r, const char *key, const char *ours)
{
    const char *word = text(r, key, ours);
    if (strcmp(word, ours) != 0)
        REFUSE(r, QD_UNSUPPORTED, "%s: '%s' is '%s': only %s can be imported", FILE_OF(r), key, word, ours);
}

/* The router of DeepSeek V2: the best experts of all, or of the groups with the best experts. */
static void read_greedy(reader *r, qd_moe *e)
{
    const char *method = member(r, "topk_method") ? text(r, "topk_method", "greedy") : "greedy";
    const bool grouped = strcmp(method, "group_limited_greedy") == 0;
    check_word(r, "scoring_func", "softmax");
    if (!grouped && strcmp(method, "greedy") != 0)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'topk_method' is '%s': only greedy and group_limited_greedy can be imported", FILE_OF(r), method);
    if (flag(r, "norm_topk_prob", false))
        REFUSE(r, QD_UNSUPPORTED, "%s: 'norm_topk_prob' is true, which DeepSeek V2 of transformers ignores: such models cannot be imported",
               FILE_OF(r));
    if (flag(r, "mlp_bias", false))
        REFUSE(r, QD_UNSUPPORTED, "%s: 'mlp_bias' is true: such models cannot be imported", FILE_OF(r));
    e->normalised = e->bias = false;
    if (!grouped)
        e->groups = e->top_groups = 1;
}

/* DeepSeek V2 and V3, Kimi K2. Routers of the latter two have a bias per expert, which transformers
 * does not train. */
static void read_deepseek(reader *r, qd_hf_config *c)
{
    qd_model *m = &c->model;
    qd_moe *e = &m->moe;
    bool compressed = member(r, "q_lora_rank") || !qd_json_member(r->root, "q_lora_rank"); /* null: not */
    m->q_lora_rank = compressed ? (int)size_of(r, "q_lora_rank", c->family->defaults.q_lora_rank, "model.q_lora_rank") : 0;
    if (compressed && m->q_lora_rank < 1)
        REFUSE(r, QD_USAGE, "%s: 'q_lora_rank' is 0: it must be at least 1, or null for queries that are not compressed", FILE_OF(r));
    m->head_dim = m->qk_nope_head_dim + m->qk_rope_head_dim;
    m->latent_norm_eps = c->family->defaults.latent_norm_eps; /* whatever rms_norm_eps is */
    if (flag(r, "attention_bias", false))
        REFUSE(r, QD_UNSUPPORTED, "%s: 'attention_bias' is true: such models cannot be imported", FILE_OF(r));
    if (size_of(r, "moe_layer_freq", 1, "model.layers") != 1)
        REFUSE(r, QD_UNSUPPORTED, "%s: 'moe_layer_freq' is not 1: such models cannot be imported", FILE_OF(r));
    if (e->experts < 1)
        REFUSE(r, QD_USAGE, "%s: the number of experts must be at least 1", FILE_OF(r));
    e->router = c->family->defaults.moe.router;
    if (e->router == QD_ROUTER_SOFTMAX) {
        read_greedy(r, e);
        return;
    }
    check_word(r, "scoring_func", "sigmoid");
    check_word(r, "topk_method", "noaux_tc");
    e->bias = true;
    e->bias_rate = 0.0;
    /* They add two scores to rank a group, which the paper derives from the other numbers. */
    e->group_best = e->groups > 1 && qd_moe_group_best(e) != 2 ? 2 : 0;
    c->predicted = (int)size_of(r, "num_nextn_predict_layers", 0, "model.layers");
    if (r->status != QD_OK)
        return;
    qd_strbuf_printf(r->notes, "model.router_bias_rate is 0: the biases of experts stay as they are; DeepSeek V3 was trained with 0.001\n");
}

static qd_status read_model(const qd_json *document, qd_strbuf *notes, qd_hf_config *c)
{
    reader r = {document, qd_json_root(document), notes, QD_OK};
    const char *kind;
    char kinds[256];
    QD_TRY(qd_json_get_string(document, r.root, "model_type", &kind));
    c->family = qd_hf_family_by_kind(kind);
    qd_hf_family_kinds(kinds, sizeof kinds);
    if (!c->family)
        return QD_FAIL(QD_UNSUPPORTED, "%s: 'model_type' is '%s': only %s can be imported", qd_json_name(document), kind, kinds);
    if (member(&r, "quantization_config"))
        QD_TRY(qd_hf_quantization_read(document, member(&r, "quantization_config"), c->family, &c->blocks));
    c->model = qd_model_default(c->family->arch);
    snprintf(c->model.name, sizeof c->model.name, "%s", kind);
    read_fields(&r, c);
    if (c->family->arch == QD_ARCH_GPT2)
        read_gpt2(&r, c);
    else
        read_llama(&r, c);
    if (qd_model_is_latent(&c->model))
        read_deepseek(&r, c);
    else if (qd_hf_has_experts(c->family))
        read_experts(&r, c);
    QD_TRY(r.status);
    qd_status status = qd_model_validate(&c->model);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "%s: ", qd_json_name(document));
}

qd_status qd_hf_config_read(const char *path, qd_strbuf *notes, qd_hf_config *config)
{
    qd_json *document = NULL;
    memset(config, 0, sizeof *config);
    QD_TRY(qd_json_load(path, &document));
    qd_status status = read_model(document, notes, config);
    qd_json_destroy(document);
    return status;
}
