/* The Kneser-Ney model: trigrams as sorted 64-bit keys, grouped into count tables per order. */
#include "data/kneser_ney.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* A trigram is one word of 3 × 21 bits, so sorting groups it by context. The start symbol is the
 * token `vocab`. */
enum { TOKEN_BITS = 21 };
#define TOKEN_MASK ((UINT64_C(1) << TOKEN_BITS) - 1)

/* Counts of one order, grouped by context. */
typedef struct context_table {
    uint64_t *contexts; /* (context_count) sorted; NULL: context i is token i */
    int64_t *begin;     /* (context_count + 1): offsets of its entries */
    double *total;      /* (context_count): sum of the counts */
    double *free;       /* (context_count): probability mass freed by the discounts */
    int64_t context_count;
    uint32_t *tokens, *counts; /* entries: sorted by token inside a context */
    int64_t entry_count;
    double discount[3]; /* for counts of 1, 2, and 3 or more */
} context_table;

struct qd_kn {
    int64_t vocab;
    uint64_t *keys; /* (count): trigrams in input order, until finished */
    int64_t count, capacity;
    uint32_t before[2]; /* the last two tokens */
    context_table trigrams, bigrams;
    double *unigram; /* (vocab): P1 */
    double unigram_discount[3];
    int64_t total;
};

static uint64_t pack(uint64_t u, uint64_t v, uint64_t w)
{
    return u << (2 * TOKEN_BITS) | v << TOKEN_BITS | w;
}

qd_status qd_kn_create(int64_t vocab, qd_kn **model)
{
    if (vocab < 1 || vocab >= (int64_t)TOKEN_MASK)
        return QD_FAIL(QD_USAGE, "a trigram model of %lld tokens; fewer than %lld are possible", (long long)vocab,
                       (long long)TOKEN_MASK);
    qd_kn *m = calloc(1, sizeof *m);
    if (!m)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a trigram model");
    m->vocab = vocab;
    qd_kn_break(m);
    *model = m;
    return QD_OK;
}

static void table_free(context_table *t)
{
    free(t->contexts);
    free(t->begin);
    free(t->total);
    free(t->free);
    free(t->tokens);
    free(t->counts);
}

void qd_kn_destroy(qd_kn *m)
{
    if (!m)
        return;
    table_free(&m->trigrams);
    table_free(&m->bigrams);
    free(m->keys);
    free(m->unigram);
    free(m);
}

void qd_kn_break(qd_kn *m)
{
    m->before[0] = m->before[1] = (uint32_t)m->vocab;
}

qd_status qd_kn_add(qd_kn *m, const int32_t *tokens, int64_t count)
{
    if (m->capacity - m->count < count) {
        int64_t capacity = m->capacity + m->capacity / 2;
        capacity = capacity - m->count < count ? m->count + count : capacity;
        uint64_t *keys = realloc(m->keys, (size_t)capacity * sizeof *keys);
        if (!keys)
            return QD_FAIL(QD_NO_MEMORY, "no memory to count %lld trigrams", (long long)capacity);
        m->keys = keys;
        m->capacity = capacity;
    }
    for (int64_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= m->vocab)
            return QD_FAIL(QD_USAGE, "token %d is outside the vocabulary of %lld", tokens[i], (long long)m->vocab);
        m->keys[m->count++] = pack(m->before[0], m->before[1], (uint64_t)tokens[i]);
        m->before[0] = m->before[1];
        m->before[1] = (uint32_t)tokens[i];
    }
    return QD_OK;
}

