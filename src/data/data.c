/* A data set: reads the tokens of its sources, cuts them into samples, and opens data.path. */
#include "data/data_impl.h"
#include "base/sized.h"

#include "base/text/strbuf.h"
#include "data/files.h"

#include <math.h>
#include <quadrille/log.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The part that contains the token at `position`, which is inside the source. */
static int64_t part_of(const qd_token_source *s, int64_t position)
{
    int64_t low = 0, high = s->part_count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (s->parts[middle].first <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

qd_status qd_token_part_read(const qd_token_part *part, int64_t first, int64_t count, void *out)
{
    if (part->tokens) {
        memcpy(out, (const char *)part->tokens + first * part->token_bytes, (size_t)(count * part->token_bytes));
        return QD_OK;
    }
    if (part->shard.file)
        return qd_shard_tokens(&part->shard, first, count, out);
    qd_status status = qd_stored_read(part->text, first, out, (size_t)count);
    if (status != QD_CORRUPT)
        return status;
    return QD_FAIL(QD_CORRUPT, "%s; do not modify text while a run reads it, or convert it to shards (quadrille tokenize)",
                   qd_error_message());
}

/* Widens tokens of token_bytes each, stored in the last bytes of `out`, to 4 bytes each from the
 * front. The write position never passes the read position. Returns the largest token. */
static uint32_t widen(int token_bytes, int64_t count, int32_t *out)
{
    const char *from = (const char *)out + count * (4 - token_bytes);
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint8_t byte;
        uint16_t narrow;
        uint32_t token;
        switch (token_bytes) {
        case 1: memcpy(&byte, from + i, 1); token = byte; break;
        case 2: memcpy(&narrow, from + 2 * i, 2); token = narrow; break;
        default: memcpy(&token, from + 4 * i, 4); break;
        }
        memcpy(&out[i], &token, sizeof token);
        largest = token > largest ? token : largest;
    }
    return largest;
}

qd_status qd_token_source_read(const qd_token_source *s, int64_t vocab, int64_t first, int64_t count, int32_t *out)
{
    for (int64_t p = part_of(s, first); count > 0; p++) {
        const qd_token_part *part = &s->parts[p];
        int64_t at = first - part->first, length = part->count - at;
        length = count < length ? count : length;
        QD_TRY(qd_token_part_read(part, at, length, (char *)out + length * (4 - part->token_bytes)));
        /* Checked here too: shards may not have been verified, and a token outside the vocabulary
         * would index past the embedding. */
        if ((int64_t)widen(part->token_bytes, length, out) >= vocab)
            for (int64_t i = 0; i < length; i++)
                if ((uint32_t)out[i] >= (uint64_t)vocab)
                    return QD_FAIL(QD_CORRUPT, "%s: token %lld is %u, outside the vocabulary of %lld", part->path,
                                   (long long)(at + i), (uint32_t)out[i], (long long)vocab);
        first += length;
        out += length;
        count -= length;
    }
    return QD_OK;
}

/* Reads entries of a part's document list. */
static qd_status read_documents(const qd_token_part *part, int64_t first, int64_t count, uint64_t *out)
{
    if (part->shard.file)
        return qd_shard_documents(&part->shard, first, count, out);
    if (part->documents)
        memcpy(out, part->documents + first, (size_t)count * sizeof *out);
    else
        *out = 0; /* a text: one document, starting at its first token */
    return QD_OK;
}

/* The number of documents of a part that begin before token `position`, and where the next one
 * begins, if there is one. Binary search while many are left, then one read for the rest. */
static qd_status find_document(const qd_token_part *part, int64_t position, int64_t *before, uint64_t *next)
{
    enum { FEW = 64 };
    int64_t low = 0, high = part->document_count; /* the answer is in [low, high] */
    uint64_t few[FEW];
    while (high - low > FEW) {
        const int64_t middle = low + (high - low) / 2;
        QD_TRY(read_documents(part, middle, 1, few));
        if ((int64_t)few[0] < position)
            low = middle + 1;
        else
            high = middle;
    }
    const int64_t count = high < part->document_count && high - low < FEW ? high - low + 1 : high - low;
    int64_t i = 0;
    if (count > 0)
        QD_TRY(read_documents(part, low, count, few));
    while (i < count && (int64_t)few[i] < position)
        i++;
    *before = low + i;
    if (i < count)
        *next = few[i];
    else if (*before < part->document_count)
        QD_TRY(read_documents(part, *before, 1, next));
    return QD_OK;
}

qd_status qd_token_source_document(const qd_token_source *s, int64_t position, int64_t *document)
{
    *document = s->tokens;
    if (position >= s->tokens)
        return QD_OK;
    for (int64_t p = part_of(s, position); p < s->part_count; p++) {
        const qd_token_part *part = &s->parts[p];
        int64_t before;
        uint64_t next = 0;
        QD_TRY(find_document(part, position - part->first, &before, &next));
        if (before == part->document_count)
            continue;
        *document = part->first + (int64_t)next;
        return QD_OK;
    }
    return QD_OK;
}

/* Examples before the held-out ones. */
static int64_t training_examples(const qd_token_source *s)
{
    return s->documents - s->validation_examples;
}

qd_status qd_data_window(const qd_data *d, int source, int64_t first, int64_t count, int32_t *tokens, int32_t *targets,
                         int32_t *doc_start)
{
    const qd_token_source *s = &d->sources[source];
    QD_TRY(qd_token_source_read(s, d->vocab, first, count, tokens));
    memcpy(targets, tokens + 1, (size_t)(count - 1) * sizeof *targets);
    QD_TRY(qd_token_source_read(s, d->vocab, first + count, 1, targets + count - 1));
    memset(doc_start, 0, (size_t)count * sizeof *doc_start);
    if (!d->document_mask)
        return QD_OK;
    int64_t next;
    QD_TRY(qd_token_source_document(s, first + 1, &next));
    while (next <= first + count) {
        int64_t begin = next - first;
        targets[begin - 1] = -1;
        if (begin < count)
            QD_TRY(qd_token_source_document(s, next + 1, &next));
        else
            next = first + count + 1;
        for (int64_t t = begin; t < count && t < next - first; t++)
            doc_start[t] = (int32_t)begin;
    }
    return QD_OK;
}

qd_window_walk qd_window_examples(const qd_data *d, const qd_token_source *s, int64_t window)
{
    const bool held_out = window >= s->windows;
    const qd_packing *p = held_out ? &s->validation_packing : &s->packing;
    window -= held_out ? s->windows : 0;
    return (qd_window_walk){.source = s, .packing = p, .first_example = held_out ? training_examples(s) : 0, .item = p->first[window],
                            .end = p->first[window + 1], .each = d->pairs ? 2 : 1};
}

const int64_t *qd_window_next(qd_window_walk *w)
{
    if (w->item == w->end)
        return NULL;
    const int64_t *begin = &w->source->examples[w->first_example + w->packing->order[w->item] * w->each + w->part];
    w->part = (w->part + 1) % w->each;
    w->item += w->part == 0;
    return begin;
}

/* The examples of a window one after another, each a document. The last token of an example is only
 * a target. What is left of the window is a document without targets. */
static qd_status fill_packed(const qd_data *d, const qd_token_source *s, int64_t window, int32_t *tokens, int32_t *targets,
                             int32_t *doc_start)
{
    int64_t at = 0;
    qd_window_walk walk = qd_window_examples(d, s, window);
    for (const int64_t *begin; (begin = qd_window_next(&walk)) != NULL;) {
        const int64_t count = begin[1] - begin[0] - 1;
        QD_TRY(qd_token_source_read(s, d->vocab, begin[0], count, tokens + at));
        QD_TRY(qd_token_source_read(s, d->vocab, begin[0] + 1, count, targets + at));
        for (int64_t t = 0; t < count; t++) {
            targets[at + t] = s->counted[begin[0] + t + 1] ? targets[at + t] : -1;
            doc_start[at + t] = (int32_t)at;
        }
        at += count;
    }
    for (int64_t t = at; t < d->seq; t++) {
        tokens[t] = 0;
        targets[t] = -1;
        doc_start[t] = (int32_t)at;
    }
    return QD_OK;
}

qd_status qd_data_fill_window(const qd_data *d, int source, int64_t window, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    if (d->sources[source].examples)
        return fill_packed(d, &d->sources[source], window, tokens, targets, doc_start);
    return qd_data_window(d, source, window * d->seq, d->seq, tokens, targets, doc_start);
}

static qd_status check_seq(const qd_data *d, int64_t seq)
{
    return seq == d->seq ? QD_OK
                         : QD_FAIL(QD_USAGE, "the data set was opened for sequences of %lld tokens, not %lld",
                                   (long long)d->seq, (long long)seq);
}

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    const qd_data *d = context;
    QD_TRY(check_seq(d, seq));
    for (int64_t i = 0; i < count; i++) {
        qd_sample sample = qd_mixture_sample(&d->mixture, first + i);
        QD_TRY(qd_data_fill_window(d, sample.source, sample.window, tokens + i * seq, targets + i * seq, doc_start + i * seq));
    }
    return QD_OK;
}

