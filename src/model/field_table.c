/* Walks the fields of a model: one loop for each operation on all of them. */
#include "model/field_table.h"
#include "model/family.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIND_INT QD_FIELD_INT
#define KIND_SIZE QD_FIELD_SIZE
#define KIND_REAL QD_FIELD_REAL
#define KIND_LIST QD_FIELD_LIST
#define KIND_FLAG QD_FIELD_FLAG
#define KIND_AUTO QD_FIELD_FLAG
#define KIND_ENUM(type) QD_FIELD_ENUM

/* GROUP is the member of qd_model that holds the fields, including the dot. */
#define WORD(x) WORD_(x)
#define WORD_(x) #x
#define ROW(kind_, name, key, fallback, limits, preset_, hf_, when_, help) \
    {.member = WORD(GROUP) #name, .offset = offsetof(qd_model, GROUP name), .kind = KIND_##kind_, \
     .option = QD_FIELD_OPTION(kind_, key, fallback, help, limits), .preset = preset_, .hf = hf_, \
     .when = QD_WHEN_##when_},
#define IMPLIED(kind_, name, words, preset_) \
    {.member = WORD(GROUP) #name, .offset = offsetof(qd_model, GROUP name), .kind = KIND_##kind_, .option = {.choices = words}, \
     .preset = preset_},

static const qd_model_field fields[] = {
#define GROUP
    QD_MODEL_SIZES(ROW, IMPLIED)
#undef GROUP
#define GROUP rope.
    QD_ROPE_FIELDS(ROW, IMPLIED)
#undef GROUP
#define GROUP
    QD_SCORE_FIELDS(ROW, IMPLIED)
    QD_LATENT_FIELDS(ROW, IMPLIED)
    QD_MODEL_KINDS(ROW, IMPLIED)
#undef GROUP
#define GROUP moe.
    QD_MOE_FIELDS(ROW, IMPLIED)
#undef GROUP
};
enum { FIELDS = sizeof fields / sizeof *fields };
_Static_assert(sizeof(qd_arch) == sizeof(int), "values of enums are copied as int");

/* Options of earlier versions: `key` sets both fields. */
typedef struct synonym {
    const char *option, *key, *set[2];
} synonym;
#define SYNONYM(key_, one, other, help) {"model." key_, key_, {one, other}},
static const synonym synonyms[] = {QD_MODEL_SYNONYMS(SYNONYM)};
enum { SYNONYMS = sizeof synonyms / sizeof *synonyms };

const qd_model_field *qd_model_fields(int *count)
{
    *count = FIELDS;
    return fields;
}

const char *qd_field_key(const qd_model_field *f)
{
    return f->option.key ? f->option.key + strlen("model.") : NULL;
}

const char *qd_field_preset(const qd_model_field *f)
{
    return f->preset ? f->preset : qd_field_key(f);
}

bool qd_field_counts(const qd_model_field *f, const qd_model *m)
{
    switch (f->when) {
    case QD_WHEN_SCALED: return m->rope.scaling != QD_ROPE_NONE;
    case QD_WHEN_LLAMA3: return m->rope.scaling == QD_ROPE_LLAMA3;
    case QD_WHEN_YARN: return m->rope.scaling == QD_ROPE_YARN;
    case QD_WHEN_LONGROPE: return m->rope.scaling == QD_ROPE_LONG;
    case QD_WHEN_LENGTHS: return m->rope.scaling == QD_ROPE_YARN || m->rope.scaling == QD_ROPE_LONG;
    case QD_WHEN_ORIGINAL: return m->rope.scaling != QD_ROPE_NONE && m->rope.scaling != QD_ROPE_LINEAR;
    case QD_WHEN_WINDOW: return m->window > 0;
    case QD_WHEN_EXPERTS: return m->moe.experts > 0;
    case QD_WHEN_QK_NORM: return m->qk_norm;
    case QD_WHEN_SHARED: return m->moe.experts > 0 && m->moe.shared > 0;
    case QD_WHEN_CLAMPED: return m->activation == QD_ACT_SWIGLU_CLAMPED;
    case QD_WHEN_LATENT: return qd_model_is_latent(m);
    case QD_WHEN_MTP: return qd_model_ahead(m) > 0;
    default: return true;
    }
}

int64_t qd_field_whole(const qd_model_field *f, const qd_model *m)
{
    const void *at = (const char *)m + f->offset;
    return f->kind == QD_FIELD_SIZE ? *(const int64_t *)at : f->kind == QD_FIELD_FLAG ? *(const bool *)at : *(const int *)at;
}

double qd_field_real(const qd_model_field *f, const qd_model *m)
{
    return *(const double *)(const void *)((const char *)m + f->offset);
}

const qd_number_list *qd_field_list(const qd_model_field *f, const qd_model *m)
{
    return (const qd_number_list *)(const void *)((const char *)m + f->offset);
}

void qd_field_set_whole(const qd_model_field *f, int64_t value, qd_model *m)
{
    void *at = (char *)m + f->offset;
    if (f->kind == QD_FIELD_SIZE)
        *(int64_t *)at = value;
    else if (f->kind == QD_FIELD_FLAG)
        *(bool *)at = value != 0;
    else
        *(int *)at = (int)value;
}

void qd_field_set_real(const qd_model_field *f, double value, qd_model *m)
{
    *(double *)(void *)((char *)m + f->offset) = value;
}

bool qd_field_set_list(const qd_model_field *f, const double *values, size_t count, qd_model *m)
{
    qd_number_list list = {0};
    if (count > QD_NUMBERS_MOST)
        return false;
    for (; (size_t)list.count < count; list.count++)
        list.at[list.count] = values[list.count];
    *(qd_number_list *)(void *)((char *)m + f->offset) = list;
    return true;
}

/* The words of an enum, without auto. */
static const char *words_of(const qd_model_field *f)
{
    return f->option.choices + (strncmp(f->option.choices, "auto|", 5) == 0 ? 5 : 0);
}

static int word_index(const char *words, const char *text)
{
    size_t length = strlen(text);
    for (int i = 0;; i++) {
        size_t here = strcspn(words, "|");
        if (here == length && memcmp(words, text, length) == 0)
            return i;
        if (words[here] == '\0')
            return -1;
        words += here + 1;
    }
}

static void list_text(const qd_number_list *list, char text[QD_FIELD_TEXT])
{
    size_t used = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < list->count; i++) {
        if (i > 0)
            text[used++] = ',';
        qd_double_shortest(list->at[i], text + used);
        used += strlen(text + used);
    }
}

