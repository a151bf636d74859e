/* Translates regular expressions from Oniguruma to PCRE2. The two agree on most of what tokenizers
 * use and differ silently in the rest: [a-z&&[^b]] and [a-z[0-9]] are set operations in Oniguruma
 * and plain characters in PCRE2, \h is a hexadecimal digit there and a space here, {1,3}+ repeats a
 * repetition there and is possessive here. So this is an allow-list of constructs known to be
 * equivalent. Anything else is refused by name, because tokens that differ from those a model was
 * trained with are worse than an error. */
#include "data/tokenizer/split/onig.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* White space of Unicode. PCRE2 includes U+180E, which Unicode no longer does, so \s and \S are
 * spelled out. */
#define SPACE     "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NOT_SPACE "\\x{0}-\\x{8}\\x{e}-\\x{1f}!-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}" \
                  "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"

enum { DEEPEST = 200 };

typedef struct scanner {
    const char *where, *text;
    size_t length, at;
    qd_strbuf *out;
    int depth;
    bool fold[DEEPEST + 1]; /* case-insensitive, per open group */
    bool opened;            /* at the start of the expression or of a group */
    bool empty;             /* at the start of an alternative */
    bool quantified;        /* after a quantifier */
    char literal, previous; /* where case is ignored: the current character and the one before it; 0: none */
} scanner;

static qd_status differs(const scanner *s, size_t from, size_t length, const char *what)
{
    length = length < s->length - from ? length : s->length - from;
    while (from + length < s->length && ((unsigned char)s->text[from + length] & 0xc0) == 0x80)
        length++; /* to the end of a UTF-8 character */
    return QD_FAIL(QD_USAGE, "%s: the regular expression has '%.*s' at offset %zu, %s, which is not supported: Oniguruma (used by "
                             "the package tokenizers) and PCRE2 (used here) may interpret it differently", s->where, (int)length,
                   s->text + from, from, what);
}

static bool folds(const scanner *s)
{
    return s->fold[s->depth];
}

static int peek(const scanner *s, size_t ahead)
{
    return s->at + ahead < s->length ? (unsigned char)s->text[s->at + ahead] : -1;
}

static bool follows(const scanner *s, const char *text)
{
    size_t length = strlen(text);
    return s->length - s->at >= length && memcmp(s->text + s->at, text, length) == 0;
}

static void copy(scanner *s, size_t count)
{
    qd_strbuf_append(s->out, s->text + s->at, count);
    s->at += count;
}

/* Where case is ignored, Oniguruma also matches characters that fold to several letters: "ss"
 * matches ß, "fi" a ligature. */
static qd_status check_letter(scanner *s, char c)
{
    static const char *const pairs[] = {"ss", "st", "ff", "fi", "fl"};
    if (!folds(s))
        return QD_OK;
    if ((unsigned char)c >= 0x80)
        return differs(s, s->at, 1, "a character beyond ASCII where case is ignored");
    char lower = (char)tolower((unsigned char)c);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (s->previous == pairs[i][0] && lower == pairs[i][1])
            return differs(s, s->at - 1, 2, "letters that one character folds to, where case is ignored");
    s->literal = lower;
    return QD_OK;
}

/* The general categories of Unicode, by short name. */
static bool is_category(const char *name)
{
    static const char all[] = " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Cs Co Cn ";
    char wanted[8];
    snprintf(wanted, sizeof wanted, " %.2s ", name);
    return strlen(name) <= 2 && strstr(all, wanted);
}

/* \p{…}: categories are equivalent. For scripts, PCRE2 must be asked to exclude script
 * extensions. */
static qd_status property(scanner *s)
{
    size_t from = s->at, end = s->at + 3, count = 0;
    char name[64];
    if (folds(s))
        return differs(s, from, 2, "a property where case is ignored");
    if (peek(s, 2) != '{')
        return differs(s, from, 2, "a property without braces");
    bool inverse = peek(s, 3) == '^';
    for (end += inverse; end < s->length && s->text[end] != '}' && count + 1 < sizeof name; end++) {
        char c = s->text[end];
        if (!isalpha((unsigned char)c) && c != '_')
            return differs(s, from, end + 1 - from, "a property");
        name[count++] = c;
    }
    name[count] = '\0';
    if (end >= s->length || s->text[end] != '}' || count == 0)
        return differs(s, from, end - from, "a property without an end");
    if (count <= 2) {
        name[0] = (char)toupper((unsigned char)name[0]);
        name[1] = (char)tolower((unsigned char)name[1]);
        if (!is_category(name))
            return differs(s, from, end + 1 - from, "a property that is no category of Unicode");
    }
    qd_strbuf_printf(s->out, "\\%c{%s%s%s}", s->text[from + 1], inverse ? "^" : "", count <= 2 ? "" : "sc:", name);
    s->at = end + 1;
    return QD_OK;
}

