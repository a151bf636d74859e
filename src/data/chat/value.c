/* Values: construction, truth, equality and order as in Python, and their conversion from JSON. */
#include "data/chat/chat_impl.h"

#include <string.h>

enum { MOST_DATA_DEPTH = 100 }; /* of nested lists and dicts */

qd_chat_value qd_chat_literal(const char *text)
{
    return qd_chat_string(text, strlen(text));
}

qd_chat_value qd_chat_undefined(const char *name, size_t length, qd_chat_type owner)
{
    return (qd_chat_value){.type = QD_CHAT_UNDEFINED, .detail = (uint8_t)owner, .text = name, .length = (uint32_t)length};
}

qd_status qd_chat_copy(qd_chat_run *run, const char *text, size_t length, qd_chat_value *value)
{
    char *copy;
    QD_TRY(qd_chat_spend(run, length / 16));
    QD_TRY(qd_chat_take(run, length + 1, &copy));
    if (length)
        memcpy(copy, text, length);
    *value = qd_chat_string(copy, length);
    return QD_OK;
}

qd_status qd_chat_sequence_new(qd_chat_run *run, qd_chat_type type, size_t count, qd_chat_value *value)
{
    qd_chat_sequence *sequence;
    if (count > QD_CHAT_MOST_MEMORY / sizeof *sequence->items)
        return QD_CHAT_FAIL(run, "the values of the template need more than %d MiB", QD_CHAT_MOST_MEMORY >> 20);
    QD_TRY(qd_chat_spend(run, count / 16));
    QD_TRY(qd_chat_take(run, sizeof *sequence, &sequence));
    QD_TRY(qd_chat_take(run, count * sizeof *sequence->items, &sequence->items));
    sequence->count = count;
    *value = (qd_chat_value){.type = (uint8_t)type, .sequence = sequence};
    return QD_OK;
}

qd_status qd_chat_dict_new(qd_chat_run *run, qd_chat_type type, size_t capacity, qd_chat_value *value)
{
    qd_chat_dict *dict;
    QD_TRY(qd_chat_take(run, sizeof *dict, &dict));
    QD_TRY(qd_chat_take(run, 2 * capacity * sizeof *dict->keys, &dict->keys));
    dict->values = dict->keys + capacity;
    dict->capacity = capacity;
    *value = (qd_chat_value){.type = (uint8_t)type, .dict = dict};
    return QD_OK;
}

static qd_status dict_grow(qd_chat_run *run, qd_chat_dict *dict)
{
    size_t capacity = dict->capacity ? 2 * dict->capacity : 4;
    qd_chat_value *keys;
    QD_TRY(qd_chat_take(run, 2 * capacity * sizeof *keys, &keys));
    if (dict->count) {
        memcpy(keys, dict->keys, dict->count * sizeof *keys);
        memcpy(keys + capacity, dict->values, dict->count * sizeof *keys);
    }
    dict->keys = keys;
    dict->values = keys + capacity;
    dict->capacity = capacity;
    return QD_OK;
}

static bool same_text(qd_chat_value a, const char *text, size_t length)
{
    return a.type == QD_CHAT_STRING && a.length == length && memcmp(a.text, text, length) == 0;
}

bool qd_chat_dict_text(const qd_chat_dict *dict, const char *key, size_t length, qd_chat_value *value)
{
    for (size_t i = 0; i < dict->count; i++)
        if (same_text(dict->keys[i], key, length)) {
            *value = dict->values[i];
            return true;
        }
    return false;
}

static qd_status hashable(qd_chat_run *run, qd_chat_value key)
{
    if (key.type == QD_CHAT_LIST || key.type == QD_CHAT_DICT || key.type == QD_CHAT_VIEW || key.type == QD_CHAT_NAMESPACE)
        return QD_CHAT_FAIL(run, "unhashable type: '%s'", qd_chat_type_name(key));
    for (size_t i = 0; key.type == QD_CHAT_TUPLE && i < key.sequence->count; i++) {
        if (key.sequence->items[i].type == QD_CHAT_TUPLE)
            return QD_CHAT_FAIL(run, "a nested tuple as the key of a dict is not implemented");
        QD_TRY(hashable(run, key.sequence->items[i]));
    }
    return QD_OK;
}

static qd_status dict_index(qd_chat_run *run, const qd_chat_dict *dict, qd_chat_value key, size_t *index)
{
    QD_TRY(hashable(run, key));
    QD_TRY(qd_chat_spend(run, dict->count / 8));
    for (*index = 0; *index < dict->count; ++*index) {
        bool equal;
        QD_TRY(qd_chat_equal(run, dict->keys[*index], key, &equal));
        if (equal)
            return QD_OK;
    }
    return QD_OK;
}