/* The reverse; false: it is not a list of numbers, or too long. */
static bool set_list_text(const qd_model_field *f, const char *text, qd_model *m)
{
    double values[QD_NUMBERS_MOST];
    size_t count = 0;
    for (char *end; *text; text = end + (*end == ',')) {
        if (count == QD_NUMBERS_MOST)
            return false;
        values[count++] = qd_double_parse(text, &end);
        if (end == text || (*end != '\0' && *end != ',') || (*end == ',' && end[1] == '\0'))
            return false;
    }
    return qd_field_set_list(f, values, count, m);
}

void qd_field_text(const qd_model_field *f, const qd_model *m, char text[QD_FIELD_TEXT])
{
    int64_t value = f->kind == QD_FIELD_REAL || f->kind == QD_FIELD_LIST ? 0 : qd_field_whole(f, m);
    if (f->kind == QD_FIELD_LIST) {
        list_text(qd_field_list(f, m), text);
    } else if (f->kind == QD_FIELD_REAL) {
        qd_double_shortest(qd_field_real(f, m), text);
    } else if (f->kind == QD_FIELD_FLAG) {
        snprintf(text, QD_FIELD_TEXT, "%s", value ? "true" : "false");
    } else if (f->kind == QD_FIELD_ENUM) {
        const char *word = words_of(f);
        for (; value > 0; value--)
            word += strcspn(word, "|") + 1;
        snprintf(text, QD_FIELD_TEXT, "%.*s", (int)strcspn(word, "|"), word);
    } else {
        snprintf(text, QD_FIELD_TEXT, "%lld", (long long)value);
    }
}

