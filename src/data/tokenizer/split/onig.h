/* Translates the regular expressions of tokenizer.json, which use Oniguruma's Ruby syntax, to
 * PCRE2. */
#ifndef QD_DATA_TOKENIZER_SPLIT_ONIG_H
#define QD_DATA_TOKENIZER_SPLIT_ONIG_H

#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <stddef.h>

/* Appends an expression that matches in PCRE2 (UTF, UCP, MULTILINE, newline \n) what `regex`
 * matches in Oniguruma. Constructs that the engines interpret differently, or that have no
 * translation here, are QD_USAGE with name and offset. Other syntax errors are left to PCRE2. */
qd_status qd_onig_translate(const char *where, const char *regex, size_t length, qd_strbuf *out);

#endif
