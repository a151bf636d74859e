/* Character classes of Unicode 16.0, and decoding of possibly invalid UTF-8. */
#ifndef QD_DATA_TOKENIZER_SPLIT_UNICODE_H
#define QD_DATA_TOKENIZER_SPLIT_UNICODE_H

#include <quadrille/strbuf.h>
#include <stddef.h>
#include <stdint.h>

enum {
    QD_LETTER = 1,   /* \p{L} */
    QD_NUMBER = 2,   /* \p{N} */
    QD_SPACE = 4,    /* \s: White_Space */
    QD_NEWLINE = 8,  /* carriage return or line feed */
    QD_UPPER = 16,   /* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] */
    QD_LOWER = 32,   /* [\p{Ll}\p{Lm}\p{Lo}\p{M}] */
    QD_WORD = 64,    /* \w */
};

extern const uint8_t qd_unicode_ascii[128];   /* class bits */
extern const uint8_t qd_unicode_bits[16];     /* kind -> class bits */
extern const uint32_t qd_unicode_blocks;      /* length of the index; characters beyond are kind 0 */
extern const uint8_t qd_unicode_index[];      /* character / 128 -> block */
extern const uint64_t qd_unicode_kinds[];     /* (blocks, 8): 16 kinds of 4 bits each */

static inline unsigned qd_unicode_class(uint32_t character)
{
    uint32_t block = character >> 7;
    if (block >= qd_unicode_blocks)
        return 0;
    uint64_t kinds = qd_unicode_kinds[qd_unicode_index[block] * 8u + (character >> 4 & 7u)];
    return qd_unicode_bits[kinds >> 4 * (character & 15u) & 15u];
}

/* Decodes a character that does not start with an ASCII byte and returns its length. An invalid one
 * (*character = U+FFFD) has the length of its longest prefix that starts some valid character, as
 * in the replacement rules of Python and Rust. */
static inline size_t qd_utf8_read(const uint8_t *at, const uint8_t *end, uint32_t *character)
{
    uint8_t first = *at;
    size_t left = (size_t)(end - at);
    *character = 0xfffd;
    if (first < 0xc2 || first > 0xf4)
        return 1;
    if (first < 0xe0) {
        if (left < 2 || (at[1] & 0xc0) != 0x80)
            return 1;
        *character = (uint32_t)(first & 0x1f) << 6 | (at[1] & 0x3f);
        return 2;
    }
    uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (left < 2 || at[1] < low || at[1] > high)
        return 1;
    if (left < 3 || (at[2] & 0xc0) != 0x80)
        return 2;
    if (first < 0xf0) {
        *character =
            (uint32_t)(first & 0x0f) << 12 | (uint32_t)(at[1] & 0x3f) << 6 | (at[2] & 0x3f);
        return 3;
    }
    if (left < 4 || (at[3] & 0xc0) != 0x80)
        return 3;
    *character = (uint32_t)(first & 0x07) << 18 | (uint32_t)(at[1] & 0x3f) << 12 |
                 (uint32_t)(at[2] & 0x3f) << 6 | (at[3] & 0x3f);
    return 4;
}

/* Class bits of the character at `at` (< end) and its length. An invalid part has no class, like
 * U+FFFD. */
static inline unsigned qd_class_at(const uint8_t *at, const uint8_t *end, size_t *length)
{
    if (*at < 0x80) {
        *length = 1;
        return qd_unicode_ascii[*at];
    }
    uint32_t character;
    *length = qd_utf8_read(at, end, &character);
    return qd_unicode_class(character);
}

/* Writes the text to *out with U+FFFD for each invalid part. Running out of memory sets
 * out->failed. */
void qd_utf8_replace(const uint8_t *text, size_t length, qd_strbuf *out);

#endif