int qd_data_held_out(const qd_data *d, int64_t *index)
{
    int source = 0;
    *index %= d->validation_windows;
    while (*index >= d->sources[source].validation_windows)
        *index -= d->sources[source++].validation_windows;
    *index += d->sources[source].windows;
    return source;
}

static qd_status fill_validation(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens,
                                 int32_t *targets, int32_t *doc_start)
{
    const qd_data *d = context;
    QD_TRY(check_seq(d, seq));
    if (d->validation_windows == 0)
        return QD_FAIL(QD_USAGE, "nothing is held out for validation: set data.validation, for example to 0.02");
    for (int64_t i = 0; i < count; i++) {
        int64_t window = first + i;
        int source = qd_data_held_out(d, &window);
        QD_TRY(qd_data_fill_window(d, source, window, tokens + i * seq, targets + i * seq, doc_start + i * seq));
    }
    return QD_OK;
}

qd_batch_source qd_data_source(qd_data *data)
{
    return (qd_batch_source){.fill = fill, .fill_pairs = data->pairs ? qd_pairs_fill_training : NULL, .context = data,
                             .documents = data->document_mask};
}

qd_batch_source qd_data_validation_source(qd_data *data)
{
    return (qd_batch_source){.fill = fill_validation, .fill_pairs = data->pairs ? qd_pairs_fill_validation : NULL, .context = data,
                             .documents = data->document_mask};
}