static bool hexadecimal(const scanner *s, size_t ahead, int count)
{
    for (int i = 0; i < count; i++)
        if (peek(s, ahead + (size_t)i) < 0 || !isxdigit(peek(s, ahead + (size_t)i)))
            return false;
    return true;
}

/* \x41, \x{1f600}, \u0041 */
static qd_status code_point(scanner *s)
{
    size_t from = s->at, end = s->at + 3;
    if (folds(s))
        return differs(s, from, 2, "a code point where case is ignored");
    if (peek(s, 1) == 'u' && hexadecimal(s, 2, 4)) {
        qd_strbuf_printf(s->out, "\\x{%.4s}", s->text + from + 2);
        s->at += 6;
        return QD_OK;
    }
    if (peek(s, 1) == 'x' && hexadecimal(s, 2, 2) && peek(s, 2) < '8') { /* above 0x7f Oniguruma reads a byte */
        copy(s, 4);
        return QD_OK;
    }
    while (end < s->length && isxdigit((unsigned char)s->text[end]))
        end++;
    if (peek(s, 1) != 'x' || peek(s, 2) != '{' || end == from + 3 || end >= s->length || s->text[end] != '}')
        return differs(s, from, 2, "a code point in an unusual form");
    copy(s, end + 1 - from);
    return QD_OK;
}

/* *set: the escape stands for more than one character. */
static qd_status escape(scanner *s, bool in_class, bool *set)
{
    int c = peek(s, 1);
    *set = true;
    if (c == 'p' || c == 'P')
        return property(s);
    if (c == 's' || c == 'S') {
        if (c == 'S' && folds(s))
            return differs(s, s->at, 2, "a set beyond ASCII where case is ignored");
        qd_strbuf_printf(s->out, in_class ? "%s" : "[%s]", c == 's' ? SPACE : NOT_SPACE);
        s->at += 2;
        return QD_OK;
    }
    if (c == 'd' || (c == 'D' && !folds(s))) {
        copy(s, 2);
        return QD_OK;
    }
    *set = false;
    if (c == 'x' || c == 'u')
        return code_point(s);
    if (c > 0 && strchr("nrtfae", c)) {
        copy(s, 2);
        return QD_OK;
    }
    if (!in_class && (c == 'A' || c == 'z')) {
        copy(s, 2);
        return QD_OK;
    }
    if (c == ' ' || (c > 0 && c < 0x80 && ispunct(c))) {
        copy(s, 2);
        return QD_OK;
    }
    return differs(s, s->at, c < 0 ? 1 : 2, "an escape");
}

static qd_status class_item(scanner *s, bool *set)
{
    *set = false;
    if (peek(s, 0) == '\\')
        return escape(s, true, set);
    if (peek(s, 0) == '[')
        return differs(s, s->at, 2, peek(s, 1) == ':' ? "a POSIX bracket" : "a class inside a class");
    if (follows(s, "&&"))
        return differs(s, s->at, 2, "an intersection of classes");
    if (folds(s) && peek(s, 0) >= 0x80)
        return differs(s, s->at, 1, "a character beyond ASCII where case is ignored");
    copy(s, 1); /* the remaining bytes of a UTF-8 character follow as separate items, which is equivalent */
    return QD_OK;
}

static qd_status class_(scanner *s)
{
    size_t from = s->at;
    copy(s, peek(s, 1) == '^' ? 2 : 1);
    for (bool first = true; first || peek(s, 0) != ']'; first = false) {
        bool set, end_is_set;
        if (s->at >= s->length)
            return differs(s, from, 1, "a class without an end");
        QD_TRY(class_item(s, &set));
        if (peek(s, 0) != '-' || peek(s, 1) == ']' || peek(s, 1) < 0)
            continue;
        size_t dash = s->at;
        copy(s, 1);
        QD_TRY(class_item(s, &end_is_set));
        if (set || end_is_set)
            return differs(s, dash, 1, "a range from or to a set");
    }
    copy(s, 1);
    return QD_OK;
}

