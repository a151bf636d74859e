/* Reading parts of values: attributes, items, slices, length and iteration, as Jinja's sandbox
 * does. */
#include "data/chat/chat_impl.h"

#include <string.h>

qd_status qd_chat_size(qd_chat_run *run, qd_chat_value value, size_t *size)
{
    switch ((int)value.type) {
    case QD_CHAT_UNDEFINED:
        *size = 0;
        return QD_OK;
    case QD_CHAT_STRING:
        QD_TRY(qd_chat_spend(run, value.length / 16));
        *size = qd_chat_text_length(value.text, value.length);
        return QD_OK;
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
        *size = value.sequence->count;
        return QD_OK;
    case QD_CHAT_DICT:
    case QD_CHAT_VIEW:
        *size = value.dict->count;
        return QD_OK;
    case QD_CHAT_RANGE:
        *size = (size_t)value.range->count;
        return QD_OK;
    default:
        return QD_CHAT_FAIL(run, "a value of type '%s' has no length", qd_chat_type_name(value));
    }
}

static qd_status method(qd_chat_run *run, qd_chat_value object, const char *name, size_t length, bool *found, qd_chat_value *value)
{
    qd_chat_missing missing;
    const qd_chat_function *function = qd_chat_find_method(object.type, name, length, &missing);
    *found = function != NULL;
    if (missing == QD_CHAT_MODIFIES)
        return QD_CHAT_FAIL(run, "'%.*s' modifies its object, which Jinja's sandbox refuses", (int)length, name);
    if (missing == QD_CHAT_NOT_IMPLEMENTED)
        return QD_CHAT_FAIL(run, "attribute '%.*s' of a value of type '%s' is not implemented", (int)length, name,
                            qd_chat_type_name(object));
    if (!function)
        return QD_OK;
    if (object.detail)
        return QD_CHAT_FAIL(run, "methods of the result of 'safe' are not implemented");
    qd_chat_bound *bound;
    QD_TRY(qd_chat_take(run, sizeof *bound, &bound));
    *bound = (qd_chat_bound){function, object};
    *value = (qd_chat_value){.type = QD_CHAT_METHOD, .bound = bound};
    return QD_OK;
}

/* An attribute, without looking at items. *found: it exists. */
static qd_status own_attribute(qd_chat_run *run, qd_chat_value object, const char *name, size_t length, bool *found, qd_chat_value *value)
{
    *found = false;
    switch ((int)object.type) {
    case QD_CHAT_STRING:
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
    case QD_CHAT_DICT:
    case QD_CHAT_BOOL:
    case QD_CHAT_INT:
    case QD_CHAT_FLOAT:
    case QD_CHAT_RANGE:
        return method(run, object, name, length, found, value);
    case QD_CHAT_NAMESPACE:
        QD_TRY(qd_chat_spend(run, object.dict->count / 8));
        *found = qd_chat_dict_text(object.dict, name, length, value);
        return QD_OK;
    case QD_CHAT_LOOP:
        QD_TRY(qd_chat_loop_attribute(run, object.loop, name, length, value));
        *found = !qd_chat_is_undefined(*value);
        return QD_OK;
    case QD_CHAT_NONE:
        return QD_OK;
    default:
        return QD_CHAT_FAIL(run, "attributes of a value of type '%s' are not implemented", qd_chat_type_name(object));
    }
}

qd_status qd_chat_attribute(qd_chat_run *run, qd_chat_value object, const char *name, size_t length, qd_chat_value *value)
{
    bool found;
    QD_TRY(qd_chat_refuse_undefined(run, object));
    QD_TRY(own_attribute(run, object, name, length, &found, value));
    if (!found && object.type == QD_CHAT_DICT) {
        QD_TRY(qd_chat_spend(run, object.dict->count / 8));
        found = qd_chat_dict_text(object.dict, name, length, value);
    }
    if (!found && object.type != QD_CHAT_LOOP)
        *value = qd_chat_undefined(name, length, object.type);
    return QD_OK;
}