int64_t qd_data_windows(const qd_data *data)
{
    return data->windows;
}

int64_t qd_data_validation_windows(const qd_data *data)
{
    return data->validation_windows;
}

uint64_t qd_data_tokenizer_hash(const qd_data *data)
{
    return data->tokenizer_hash;
}

int qd_data_source_count(const qd_data *data)
{
    return data->source_count;
}

void qd_data_source_describe(const qd_data *data, int source, qd_data_source_info *info)
{
    const qd_token_source *s = &data->sources[source];
    const qd_data_source_info own = {
        .path = s->path,
        .weight = s->weight,
        .files = s->files,
        .skipped = s->skipped,
        .tokens = s->tokens,
        .documents = s->documents,
        .windows = s->windows,
        .validation_windows = s->validation_windows,
        .cut_examples = s->cut_examples,
        .skipped_examples = s->skipped_examples,
    };
    QD_SIZED_WRITE(info, &own);
}

qd_status qd_data_read(const qd_data *data, int source, int64_t first, int64_t count, int32_t *tokens)
{
    if (source < 0 || source >= data->source_count)
        return QD_FAIL(QD_USAGE, "the data set has %d sources; source %d does not exist", data->source_count, source);
    const qd_token_source *s = &data->sources[source];
    if (first < 0 || count < 0 || first > s->tokens || count > s->tokens - first)
        return QD_FAIL(QD_USAGE, "%s has %lld tokens; [%lld, %lld) is outside", s->path, (long long)s->tokens,
                       (long long)first, (long long)(first + count));
    return qd_token_source_read(s, data->vocab, first, count, tokens);
}