static qd_status group(scanner *s)
{
    static const char *const plain[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    bool fold = folds(s), on = follows(s, "(?i"), off = follows(s, "(?-i");
    size_t count = 1;
    if (peek(s, 1) == '*')
        return differs(s, s->at, 2, "a verb or a call");
    if (on || off) {
        count = on ? 4 : 5;
        fold = on;
        if (peek(s, count - 1) == ')' && s->opened) { /* applies to the rest of the group, which is all of it */
            copy(s, count);
            s->fold[s->depth] = fold;
            return QD_OK;
        }
        if (peek(s, count - 1) != ':')
            return differs(s, s->at, count, "an option that is not at the start of a group");
    } else if (peek(s, 1) == '?') {
        count = 0;
        for (size_t i = 0; i < sizeof plain / sizeof *plain && count == 0; i++)
            count = follows(s, plain[i]) ? strlen(plain[i]) : 0;
        if (count == 0)
            return differs(s, s->at, 3, "a kind of group");
    }
    if (s->depth == DEEPEST)
        return QD_FAIL(QD_USAGE, "%s: the regular expression has groups nested more than %d deep", s->where, DEEPEST);
    copy(s, count);
    s->fold[++s->depth] = fold;
    return QD_OK;
}

static size_t digits(const scanner *s, size_t ahead)
{
    size_t count = 0;
    while (peek(s, ahead + count) >= '0' && peek(s, ahead + count) <= '9')
        count++;
    return count;
}

static qd_status quantifier(scanner *s)
{
    size_t from = s->at, count = 1;
    bool interval = peek(s, 0) == '{', exact = false;
    if (s->quantified)
        return differs(s, from, 1, "a quantifier of a quantifier");
    if (interval) {
        size_t least = digits(s, 1), most = 0;
        exact = peek(s, 1 + least) == '}';
        count = 1 + least + 1;
        if (!exact && peek(s, 1 + least) == ',') {
            most = digits(s, count);
            count += most + 1;
        }
        if (least == 0 || least > 5 || most > 5 || peek(s, count - 1) != '}')
            return differs(s, from, 1, "neither escaped nor a quantifier {n}, {n,} or {n,m}");
    }
    copy(s, count);
    int suffix = peek(s, 0);
    if ((interval && suffix == '+') || (exact && suffix == '?'))
        return differs(s, from, s->at + 1 - from, "a quantifier");
    if (suffix == '+' || suffix == '?')
        copy(s, 1);
    return QD_OK;
}

static qd_status item(scanner *s)
{
    bool set;
    switch (peek(s, 0)) {
    case '\\': return escape(s, false, &set);
    case '[': return class_(s);
    case ')':
        s->depth -= s->depth > 0; /* PCRE2 reports an unmatched one */
        copy(s, 1);
        return QD_OK;
    default: break;
    }
    if (!strchr(".^$|", peek(s, 0)))
        QD_TRY(check_letter(s, s->text[s->at]));
    copy(s, 1);
    return QD_OK;
}

qd_status qd_onig_translate(const char *where, const char *regex, size_t length, qd_strbuf *out)
{
    scanner s = {.where = where, .text = regex, .length = length, .out = out, .opened = true, .empty = true};
    while (s.at < length) {
        int c = peek(&s, 0);
        s.previous = s.literal;
        s.literal = 0;
        if (c == '\0')
            return differs(&s, s.at, 0, "a NUL character");
        if (s.empty && (c == '|' || c == ')'))
            return differs(&s, s.at, 1, "behind an empty alternative");
        if (c == '*' || c == '+' || c == '?' || c == '{') {
            QD_TRY(quantifier(&s));
            s.quantified = true;
            s.opened = false;
        } else if (c == '(') {
            QD_TRY(group(&s));
            s.quantified = false;
            s.opened = true;
        } else {
            QD_TRY(item(&s));
            s.quantified = s.opened = false;
        }
        s.empty = c == '|' || (c == '(' && s.text[s.at - 1] != ')'); /* (?i) neither starts nor ends an alternative */
    }
    return QD_OK;
}
