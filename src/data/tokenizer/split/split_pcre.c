/* Splits text by custom regular expressions, with PCRE2. */
#include "data/tokenizer/split/split.h"

#include "base/text/strbuf.h"
#include "data/tokenizer/split/onig.h"
#include "data/tokenizer/split/unicode.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The time for all texts that a state has split. An expression that backtracks far in every match,
 * but never far enough for the limit of a single one, would take minutes for a few kilobytes; those
 * of published tokenizers take less than a microsecond per byte. */
static const double allowed_seconds = 2, allowed_seconds_per_byte = 20e-6;
/* What one match counts at most: a process that was suspended meanwhile did not compute. */
static const double most_per_match = 0.5;

struct qd_regex {
    pcre2_code *code;
    bool fast; /* JIT-compiled */
    char *where;
};

struct qd_regex_state {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    qd_strbuf whole;  /* a copy of the text with invalid parts replaced */
    size_t *origin;   /* for each byte of `whole`, its offset in the text */
    size_t capacity;
    double spent;     /* seconds of matching */
    double allowed;
};

qd_status qd_regex_create(const char *where, const char *regex, size_t length, qd_regex **compiled)
{
    qd_status status = QD_OK;
    qd_strbuf text = {0};
    char *pattern = NULL;
    pcre2_compile_context *how = pcre2_compile_context_create(NULL);
    qd_regex *made = calloc(1, sizeof *made);
    if (!how || !made || !(made->where = strdup(where))) {
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory for a regular expression", where);
        goto done;
    }
    if (length > 65536) {
        status = QD_FAIL(QD_USAGE, "%s: a regular expression of %zu bytes; at most 65536 are allowed", where, length);
        goto done;
    }
    QD_TRY_DONE(qd_onig_translate(where, regex, length, &text));
    size_t written = text.length;
    QD_TRY_DONE(qd_strbuf_take(&text, &pattern));
    int code;
    PCRE2_SIZE offset;
    /* MULTILINE: "^" and "$" match at lines, which end with \n whatever PCRE2's default, as in the
     * engine of `tokenizers`. */
    pcre2_set_newline(how, PCRE2_NEWLINE_LF);
    made->code = pcre2_compile((PCRE2_SPTR)(pattern ? pattern : ""), written, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE,
                               &code, &offset, how);
    if (!made->code) {
        PCRE2_UCHAR message[256] = "";
        pcre2_get_error_message(code, message, sizeof message);
        status = QD_FAIL(QD_USAGE, "%s: not a regular expression: %s at offset %zu of %s", where, (char *)message,
                         (size_t)offset, pattern ? pattern : "");
        goto done;
    }
    uint32_t empty = 0;
    pcre2_pattern_info(made->code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty) {
        status = QD_FAIL(QD_USAGE, "%s: the regular expression can match the empty string; it must match at least one character",
                         where);
        goto done;
    }
    made->fast = pcre2_jit_compile(made->code, PCRE2_JIT_COMPLETE) == 0;
    *compiled = made;
    made = NULL;
done:
    pcre2_compile_context_free(how);
    qd_regex_destroy(made);
    qd_strbuf_free(&text);
    free(pattern);
    return status;
}

void qd_regex_destroy(qd_regex *compiled)
{
    if (!compiled)
        return;
    pcre2_code_free(compiled->code);
    free(compiled->where);
    free(compiled);
}

qd_status qd_regex_state_create(qd_regex_state **state)
{
    qd_regex_state *made = calloc(1, sizeof *made);
    if (made) {
        made->match = pcre2_match_data_create(1, NULL);
        made->context = pcre2_match_context_create(NULL);
        made->stack = pcre2_jit_stack_create(32 * 1024, 4 * 1024 * 1024, NULL);
    }
    if (!made || !made->match || !made->context || !made->stack) {
        qd_regex_state_destroy(made);
        return QD_FAIL(QD_NO_MEMORY, "no memory to match regular expressions");
    }
    pcre2_jit_stack_assign(made->context, NULL, made->stack);
    /* Limits: an expression that backtracks catastrophically ends with an error. */
    pcre2_set_match_limit(made->context, 50 * 1000 * 1000);
    pcre2_set_heap_limit(made->context, 256 * 1024);
    made->allowed = allowed_seconds;
    *state = made;
    return QD_OK;
}

