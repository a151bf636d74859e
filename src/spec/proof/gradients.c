/* Gradient memory as pieces of parameters, because reductions work on ranges that may cut a
 * parameter anywhere. */
#include "spec/proof/proof_impl.h"

#include <stdlib.h>
#include <string.h>

void qd_proof_memory_clear(proof_memory *m)
{
    free(m->pieces);
    *m = (proof_memory){0};
}

static bool reserve(proof_memory *m, int more)
{
    if (m->count + more <= m->capacity)
        return true;
    int wanted = 2 * (m->count + more) + 16;
    proof_piece *larger = realloc(m->pieces, (size_t)wanted * sizeof *larger);
    if (!larger)
        return false;
    m->pieces = larger;
    m->capacity = wanted;
    return true;
}

qd_status qd_proof_memory_add(proof_memory *m, int64_t first, int64_t end, int param)
{
    if (!reserve(m, 1))
        return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    m->pieces[m->count++] = (proof_piece){.first = first, .end = end, .param = param, .by = -1};
    return QD_OK;
}

/* The first piece that ends after an element. */
static int find(const proof_memory *m, int64_t element)
{
    int low = 0, high = m->count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (m->pieces[middle].end <= element)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void cut(proof_memory *m, int64_t at)
{
    int i = find(m, at);
    if (i == m->count || m->pieces[i].first >= at)
        return;
    proof_piece *piece = &m->pieces[i];
    memmove(piece + 1, piece, (size_t)(m->count++ - i) * sizeof *piece);
    piece[0].end = piece[1].first = at;
}

int qd_proof_memory_range(proof_memory *m, int64_t first, int64_t end, int *count)
{
    *count = 0;
    if (!reserve(m, 2))
        return -1;
    cut(m, first);
    cut(m, end);
    int begin = find(m, first);
    while (begin + *count < m->count && m->pieces[begin + *count].end <= end)
        ++*count;
    return begin;
}
