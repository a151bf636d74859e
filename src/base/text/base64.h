/* Base64, as in tiktoken files and character maps of tokenizers. */
#ifndef QD_BASE_TEXT_BASE64_H
#define QD_BASE_TEXT_BASE64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Decodes base64 with padding into `bytes`, which has 3/4 of the length; false if it is not
 * valid. */
bool qd_base64_read(const char *text, size_t length, uint8_t *bytes, size_t *count);

#endif