/* LSD radix sort, 11 bits per pass; digits that all keys share are skipped. */
static qd_status sort_keys(uint64_t **keys, int64_t count)
{
    enum { DIGIT = 11, BUCKETS = 1 << DIGIT };
    uint64_t *from = *keys, *to = malloc((size_t)count * sizeof *to);
    if (!to)
        return QD_FAIL(QD_NO_MEMORY, "no memory to sort %lld trigrams", (long long)count);
    for (int shift = 0; shift < 3 * TOKEN_BITS; shift += DIGIT) {
        int64_t place[BUCKETS] = {0}, sum = 0;
        for (int64_t i = 0; i < count; i++)
            place[from[i] >> shift & (BUCKETS - 1)]++;
        if (place[from[0] >> shift & (BUCKETS - 1)] == count)
            continue;
        for (int b = 0; b < BUCKETS; b++) {
            int64_t size = place[b];
            place[b] = sum;
            sum += size;
        }
        for (int64_t i = 0; i < count; i++)
            to[place[from[i] >> shift & (BUCKETS - 1)]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    free(to);
    *keys = from;
    return QD_OK;
}

static int64_t count_different(const uint64_t *keys, int64_t count, int shift)
{
    int64_t different = count > 0;
    for (int64_t i = 1; i < count; i++)
        different += keys[i] >> shift != keys[i - 1] >> shift;
    return different;
}

/* Index of the discount for a count: 1, 2, or 3 and more. */
static int count_class(uint32_t count)
{
    return count >= 3 ? 2 : (int)count - 1;
}

/* Discounts from n[k] = number of events seen k times. Small texts have gaps in n, which give no
 * estimate or one outside (0, k]: then one discount n1/(n1 + 2 n2) for all, and 1/2 if that is
 * undefined too. */
static void estimate_discounts(const int64_t n[5], double discount[3])
{
    double y = n[1] > 0 ? (double)n[1] / (double)(n[1] + 2 * n[2]) : 0.5;
    bool usable = n[1] > 0 && n[2] > 0 && n[3] > 0;
    for (int k = 1; k <= 3; k++) {
        double d = usable ? k - (k + 1) * y * (double)n[k + 1] / (double)n[k] : y;
        usable = usable && d > 0 && d <= k;
        discount[k - 1] = d;
    }
    for (int k = 0; !usable && k < 3; k++)
        discount[k] = y < 1 ? y : 0.5; /* a discount of 1 would remove all mass of an event seen once */
}

static void estimate_from(const uint32_t *counts, int64_t count, double discount[3])
{
    int64_t n[5] = {0};
    for (int64_t i = 0; i < count; i++)
        if (counts[i] >= 1 && counts[i] <= 4)
            n[counts[i]]++;
    estimate_discounts(n, discount);
}

static double discounted(const double discount[3], uint32_t count)
{
    return count == 0 ? 0 : (double)count - discount[count_class(count)];
}

static qd_status table_alloc(context_table *t, int64_t contexts, int64_t entries, bool sparse)
{
    t->context_count = contexts;
    t->entry_count = entries;
    t->contexts = sparse ? malloc((size_t)contexts * sizeof *t->contexts) : NULL;
    t->begin = calloc((size_t)contexts + 1, sizeof *t->begin);
    t->total = calloc((size_t)contexts, sizeof *t->total);
    t->free = calloc((size_t)contexts, sizeof *t->free);
    t->tokens = malloc((size_t)entries * sizeof *t->tokens);
    t->counts = malloc((size_t)entries * sizeof *t->counts);
    if ((sparse && !t->contexts) || !t->begin || !t->total || !t->free || !t->tokens || !t->counts)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld trigrams", (long long)entries);
    return QD_OK;
}

/* Fills the entries from sorted keys (context << TOKEN_BITS | token): a run of equal keys is an
 * entry, its length the count. */
static void table_fill(context_table *t, const uint64_t *keys, int64_t count)
{
    int64_t entry = -1, context = -1;
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && keys[i] == keys[i - 1]) {
            if (t->counts[entry] < UINT32_MAX)
                t->counts[entry]++;
            continue;
        }
        entry++;
        t->tokens[entry] = (uint32_t)(keys[i] & TOKEN_MASK);
        t->counts[entry] = 1;
        if (!t->contexts) {
            t->begin[(keys[i] >> TOKEN_BITS) + 1] = entry + 1;
        } else {
            if (i == 0 || keys[i] >> TOKEN_BITS != keys[i - 1] >> TOKEN_BITS)
                t->contexts[++context] = keys[i] >> TOKEN_BITS;
            t->begin[context + 1] = entry + 1;
        }
    }
    /* Context numbers without entries are empty ranges: they end where the previous one ends. */
    for (int64_t c = 1; c <= t->context_count; c++)
        t->begin[c] = t->begin[c] ? t->begin[c] : t->begin[c - 1];
}

static void table_weigh(context_table *t)
{
    estimate_from(t->counts, t->entry_count, t->discount);
    for (int64_t c = 0; c < t->context_count; c++) {
        double sum = 0, freed = 0;
        for (int64_t e = t->begin[c]; e < t->begin[c + 1]; e++) {
            sum += (double)t->counts[e];
            freed += t->discount[count_class(t->counts[e])];
        }
        t->total[c] = sum;
        t->free[c] = sum > 0 ? freed / sum : 1;
    }
}