void qd_regex_state_destroy(qd_regex_state *state)
{
    if (!state)
        return;
    pcre2_match_data_free(state->match);
    pcre2_match_context_free(state->context);
    pcre2_jit_stack_free(state->stack);
    qd_strbuf_free(&state->whole);
    free(state->origin);
    free(state);
}

/* Replaces each invalid part by U+FFFD and records where each byte of the result comes from. */
static qd_status mend(qd_regex_state *state, const uint8_t *text, size_t length)
{
    qd_strbuf_clear(&state->whole);
    size_t most = length * 3 + 1;
    if (state->capacity < most) {
        free(state->origin);
        state->capacity = 0;
        state->origin = malloc(most * sizeof *state->origin);
        if (!state->origin)
            return QD_FAIL(QD_NO_MEMORY, "no memory to split a text of %zu bytes", length);
        state->capacity = most;
    }
    size_t at = 0;
    while (at < length) {
        uint32_t character = 0;
        size_t size = text[at] < 0x80 ? 1 : qd_utf8_read(text + at, text + length, &character);
        size_t start = state->whole.length;
        if (character == 0xfffd)
            qd_strbuf_append(&state->whole, "\xef\xbf\xbd", 3);
        else
            qd_strbuf_append(&state->whole, (const char *)text + at, size);
        for (size_t i = start; i < state->whole.length; i++)
            state->origin[i] = at;
        at += size;
    }
    state->origin[state->whole.length] = length;
    return state->whole.failed ? QD_FAIL(QD_NO_MEMORY, "no memory to split a text of %zu bytes", length) : QD_OK;
}

/* Precise to a few milliseconds, and as cheap as reading memory: it is read for every match. */
static double coarse_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

qd_status qd_regex_split(const qd_regex *compiled, qd_regex_state *state, const uint8_t *text, size_t length,
                         qd_regex_emit emit, void *context)
{
    const size_t *origin = NULL;
    const uint8_t *subject = text;
    size_t size = length;
    if (qd_utf8_valid((const char *)text, length) != length) {
        QD_TRY(mend(state, text, length));
        subject = (const uint8_t *)state->whole.data;
        size = state->whole.length;
        origin = state->origin;
    }
#define ORIGIN(place) (origin ? origin[place] : (place))
    size_t at = 0;
    state->allowed += allowed_seconds_per_byte * (double)size;
    while (at < size) {
        const double before = coarse_now();
        int found = compiled->fast
                        ? pcre2_jit_match(compiled->code, subject, size, at, PCRE2_NO_UTF_CHECK, state->match, state->context)
                        : pcre2_match(compiled->code, subject, size, at, PCRE2_NO_UTF_CHECK, state->match, state->context);
        if (found == PCRE2_ERROR_NOMATCH)
            break;
        const PCRE2_SIZE *place = pcre2_get_ovector_pointer(state->match);
        if (found < 0 || place[1] <= place[0] || place[0] < at) {
            PCRE2_UCHAR message[256] = "empty match";
            if (found < 0)
                pcre2_get_error_message(found, message, sizeof message);
            return QD_FAIL(QD_USAGE, "%s: the regular expression gave up at byte %zu of the text: %s", compiled->where,
                           ORIGIN(at), (char *)message);
        }
        state->spent += fmin(coarse_now() - before, most_per_match);
        if (state->spent > state->allowed)
            return QD_FAIL(QD_USAGE,
                           "%s: the regular expression backtracks too much: it has taken more than the %.1f s allowed for the text up to "
                           "byte %zu of %zu", compiled->where, state->allowed, ORIGIN(at), length);
        size_t start = place[0], stop = place[1];
        if (start > at)
            QD_TRY(emit(context, ORIGIN(at), ORIGIN(start) - ORIGIN(at), false));
        QD_TRY(emit(context, ORIGIN(start), ORIGIN(stop) - ORIGIN(start), true));
        at = stop;
    }
    if (at < size)
        QD_TRY(emit(context, ORIGIN(at), ORIGIN(size) - ORIGIN(at), false));
#undef ORIGIN
    return QD_OK;
}
