/* Best-fit packing with one list of windows per amount of free space, and a bitmap of the lists
 * that are not empty. */
#include "data/examples/packing.h"

#include <stdlib.h>
#include <string.h>

typedef struct packer {
    const int64_t *lengths;
    int64_t count, longest;
    int64_t *sorted; /* (count): examples, longest first; of one length in their order */
    int64_t *window; /* (count): the window of each example */
    int64_t *space;  /* (windows): free positions */
    int64_t *next;   /* (windows): the next window of the same list, -1: none */
    int64_t *head;   /* (longest + 1): list of windows with that space; the last also of those with more */
    uint64_t *used;  /* bit s: list s is not empty */
    int64_t windows;
} packer;

enum { WORD = 64 };

static void sort_by_length(packer *p)
{
    int64_t *begin = p->head; /* not in use yet; begin[n]: examples longer than n */
    memset(begin, 0, (size_t)(p->longest + 1) * sizeof *begin);
    for (int64_t i = 0; i < p->count; i++)
        begin[p->lengths[i] - 1]++;
    for (int64_t n = p->longest - 1; n > 0; n--)
        begin[n - 1] += begin[n];
    for (int64_t i = p->count - 1; i >= 0; i--)
        p->sorted[--begin[p->lengths[i] - 1]] = i;
}

static int64_t list_of(const packer *p, int64_t space)
{
    return space < p->longest ? space : p->longest;
}

static void put(packer *p, int64_t window)
{
    int64_t list = list_of(p, p->space[window]);
    p->next[window] = p->head[list];
    p->head[list] = window;
    p->used[list / WORD] |= UINT64_C(1) << (list % WORD);
}

/* Takes a window with at least `length` free positions, as few as possible; -1: none. */
static int64_t take(packer *p, int64_t length)
{
    uint64_t bits = p->used[length / WORD] & (~UINT64_C(0) << (length % WORD));
    int64_t word = length / WORD;
    while (bits == 0 && ++word <= p->longest / WORD)
        bits = p->used[word];
    if (bits == 0)
        return -1;
    int64_t list = word * WORD + __builtin_ctzll(bits), window = p->head[list];
    p->head[list] = p->next[window];
    if (p->head[list] < 0)
        p->used[word] &= ~(UINT64_C(1) << (list % WORD));
    return window;
}

static void assign(packer *p, int64_t room)
{
    for (int64_t s = 0; s <= p->longest; s++)
        p->head[s] = -1;
    for (int64_t i = 0; i < p->count; i++) {
        int64_t example = p->sorted[i], length = p->lengths[example], window = take(p, length);
        if (window < 0) {
            window = p->windows++;
            p->space[window] = room;
        }
        p->window[example] = window;
        p->space[window] -= length;
        put(p, window);
    }
}

/* Lists the examples by window, in each window longest first. */
static void list(const packer *p, qd_packing *out)
{
    for (int64_t i = 0; i < p->count; i++)
        out->first[p->window[i] + 1]++;
    for (int64_t w = 0; w < p->windows; w++)
        out->first[w + 1] += out->first[w];
    int64_t *at = p->space; /* no longer needed */
    memcpy(at, out->first, (size_t)p->windows * sizeof *at);
    for (int64_t i = 0; i < p->count; i++)
        out->order[at[p->window[p->sorted[i]]]++] = p->sorted[i];
}

qd_status qd_packing_make(const int64_t *lengths, int64_t count, int64_t room, qd_packing *packing)
{
    packer p = {.lengths = lengths, .count = count, .longest = 1};
    *packing = (qd_packing){0};
    for (int64_t i = 0; i < count; i++)
        p.longest = lengths[i] > p.longest ? lengths[i] : p.longest;
    const size_t n = (size_t)count, lists = (size_t)p.longest + 1;
    int64_t *memory = malloc((4 * n + lists) * sizeof *memory);
    p.used = calloc(lists / WORD + 1, sizeof *p.used);
    packing->first = calloc(n + 1, sizeof *packing->first);
    packing->order = malloc(n * sizeof *packing->order);
    qd_status status = QD_OK;
    if (!memory || !p.used || !packing->first || !packing->order) {
        qd_packing_free(packing);
        status = QD_FAIL(QD_NO_MEMORY, "no memory to pack %lld examples", (long long)count);
    } else {
        p.sorted = memory;
        p.window = memory + n;
        p.space = memory + 2 * n;
        p.next = memory + 3 * n;
        p.head = memory + 4 * n;
        sort_by_length(&p);
        assign(&p, room);
        list(&p, packing);
        packing->windows = p.windows;
    }
    free(memory);
    free(p.used);
    return status;
}

void qd_packing_free(qd_packing *packing)
{
    free(packing->first);
    free(packing->order);
    *packing = (qd_packing){0};
}
