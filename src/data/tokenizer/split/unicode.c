/* Replacement of invalid UTF-8 by U+FFFD. */
#include "data/tokenizer/split/unicode.h"

#include "base/text/strbuf.h"

void qd_utf8_replace(const uint8_t *text, size_t length, qd_strbuf *out)
{
    const uint8_t *at = text, *end = text + length;
    qd_strbuf_clear(out);
    while (at < end) {
        size_t valid = qd_utf8_valid((const char *)at, (size_t)(end - at));
        qd_strbuf_append(out, (const char *)at, valid);
        at += valid;
        if (at < end) {
            uint32_t character;
            qd_strbuf_append(out, "\xef\xbf\xbd", 3);
            at += qd_utf8_read(at, end, &character);
        }
    }
}
