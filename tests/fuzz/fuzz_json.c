/* libFuzzer target of the JSON reader and writer: any bytes are one value or one error with its
 * position; a value that is written and read again gives the same text. */
#include "base/text/json.h"

#include <quadrille/json_writer.h>

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void put(qd_json_writer *w, const char *key, const qd_json_node *node)
{
    int64_t integer = 0;
    double real = 0;
    bool truth = false;
    const char *name;
    const qd_json_node *value;
    switch (qd_json_kind_of(node)) {
    case QD_JSON_NULL:
        qd_json_put_null(w, key);
        break;
    case QD_JSON_BOOL:
        assert(qd_json_as_bool(node, &truth));
        qd_json_put_bool(w, key, truth);
        break;
    case QD_JSON_INT:
        assert(qd_json_as_int(node, &integer) && qd_json_as_double(node, &real));
        qd_json_put_int(w, key, integer);
        break;
    case QD_JSON_REAL:
        assert(!qd_json_as_int(node, &integer) && qd_json_as_double(node, &real));
        qd_json_put_double(w, key, real);
        break;
    case QD_JSON_STRING:
        qd_json_put_string(w, key, qd_json_as_string(node));
        break;
    case QD_JSON_LIST:
        qd_json_list_begin(w, key);
        for (size_t i = 0; i < qd_json_count(node); i++)
            put(w, NULL, qd_json_item(node, i));
        assert(!qd_json_item(node, qd_json_count(node)));
        qd_json_end(w);
        break;
    case QD_JSON_OBJECT:
        qd_json_object_begin(w, key);
        for (qd_json_iterator it = qd_json_begin(node); qd_json_next(&it, &name, &value);) {
            assert(qd_json_member(node, name) == value);
            put(w, name, value);
        }
        qd_json_end(w);
        break;
    }
}

/* The nesting depth, which the writer limits. */
static int depth_of(const qd_json_node *node)
{
    int deepest = 0;
    const char *name;
    const qd_json_node *value;
    for (size_t i = 0; qd_json_kind_of(node) == QD_JSON_LIST && i < qd_json_count(node); i++) {
        int depth = depth_of(qd_json_item(node, i));
        deepest = depth > deepest ? depth : deepest;
    }
    if (qd_json_kind_of(node) == QD_JSON_OBJECT)
        for (qd_json_iterator it = qd_json_begin(node); qd_json_next(&it, &name, &value);) {
            int depth = depth_of(value);
            deepest = depth > deepest ? depth : deepest;
        }
    return deepest + 1;
}

typedef qd_status (*reader)(const char *name, const char *text, size_t length, qd_json **document);

static qd_json *read_by(reader load, const char *text, size_t length)
{
    qd_json *document = NULL;
    qd_status status = load("fuzz", text, length, &document);
    assert(status == QD_OK || (status == QD_USAGE && strncmp(qd_error_message(), "fuzz", 4) == 0));
    return status == QD_OK ? document : NULL;
}

static qd_json *read_text(const char *text, size_t length)
{
    return read_by(qd_json_load_text, text, length);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { DEEP = 16 };
    qd_json *first = read_text((const char *)data, size), *collected = read_by(qd_json_load_collected, (const char *)data, size);
    if (!first) {
        qd_json_destroy(collected);
        return 0;
    }
    assert(collected); /* it accepts more, and reads what is accepted here identically */
    qd_json_kind kind = qd_json_kind_of(qd_json_root(first));
    if ((kind == QD_JSON_LIST || kind == QD_JSON_OBJECT) && depth_of(qd_json_root(first)) <= DEEP) {
        qd_strbuf once = {0}, twice = {0};
        qd_json_writer w = qd_json_writer_on(&once);
        put(&w, NULL, qd_json_root(first));
        w = qd_json_writer_on(&twice);
        put(&w, NULL, qd_json_root(collected));
        assert(once.length == twice.length && memcmp(once.data, twice.data, once.length) == 0);
        qd_strbuf_free(&twice);
        qd_json *second = read_text(once.data, once.length);
        assert(second);
        w = qd_json_writer_on(&twice);
        put(&w, NULL, qd_json_root(second));
        assert(once.length == twice.length && memcmp(once.data, twice.data, once.length) == 0);
        qd_json_destroy(second);
        qd_strbuf_free(&once);
        qd_strbuf_free(&twice);
    }
    qd_json_destroy(first);
    qd_json_destroy(collected);
    return 0;
}
