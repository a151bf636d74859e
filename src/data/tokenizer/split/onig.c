/* Translates regular expressions from Oniguruma to PCRE2. The two agree on most of what tokenizers
 * use and differ silently in the rest: [a-z&&[^b]] and [a-z[0-9]] are set operations in Oniguruma
 * and plain characters in PCRE2, \h is a hexadecimal digit there and a space here, {1,3}+ repeats a
 * repetition there and is possessive here, and \p{L} has letters of Unicode 16 there. These are
 * rewritten; sets become look-aheads. The rest is an allow-list of constructs known to be
 * equivalent. Anything else is refused by name, because tokens that differ from those a model was
 * trained with are worse than an error. */
#include "data/tokenizer/split/onig.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* White space of Unicode. PCRE2 includes U+180E, which Unicode no longer does, so \s and \S are
 * spelled out. */
#define SPACE     "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NOT_SPACE "\\x{0}-\\x{8}\\x{e}-\\x{1f}!-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}" \
                  "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"

enum { DEEPEST = 200, DEEPEST_CLASS = 20 };

typedef struct scanner {
    const char *where, *text;
    size_t length, at;
    qd_strbuf *out;
    int depth;
    bool fold[DEEPEST + 1]; /* case-insensitive, per open group */
    size_t open[DEEPEST + 1]; /* where the output of each open group starts */
    size_t atom;            /* where the output of the last character, class or group starts */
    qd_strbuf *sets;        /* inside a class: alternatives that a class of PCRE2 cannot contain; otherwise NULL */
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

/* Appends the new characters of a category (by its first letters) or script. */
static void put_new(const char *category, const char *script, bool others, qd_strbuf *out)
{
    for (int i = 0; i < qd_new_count; i++) {
        const qd_new_characters *c = &qd_new_characters_of[i];
        bool member = category ? strncmp(c->category, category, strlen(category)) == 0 : strcasecmp(c->script, script) == 0;
        if (member != others)
            qd_strbuf_printf(out, c->first == c->last ? "\\x{%x}" : "\\x{%x}-\\x{%x}", c->first, c->last);
    }
}

static void put_set(scanner *s, const char *body, const char *without, bool inverse)
{
    qd_strbuf *out = s->sets ? s->sets : s->out;
    if (s->sets && !inverse && !without[0]) {
        qd_strbuf_puts(s->out, body);
        return;
    }
    if (s->sets && s->sets->length)
        qd_strbuf_puts(out, "|");
    if (!without[0])
        qd_strbuf_printf(out, "[%s%s]", inverse ? "^" : "", body);
    else if (inverse)
        qd_strbuf_printf(out, "(?:[%s]|[^%s])", without, body);
    else
        qd_strbuf_printf(out, "(?:(?![%s])[%s])", without, body);
}

/* A category or script, with the characters that PCRE2 may not know yet and without those that it
 * counts differently. */
static qd_status put_property(scanner *s, const char *category, const char *script, bool inverse)
{
    qd_strbuf body = {0}, without = {0};
    qd_strbuf_printf(&body, "\\p{%s%s}", category ? "" : "sc:", category ? category : script);
    if (category && (strcmp(category, "Cn") == 0 || strcmp(category, "C") == 0))
        put_new(category, NULL, true, &without); /* they are assigned now; as Cf they stay in C */
    else
        put_new(category, script, false, &body);
    qd_strbuf_puts(&without, category && strcmp(category, "Mn") == 0 ? "\\x{1171e}" : ""); /* Mc since Unicode 15 */
    qd_strbuf_puts(&body, category && strcmp(category, "Mc") == 0 ? "\\x{1171e}" : "");
    put_set(s, body.data ? body.data : "", without.data ? without.data : "", inverse);
    s->out->failed = s->out->failed || body.failed || without.failed;
    qd_strbuf_free(&body);
    qd_strbuf_free(&without);
    return QD_OK;
}

/* \p{…}: categories and scripts, not script extensions. */
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
    inverse = inverse != (s->text[from + 1] == 'P');
    s->at = end + 1;
    return put_property(s, count <= 2 ? name : NULL, count <= 2 ? NULL : name, inverse);
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
    if (c == 'd' || c == 'h' || ((c == 'D' || c == 'H') && !folds(s))) {
        s->at += 2;
        if (c == 'd' || c == 'D')
            return put_property(s, "Nd", NULL, c == 'D');
        put_set(s, "0-9a-fA-F", "", c == 'H');
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

static qd_status nested_class(scanner *s, int depth, qd_strbuf *result);

static qd_status class_item(scanner *s, int depth, bool *set)
{
    *set = false;
    if (peek(s, 0) == '\\')
        return escape(s, true, set);
    if (peek(s, 0) == '[') {
        if (peek(s, 1) == ':')
            return differs(s, s->at, 2, "a POSIX bracket");
        *set = true;
        if (s->sets->length)
            qd_strbuf_puts(s->sets, "|");
        return nested_class(s, depth + 1, s->sets);
    }
    if (folds(s) && peek(s, 0) >= 0x80)
        return differs(s, s->at, 1, "a character beyond ASCII where case is ignored");
    if (strchr("^-]", peek(s, 0))) /* what it means may depend on its place */
        qd_strbuf_puts(s->out, "\\");
    copy(s, 1); /* the remaining bytes of a UTF-8 character follow as separate items, which is equivalent */
    return QD_OK;
}

/* The union of a class's items so far: a class of PCRE2, and alternatives. */
static qd_status put_union(const scanner *s, size_t from, const qd_strbuf *plain, const qd_strbuf *sets, qd_strbuf *out)
{
    if (!plain->length && !sets->length)
        return differs(s, from, 1, "an empty class");
    if (plain->length)
        qd_strbuf_printf(out, sets->length ? "(?:[%s]|%s)" : "[%s]", plain->data, sets->data);
    else
        qd_strbuf_printf(out, "(?:%s)", sets->data);
    return QD_OK;
}

/* Items up to the end of the class, with s->out and s->sets as their destinations. `earlier`
 * collects the operands of && before the last as look-aheads. */
static qd_status class_items(scanner *s, size_t from, int depth, qd_strbuf *earlier)
{
    for (bool first = true; first || peek(s, 0) != ']'; first = false) {
        bool set, end_is_set;
        if (s->at >= s->length)
            return differs(s, from, 1, "a class without an end");
        if (follows(s, "&&")) {
            qd_strbuf_puts(earlier, "(?=");
            QD_TRY(put_union(s, from, s->out, s->sets, earlier));
            qd_strbuf_puts(earlier, ")");
            qd_strbuf_clear(s->out);
            qd_strbuf_clear(s->sets);
            s->at += 2;
            continue;
        }
        QD_TRY(class_item(s, depth, &set));
        if (peek(s, 0) != '-' || peek(s, 1) == ']' || peek(s, 1) < 0)
            continue;
        size_t dash = s->at;
        copy(s, 1);
        QD_TRY(class_item(s, depth, &end_is_set));
        if (set || end_is_set)
            return differs(s, dash, 1, "a range from or to a set");
    }
    return QD_OK;
}

/* Appends an expression that matches one character of the class at s->at. */
static qd_status nested_class(scanner *s, int depth, qd_strbuf *result)
{
    qd_strbuf plain = {0}, sets = {0}, earlier = {0}, inner = {0}, *out = s->out, *outer = s->sets;
    const size_t from = s->at;
    const bool inverse = peek(s, 1) == '^';
    if (depth > DEEPEST_CLASS)
        return QD_FAIL(QD_USAGE, "%s: the regular expression has classes nested more than %d deep", s->where, DEEPEST_CLASS);
    s->at += inverse ? 2 : 1;
    s->out = &plain;
    s->sets = &sets;
    qd_status status = class_items(s, from, depth, &earlier);
    s->out = out;
    s->sets = outer;
    const bool simple = sets.length == 0 && earlier.length == 0;
    if (status == QD_OK && !simple && folds(s))
        status = differs(s, from, s->at + 1 - from, "a set of classes where case is ignored");
    if (status == QD_OK && !(simple && inverse))
        status = put_union(s, from, &plain, &sets, &inner);
    if (status == QD_OK && simple && inverse)
        status = plain.length ? QD_OK : differs(s, from, 2, "an empty class");
    if (status == QD_OK) {
        const char *before = earlier.data ? earlier.data : "", *last = inner.data ? inner.data : "";
        if (simple && inverse)
            qd_strbuf_printf(result, "[^%s]", plain.data);
        else if (simple)
            qd_strbuf_puts(result, last);
        else if (inverse)
            qd_strbuf_printf(result, "(?:(?!%s%s)(?s:.))", before, last);
        else
            qd_strbuf_printf(result, "(?:%s%s)", before, last);
        s->at++;
    }
    result->failed = result->failed || plain.failed || sets.failed || earlier.failed || inner.failed;
    qd_strbuf_free(&plain);
    qd_strbuf_free(&sets);
    qd_strbuf_free(&earlier);
    qd_strbuf_free(&inner);
    return status;
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
    s->open[s->depth + 1] = s->out->length;
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

/* The last character, class or group becomes a group of its own, so that a repetition of it can be
 * repeated. */
static qd_status wrap_atom(scanner *s)
{
    qd_strbuf atom = {0};
    qd_strbuf_append(&atom, s->out->data + s->atom, s->out->length - s->atom);
    s->out->length = s->atom;
    qd_strbuf_puts(s->out, "(?:");
    qd_strbuf_append(s->out, atom.data ? atom.data : "", atom.length);
    s->out->failed = s->out->failed || atom.failed;
    qd_strbuf_free(&atom);
    return QD_OK;
}

static qd_status quantifier(scanner *s)
{
    size_t from = s->at, count = 1;
    bool interval = peek(s, 0) == '{', exact = false, open = false;
    if (s->quantified || s->opened || s->empty)
        return differs(s, from, 1, s->quantified ? "a quantifier of a quantifier" : "a quantifier of nothing");
    if (interval) {
        size_t least = digits(s, 1), most = 0;
        exact = peek(s, 1 + least) == '}';
        count = 1 + least + 1;
        if (!exact && peek(s, 1 + least) == ',') {
            most = digits(s, count);
            count += most + 1;
        }
        open = least == 0 && most > 0; /* {,n} is {0,n} */
        if ((least == 0 && !open) || least > 5 || most > 5 || peek(s, count - 1) != '}')
            return differs(s, from, 1, "neither escaped nor a quantifier {n}, {n,}, {,m} or {n,m}");
    }
    int suffix = peek(s, count);
    /* {1,3}+ repeats the repetition, {2}? makes it optional. */
    const bool again = (interval && suffix == '+') || (exact && suffix == '?');
    if (again)
        QD_TRY(wrap_atom(s));
    if (open) {
        qd_strbuf_puts(s->out, "{0");
        s->at++;
        count--;
    }
    copy(s, count);
    if (again)
        qd_strbuf_puts(s->out, ")");
    if (suffix == '+' || suffix == '?')
        copy(s, 1);
    return QD_OK;
}

static qd_status item(scanner *s)
{
    bool set;
    switch (peek(s, 0)) {
    case '\\': return escape(s, false, &set);
    case '[': return nested_class(s, 0, s->out);
    case ')':
        s->atom = s->open[s->depth];
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
        if (!strchr(")*+?{", c) && (c & 0xc0) != 0x80) /* the bytes of a character belong together */
            s.atom = out->length;
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
