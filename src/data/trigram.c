/* The trigram baseline of a data set: counts the training windows, scores the held-out ones. */
#include "data/data_impl.h"
#include "base/sized.h"
#include "data/kneser_ney.h"

#include "base/clock.h"

#include <math.h>
#include <stdlib.h>

enum { CHUNK = 1 << 16 };

/* Walks over tokens [first, end) of a source in chunks, which end where a document begins if
 * documents are masked. */
typedef struct token_walk {
    const qd_data *data;
    const qd_token_source *source;
    int64_t at, end;
    int32_t *tokens; /* (CHUNK) */
    int64_t count;
    bool begins; /* the first token of the chunk begins a document */
} token_walk;

static qd_status walk_next(token_walk *w)
{
    int64_t stop = w->end - w->at < CHUNK ? w->end : w->at + CHUNK;
    w->begins = false;
    if (w->data->document_mask && w->at < w->end) {
        int64_t here, next;
        QD_TRY(qd_token_source_document(w->source, w->at, &here));
        QD_TRY(qd_token_source_document(w->source, w->at + 1, &next));
        w->begins = here == w->at;
        stop = next < stop ? next : stop;
    }
    w->count = stop - w->at;
    if (w->count == 0)
        return QD_OK;
    QD_TRY(qd_token_source_read(w->source, w->data->vocab, w->at, w->count, w->tokens));
    w->at = stop;
    return QD_OK;
}

/* The training windows, including the last target of the last one. */
static qd_status count_source(token_walk *w, qd_kn *model)
{
    qd_kn_break(model);
    w->at = 0;
    w->end = w->source->windows * w->data->seq + 1;
    for (;;) {
        QD_TRY(walk_next(w));
        if (w->count == 0)
            return QD_OK;
        if (w->begins)
            qd_kn_break(model);
        QD_TRY(qd_kn_add(model, w->tokens, w->count));
    }
}

/* The targets of the held-out windows. The two tokens before each target are known, as they are to
 * a model that reads the window, except at the start of a window, where the trigram sees a little
 * more. */
static qd_status score_source(token_walk *w, const qd_kn *model, double *sum, int64_t *scored)
{
    const int64_t held = w->source->windows * w->data->seq; /* its first token is not a target */
    int32_t u = QD_KN_START, v = QD_KN_START;
    w->at = held > 0 ? held - 1 : 0;
    w->end = held + w->source->validation_windows * w->data->seq + 1;
    for (;;) {
        int64_t first = w->at;
        QD_TRY(walk_next(w));
        if (w->count == 0)
            return QD_OK;
        if (w->begins)
            u = v = QD_KN_START;
        for (int64_t i = 0; i < w->count; i++) {
            if (first + i > held && !(w->begins && i == 0)) {
                *sum -= log(qd_kn_probability(model, u, v, w->tokens[i]));
                ++*scored;
            }
            u = v;
            v = w->tokens[i];
        }
    }
}

static qd_status score_trigram(const qd_data *data, qd_trigram_report *report)
{
    if (data->validation_windows == 0)
        return QD_FAIL(QD_USAGE, "nothing is held out for validation: set data.validation, for example to 0.02");
    double begun = qd_clock_now(), sum = 0;
    qd_kn *model = NULL;
    QD_TRY(qd_kn_create(data->vocab, &model));
    token_walk walk = {.data = data, .tokens = malloc(CHUNK * sizeof(int32_t))};
    qd_status status = walk.tokens ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for a trigram model");
    for (int s = 0; status == QD_OK && s < data->source_count; s++) {
        walk.source = &data->sources[s];
        status = count_source(&walk, model);
    }
    if (status == QD_OK)
        status = qd_kn_finish(model);
    for (int s = 0; status == QD_OK && s < data->source_count; s++) {
        walk.source = &data->sources[s];
        status = score_source(&walk, model, &sum, &report->scored);
    }
    if (status == QD_OK) {
        qd_kn_info info = qd_kn_describe(model);
        report->loss = report->scored ? sum / (double)report->scored : 0;
        report->trained = info.tokens;
        report->trigrams = info.trigrams;
        report->seconds = qd_clock_now() - begun;
    }
    free(walk.tokens);
    qd_kn_destroy(model);
    return status;
}

qd_status qd_data_trigram(const qd_data *data, qd_trigram_report *report)
{
    qd_trigram_report r = qd_trigram_report_default();
    QD_TRY(QD_SIZED_CHECK(report, qd_trigram_report));
    if (data->sources[0].examples)
        return QD_FAIL(QD_USAGE, "the trigram baseline is for text, and the data set consists of examples");
    qd_status status = score_trigram(data, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