typedef struct mixture_item {
    char *path;
    double weight; /* 0: not set */
} mixture_item;

static bool exists(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0;
}

/* "path:0.3" → weight 0.3, and the path cut at the colon, unless a file has that very name. */
static qd_status take_weight(mixture_item *item)
{
    char *colon = strrchr(item->path, ':'), *end;
    if (!colon || exists(item->path))
        return QD_OK;
    double weight = qd_double_parse(colon + 1, &end);
    if (end == colon + 1 || *end != '\0')
        return QD_OK;
    if (!(weight > 0) || !isfinite(weight))
        return QD_FAIL(QD_USAGE, "data.path: the weight of '%s' must be a number above 0", item->path);
    *colon = '\0';
    item->weight = weight;
    return QD_OK;
}

static void free_items(mixture_item *items, int count)
{
    for (int i = 0; i < count; i++)
        free(items[i].path);
    free(items);
}

/* Splits data.path at its commas. */
static qd_status parse_items(const char *path, mixture_item **out, int *out_count)
{
    int count = 1;
    if (!exists(path))
        for (const char *at = path; (at = strchr(at, ',')); at++)
            count++;
    if (count > QD_MIXTURE_BLOCK)
        return QD_FAIL(QD_USAGE, "data.path: a mixture of %d sources; at most %d are possible", count,
                       QD_MIXTURE_BLOCK);
    mixture_item *items = calloc((size_t)count, sizeof *items);
    qd_status status = items ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for data.path");
    const char *at = path;
    int weighted = 0;
    for (int i = 0; status == QD_OK && i < count; i++) {
        size_t length = count == 1 ? strlen(at) : strcspn(at, ",");
        items[i].path = strndup(at, length);
        at += length + 1;
        if (!items[i].path)
            status = QD_FAIL(QD_NO_MEMORY, "no memory for data.path");
        else if (length == 0)
            status = QD_FAIL(QD_USAGE, "data.path: '%s' has an empty entry between commas", path);
        else
            status = take_weight(&items[i]);
        weighted += items[i].weight > 0;
    }
    if (status == QD_OK && weighted != 0 && weighted != count)
        status = QD_FAIL(QD_USAGE,
                         "data.path: %d of %d sources have weights: give a weight to all of them, as in a:0.7,b:0.3, or to none",
                         weighted, count);
    if (status != QD_OK) {
        free_items(items, items ? count : 0);
        return status;
    }
    *out = items;
    *out_count = count;
    return QD_OK;
}

/* Packs examples [first, first + count) of a source, alone or in pairs. One of n tokens takes n - 1
 * positions. */
static qd_status pack(const qd_data_options *o, const qd_token_source *s, int64_t first, int64_t count, qd_packing *packing)
{
    const int each = o->pairs ? 2 : 1;
    count /= each;
    int64_t *lengths = malloc((size_t)count * sizeof *lengths);
    if (!lengths)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to pack %lld examples", s->path, (long long)count);
    for (int64_t i = 0; i < count; i++)
        lengths[i] = o->unpacked ? o->seq : s->examples[first + (i + 1) * each] - s->examples[first + i * each] - each;
    qd_status status = qd_packing_make(lengths, count, o->seq, packing);
    free(lengths);
    return status;
}

/* Packs the examples of a source into training windows and held-out windows. */
static qd_status pack_windows(const qd_data_options *o, qd_token_source *s)
{
    if (o->validation > 0) {
        const int64_t each = o->pairs ? 2 : 1;
        if (s->documents < 2 * each)
            return QD_FAIL(QD_USAGE, "data.path: %s has one %s: nothing is left to train on with data.validation", s->path,
                           o->pairs ? "pair" : "example");
        int64_t held = (int64_t)floor((double)(s->documents / each) * o->validation);
        s->validation_examples = (held < 1 ? 1 : held) * each;
        QD_TRY(pack(o, s, training_examples(s), s->validation_examples, &s->validation_packing));
    }
    QD_TRY(pack(o, s, 0, training_examples(s), &s->packing));
    s->windows = s->packing.windows;
    s->validation_windows = s->validation_packing.windows;
    return QD_OK;
}