qd_status qd_chat_item(qd_chat_run *run, qd_chat_value object, qd_chat_value key, qd_chat_value *value)
{
    bool found = false;
    QD_TRY(qd_chat_refuse_undefined(run, object));
    bool integral = key.type == QD_CHAT_INT || key.type == QD_CHAT_BOOL;
    if (object.type == QD_CHAT_DICT && key.type != QD_CHAT_LIST && key.type != QD_CHAT_DICT && key.type != QD_CHAT_VIEW &&
        key.type != QD_CHAT_NAMESPACE)
        QD_TRY(qd_chat_dict_find(run, object.dict, key, &found, value));
    if (integral && (object.type == QD_CHAT_STRING || object.type == QD_CHAT_LIST || object.type == QD_CHAT_TUPLE ||
                     object.type == QD_CHAT_RANGE)) {
        size_t size;
        QD_TRY(qd_chat_size(run, object, &size));
        int64_t index = qd_chat_as_int(key);
        index += index < 0 ? (int64_t)size : 0;
        found = index >= 0 && index < (int64_t)size;
        if (found && object.type == QD_CHAT_STRING) {
            size_t at = qd_chat_text_offset(object.text, object.length, (size_t)index), bytes;
            qd_chat_code_point(object.text + at, object.length - at, &bytes);
            *value = qd_chat_string(object.text + at, bytes);
        } else if (found && object.type == QD_CHAT_RANGE) {
            *value = qd_chat_int(object.range->start + index * object.range->step);
        } else if (found) {
            *value = object.sequence->items[index];
        }
    }
    if (!found && key.type == QD_CHAT_STRING) /* Jinja tries the attribute then */
        QD_TRY(own_attribute(run, object, key.text, key.length, &found, value));
    if (!found)
        *value = key.type == QD_CHAT_STRING ? qd_chat_undefined(key.text, key.length, object.type)
                                            : qd_chat_undefined(NULL, 0, object.type);
    return QD_OK;
}

/* ---- slices ---- */

static qd_status bound_of(qd_chat_run *run, qd_chat_value value, int64_t absent, int64_t size, int64_t lowest, int64_t highest,
                          int64_t *bound)
{
    *bound = absent;
    if (value.type == QD_CHAT_NONE)
        return QD_OK;
    QD_TRY(qd_chat_refuse_undefined(run, value));
    if (value.type != QD_CHAT_INT && value.type != QD_CHAT_BOOL)
        return QD_CHAT_FAIL(run, "the bounds of a slice must be integers, not '%s'", qd_chat_type_name(value));
    *bound = qd_chat_as_int(value);
    if (*bound < 0)
        *bound = *bound < -size ? lowest : *bound + size;
    *bound = *bound < lowest ? lowest : *bound > highest ? highest : *bound;
    return QD_OK;
}

static qd_status slice_text(qd_chat_run *run, qd_chat_value object, int64_t start, int64_t step, size_t count, qd_chat_value *value)
{
    if (step == 1) {
        size_t begin = qd_chat_text_offset(object.text, object.length, (size_t)start);
        *value = object;
        value->text += begin;
        value->length = (uint32_t)qd_chat_text_offset(value->text, object.length - begin, count);
        return QD_OK;
    }
    uint32_t *offsets;
    size_t size = 0, length = 0;
    char *text;
    QD_TRY(qd_chat_take(run, ((size_t)object.length + 1) * sizeof *offsets, &offsets));
    for (size_t i = 0; i < object.length; i++)
        if (((unsigned char)object.text[i] & 0xc0) != 0x80)
            offsets[size++] = (uint32_t)i;
    offsets[size] = object.length;
    QD_TRY(qd_chat_take(run, (size_t)object.length + 1, &text));
    for (size_t i = 0; i < count; i++) {
        int64_t at = start + (int64_t)i * step;
        memcpy(text + length, object.text + offsets[at], offsets[at + 1] - offsets[at]);
        length += offsets[at + 1] - offsets[at];
    }
    *value = qd_chat_string(text, length);
    value->detail = object.detail;
    return QD_OK;
}