bool qd_field_set_text(const qd_model_field *f, const char *text, qd_model *m)
{
    char *end = NULL;
    int64_t value = 0;
    if (strcmp(text, "auto") == 0)
        return true;
    if (f->kind == QD_FIELD_LIST)
        return set_list_text(f, text, m);
    if (f->kind == QD_FIELD_REAL) {
        double real = strtod(text, &end);
        bool number = end != text && *end == '\0';
        qd_field_set_real(f, number ? real : qd_field_real(f, m), m);
        return number;
    }
    if (f->kind == QD_FIELD_FLAG || f->kind == QD_FIELD_ENUM)
        value = word_index(f->kind == QD_FIELD_FLAG ? "false|true" : words_of(f), text);
    else
        value = strtoll(text, &end, 10);
    if (value < 0 || (end && (end == text || *end != '\0')))
        return false;
    qd_field_set_whole(f, value, m);
    return true;
}

static const qd_model_field *field_of(const char *key)
{
    const qd_model_field *f = fields;
    while (!f->option.key || strcmp(qd_field_key(f), key) != 0)
        f++;
    return f;
}

static qd_status take_synonyms(const qd_options *o, qd_model *m)
{
    for (const synonym *s = synonyms; s < synonyms + SYNONYMS; s++) {
        const char *value = qd_options_string(o, s->option);
        for (int i = 0; i < 2 && strcmp(value, "auto") != 0; i++) {
            const qd_model_field *f = field_of(s->set[i]);
            const char *own = qd_options_string(o, f->option.key);
            if (strcmp(own, "auto") != 0 && strcmp(own, value) != 0)
                return QD_FAIL(QD_USAGE, "%s is %s and %s is %s: the first is the old name of model.%s and model.%s, remove it",
                               s->option, value, f->option.key, own, s->set[0], s->set[1]);
            qd_field_set_text(f, value, m);
        }
    }
    return QD_OK;
}

static qd_status take_list(const qd_options *o, const qd_model_field *f, qd_model *m)
{
    const double *values;
    int count = qd_options_float_list(o, f->option.key, &values);
    return qd_field_set_list(f, values, (size_t)count, m)
               ? QD_OK
               : QD_FAIL(QD_USAGE, "%s has %d numbers: there can be at most %d", f->option.key, count, QD_NUMBERS_MOST);
}

qd_status qd_model_take(const qd_options *o, bool always, qd_model *m)
{
    for (const qd_model_field *f = fields; f < fields + FIELDS; f++) {
        const char *key = f->option.key;
        if (!key || !(always || qd_options_is_set(o, key)))
            continue;
        if (f->option.type == QD_OPTION_INT)
            qd_field_set_whole(f, qd_options_int(o, key), m);
        else if (f->option.type == QD_OPTION_FLOAT)
            qd_field_set_real(f, qd_options_float(o, key), m);
        else if (f->option.type == QD_OPTION_FLOAT_LIST)
            QD_TRY(take_list(o, f, m));
        else if (f->option.type == QD_OPTION_BOOL)
            qd_field_set_whole(f, qd_options_bool(o, key), m);
        else
            qd_field_set_text(f, qd_options_string(o, key), m);
    }
    return take_synonyms(o, m);
}

/* Replaces a preset by its dimensions, so that a saved file keeps its meaning when presets
 * change. */
qd_status qd_model_put(const qd_model *m, qd_options *o)
{
    char text[QD_FIELD_TEXT];
    QD_TRY(qd_options_resolve(o, "model.preset", ""));
    for (const qd_model_field *f = fields; f < fields + FIELDS; f++) {
        if (!f->option.key || !qd_field_counts(f, m))
            continue;
        qd_field_text(f, m, text);
        QD_TRY(qd_options_resolve(o, f->option.key, text));
    }
    for (const synonym *s = synonyms; s < synonyms + SYNONYMS; s++) {
        QD_TRY(qd_options_resolve(o, s->option, "auto"));
        qd_options_leave_out(o, s->option);
    }
    return QD_OK;
}

static qd_status read_list(const qd_json *d, const qd_json_node *object, const qd_model_field *f, const char *key, qd_model *m)
{
    const qd_json_node *list;
    double values[QD_NUMBERS_MOST];
    QD_TRY(qd_json_get_node(d, object, key, QD_JSON_LIST, &list));
    size_t count = qd_json_count(list), i = 0;
    while (i < count && i < QD_NUMBERS_MOST && qd_json_as_double(qd_json_item(list, i), &values[i]))
        i++;
    if (i < count)
        return QD_FAIL(QD_USAGE, "%s: '%s' must be a list of at most %d numbers", qd_json_name(d), key, QD_NUMBERS_MOST);
    qd_field_set_list(f, values, count, m);
    return QD_OK;
}