/* Cuts a source into training windows and held-out windows. */
static qd_status cut_windows(const qd_data_options *o, qd_token_source *s)
{
    const int64_t all = (s->tokens - 1) / o->seq;
    if (all < 1)
        return QD_FAIL(QD_USAGE, "data.path: %s has %lld tokens, but one sample needs data.seq + 1 = %lld", s->path,
                       (long long)s->tokens, (long long)(o->seq + 1));
    if (o->validation > 0) {
        if (all < 2)
            return QD_FAIL(QD_USAGE,
                           "data.path: %s has one window of data.seq = %lld tokens: nothing is left to train on "
                           "with data.validation",
                           s->path, (long long)o->seq);
        int64_t held = (int64_t)floor((double)all * o->validation);
        s->validation_windows = held < 1 ? 1 : held > all - 1 ? all - 1 : held;
    }
    s->windows = all - s->validation_windows;
    return QD_OK;
}

static qd_status open_sources(const qd_data_options *o, const mixture_item *items, int count, qd_data *d)
{
    /* Without weights all items are one source, so that an epoch contains each window exactly
     * once. */
    const bool weighted = items[0].weight > 0;
    d->source_count = weighted ? count : 1;
    d->sources = calloc((size_t)d->source_count, sizeof *d->sources);
    if (!d->sources)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d sources", d->source_count);
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += items[i].weight;
    for (int s = 0; s < d->source_count; s++) {
        qd_token_source *source = &d->sources[s];
        source->path = strdup(weighted ? items[s].path : o->path);
        source->weight = weighted ? items[s].weight / sum : 1;
        if (!source->path)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d sources", d->source_count);
        for (int i = weighted ? s : 0; i < (weighted ? s + 1 : count); i++)
            QD_TRY(qd_token_source_add(o, items[i].path, d, source));
        QD_TRY(o->examples ? pack_windows(o, source) : cut_windows(o, source));
        d->windows += source->windows;
        d->validation_windows += source->validation_windows;
        qd_log(QD_LOG_INFO, "data", "%s: %lld tokens in %lld documents of %lld files (%lld skipped)", source->path,
               (long long)source->tokens, (long long)source->documents, (long long)source->files,
               (long long)source->skipped);
    }
    return QD_OK;
}

static qd_status make_mixture(const qd_data_options *o, qd_data *d)
{
    const size_t n = (size_t)d->source_count;
    double *weights = calloc(n, sizeof *weights);
    d->mixture_windows = calloc(n, sizeof *d->mixture_windows);
    d->mixture_bounds = calloc(n + 1, sizeof *d->mixture_bounds);
    if (!weights || !d->mixture_windows || !d->mixture_bounds) {
        free(weights);
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d sources", d->source_count);
    }
    for (size_t s = 0; s < n; s++) {
        weights[s] = d->sources[s].weight;
        d->mixture_windows[s] = d->sources[s].windows;
    }
    qd_mixture_bounds(weights, d->source_count, d->mixture_bounds);
    free(weights);
    d->mixture = (qd_mixture){
        .seed = o->seed, .sources = d->source_count, .windows = d->mixture_windows, .bounds = d->mixture_bounds};
    return QD_OK;
}

/* Removes shards from a list. */
static void keep_text(qd_file_list *files)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < files->count; i++) {
        if (files->items[i].kind == QD_FILE_SHARD)
            free(files->items[i].path);
        else
            files->items[kept++] = files->items[i];
    }
    files->count = kept;
}