qd_status qd_chat_slice(qd_chat_run *run, qd_chat_value object, const qd_chat_value bounds[3], qd_chat_value *value)
{
    QD_TRY(qd_chat_refuse_undefined(run, object));
    if (object.type != QD_CHAT_STRING && object.type != QD_CHAT_LIST && object.type != QD_CHAT_TUPLE)
        return QD_CHAT_FAIL(run, "slices of a value of type '%s' are not implemented", qd_chat_type_name(object));
    size_t size_of;
    QD_TRY(qd_chat_size(run, object, &size_of));
    int64_t size = (int64_t)size_of, start, stop, step = 1;
    if (bounds[2].type == QD_CHAT_INT || bounds[2].type == QD_CHAT_BOOL)
        step = qd_chat_as_int(bounds[2]);
    else if (bounds[2].type != QD_CHAT_NONE)
        return qd_chat_bad_type(run, "a slice with a step", bounds[2]);
    if (step == 0)
        return QD_CHAT_FAIL(run, "the step of a slice must not be 0");
    step = step > size + 1 ? size + 1 : step < -size - 1 ? -size - 1 : step;
    int64_t lowest = step < 0 ? -1 : 0, highest = step < 0 ? size - 1 : size;
    QD_TRY(bound_of(run, bounds[0], step < 0 ? highest : lowest, size, lowest, highest, &start));
    QD_TRY(bound_of(run, bounds[1], step < 0 ? lowest : highest, size, lowest, highest, &stop));
    int64_t distance = step < 0 ? start - stop : stop - start, stride = step < 0 ? -step : step;
    size_t count = distance > 0 ? (size_t)((distance + stride - 1) / stride) : 0;
    if (object.type == QD_CHAT_STRING && !count) {
        *value = qd_chat_literal("");
        value->detail = object.detail;
        return QD_OK;
    }
    if (object.type == QD_CHAT_STRING)
        return slice_text(run, object, start, step, count, value);
    QD_TRY(qd_chat_sequence_new(run, object.type, count, value));
    for (size_t i = 0; i < count; i++)
        value->sequence->items[i] = object.sequence->items[start + (int64_t)i * step];
    return QD_OK;
}

/* ---- iteration ---- */

qd_status qd_chat_iterate(qd_chat_run *run, qd_chat_value value, qd_chat_iterator *iterator)
{
    switch ((int)value.type) {
    case QD_CHAT_UNDEFINED:
    case QD_CHAT_STRING:
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
    case QD_CHAT_DICT:
    case QD_CHAT_VIEW:
    case QD_CHAT_RANGE:
    case QD_CHAT_ITERATOR:
        *iterator = (qd_chat_iterator){.source = value};
        return QD_OK;
    default:
        return QD_CHAT_FAIL(run, "a value of type '%s' cannot be iterated", qd_chat_type_name(value));
    }
}

static qd_status dict_item(qd_chat_run *run, qd_chat_value source, size_t index, qd_chat_value *value)
{
    if (source.type == QD_CHAT_DICT || source.detail == 'k') {
        *value = source.dict->keys[index];
        return QD_OK;
    }
    if (source.detail == 'v') {
        *value = source.dict->values[index];
        return QD_OK;
    }
    QD_TRY(qd_chat_sequence_new(run, QD_CHAT_TUPLE, 2, value));
    value->sequence->items[0] = source.dict->keys[index];
    value->sequence->items[1] = source.dict->values[index];
    return QD_OK;
}

qd_status qd_chat_next(qd_chat_run *run, qd_chat_iterator *iterator, bool *more, qd_chat_value *value)
{
    qd_chat_value source = iterator->source;
    size_t bytes;
    QD_TRY(qd_chat_spend(run, 1));
    switch ((int)source.type) {
    case QD_CHAT_STRING:
        *more = iterator->at < source.length;
        if (*more) {
            qd_chat_code_point(source.text + iterator->at, source.length - iterator->at, &bytes);
            *value = qd_chat_string(source.text + iterator->at, bytes);
            iterator->at += bytes;
        }
        return QD_OK;
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
        *more = iterator->at < source.sequence->count;
        if (*more)
            *value = source.sequence->items[iterator->at++];
        return QD_OK;
    case QD_CHAT_ITERATOR:
        *more = source.sequence->at < source.sequence->count;
        if (*more)
            *value = source.sequence->items[source.sequence->at++];
        return QD_OK;
    case QD_CHAT_DICT:
    case QD_CHAT_VIEW:
        *more = iterator->at < source.dict->count;
        return *more ? dict_item(run, source, iterator->at++, value) : QD_OK;
    case QD_CHAT_RANGE:
        *more = iterator->at < (size_t)source.range->count;
        if (*more)
            *value = qd_chat_int(source.range->start + (int64_t)iterator->at++ * source.range->step);
        return QD_OK;
    default:
        *more = false;
        return QD_OK;
    }
}

qd_status qd_chat_items(qd_chat_run *run, qd_chat_value value, qd_chat_value *list)
{
    qd_chat_iterator iterator;
    size_t count;
    bool more = true;
    QD_TRY(qd_chat_iterate(run, value, &iterator));
    if (value.type == QD_CHAT_ITERATOR)
        count = value.sequence->count - value.sequence->at;
    else
        QD_TRY(qd_chat_size(run, value, &count));
    QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, count, list));
    for (size_t i = 0; i < count && more; i++)
        QD_TRY(qd_chat_next(run, &iterator, &more, &list->sequence->items[i]));
    return QD_OK;
}