qd_status qd_chat_dict_find(qd_chat_run *run, const qd_chat_dict *dict, qd_chat_value key, bool *found, qd_chat_value *value)
{
    size_t index;
    QD_TRY(dict_index(run, dict, key, &index));
    *found = index < dict->count;
    if (*found)
        *value = dict->values[index];
    return QD_OK;
}

static qd_status dict_add(qd_chat_run *run, qd_chat_dict *dict, qd_chat_value key, qd_chat_value value)
{
    if (dict->count == dict->capacity)
        QD_TRY(dict_grow(run, dict));
    dict->keys[dict->count] = key;
    dict->values[dict->count++] = value;
    return QD_OK;
}

qd_status qd_chat_dict_put(qd_chat_run *run, qd_chat_dict *dict, qd_chat_value key, qd_chat_value value)
{
    size_t index;
    QD_TRY(dict_index(run, dict, key, &index));
    if (index == dict->count)
        return dict_add(run, dict, key, value);
    dict->values[index] = value;
    return QD_OK;
}

/* ---- from JSON ---- */

static qd_status from_json(qd_chat_run *run, const qd_json_node *node, int depth, qd_chat_value *value)
{
    int64_t integer = 0;
    double real = 0;
    bool truth = false;
    const char *text;
    const qd_json_node *member;
    qd_chat_value item;
    if (depth > MOST_DATA_DEPTH)
        return QD_FAIL(QD_USAGE, "%s: the messages are nested more than %d levels deep", run->chat->name, MOST_DATA_DEPTH);
    QD_TRY(qd_chat_spend(run, 1));
    switch (qd_json_kind_of(node)) {
    case QD_JSON_NULL:
        *value = qd_chat_none();
        break;
    case QD_JSON_BOOL:
        qd_json_as_bool(node, &truth);
        *value = qd_chat_bool(truth);
        break;
    case QD_JSON_INT:
        qd_json_as_int(node, &integer);
        *value = qd_chat_int(integer);
        break;
    case QD_JSON_REAL:
        qd_json_as_double(node, &real);
        *value = qd_chat_real(real);
        break;
    case QD_JSON_STRING: {
        size_t length;
        text = qd_json_as_bytes(node, &length);
        if (length > QD_CHAT_MOST_OUTPUT)
            return QD_FAIL(QD_USAGE, "%s: a message has more than %d MiB", run->chat->name, QD_CHAT_MOST_OUTPUT >> 20);
        *value = qd_chat_string(text, length);
        break;
    }
    case QD_JSON_LIST:
        QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, qd_json_count(node), value));
        for (size_t i = 0; i < value->sequence->count; i++)
            QD_TRY(from_json(run, qd_json_item(node, i), depth + 1, &value->sequence->items[i]));
        break;
    case QD_JSON_OBJECT:
        QD_TRY(qd_chat_dict_new(run, QD_CHAT_DICT, qd_json_count(node), value));
        for (qd_json_iterator it = qd_json_begin(node); qd_json_next(&it, &text, &member);) {
            QD_TRY(from_json(run, member, depth + 1, &item));
            QD_TRY(dict_add(run, value->dict, qd_chat_literal(text), item)); /* the reader refuses repeated keys */
        }
        break;
    }
    return QD_OK;
}

qd_status qd_chat_from_json(qd_chat_run *run, const qd_json_node *node, qd_chat_value *value)
{
    return from_json(run, node, 0, value);
}

/* ---- types and truth ---- */

const char *qd_chat_type_name(qd_chat_value value)
{
    static const char *const names[] = {
        [QD_CHAT_UNDEFINED] = "Undefined", [QD_CHAT_NONE] = "NoneType", [QD_CHAT_BOOL] = "bool", [QD_CHAT_INT] = "int",
        [QD_CHAT_FLOAT] = "float", [QD_CHAT_STRING] = "str", [QD_CHAT_LIST] = "list", [QD_CHAT_TUPLE] = "tuple",
        [QD_CHAT_DICT] = "dict", [QD_CHAT_VIEW] = "dict view", [QD_CHAT_RANGE] = "range", [QD_CHAT_ITERATOR] = "generator",
        [QD_CHAT_NAMESPACE] = "namespace", [QD_CHAT_LOOP] = "loop", [QD_CHAT_MACRO] = "macro", [QD_CHAT_FUNCTION] = "function",
        [QD_CHAT_METHOD] = "method",
    };
    return names[value.type];
}

