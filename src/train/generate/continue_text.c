/* Encodes the prompt, generates tokens and decodes them. */
#include "train/generate/continue_text.h"

#include "base/clock.h"
#include "base/text/strbuf.h"
#include "train/generate/sampling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct writing {
    const qd_generate_options *options;
    qd_generate_report *report;
    qd_generator *generator;
    qd_sampler *sampler;
    qd_model_text *text;
    qd_tokens history; /* prompt and continuation */
    qd_strbuf pending; /* text that has not been passed to the caller yet */
} writing;

qd_status qd_generate_options_check(const qd_generate_options *o)
{
    if (o->tokens < 1 || o->temperature < 0.0 || o->top_k < 0 || !(o->top_p > 0.0 && o->top_p <= 1.0))
        return QD_FAIL(QD_USAGE, "generation needs at least 1 token, a temperature and top-k of 0 or more, and top-p above 0 up to 1");
    return QD_OK;
}

static qd_status remember(qd_tokens *history, int32_t token)
{
    if (history->count == history->capacity) {
        size_t capacity = history->capacity ? 2 * history->capacity : 256;
        int32_t *ids = realloc(history->ids, capacity * sizeof *ids);
        if (!ids)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %zu tokens", capacity);
        history->ids = ids;
        history->capacity = capacity;
    }
    history->ids[history->count++] = token;
    return QD_OK;
}

/* Feeds the last `count` tokens of the history. If they do not fit, the context is restarted with
 * its last half. */
static qd_status feed(writing *s, int64_t count, bool *started_anew)
{
    const int64_t all = (int64_t)s->history.count, half = qd_generator_context(s->generator) / 2;
    *started_anew = count > qd_generator_room(s->generator);
    if (*started_anew) {
        count = half < 1 ? 1 : half < all ? half : all;
        qd_generator_forget(s->generator, all - count);
    }
    return qd_generator_feed(s->generator, s->history.ids + all - count, count);
}

static qd_status read_prompt(writing *s)
{
    const qd_generate_options *o = s->options;
    double begin = qd_clock_now();
    int32_t end = s->text->encoder.document_end, before;
    for (int i = 0; s->text->tokenizer && (before = qd_tokenizer_before(s->text->tokenizer, i)) >= 0; i++)
        QD_TRY(remember(&s->history, before));
    QD_TRY(qd_model_text_encode(s->text, o->prompt, o->prompt_length, &s->history));
    s->report->prompt_tokens = (int64_t)s->history.count;
    if (s->history.count == 0)
        QD_TRY(end >= 0 ? remember(&s->history, end) : qd_model_text_encode(s->text, "\n", 1, &s->history));
    if (o->prompt_length == 0) {
        qd_strbuf start = {0};
        qd_model_text_decode(s->text, s->history.ids[0], &start);
        snprintf(s->report->start, sizeof s->report->start, "%s", start.data ? start.data : "");
        qd_strbuf_free(&start);
    }
    QD_TRY(feed(s, (int64_t)s->history.count, &s->report->prompt_cut));
    s->report->prompt_seconds = qd_clock_now() - begin;
    if (o->on_start)
        o->on_start(o->callback_context, s->report);
    return QD_OK;
}

/* Passes whole characters to the caller, or everything at the end. False: the caller wants no
 * more. */
static bool hand_out(writing *s, bool all)
{
    const qd_generate_options *o = s->options;
    size_t whole = all ? s->pending.length : qd_utf8_whole(s->pending.data, s->pending.length);
    if (whole == 0)
        return true;
    bool more = !o->on_text || o->on_text(o->callback_context, s->pending.data, whole);
    memmove(s->pending.data, s->pending.data + whole, s->pending.length - whole);
    s->pending.length -= whole;
    return more;
}

static qd_status continue_text(writing *s)
{
    const qd_generate_options *o = s->options;
    qd_generate_report *r = s->report;
    const qd_sampling sampling = {.temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .seed = o->seed};
    double begin = qd_clock_now();
    bool more = true;
    r->end = QD_GENERATE_TOKENS;
    while (more && r->tokens < o->tokens) {
        int32_t token = qd_sampler_draw(s->sampler, &sampling, qd_generator_logits(s->generator), qd_generator_position(s->generator));
        if (token == s->text->encoder.document_end) {
            r->end = QD_GENERATE_DOCUMENT;
            break;
        }
        r->tokens++;
        qd_model_text_decode(s->text, token, &s->pending);
        if (s->pending.failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the text");
        more = hand_out(s, false);
        bool slid = false;
        QD_TRY(remember(&s->history, token));
        if (more && r->tokens < o->tokens)
            QD_TRY(feed(s, 1, &slid));
        r->slides += slid;
    }
    if (!more)
        r->end = QD_GENERATE_STOPPED;
    else
        hand_out(s, true);
    r->seconds = qd_clock_now() - begin;
    return QD_OK;
}

qd_status qd_continue_text(qd_generator *generator, qd_model_text *text, const qd_generate_options *o, qd_generate_report *report)
{
    writing s = {.options = o, .report = report, .generator = generator, .text = text};
    qd_status status = QD_OK;
    qd_generator_forget(generator, 0);
    QD_TRY_DONE(qd_generate_options_check(o));
    QD_TRY_DONE(qd_sampler_create(qd_generator_vocab(generator), &s.sampler));
    qd_text_encoder_set_special(&text->encoder, o->special);
    report->context = qd_generator_context(generator);
    QD_TRY_DONE(read_prompt(&s));
    QD_TRY_DONE(continue_text(&s));
done:
    qd_strbuf_free(&s.pending);
    qd_tokens_free(&s.history);
    qd_sampler_destroy(s.sampler);
    return status;
}