static qd_status read_field(const qd_json *d, const qd_json_node *object, const qd_model_field *f, const char *key, qd_model *m)
{
    const qd_json_node *node = qd_json_member(object, key);
    int64_t whole = 0;
    double real = 0.0;
    bool flag = false;
    const char *word = NULL;
    if (!node || qd_json_kind_of(node) == QD_JSON_NULL)
        return QD_OK;
    if (f->kind == QD_FIELD_LIST)
        return read_list(d, object, f, key, m);
    if (f->kind == QD_FIELD_REAL) {
        QD_TRY(qd_json_get_double(d, object, key, &real));
        qd_field_set_real(f, real, m);
    } else if (f->kind == QD_FIELD_ENUM) {
        QD_TRY(qd_json_get_string(d, object, key, &word));
        if (!qd_field_set_text(f, word, m))
            return QD_FAIL(QD_USAGE, "%s: '%s' is '%s': it must be one of %s", qd_json_name(d), key, word, words_of(f));
    } else if (f->kind == QD_FIELD_FLAG) {
        QD_TRY(qd_json_get_bool(d, object, key, &flag));
        qd_field_set_whole(f, flag, m);
    } else {
        QD_TRY(qd_json_get_int(d, object, key, &whole));
        qd_field_set_whole(f, whole, m);
    }
    return QD_OK;
}

static qd_status read_synonyms(const qd_json *d, const qd_json_node *object, qd_model *m)
{
    for (const synonym *s = synonyms; s < synonyms + SYNONYMS; s++)
        for (int i = 0; i < 2; i++) {
            bool both, own;
            const qd_json_node *other = qd_json_member(object, s->set[i]);
            QD_TRY(read_field(d, object, field_of(s->set[i]), s->key, m));
            if (qd_json_as_bool(qd_json_member(object, s->key), &both) && qd_json_as_bool(other, &own) && both != own)
                return QD_FAIL(QD_USAGE, "%s: '%s' and '%s' differ: the first is the old name of '%s' and '%s', remove it",
                               qd_json_name(d), s->key, s->set[i], s->set[0], s->set[1]);
        }
    return QD_OK;
}

qd_status qd_model_read(const qd_json *d, const qd_json_node *object, qd_model *m)
{
    QD_TRY(read_synonyms(d, object, m));
    for (const qd_model_field *f = fields; f < fields + FIELDS; f++) {
        const char *key = qd_field_preset(f), *point = strchr(key, '.');
        char outer[32];
        snprintf(outer, sizeof outer, "%.*s", point ? (int)(point - key) : 0, key);
        QD_TRY(read_field(d, point ? qd_json_member(object, outer) : object, f, point ? point + 1 : key, m));
    }
    return QD_OK;
}

static bool same_value(const qd_model_field *f, const qd_model *a, const qd_model *b)
{
    if (f->kind == QD_FIELD_REAL)
        return qd_field_real(f, a) == qd_field_real(f, b);
    if (f->kind != QD_FIELD_LIST)
        return qd_field_whole(f, a) == qd_field_whole(f, b);
    const qd_number_list *one = qd_field_list(f, a), *other = qd_field_list(f, b);
    bool same = one->count == other->count;
    for (int64_t i = 0; same && i < one->count; i++)
        same = one->at[i] == other->at[i];
    return same;
}

bool qd_model_equal(const qd_model *a, const qd_model *b)
{
    for (const qd_model_field *f = fields; f < fields + FIELDS; f++) {
        if (!qd_field_counts(f, a) && !qd_field_counts(f, b))
            continue;
        if (!same_value(f, a, b))
            return false;
    }
    return true;
}

qd_model qd_model_default(qd_arch arch)
{
    qd_model m = {0};
    for (const qd_model_field *f = fields; f < fields + FIELDS; f++)
        if (f->option.key)
            qd_field_set_text(f, f->option.fallback, &m);
    /* A preset or a checkpoint folder must set these; 0 is rejected. */
    m.hidden = m.vocab = m.layers = m.heads = m.moe.per_token = 0;
    m.arch = arch;
    qd_family_of(&m)->defaults(&m);
    return m;
}
