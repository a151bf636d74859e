/* Regular expressions of tokenizer.json are Oniguruma's, in its Ruby syntax; ours run in PCRE2. */
#ifndef QD_DATA_TOKENIZER_SPLIT_ONIG_H
#define QD_DATA_TOKENIZER_SPLIT_ONIG_H

#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <stddef.h>

/* Appends the expression that PCRE2 (UTF, UCP, MULTILINE, lines that end with \n) matches as
 * Oniguruma matches `regex`. What the two read differently and what has no translation here is
 * QD_USAGE, with its name and its offset. Whether the rest is a regular expression at all is for
 * PCRE2 to say. */
qd_status qd_onig_translate(const char *where, const char *regex, size_t length, qd_strbuf *out);

#endif
