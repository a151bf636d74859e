/* All-to-all where all ranks reach all buffers by address: any running rank may do the work.
 *
 * The data that a rank receives is its list of chunks (qd_local_claim). A rank claims chunks of its
 * own list from the front, then helps the others from the back of theirs: where ranks outnumber
 * cores, ranks that are not scheduled do not delay the rest. The operation is over when all lists
 * are done. The own block is not in the list: it is copied without waiting for the posts. */
#include "comm/local/collective_impl.h"

#include <string.h>

typedef qd_local_state state;

static int64_t chunks_of(int64_t bytes, int64_t chunk)
{
    return (bytes + chunk - 1) / chunk;
}

void qd_local_common_begin(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank, n = op->comm->size;
    qd_local_lane *lane = qd_local_group_of(op)->lanes[me];
    qd_local_post *post = qd_local_post_of(op, me);
    int64_t size = qd_local_element_size(op), bytes = 0;
    for (int from = 0; from < n; from++) bytes += from == me ? 0 : r->out_counts[from] * size;
    post->shares = qd_local_state_of(op)->chunked;
    post->chunk = qd_local_chunk_bytes(bytes);
    post->chunks = 0;
    for (int from = 0; from < n; from++)
        if (from != me) post->chunks += chunks_of(r->out_counts[from] * size, post->chunk);
    memset(qd_local_pushed_of(op, me), 0, (size_t)n * sizeof(int64_t));
    atomic_store_explicit(&lane->claims, qd_local_state_of(op)->base, memory_order_relaxed);
    /* Tells a rank that is still in the previous operation that all chunks of this rank's list
     * were done in it. */
    atomic_store_explicit(&lane->moved, qd_local_state_of(op)->base, memory_order_release);
}

bool qd_local_common_decide(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    int n = op->comm->size;
    for (int r = 0; r < n; r++) {
        const qd_local_post *post = qd_local_post_of(op, r);
        if (post->way != QD_LOCAL_PLACED || !post->shares || post->out_at == QD_LOCAL_NOWHERE) return false;
        /* A pair that disagrees reports it itself; no other rank may touch its memory. */
        for (int to = 0; to < n; to++)
            if (qd_local_blocks_of(op, r)[to].count != qd_local_blocks_of(op, to)[r].expected) return false;
    }
    s->parts = n == 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1;
    return true;
}

/* Copies chunk `index` of the list of `to`. Returns its bytes. */
static int64_t copy_chunk(qd_transfer *op, int to, int64_t index)
{
    qd_local_group *group = qd_local_group_of(op);
    const qd_local_post *post = qd_local_post_of(op, to);
    int n = op->comm->size, from = (to + 1) % n;
    int64_t size = qd_local_element_size(op), bytes;
    for (;; from = (from + 1) % n) {
        bytes = qd_local_blocks_of(op, from)[to].count * size;
        int64_t chunks = chunks_of(bytes, post->chunk);
        if (index < chunks) break;
        index -= chunks;
    }
    int64_t first = index * post->chunk, length = bytes - first < post->chunk ? bytes - first : post->chunk;
    const char *in = (const char *)qd_local_at(group, qd_local_post_of(op, from)->in_at) + qd_local_blocks_of(op, from)[to].offset;
    char *out = (char *)qd_local_at(group, post->out_at) + qd_local_blocks_of(op, to)[from].out_offset;
    qd_comm_copy(out + first, in + first, length, qd_local_state_of(op)->large);
    return length;
}

bool qd_local_common_work(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    int64_t done = 0;
    /* A rank keeps this mark until its claimed chunk is copied: it shows which rank is waited
     * for. */
    _Atomic uint32_t *inside = &group->lanes[me]->inside;
    if (!s->parts || !qd_local_enter(group, inside)) return false;
    for (int step = 0; step < n && done < QD_LOCAL_PIECE;) {
        int to = (me + step) % n;
        qd_local_lane *lane = group->lanes[to];
        int64_t index = -1;
        if (s->parts >> to & 1) index = qd_local_claim(&lane->claims, s->base, qd_local_post_of(op, to)->chunks, step > 0);
        if (index < 0) {
            s->parts &= ~((uint64_t)1 << to);
            step++;
            continue;
        }
        int64_t bytes = copy_chunk(op, to, index);
        if (!qd_local_counts(group)) { /* the core sees the abort record next */
            s->parts = 0;
            break;
        }
        if (to == me)
            op->bytes += bytes;
        else
            qd_local_pushed_of(op, me)[to] += bytes;
        atomic_fetch_add_explicit(&lane->moved, 1, memory_order_acq_rel);
        done += bytes;
    }
    qd_local_leave(inside);
    return done > 0;
}

bool qd_local_common_is_done(qd_transfer *op)
{
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    for (int r = 0; r < n; r++)
        if (atomic_load_explicit(&group->lanes[r]->moved, memory_order_acquire) <
            qd_local_state_of(op)->base + (uint64_t)qd_local_post_of(op, r)->chunks)
            return false;
    for (int r = 0; r < n; r++)
        if (r != me) op->bytes += qd_local_pushed_of(op, r)[me];
    return true;
}
