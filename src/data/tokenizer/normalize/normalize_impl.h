/* Parts of the normalizers, shared by the files of this folder. */
#ifndef QD_DATA_TOKENIZER_NORMALIZE_NORMALIZE_IMPL_H
#define QD_DATA_TOKENIZER_NORMALIZE_NORMALIZE_IMPL_H

#include "data/tokenizer/normalize/normalize.h"

/* Writes a character as UTF-8 and returns its length. */
size_t qd_utf8_write(uint32_t character, uint8_t out[4]);
/* The lower case of a character; U+0130, whose lower case is two characters, is left alone. */
uint32_t qd_to_lower(uint32_t character);

/* Appends the normal form to `out` unless the text is already in it (*changed = false). */
qd_status qd_normal_form(qd_normal_kind kind, qd_normal_work *work, const uint8_t *text, size_t length, size_t *zero,
                         qd_strbuf *out, bool *changed);

#endif
