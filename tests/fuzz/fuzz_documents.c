/* libFuzzer target of the document readers: text with a separator line, and .jsonl; the first byte
 * selects one. A .jsonl input is accepted or refused with its line; text must give the same bytes
 * and documents as a slow reference reader. */
#include "memory_file.h"

#include "data/encode.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 1 << 16 };
static const char separator[] = "--";

typedef struct outcome {
    uint8_t bytes[MOST];
    int64_t count, documents, starts[MOST];
} outcome;

static qd_status on_document(void *context)
{
    outcome *o = context;
    assert(o->documents < MOST);
    o->starts[o->documents++] = o->count;
    return QD_OK;
}

static qd_status on_tokens(void *context, const int32_t *tokens, int64_t count)
{
    outcome *o = context;
    assert(count > 0 && o->count + count <= MOST && o->documents > 0);
    for (int64_t i = 0; i < count; i++) {
        assert(tokens[i] >= 0 && tokens[i] < 256);
        o->bytes[o->count++] = (uint8_t)tokens[i];
    }
    return QD_OK;
}

/* The reference: a line that equals the separator, with or without a carriage return, ends a
 * document. */
static void read_slowly(const uint8_t *text, size_t length, outcome *o)
{
    bool begins = true;
    o->count = o->documents = 0;
    for (size_t at = 0, next; at < length; at = next) {
        for (next = at; next < length && text[next] != '\n'; next++)
            ;
        size_t inner = next - at;
        inner -= inner > 0 && text[next - 1] == '\r';
        next += next < length;
        if (inner == strlen(separator) && memcmp(text + at, separator, inner) == 0) {
            begins = true;
            continue;
        }
        if (begins)
            o->starts[o->documents++] = o->count;
        begins = false;
        memcpy(o->bytes + o->count, text + at, next - at);
        o->count += (int64_t)(next - at);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static outcome found, expected;
    if (size < 2 || size > MOST)
        return 0;
    const bool objects = data[0] & 1;
    data++;
    size--;
    char *path = memory_file(data, size);
    if (!path)
        return 0;
    qd_file file = {.path = path, .bytes = (int64_t)size, .kind = objects ? QD_FILE_LINES : QD_FILE_TEXT};
    qd_file_list files = {.items = &file, .count = 1, .capacity = 1, .bytes = file.bytes};
    qd_text_encoder encoder = qd_text_encoder_bytes();
    qd_encode_job job = {.files = &files, .encoder = &encoder, .documents = {.separator = separator}, .threads = 1};
    qd_token_sink sink = {.context = &found, .document = on_document, .append = on_tokens};
    qd_tokenize_progress total;
    found.count = found.documents = 0;
    qd_status status = qd_encode_files(&job, &sink, &total);
    assert(status == QD_OK || (objects && status == QD_USAGE && strstr(qd_error_message(), "(line ")));
    if (status != QD_OK)
        return 0;
    assert(total.tokens == found.count && total.documents == found.documents && total.bytes == file.bytes);
    if (objects) {
        assert(found.count <= file.bytes);
        return 0;
    }
    read_slowly(data, size, &expected);
    assert(found.count == expected.count && memcmp(found.bytes, expected.bytes, (size_t)found.count) == 0);
    assert(found.documents == expected.documents &&
           memcmp(found.starts, expected.starts, (size_t)found.documents * sizeof *found.starts) == 0);
    return 0;
}