/* P1 of all tokens, from the distinct bigrams. */
static qd_status weigh_unigrams(qd_kn *m)
{
    uint32_t *before = calloc((size_t)m->vocab, sizeof *before); /* m(w) */
    m->unigram = calloc((size_t)m->vocab, sizeof *m->unigram);
    if (!before || !m->unigram) {
        free(before);
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld tokens", (long long)m->vocab);
    }
    for (int64_t e = 0; e < m->bigrams.entry_count; e++)
        before[m->bigrams.tokens[e]]++;
    estimate_from(before, m->vocab, m->unigram_discount);
    double sum = 0, freed = 0;
    for (int64_t w = 0; w < m->vocab; w++) {
        sum += before[w];
        freed += before[w] ? m->unigram_discount[count_class(before[w])] : 0;
    }
    for (int64_t w = 0; w < m->vocab; w++)
        m->unigram[w] = (discounted(m->unigram_discount, before[w]) + freed / (double)m->vocab) / sum;
    free(before);
    return QD_OK;
}

qd_status qd_kn_finish(qd_kn *m)
{
    assert(!m->unigram);
    if (m->count == 0)
        return QD_FAIL(QD_USAGE, "a trigram model needs at least one token");
    m->total = m->count;
    QD_TRY(sort_keys(&m->keys, m->count));
    int64_t trigrams = count_different(m->keys, m->count, 0);
    QD_TRY(table_alloc(&m->trigrams, count_different(m->keys, m->count, TOKEN_BITS), trigrams, true));
    table_fill(&m->trigrams, m->keys, m->count);
    table_weigh(&m->trigrams);
    /* Each distinct trigram uvw once, as vw: the count of vw is then the number of distinct u
     * before it. */
    int64_t at = 0;
    for (int64_t i = 0; i < m->count; i++)
        if (i == 0 || m->keys[i] != m->keys[i - 1])
            m->keys[at++] = m->keys[i];
    for (int64_t i = 0; i < at; i++)
        m->keys[i] &= TOKEN_MASK << TOKEN_BITS | TOKEN_MASK;
    QD_TRY(sort_keys(&m->keys, at));
    QD_TRY(table_alloc(&m->bigrams, m->vocab + 1, count_different(m->keys, at, 0), false));
    table_fill(&m->bigrams, m->keys, at);
    table_weigh(&m->bigrams);
    free(m->keys);
    m->keys = NULL;
    m->capacity = 0;
    return weigh_unigrams(m);
}

/* (count - discount) / total + free · lower, with the count of `token` in context number c (-1:
 * context never seen). */
static double interpolate(const context_table *t, int64_t c, uint32_t token, double lower)
{
    if (c < 0 || t->begin[c] == t->begin[c + 1])
        return lower;
    int64_t low = t->begin[c], high = t->begin[c + 1];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (t->tokens[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    uint32_t count = low < t->begin[c + 1] && t->tokens[low] == token ? t->counts[low] : 0;
    return discounted(t->discount, count) / t->total[c] + t->free[c] * lower;
}

static int64_t find_context(const context_table *t, uint64_t context)
{
    int64_t low = 0, high = t->context_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (t->contexts[middle] < context)
            low = middle + 1;
        else
            high = middle;
    }
    return low < t->context_count && t->contexts[low] == context ? low : -1;
}

double qd_kn_probability(const qd_kn *m, int32_t u, int32_t v, int32_t w)
{
    assert(m->unigram && u < m->vocab && v < m->vocab && w >= 0 && w < m->vocab);
    uint64_t before[2] = {(uint64_t)(u < 0 ? m->vocab : u), (uint64_t)(v < 0 ? m->vocab : v)};
    double p = interpolate(&m->bigrams, (int64_t)before[1], (uint32_t)w, m->unigram[w]);
    return interpolate(&m->trigrams, find_context(&m->trigrams, before[0] << TOKEN_BITS | before[1]), (uint32_t)w, p);
}

qd_kn_info qd_kn_describe(const qd_kn *m)
{
    qd_kn_info info = {.tokens = m->total, .trigrams = m->trigrams.entry_count, .bigrams = m->bigrams.entry_count};
    memcpy(info.discounts[0], m->unigram_discount, sizeof info.discounts[0]);
    memcpy(info.discounts[1], m->bigrams.discount, sizeof info.discounts[1]);
    memcpy(info.discounts[2], m->trigrams.discount, sizeof info.discounts[2]);
    return info;
}
