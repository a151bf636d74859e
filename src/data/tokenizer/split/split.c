/* The published split patterns (GPT-2, cl100k, Llama 3, Qwen2, o200k) as hand-written matchers. */
#include "data/tokenizer/split/split.h"

#include "data/tokenizer/split/unicode.h"

#include <string.h>

#define CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WORD        "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
#define SYMBOLS     " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
#define TAIL        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const struct pattern_row {
    const char *name;
    const char *regex; /* as written to files */
    const char *also;  /* an equivalent spelling that is recognized too */
} patterns[QD_PATTERN_COUNT] = {
    [QD_PATTERN_GPT2] = {"gpt2",
                         "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
                         "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    /* tiktoken writes it with possessive quantifiers and "$", which other engines interpret
     * differently. */
    [QD_PATTERN_CL100K] = {"cl100k", CONTRACTION "|" WORD "|\\p{N}{1,3}|" SYMBOLS "|\\s+\\z|" TAIL, NULL},
    [QD_PATTERN_LLAMA3] = {"llama3",
                           CONTRACTION "|" WORD "|\\p{N}{1,3}|" SYMBOLS "|" TAIL, NULL},
    [QD_PATTERN_QWEN2] = {"qwen2", CONTRACTION "|" WORD "|\\p{N}|" SYMBOLS "|" TAIL, NULL},
    [QD_PATTERN_O200K] = {"o200k",
                          "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
                          CONTRACTION "?|"
                          "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
                          CONTRACTION "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TAIL,
                          NULL},
};

qd_pattern qd_pattern_by_name(const char *name)
{
    for (int i = 0; i < QD_PATTERN_COUNT; i++)
        if (strcmp(name, patterns[i].name) == 0)
            return (qd_pattern)i;
    return QD_PATTERN_CUSTOM;
}

const char *qd_pattern_regex(qd_pattern pattern)
{
    return patterns[pattern].regex;
}

static bool same_text(const char *regex, size_t length, const char *known)
{
    return known && strlen(known) == length && memcmp(regex, known, length) == 0;
}

qd_pattern qd_pattern_by_regex(const char *regex, size_t length)
{
    for (int i = 0; i < QD_PATTERN_COUNT; i++)
        if (same_text(regex, length, patterns[i].regex) || same_text(regex, length, patterns[i].also))
            return (qd_pattern)i;
    return QD_PATTERN_CUSTOM;
}

/* First position at or after `at` whose character has none of `classes`. */
static const uint8_t *skip(const uint8_t *at, const uint8_t *end, unsigned classes)
{
    while (at < end) {
        size_t length;
        if (!(qd_class_at(at, end, &length) & classes))
            break;
        at += length;
    }
    return at;
}

/* First position at or after `at` whose character has one of `classes`. */
static const uint8_t *skip_without(const uint8_t *at, const uint8_t *end, unsigned classes)
{
    while (at < end) {
        size_t length;
        if (qd_class_at(at, end, &length) & classes)
            break;
        at += length;
    }
    return at;
}

/* The end of 's 't 're 've 'm 'll 'd at `at`, or NULL. If caseless, the long s (U+017F) is an s. */
static const uint8_t *contraction(const uint8_t *at, const uint8_t *end, bool caseless)
{
    if (end - at < 2 || *at != '\'')
        return NULL;
    uint8_t fold = caseless ? 0x20 : 0;
    uint8_t first = at[1] < 0x80 ? at[1] | fold : at[1];
    if (first == 's' || first == 't' || first == 'm' || first == 'd')
        return at + 2;
    if (end - at < 3)
        return NULL;
    if (caseless && at[1] == 0xc5 && at[2] == 0xbf)
        return at + 3;
    uint8_t second = at[2] < 0x80 ? at[2] | fold : at[2];
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
        return at + 3;
    return NULL;
}

/* White space at `at`, with the rules of all patterns: a run before other text leaves its last
 * character to the next piece; with `newlines` a run ends after its last line end; with `whole`,
 * not so at the end of the text. */
static const uint8_t *space(const uint8_t *at, const uint8_t *end, bool newlines, bool whole)
{
    const uint8_t *last = at, *after_newline = NULL, *place = at;
    while (place < end) {
        size_t length;
        unsigned class = qd_class_at(place, end, &length);
        if (!(class & QD_SPACE))
            break;
        last = place;
        place += length;
        if (class & QD_NEWLINE)
            after_newline = place;
    }
    if (newlines && after_newline && !(whole && place == end))
        return after_newline;
    return place == end || last == at ? place : last;
}

static const uint8_t *next_gpt2(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *short_form = contraction(at, end, false);
    if (short_form)
        return short_form;
    const uint8_t *start = *at == ' ' && at + 1 < end ? at + 1 : at;
    size_t length;
    unsigned class = qd_class_at(start, end, &length);
    if (class & QD_LETTER)
        return skip(start + length, end, QD_LETTER);
    if (class & QD_NUMBER)
        return skip(start + length, end, QD_NUMBER);
    if (!(class & QD_SPACE))
        return skip_without(start + length, end, QD_SPACE | QD_LETTER | QD_NUMBER);
    return space(at, end, false, false);
}

/* Up to `most` digits; the first has `length` bytes. */
static const uint8_t *digits(const uint8_t *at, const uint8_t *end, size_t length, int most)
{
    at += length;
    for (int i = 1; i < most && at < end; i++) {
        if (!(qd_class_at(at, end, &length) & QD_NUMBER))
            break;
        at += length;
    }
    return at;
}

/* " ?[^\s\p{L}\p{N}]+" and the line ends after it; NULL if it does not match. */
static const uint8_t *symbols(const uint8_t *at, const uint8_t *end, bool slashes)
{
    const uint8_t *start = *at == ' ' ? at + 1 : at;
    const uint8_t *stop = skip_without(start, end, QD_SPACE | QD_LETTER | QD_NUMBER);
    if (stop == start)
        return NULL;
    while (stop < end && (*stop == '\r' || *stop == '\n' || (slashes && *stop == '/')))
        stop++;
    return stop;
}

static const uint8_t *next_cl100k(const uint8_t *at, const uint8_t *end, int most_digits, bool whole)
{
    const uint8_t *stop = contraction(at, end, true);
    if (stop)
        return stop;
    size_t length;
    unsigned class = qd_class_at(at, end, &length);
    if (class & QD_LETTER)
        return skip(at + length, end, QD_LETTER);
    if (class & QD_NUMBER)
        return digits(at, end, length, most_digits);
    if (!(class & QD_NEWLINE)) {
        stop = skip(at + length, end, QD_LETTER);
        if (stop > at + length)
            return stop;
    }
    stop = symbols(at, end, false);
    return stop ? stop : space(at, end, true, whole);
}

/* "[upper]*[lower]+" at `at`, or else, with `capitals`, "[upper]+"; `at` if it does not match.
 * Characters in both classes are matched greedily by the first part; backtracks over the last of
 * them when the second part would otherwise be empty. */
static const uint8_t *cased_word(const uint8_t *at, const uint8_t *end, bool capitals)
{
    const uint8_t *place = at, *after_both = NULL;
    size_t length;
    unsigned class = 0;
    while (place < end) {
        class = qd_class_at(place, end, &length);
        if (!(class & QD_UPPER))
            break;
        place += length;
        if (class & QD_LOWER)
            after_both = place;
        class = 0;
    }
    if (class & QD_LOWER)
        return skip(place, end, QD_LOWER);
    if (after_both)
        return after_both;
    return capitals ? place : at;
}

static const uint8_t *next_o200k(const uint8_t *at, const uint8_t *end)
{
    size_t length;
    unsigned class = qd_class_at(at, end, &length);
    const uint8_t *stop = at;
    if (class & QD_NUMBER)
        return digits(at, end, length, 3);
    if (!(class & (QD_LETTER | QD_NEWLINE))) {
        /* A mark can be the optional first character or part of the word; capitals alone come after
         * both. */
        stop = cased_word(at + length, end, !(class & QD_LOWER));
        if (stop == at + length)
            stop = at;
    }
    if (stop == at)
        stop = cased_word(at, end, true);
    if (stop > at) {
        const uint8_t *more = contraction(stop, end, true);
        return more ? more : stop;
    }
    stop = symbols(at, end, true);
    return stop ? stop : space(at, end, true, false);
}

const uint8_t *qd_pattern_next(qd_pattern pattern, const uint8_t *at, const uint8_t *end)
{
    switch (pattern) {
    case QD_PATTERN_GPT2:
        return next_gpt2(at, end);
    case QD_PATTERN_CL100K:
        return next_cl100k(at, end, 3, true);
    case QD_PATTERN_LLAMA3:
        return next_cl100k(at, end, 3, false);
    case QD_PATTERN_QWEN2:
        return next_cl100k(at, end, 1, false);
    case QD_PATTERN_O200K:
        return next_o200k(at, end);
    case QD_PATTERN_CUSTOM:
        break;
    }
    return end;
}