qd_status qd_chat_bad_type(qd_chat_run *run, const char *operation, qd_chat_value value)
{
    return QD_CHAT_FAIL(run, "%s does not apply to a value of type '%s'", operation, qd_chat_type_name(value));
}

bool qd_chat_is_undefined(qd_chat_value value)
{
    return value.type == QD_CHAT_UNDEFINED;
}

qd_status qd_chat_refuse_undefined(qd_chat_run *run, qd_chat_value value)
{
    if (value.type != QD_CHAT_UNDEFINED)
        return QD_OK;
    if (!value.text)
        return QD_CHAT_FAIL(run, "a '%s' object has no such element", qd_chat_type_name((qd_chat_value){.type = value.detail}));
    if (value.detail == QD_CHAT_UNDEFINED)
        return QD_CHAT_FAIL(run, "'%.*s' is undefined", value.length > 100 ? 100 : (int)value.length, value.text);
    return QD_CHAT_FAIL(run, "a '%s' object has no attribute '%.*s'", qd_chat_type_name((qd_chat_value){.type = value.detail}),
                        value.length > 100 ? 100 : (int)value.length, value.text);
}

bool qd_chat_truth(qd_chat_value value)
{
    switch ((qd_chat_type)value.type) {
    case QD_CHAT_UNDEFINED:
    case QD_CHAT_NONE:
        return false;
    case QD_CHAT_BOOL:
        return value.truth;
    case QD_CHAT_INT:
        return value.integer != 0;
    case QD_CHAT_FLOAT:
        return value.real != 0;
    case QD_CHAT_STRING:
        return value.length > 0;
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
        return value.sequence->count > 0;
    case QD_CHAT_DICT:
    case QD_CHAT_VIEW:
        return value.dict->count > 0;
    case QD_CHAT_RANGE:
        return value.range->count > 0;
    case QD_CHAT_ITERATOR:
    case QD_CHAT_NAMESPACE:
    case QD_CHAT_LOOP:
    case QD_CHAT_MACRO:
    case QD_CHAT_FUNCTION:
    case QD_CHAT_METHOD:
        break;
    }
    return true;
}

bool qd_chat_is_number(qd_chat_value value)
{
    return value.type == QD_CHAT_BOOL || value.type == QD_CHAT_INT || value.type == QD_CHAT_FLOAT;
}

int64_t qd_chat_as_int(qd_chat_value value)
{
    return value.type == QD_CHAT_BOOL ? value.truth : value.integer;
}

double qd_chat_as_real(qd_chat_value value)
{
    return value.type == QD_CHAT_FLOAT ? value.real : (double)qd_chat_as_int(value);
}

/* ---- equality and order ---- */

/* An integer and a float, exactly: a 64-bit integer may have no equal double. 2: not ordered. */
static int order_mixed(int64_t integer, double real)
{
    if (real != real)
        return 2;
    if (real >= 9223372036854775808.0)
        return -1;
    if (real < -9223372036854775808.0)
        return 1;
    int64_t whole = (int64_t)real;
    if (integer != whole)
        return integer < whole ? -1 : 1;
    double rest = real - (double)whole;
    return rest > 0 ? -1 : rest < 0 ? 1 : 0;
}

static int order_numbers(qd_chat_value a, qd_chat_value b)
{
    if (a.type == QD_CHAT_FLOAT && b.type == QD_CHAT_FLOAT)
        return a.real < b.real ? -1 : a.real > b.real ? 1 : a.real == b.real ? 0 : 2;
    if (b.type == QD_CHAT_FLOAT)
        return order_mixed(qd_chat_as_int(a), b.real);
    if (a.type == QD_CHAT_FLOAT) {
        int order = order_mixed(qd_chat_as_int(b), a.real);
        return order == 2 ? 2 : -order;
    }
    return qd_chat_as_int(a) < qd_chat_as_int(b) ? -1 : qd_chat_as_int(a) > qd_chat_as_int(b);
}

static qd_status deeper(qd_chat_run *run)
{
    QD_TRY(qd_chat_spend(run, 1));
    if (++run->depth > QD_CHAT_MOST_DEPTH)
        return QD_CHAT_FAIL(run, "values are nested more than %d levels deep", QD_CHAT_MOST_DEPTH);
    return QD_OK;
}

