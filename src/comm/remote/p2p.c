/* Send and receive: a head, which carries a short payload or the first part of a long one, then the
 * rest in chunks. */
#include "comm/remote/remote.h"

#include <stdlib.h>
#include <string.h>

typedef struct p2p_state {
    qd_remote_group *group;
    qd_remote_link *link;
    uint64_t requests[2];
    bool in_flight[2];
    unsigned char *bytes;         /* the caller's buffer */
    int64_t total, posted, chunk; /* bytes; posted includes what the head carried; chunk: the message in flight */
    double asked;
    bool sending, greeted;
} p2p_state;
enum { HEAD, DATA };
#define FIRST_PART ((int64_t)16 << 10) /* of a long message, with its head: it is copied twice more than the rest */
_Static_assert(sizeof(p2p_state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static p2p_state *state_of(const qd_transfer *op)
{
    return (p2p_state *)(void *)op->state;
}

/* Posts the next chunk of the payload, if there is one. */
static qd_status post_next(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    int64_t bytes = s->total - s->posted;
    if (bytes == 0)
        return QD_OK;
    if (bytes > QD_REMOTE_MESSAGE_BYTES)
        bytes = QD_REMOTE_MESSAGE_BYTES;
    unsigned char *at = s->bytes + s->posted;
    s->in_flight[DATA] = true;
    QD_TRY((s->sending ? qd_remote_send(s->group, op->request.root, QD_REMOTE_TAG_P2P, at, bytes, s->requests, DATA)
                       : qd_remote_recv(s->group, op->request.root, QD_REMOTE_TAG_P2P, at, bytes, s->requests, DATA)));
    s->posted += bytes;
    s->chunk = bytes;
    return QD_OK;
}

qd_status qd_remote_p2p_start(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    const qd_coll_request *r = &op->request;
    qd_remote_group *group = op->comm->backend_data;
    *s = (p2p_state){
        .group = group,
        .link = &group->links[r->root],
        .total = r->count * (int64_t)qd_dtype_size(r->dtype),
        .sending = r->kind == QD_COLL_SEND,
    };
    /* Sends only read, so one pointer serves both directions. */
    s->bytes = s->sending ? (unsigned char *)(uintptr_t)r->in : r->out;
    unsigned char **bounce = s->sending ? &s->link->p2p_tx : &s->link->p2p_rx;
    if (!*bounce)
        *bounce = malloc((size_t)s->link->head_bytes);
    if (!*bounce)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld bytes of message buffer", (long long)s->link->head_bytes);
    group->world->transport->clear(s->requests, 2);
    s->in_flight[HEAD] = true;
    if (!s->sending)
        return qd_remote_recv(group, r->root, QD_REMOTE_TAG_P2P_HEAD, *bounce, s->link->head_bytes, s->requests, HEAD);

    /* Where a head carries much, the receiver copies the first part of a long message while the
     * rest is in transit. */
    const int64_t most = qd_remote_carry(s->link), first = most < FIRST_PART ? most : FIRST_PART;
    const int64_t carried = s->total <= most ? s->total : most > QD_REMOTE_CARRY_LEAST ? first : 0;
    int64_t length = qd_remote_write_head(group->world, op, s->total, s->bytes, carried, *bounce);
    s->posted = length - (int64_t)sizeof(qd_remote_head);
    QD_TRY(qd_remote_send(group, r->root, QD_REMOTE_TAG_P2P_HEAD, *bounce, length, s->requests, HEAD));
    return post_next(op);
}

/* The head of the message has arrived: check it, post the receive of what follows, so that this is
 * on its way, and copy what the head carries. */
static qd_status greet(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    qd_remote_head head;
    memcpy(&head, s->link->p2p_rx, sizeof head);
    qd_remote_hear(s->group, op->request.root, &head);
    QD_TRY(qd_transfer_check(op, op->request.root, &head.fingerprint, head.place));
    s->link->received = head.fingerprint.sequence;
    s->greeted = true;
    s->posted = head.carried;
    QD_TRY(post_next(op));
    if (head.carried > 0)
        memcpy(s->bytes, s->link->p2p_rx + sizeof head, (size_t)head.carried);
    if (op->request.root != op->comm->rank)
        op->bytes += head.carried;
    return QD_OK;
}

/* Whether the message in flight has ended since the last call. */
static qd_status test(p2p_state *s, int which, bool *ended)
{
    *ended = false;
    if (!s->in_flight[which])
        return QD_OK;
    const qd_remote_world *world = s->group->world;
    QD_TRY(world->transport->test(world->self, s->requests, which, ended));
    s->in_flight[which] = !*ended;
    return QD_OK;
}

qd_status qd_remote_p2p_poll(qd_transfer *op, bool *done, bool *moved)
{
    p2p_state *s = state_of(op);
    *moved = false;
    bool ended = false;
    QD_TRY(test(s, HEAD, &ended));
    if (ended) {
        *moved = true;
        if (!s->sending)
            QD_TRY(greet(op));
    }
    QD_TRY(test(s, DATA, &ended));
    if (ended) {
        *moved = true;
        if (!s->sending && op->request.root != op->comm->rank)
            op->bytes += s->chunk;
        QD_TRY(post_next(op));
    }
    *done = !s->in_flight[HEAD] && !s->in_flight[DATA] && s->posted == s->total && (s->sending || s->greeted);
    if (*moved)
        atomic_store_explicit(&s->group->world->naps, 0, memory_order_relaxed);
    else
        qd_remote_ask(s->group, op, op->request.root, &s->asked);
    return QD_OK;
}

void qd_remote_p2p_finish(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    if (s->in_flight[HEAD] || s->in_flight[DATA])
        qd_remote_give_up(s->group->world, s->requests, 2);
}

bool qd_remote_p2p_late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    const p2p_state *s = state_of(op);
    if (peer != op->request.root)
        return false;
    report->sequence = s->sending || !s->greeted ? op->fingerprint.sequence - 1 : op->fingerprint.sequence;
    memcpy(report->place, s->link->place, sizeof report->place);
    return true;
}
