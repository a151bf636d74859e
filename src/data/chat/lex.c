/* The lexer: text, tags and the parts of expressions, with Jinja's rules for white space around
 * tags under trim_blocks and lstrip_blocks, which transformers sets. */
#include "data/chat/chat_impl.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct lexer {
    qd_chat *chat;
    const char *text;
    size_t length, at;
    qd_chat_lexed *lexemes;
    size_t count, capacity;
    bool line_starting; /* the last tag took the line end after it */
} lexer;

static qd_status add(lexer *x, qd_chat_lexeme kind, size_t at, qd_chat_lexed **added)
{
    if (x->count == x->capacity) {
        x->capacity = x->capacity ? 2 * x->capacity : 256;
        qd_chat_lexed *grown = realloc(x->lexemes, x->capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", x->chat->name);
        x->lexemes = grown;
    }
    *added = &x->lexemes[x->count++];
    **added = (qd_chat_lexed){.kind = (uint8_t)kind, .at = (uint32_t)at};
    return QD_OK;
}

static qd_status add_text(lexer *x, qd_chat_lexeme kind, size_t at, const char *text, size_t length)
{
    qd_chat_lexed *added;
    QD_TRY(add(x, kind, at, &added));
    added->text = text;
    added->length = (uint32_t)length;
    return QD_OK;
}

static bool follows(const lexer *x, size_t at, const char *expected)
{
    size_t length = strlen(expected);
    return at + length <= x->length && memcmp(x->text + at, expected, length) == 0;
}

static size_t after_space(const lexer *x, size_t at)
{
    return at + qd_chat_space_length(x->text + at, x->length - at);
}

/* Text before a tag, without what the tag strips. sign: '-', '+' or 0. */
static qd_status add_data(lexer *x, size_t from, size_t to, char sign, bool is_print)
{
    const char *text = x->text + from;
    size_t length = to - from;
    if (sign == '-')
        length = qd_chat_without_space(text, length);
    else if (sign != '+' && !is_print) {
        size_t line = length;
        while (line > 0 && text[line - 1] != '\n')
            line--;
        if ((line > 0 || x->line_starting) && qd_chat_space_length(text + line, length - line) == length - line)
            length = line;
    }
    return length ? add_text(x, QD_CHAT_L_DATA, from, text, length) : QD_OK;
}

/* The end of a tag `close` at x->at, if it is there: skips it and the white space that it takes. */
static bool tag_end(lexer *x, const char *close, bool is_print)
{
    size_t at = x->at;
    char sign = 0;
    if (at < x->length && (x->text[at] == '-' || (x->text[at] == '+' && !is_print)))
        sign = x->text[at++];
    if (!follows(x, at, close))
        return false;
    at += 2;
    if (sign == '-')
        at = after_space(x, at);
    else if (!sign && !is_print && at < x->length && x->text[at] == '\n')
        at++;
    x->at = at;
    x->line_starting = x->text[at - 1] == '\n';
    return true;
}

static qd_status comment(lexer *x)
{
    size_t start = x->at;
    x->at += 2;
    if (x->at < x->length && (x->text[x->at] == '-' || x->text[x->at] == '+'))
        x->at++;
    if (x->at == x->length) /* accepted by Jinja, at the end of the template only */
        return QD_OK;
    for (; x->at < x->length; x->at++)
        if (tag_end(x, "#}", false))
            return QD_OK;
    return qd_chat_fail(x->chat, start, "the comment has no end '#}'");
}

/* Position after "{%- word", followed by an end of tag, or 0. */
static size_t raw_tag(const lexer *x, size_t at, const char *word)
{
    at += 2;
    if (at < x->length && (x->text[at] == '-' || x->text[at] == '+'))
        at++;
    at = after_space(x, at);
    if (!follows(x, at, word))
        return 0;
    at = after_space(x, at + strlen(word));
    return at;
}

/* {% raw %} … {% endraw %}; x->at is after "raw". */
static qd_status raw_block(lexer *x, size_t start)
{
    if (follows(x, x->at, "-%}"))
        x->at = after_space(x, x->at + 3);
    else
        x->at += 2;
    x->line_starting = x->text[x->at - 1] == '\n';
    if (x->at == x->length)
        return QD_OK;
    for (size_t at = x->at; at < x->length; at++) {
        size_t end = follows(x, at, "{%") ? raw_tag(x, at, "endraw") : 0;
        if (!end)
            continue;
        size_t from = x->at;
        char sign = x->text[at + 2];
        x->at = end;
        bool starting = x->line_starting;
        if (!tag_end(x, "%}", false)) {
            x->at = from;
            continue;
        }
        bool after = x->line_starting;
        x->line_starting = starting;
        QD_TRY(add_data(x, from, at, sign == '-' || sign == '+' ? sign : 0, false));
        x->line_starting = after;
        return QD_OK;
    }
    return qd_chat_fail(x->chat, start, "'raw' has no 'endraw'");
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* One escape sequence after its backslash, as Python's unicode-escape reads it. */
static qd_status escape(lexer *x, size_t *at, size_t end, char *to, size_t *length)
{
    static const char simple[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";
    size_t start = *at - 1;
    char c = x->text[(*at)++];
    if (c == '\n')
        return QD_OK;
    for (size_t i = 0; i + 1 < sizeof simple; i += 2)
        if (c == simple[i]) {
            to[(*length)++] = simple[i + 1];
            return QD_OK;
        }
    uint32_t code = 0;
    if (c >= '0' && c <= '7') {
        code = (uint32_t)(c - '0');
        for (int i = 0; i < 2 && *at < end && x->text[*at] >= '0' && x->text[*at] <= '7'; i++)
            code = 8 * code + (uint32_t)(x->text[(*at)++] - '0');
    } else if (c == 'x' || c == 'u' || c == 'U') {
        for (int i = c == 'x' ? 2 : c == 'u' ? 4 : 8; i > 0; i--) {
            int digit = *at < end ? hex(x->text[*at]) : -1;
            if (digit < 0)
                return qd_chat_fail(x->chat, start, "the escape sequence \\%c is not followed by enough hexadecimal digits", c);
            code = 16 * code + (uint32_t)digit;
            ++*at;
        }
        if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
            return qd_chat_fail(x->chat, start, "the escape sequence is not a character");
    } else if (c == 'N') {
        return qd_chat_fail(x->chat, start, "the escape sequence \\N{name} is not implemented; write \\u with four digits");
    } else { /* any other: the backslash stays */
        to[(*length)++] = '\\';
        to[(*length)++] = c;
        return QD_OK;
    }
    *length += qd_chat_put_utf8(code, to + *length);
    return QD_OK;
}

static qd_status string(lexer *x)
{
    size_t start = x->at;
    char quote = x->text[x->at++];
    size_t end = x->at;
    while (end < x->length && x->text[end] != quote)
        end += x->text[end] == '\\' && end + 1 < x->length ? 2 : 1;
    if (end >= x->length)
        return qd_chat_fail(x->chat, start, "the string has no closing %c", quote);
    char *text = QD_ARENA_NEW(x->chat->arena, char, end - x->at + 4); /* no escape sequence gets longer */
    if (!text)
        return QD_NO_MEMORY;
    size_t length = 0;
    while (x->at < end) {
        char c = x->text[x->at++];
        if (c == '\\')
            QD_TRY(escape(x, &x->at, end, text, &length));
        else
            text[length++] = c;
    }
    x->at = end + 1;
    text[length] = '\0';
    return add_text(x, QD_CHAT_L_STRING, start, text, length);
}

/* Digits with single underscores between them; false if there is none. */
static size_t digits(const lexer *x, size_t at, int base)
{
    size_t end = at;
    for (;;) {
        size_t next = end < x->length && x->text[end] == '_' && end > at ? end + 1 : end;
        int digit = next < x->length ? hex(x->text[next]) : -1;
        if (digit < 0 || digit >= base)
            return end;
        end = next + 1;
    }
}

static size_t float_end(const lexer *x, size_t whole_end)
{
    size_t end = whole_end;
    bool is_float = false;
    if (end < x->length && x->text[end] == '.' && digits(x, end + 1, 10) > end + 1) {
        end = digits(x, end + 1, 10);
        is_float = true;
    }
    if (end < x->length && (x->text[end] == 'e' || x->text[end] == 'E')) {
        size_t exponent = end + 1;
        if (exponent < x->length && (x->text[exponent] == '+' || x->text[exponent] == '-'))
            exponent++;
        if (digits(x, exponent, 10) > exponent) {
            end = digits(x, exponent, 10);
            is_float = true;
        }
    }
    return is_float ? end : 0;
}

static qd_status number(lexer *x)
{
    size_t start = x->at, end = digits(x, start, 10);
    size_t whole = start > 0 && x->text[start - 1] == '.' ? 0 : float_end(x, end);
    int base = 10;
    if (whole) {
        end = whole;
    } else if (x->text[start] == '0') {
        char kind = start + 1 < x->length ? (char)tolower(x->text[start + 1]) : 0;
        base = kind == 'b' ? 2 : kind == 'o' ? 8 : kind == 'x' ? 16 : 10;
        size_t from = start + 2 < x->length && x->text[start + 2] == '_' ? start + 3 : start + 2;
        end = base == 10 ? digits(x, start, 1) : digits(x, from, base);
        if (base != 10 && end == from) { /* "0x" without digits is 0 and a name */
            base = 10;
            end = start + 1;
        }
    }
    char text[80];
    size_t length = 0;
    for (size_t i = start + (base == 10 ? 0 : 2); i < end; i++)
        if (x->text[i] != '_') {
            if (length + 1 == sizeof text)
                return qd_chat_fail(x->chat, start, "the number has too many digits");
            text[length++] = x->text[i];
        }
    text[length] = '\0';
    qd_chat_lexed *added;
    QD_TRY(add(x, whole ? QD_CHAT_L_FLOAT : QD_CHAT_L_INT, start, &added));
    added->length = (uint32_t)(end - start);
    added->text = x->text + start;
    errno = 0;
    if (whole)
        added->real = qd_double_parse(text, NULL);
    else
        added->integer = strtoll(text, NULL, base);
    if (!whole && errno == ERANGE)
        return qd_chat_fail(x->chat, start, "integers of more than 64 bits are not implemented");
    x->at = end;
    return QD_OK;
}

static qd_status operator(lexer *x, char *brackets, int *open)
{
    static const char twos[][3] = {"//", "**", "==", "!=", ">=", "<="};
    size_t start = x->at;
    char c = x->text[start];
    if (!strchr("+-/*%~[](){}><=.:|,;", c) && c != '!')
        return qd_chat_fail(x->chat, start, (unsigned char)c < 128 && c > ' ' ? "unexpected character '%c'"
                                                                               : "unexpected character 0x%02x",
                            (unsigned char)c);
    int op = c;
    for (size_t i = 0; i < sizeof twos / sizeof *twos; i++)
        if (follows(x, start, twos[i]))
            op = QD_CHAT_OP(twos[i][0], twos[i][1]);
    if (op == '!')
        return qd_chat_fail(x->chat, start, "unexpected character '!'");
    if (strchr("([{", c)) {
        if (*open == QD_CHAT_MOST_NESTING)
            return qd_chat_fail(x->chat, start, "brackets are nested more than %d levels deep", QD_CHAT_MOST_NESTING);
        brackets[(*open)++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (strchr(")]}", c)) {
        if (!*open || brackets[*open - 1] != c)
            return qd_chat_fail(x->chat, start, "unexpected '%c'", c);
        --*open;
    }
    qd_chat_lexed *added;
    QD_TRY(add(x, QD_CHAT_L_OP, start, &added));
    added->op = (uint16_t)op;
    x->at += op > 255 ? 2 : 1;
    return QD_OK;
}

/* The inside of {{ }} or {% %}, and its end. */
static qd_status tag(lexer *x, size_t start, bool is_print)
{
    char brackets[QD_CHAT_MOST_NESTING];
    int open = 0;
    qd_chat_lexed *added;
    for (;;) {
        if (x->at >= x->length)
            return qd_chat_fail(x->chat, start, "the tag has no end '%s'", is_print ? "}}" : "%}");
        size_t at = x->at;
        if (!open && tag_end(x, is_print ? "}}" : "%}", is_print))
            return add(x, is_print ? QD_CHAT_L_PRINT_END : QD_CHAT_L_BLOCK_END, at, &added);
        unsigned char c = (unsigned char)x->text[at];
        size_t space = qd_chat_space_length(x->text + at, x->length - at);
        if (space) {
            x->at += space;
        } else if (isdigit(c)) {
            QD_TRY(number(x));
        } else if (isalpha(c) || c == '_') {
            while (x->at < x->length && (isalnum((unsigned char)x->text[x->at]) || x->text[x->at] == '_'))
                x->at++;
            if (x->at < x->length && (unsigned char)x->text[x->at] >= 128 && !qd_chat_space_length(x->text + x->at, x->length - x->at))
                return qd_chat_fail(x->chat, at, "names with characters outside ASCII are not implemented");
            char *name = QD_ARENA_NEW(x->chat->arena, char, x->at - at + 1);
            if (!name)
                return QD_NO_MEMORY;
            memcpy(name, x->text + at, x->at - at);
            QD_TRY(add_text(x, QD_CHAT_L_NAME, at, name, x->at - at));
        } else if (c == '"' || c == '\'') {
            QD_TRY(string(x));
        } else {
            QD_TRY(operator(x, brackets, &open));
        }
    }
}

static qd_status lex(lexer *x)
{
    qd_chat_lexed *added;
    x->line_starting = true;
    for (;;) {
        size_t from = x->at, at = from;
        while (at < x->length && !(x->text[at] == '{' && at + 1 < x->length && strchr("{%#", x->text[at + 1]) && x->text[at + 1]))
            at++;
        if (at >= x->length) {
            if (at > from)
                QD_TRY(add_text(x, QD_CHAT_L_DATA, from, x->text + from, at - from));
            return add(x, QD_CHAT_L_END, at, &added);
        }
        char sign = at + 2 < x->length ? x->text[at + 2] : 0;
        if (sign != '-' && sign != '+')
            sign = 0;
        bool is_print = x->text[at + 1] == '{';
        QD_TRY(add_data(x, from, at, sign, is_print));
        size_t raw = x->text[at + 1] == '%' ? raw_tag(x, at, "raw") : 0;
        if (x->text[at + 1] == '#') {
            x->at = at;
            QD_TRY(comment(x));
        } else if (raw && (follows(x, raw, "%}") || follows(x, raw, "-%}"))) {
            x->at = raw;
            QD_TRY(raw_block(x, at));
        } else {
            QD_TRY(add(x, is_print ? QD_CHAT_L_PRINT_BEGIN : QD_CHAT_L_BLOCK_BEGIN, at, &added));
            x->at = at + 2 + (sign != 0);
            QD_TRY(tag(x, at, is_print));
        }
    }
}

qd_status qd_chat_lex(qd_chat *chat, qd_chat_lexed **lexemes, size_t *count)
{
    lexer x = {.chat = chat, .text = chat->text, .length = chat->length};
    qd_status status = lex(&x);
    if (status != QD_OK) {
        free(x.lexemes);
        x.lexemes = NULL;
    }
    *lexemes = x.lexemes;
    *count = x.count;
    return status;
}
