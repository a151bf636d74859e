/* Encodes the prompt, generates tokens and decodes them. */
#include "train/generate/continue_text.h"

#include "base/clock.h"
#include "base/text/strbuf.h"
#include "data/encode.h"
#include "train/generate/prompt.h"
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
    const qd_prompt *prompt;
    qd_tokens history; /* prompt and continuation */
    qd_strbuf pending; /* text that has not been passed to the caller yet */
} writing;

qd_status qd_generate_options_check(const qd_generate_options *o)
{
    if (o->tokens < 1 || !(o->temperature >= 0.0) || o->top_k < 0 || !(o->top_p > 0.0 && o->top_p <= 1.0))
        return QD_FAIL(QD_USAGE, "generation needs at least 1 token, a temperature and top-k of 0 or more, and top-p above 0 up to 1");
    if (!(o->min_p >= 0.0 && o->min_p <= 1.0) || !(o->repetition_penalty >= 0.0))
        return QD_FAIL(QD_USAGE, "min-p must be from 0 to 1, and the repetition penalty at least 0");
    for (size_t i = 0; i < o->stop_count; i++)
        if (o->stop[i][0] == '\0')
            return QD_FAIL(QD_USAGE, "a stop text is empty: it would end every text at once");
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

/* An empty prompt starts from a token that ends a text, or from a line end. */
static qd_status start_anywhere(writing *s)
{
    qd_strbuf start = {0};
    if (s->history.count == 0)
        QD_TRY(s->text->end_count > 0 ? qd_tokens_append(&s->history, s->text->ends[0])
               : s->text->ids         ? QD_FAIL(QD_USAGE, "the prompt has no token id, and no end of documents is known to start from")
                                      : qd_model_text_encode(s->text, "\n", 1, &s->history));
    qd_model_text_decode(s->text, s->history.ids[0], &start);
    snprintf(s->report->start, sizeof s->report->start, "%s", start.data ? start.data : "");
    qd_strbuf_free(&start);
    return QD_OK;
}

static qd_status read_prompt(writing *s)
{
    const qd_generate_options *o = s->options;
    double begin = qd_clock_now();
    QD_TRY(qd_prompt_encode(s->text, s->prompt, o->system, &s->history));
    s->report->prompt_tokens = (int64_t)s->history.count;
    if (s->prompt->length == 0 || s->history.count == 0)
        QD_TRY(start_anywhere(s));
    QD_TRY(feed(s, (int64_t)s->history.count, &s->report->prompt_cut));
    s->report->prompt_seconds = qd_clock_now() - begin;
    if (o->on_start)
        o->on_start(o->callback_context, s->report);
    return QD_OK;
}

/* Looks for stop texts in the pending text. Returns how much of it is certain to be before one, and
 * whether one was found there. */
static size_t before_stop(const writing *s, bool *found)
{
    const qd_generate_options *o = s->options;
    size_t certain = s->pending.length;
    *found = false;
    for (size_t at = 0; at < s->pending.length; at++)
        for (size_t i = 0; i < o->stop_count; i++) {
            size_t length = strlen(o->stop[i]), left = s->pending.length - at;
            if (memcmp(s->pending.data + at, o->stop[i], length < left ? length : left) != 0)
                continue;
            if (length <= left) { /* a longer one that began before it will not be completed */
                *found = true;
                return at;
            }
            certain = at < certain ? at : certain;
        }
    return certain;
}

/* Passes whole characters to the caller that cannot be a part of a stop text; `all`: everything
 * before one. False: the caller wants no more. */
static bool hand_out(writing *s, bool all, bool *found)
{
    const qd_generate_options *o = s->options;
    size_t certain = before_stop(s, found), whole = *found ? certain : all ? s->pending.length : qd_utf8_whole(s->pending.data, certain);
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
    const qd_sampling sampling = {.temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .min_p = o->min_p,
                                  .repetition_penalty = o->repetition_penalty, .seed = o->seed, .stream = (uint64_t)r->prompt};
    double begin = qd_clock_now();
    bool more = true, found = false;
    r->end = QD_GENERATE_TOKENS;
    while (more && !found && r->tokens < o->tokens) {
        int32_t token = qd_sampler_draw(s->sampler, &sampling, qd_generator_logits(s->generator), s->history.ids, s->history.count);
        if (!o->ignore_end && qd_model_text_ends(s->text, token)) {
            r->end = QD_GENERATE_DOCUMENT;
            break;
        }
        r->tokens++;
        qd_model_text_decode(s->text, token, &s->pending);
        if (s->pending.failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the text");
        more = hand_out(s, false, &found);
        bool slid = false;
        QD_TRY(qd_tokens_append(&s->history, token));
        if (more && !found && r->tokens < o->tokens)
            QD_TRY(feed(s, 1, &slid));
        r->slides += slid;
    }
    if (!more)
        r->end = QD_GENERATE_STOPPED;
    else if (found)
        r->end = QD_GENERATE_STOP_TEXT;
    else
        hand_out(s, true, &found);
    r->seconds = qd_clock_now() - begin;
    if (o->on_end)
        o->on_end(o->callback_context, r);
    return QD_OK;
}

static qd_status write_one(writing *s)
{
    qd_generate_report *r = s->report;
    const qd_generate_report fresh = {.size = r->size, .step = r->step, .context = r->context, .prompt = r->prompt,
                                      .prompt_text = s->prompt->text, .prompt_length = s->prompt->length,
                                      .prompt_kind = s->prompt->kind};
    char warning[sizeof r->warning];
    memcpy(warning, r->warning, sizeof warning);
    *r = fresh;
    memcpy(r->warning, warning, sizeof warning);
    s->history.count = 0;
    s->pending.length = 0;
    qd_generator_forget(s->generator, 0);
    QD_TRY(read_prompt(s));
    return continue_text(s);
}

qd_status qd_continue_text(qd_generator *generator, qd_model_text *text, const qd_generate_options *o, qd_generate_report *report)
{
    const qd_prompt single = {o->prompt_kind, o->prompt, o->prompt_length};
    writing s = {.options = o, .report = report, .generator = generator, .text = text};
    size_t count = o->prompt_count > 0 ? o->prompt_count : 1;
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_generate_options_check(o));
    QD_TRY_DONE(qd_sampler_create(qd_generator_vocab(generator), &s.sampler));
    if (!text->ids)
        qd_text_encoder_set_special(&text->encoder, o->special);
    report->context = qd_generator_context(generator);
    for (size_t i = 0; i < count && status == QD_OK; i++) {
        s.prompt = o->prompt_count > 0 ? &o->prompts[i] : &single;
        report->prompt = (int64_t)i;
        status = write_one(&s);
        if (status == QD_OK && report->end == QD_GENERATE_STOPPED)
            break;
    }
    if (status != QD_OK && o->prompt_count > 0)
        status = qd_error_prefix(status, "prompt %lld: ", (long long)report->prompt + 1);
done:
    qd_strbuf_free(&s.pending);
    qd_tokens_free(&s.history);
    qd_sampler_destroy(s.sampler);
    return status;
}

bool qd_generates_ids(const qd_generate_options *o)
{
    bool ids = o->prompt_count == 0 ? o->prompt_kind == QD_PROMPT_TOKENS : true;
    for (size_t i = 0; i < o->prompt_count; i++)
        ids = ids && o->prompts[i].kind == QD_PROMPT_TOKENS;
    return ids;
}
