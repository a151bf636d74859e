/* Extended grapheme clusters by the rules GB3 to GB13 of Unicode's annex 29. */
#include "data/tokenizer/normalize/grapheme.h"

#include "data/tokenizer/normalize/unicode_data.h"
#include "data/tokenizer/split/unicode.h"

#include <stdbool.h>

enum { HANGUL_NONE, HANGUL_L, HANGUL_V, HANGUL_T, HANGUL_LV, HANGUL_LVT };

static int hangul(uint32_t c)
{
    if ((c >= 0x1100 && c <= 0x115f) || (c >= 0xa960 && c <= 0xa97c))
        return HANGUL_L;
    if ((c >= 0x1160 && c <= 0x11a7) || (c >= 0xd7b0 && c <= 0xd7c6))
        return HANGUL_V;
    if ((c >= 0x11a8 && c <= 0x11ff) || (c >= 0xd7cb && c <= 0xd7fb))
        return HANGUL_T;
    if (c >= 0xac00 && c <= 0xd7a3)
        return (c - 0xac00) % 28 ? HANGUL_LVT : HANGUL_LV;
    return HANGUL_NONE;
}

static bool joins_hangul(uint32_t a, uint32_t b)
{
    int left = hangul(a), right = hangul(b);
    if (left == HANGUL_L)
        return right == HANGUL_L || right == HANGUL_V || right == HANGUL_LV || right == HANGUL_LVT;
    if (left == HANGUL_LV || left == HANGUL_V)
        return right == HANGUL_V || right == HANGUL_T;
    return (left == HANGUL_LVT || left == HANGUL_T) && right == HANGUL_T;
}

static bool regional(uint32_t c)
{
    return c >= 0x1f1e6 && c <= 0x1f1ff;
}

size_t qd_grapheme(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *start = at;
    uint32_t previous = 0;
    unsigned last = 0;
    bool pictograph = false, flag_open = false; /* a pictograph with extensions; an odd number of regional indicators */
    for (bool first = true; at < end; first = false) {
        uint32_t c = *at;
        size_t size = c < 0x80 ? 1 : qd_utf8_read(at, end, &c);
        unsigned bits = qd_properties(c);
        if (!first) {
            bool joined = (previous == '\r' && c == '\n') ||
                          (!(last & QD_BREAKS) && !(bits & QD_BREAKS) &&
                           ((bits & QD_JOINS) || (last & QD_PREPENDS) || joins_hangul(previous, c) ||
                            (pictograph && previous == 0x200d && (bits & QD_PICTOGRAPH)) || (flag_open && regional(c))));
            if (!joined)
                break;
        }
        flag_open = regional(c) && !(flag_open && regional(previous));
        pictograph = (bits & QD_PICTOGRAPH) || (pictograph && (bits & QD_JOINS));
        previous = c;
        last = bits;
        at += size;
    }
    return (size_t)(at - start);
}
