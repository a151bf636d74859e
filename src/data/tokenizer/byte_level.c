/* GPT-2's mapping between bytes and printable characters. */
#include "data/tokenizer/byte_level.h"

#include "data/tokenizer/split/unicode.h"

enum { SHIFTED = 256, SHIFTED_END = 256 + 33 + 34 + 1 };

uint32_t qd_byte_to_character(uint8_t byte)
{
    if (byte <= 0x20)
        return SHIFTED + (uint32_t)byte;
    if (byte >= 0x7f && byte <= 0xa0)
        return SHIFTED + 33 + (uint32_t)(byte - 0x7f);
    return byte == 0xad ? SHIFTED + 67 : byte;
}

int qd_character_to_byte(uint32_t character)
{
    if (character >= SHIFTED_END)
        return -1;
    if (character >= SHIFTED + 67)
        return 0xad;
    if (character >= SHIFTED + 33)
        return (int)character - SHIFTED - 33 + 0x7f;
    if (character >= SHIFTED)
        return (int)character - SHIFTED;
    return qd_byte_to_character((uint8_t)character) == character ? (int)character : -1;
}

bool qd_byte_level_read(const char *text, size_t length, uint8_t *bytes, size_t *count)
{
    const uint8_t *at = (const uint8_t *)text, *end = at + length;
    size_t used = 0;
    while (at < end) {
        uint32_t character = *at;
        at += character < 0x80 ? 1 : qd_utf8_read(at, end, &character);
        int byte = qd_character_to_byte(character);
        if (byte < 0)
            return false;
        bytes[used++] = (uint8_t)byte;
    }
    *count = used;
    return true;
}

void qd_byte_level_write(const uint8_t *bytes, size_t count, qd_strbuf *out)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t character = qd_byte_to_character(bytes[i]);
        char text[2] = {(char)(0xc0 | character >> 6), (char)(0x80 | (character & 0x3f))};
        if (character < 0x80)
            text[0] = (char)character;
        qd_strbuf_append(out, text, character < 0x80 ? 1 : 2);
    }
}