qd_status qd_data_text_files(const char *path, qd_file_list *files)
{
    mixture_item *items = NULL;
    int count = 0;
    *files = (qd_file_list){0};
    QD_TRY(parse_items(path, &items, &count));
    qd_status status = QD_OK;
    for (int i = 0; i < count && status == QD_OK; i++)
        status = qd_file_list_add(files, items[i].path);
    free_items(items, count);
    keep_text(files);
    if (status != QD_OK)
        qd_file_list_free(files);
    return status;
}

void qd_data_options_init(qd_data_options *options, size_t size)
{
    const qd_data_options own = {.seq = 256, .vocab = 256, .verify = true, .documents = {.field = "text"}};
    qd_sized_init(options, size, &own, sizeof own);
}

static qd_status check_options(const qd_data_options *o)
{
    if (!o->path || o->path[0] == '\0')
        return QD_FAIL(QD_USAGE, "data.path is not set: set the training data, for example data.path=corpus.txt");
    if (o->seq < 1)
        return QD_FAIL(QD_USAGE, "data.seq is %lld; it must be at least 1", (long long)o->seq);
    if (!(o->validation >= 0 && o->validation < 1))
        return QD_FAIL(QD_USAGE, "data.validation is %g; it must be at least 0 and below 1", o->validation);
    if (o->vocab < 1 || o->vocab > INT32_MAX)
        return QD_FAIL(QD_USAGE, "model.vocab is %lld; it must be from 1 to %d", (long long)o->vocab, INT32_MAX);
    if (o->pairs && (!o->examples || o->unpacked))
        return QD_FAIL(QD_USAGE, "pairs are examples that are packed into the same sample");
    if (o->encoder && o->encoder->vocab > o->vocab)
        return QD_FAIL(QD_USAGE, "the tokenizer has %lld tokens, but model.vocab is %lld: increase it",
                       (long long)o->encoder->vocab, (long long)o->vocab);
    return QD_OK;
}

static qd_status open_data(const qd_data_options *options, qd_data **data)
{
    QD_TRY(check_options(options));
    mixture_item *items = NULL;
    int count = 0;
    QD_TRY(parse_items(options->path, &items, &count));
    qd_status status = QD_OK;
    qd_data *d = calloc(1, sizeof *d);
    if (!d) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory to open %s", options->path);
    } else {
        *d = (qd_data){
            .seq = options->seq, .vocab = options->vocab, .document_mask = options->document_mask || options->examples,
            .pairs = options->pairs};
        status = open_sources(options, items, count, d);
    }
    if (status == QD_OK)
        status = make_mixture(options, d);
    free_items(items, count);
    if (status != QD_OK) {
        qd_data_close(d);
        return status;
    }
    *data = d;
    return QD_OK;
}

qd_status qd_data_open(const qd_data_options *options, qd_data **data)
{
    qd_data_options o = qd_data_options_default();
    qd_text_encoder encoder = qd_text_encoder_default();
    *data = NULL;
    QD_TRY(QD_SIZED_READ(options, qd_data_options, &o));
    if (o.encoder)
        QD_TRY(QD_SIZED_READ(o.encoder, qd_text_encoder, &encoder));
    o.encoder = o.encoder ? &encoder : NULL; /* text is encoded before this returns */
    return open_data(&o, data);
}

qd_status qd_data_open_bytes(const char *path, int64_t seq, uint64_t seed, qd_data **data)
{
    qd_data_options options = qd_data_options_default();
    options.path = path;
    options.seq = seq;
    options.seed = seed;
    return qd_data_open(&options, data);
}

void qd_data_close(qd_data *data)
{
    if (!data)
        return;
    for (int s = 0; s < (data->sources ? data->source_count : 0); s++) {
        qd_token_source *source = &data->sources[s];
        for (int64_t p = 0; p < source->part_count; p++)
            qd_token_part_free(&source->parts[p]);
        qd_packing_free(&source->packing);
        qd_packing_free(&source->validation_packing);
        free(source->counted);
        free(source->examples);
        free(source->parts);
        free(source->path);
    }
    free(data->sources);
    free(data->mixture_windows);
    free(data->mixture_bounds);
    free(data->tokenizer_from);
    free(data);
}
