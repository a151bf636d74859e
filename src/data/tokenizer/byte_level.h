/* The byte encoding of tokenizer.json: each byte as one printable character (GPT-2's table). */
#ifndef QD_DATA_TOKENIZER_BYTE_LEVEL_H
#define QD_DATA_TOKENIZER_BYTE_LEVEL_H

#include <quadrille/strbuf.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The character of a byte: itself if it is printable Latin-1, otherwise 256 and up in byte
 * order. */
uint32_t qd_byte_to_character(uint8_t byte);
/* -1 when no byte has this character. */
int qd_character_to_byte(uint32_t character);

/* Decodes a text into `bytes` (as long as the text). False if a character stands for no byte; the
 * text is then a literal. `text` is valid UTF-8. */
bool qd_byte_level_read(const char *text, size_t length, uint8_t *bytes, size_t *count);
void qd_byte_level_write(const uint8_t *bytes, size_t count, qd_strbuf *out);

#endif
