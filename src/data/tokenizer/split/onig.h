/* Translates the regular expressions of tokenizer.json, which use Oniguruma's Ruby syntax, to
 * PCRE2. */
#ifndef QD_DATA_TOKENIZER_SPLIT_ONIG_H
#define QD_DATA_TOKENIZER_SPLIT_ONIG_H

#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <stddef.h>
#include <stdint.h>

/* Appends an expression that matches in PCRE2 (UTF, UCP, MULTILINE, newline \n) what `regex`
 * matches in Oniguruma. Constructs that the engines interpret differently, or that have no
 * translation here, are QD_USAGE with name and offset. Other syntax errors are left to PCRE2. */
qd_status qd_onig_translate(const char *where, const char *regex, size_t length, qd_strbuf *out);

/* Characters that Oniguruma knows (Unicode 16) and older versions of PCRE2 do not (Unicode 14). */
typedef struct qd_new_characters {
    uint32_t first, last;
    char category[3], script[12];
} qd_new_characters;
extern const int qd_new_count;
extern const qd_new_characters qd_new_characters_of[];

#endif