static qd_status equal_dicts(qd_chat_run *run, const qd_chat_dict *a, const qd_chat_dict *b, bool *equal)
{
    *equal = a->count == b->count;
    for (size_t i = 0; i < a->count && *equal; i++) {
        qd_chat_value other;
        QD_TRY(qd_chat_dict_find(run, b, a->keys[i], equal, &other));
        if (*equal)
            QD_TRY(qd_chat_equal(run, a->values[i], other, equal));
    }
    return QD_OK;
}

static qd_status equal_sequences(qd_chat_run *run, const qd_chat_sequence *a, const qd_chat_sequence *b, bool *equal)
{
    *equal = a->count == b->count;
    for (size_t i = 0; i < a->count && *equal; i++)
        QD_TRY(qd_chat_equal(run, a->items[i], b->items[i], equal));
    return QD_OK;
}

qd_status qd_chat_equal(qd_chat_run *run, qd_chat_value a, qd_chat_value b, bool *equal)
{
    if (qd_chat_is_number(a) && qd_chat_is_number(b)) {
        *equal = order_numbers(a, b) == 0;
        return QD_OK;
    }
    *equal = false;
    if (a.type != b.type)
        return QD_OK;
    QD_TRY(deeper(run));
    switch ((qd_chat_type)a.type) {
    case QD_CHAT_UNDEFINED:
    case QD_CHAT_NONE:
        *equal = true;
        break;
    case QD_CHAT_STRING:
        QD_TRY(qd_chat_spend(run, a.length / 64));
        *equal = a.length == b.length && memcmp(a.text, b.text, a.length) == 0;
        break;
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
        QD_TRY(equal_sequences(run, a.sequence, b.sequence, equal));
        break;
    case QD_CHAT_DICT:
        QD_TRY(equal_dicts(run, a.dict, b.dict, equal));
        break;
    case QD_CHAT_RANGE:
        *equal = a.range->count == b.range->count && (!a.range->count || a.range->start == b.range->start) &&
                 (a.range->count < 2 || a.range->step == b.range->step);
        break;
    case QD_CHAT_VIEW:
        return QD_CHAT_FAIL(run, "comparing the keys, values or items of dicts is not implemented");
    case QD_CHAT_BOOL:
    case QD_CHAT_INT:
    case QD_CHAT_FLOAT:
        break;
    case QD_CHAT_METHOD:
        return QD_CHAT_FAIL(run, "comparing methods is not implemented");
    case QD_CHAT_ITERATOR:
    case QD_CHAT_NAMESPACE:
    case QD_CHAT_LOOP:
    case QD_CHAT_MACRO:
    case QD_CHAT_FUNCTION:
        *equal = a.dict == b.dict; /* identity: all are pointers */
        break;
    }
    run->depth--;
    return QD_OK;
}

qd_status qd_chat_less(qd_chat_run *run, qd_chat_value a, qd_chat_value b, const char *op, int *order)
{
    QD_TRY(qd_chat_refuse_undefined(run, a));
    QD_TRY(qd_chat_refuse_undefined(run, b));
    if (qd_chat_is_number(a) && qd_chat_is_number(b)) {
        *order = order_numbers(a, b);
        return QD_OK;
    }
    if (a.type == QD_CHAT_STRING && b.type == QD_CHAT_STRING) { /* UTF-8 sorts like code points */
        size_t least = a.length < b.length ? a.length : b.length;
        QD_TRY(qd_chat_spend(run, least / 64));
        int sign = memcmp(a.text, b.text, least);
        *order = sign ? (sign < 0 ? -1 : 1) : a.length < b.length ? -1 : a.length > b.length;
        return QD_OK;
    }
    if (a.type != b.type || (a.type != QD_CHAT_LIST && a.type != QD_CHAT_TUPLE))
        return QD_CHAT_FAIL(run, "'%s' does not apply to values of type '%s' and '%s'", op, qd_chat_type_name(a), qd_chat_type_name(b));
    QD_TRY(deeper(run));
    size_t i = 0, n = a.sequence->count, m = b.sequence->count;
    for (bool equal = true; i < n && i < m; i++) {
        QD_TRY(qd_chat_equal(run, a.sequence->items[i], b.sequence->items[i], &equal));
        if (!equal)
            break;
    }
    if (i < n && i < m)
        QD_TRY(qd_chat_less(run, a.sequence->items[i], b.sequence->items[i], op, order));
    else
        *order = n < m ? -1 : n > m;
    run->depth--;
    return QD_OK;
}
