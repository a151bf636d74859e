/* Send and receive: a head, which carries a short payload, then the rest of a long one in
 * chunks. */
#include "comm/mpi/mpi_impl.h"

#include <stdlib.h>
#include <string.h>

typedef struct p2p_state {
    qd_mpi_group *group;
    qd_mpi_link *link;
    MPI_Request head, data;
    unsigned char *bytes;         /* the caller's buffer */
    int64_t total, posted, chunk; /* bytes; posted includes what the head carried; chunk: the message in flight */
    double asked;
    bool sending, greeted;
} p2p_state;
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
    if (bytes > QD_MPI_MESSAGE_BYTES)
        bytes = QD_MPI_MESSAGE_BYTES;
    unsigned char *at = s->bytes + s->posted;
    QD_TRY((s->sending ? qd_mpi_send(s->group, op->request.root, QD_MPI_TAG_P2P, at, bytes, &s->data)
                       : qd_mpi_recv(s->group, op->request.root, QD_MPI_TAG_P2P, at, bytes, &s->data)));
    s->posted += bytes;
    s->chunk = bytes;
    return QD_OK;
}

qd_status qd_mpi_p2p_start(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    const qd_coll_request *r = &op->request;
    qd_mpi_group *group = op->comm->backend_data;
    *s = (p2p_state){
        .group = group,
        .link = &group->links[r->root],
        .head = MPI_REQUEST_NULL,
        .data = MPI_REQUEST_NULL,
        .total = r->count * (int64_t)qd_dtype_size(r->dtype),
        .sending = r->kind == QD_COLL_SEND,
    };
    /* Sends only read, so one pointer serves both directions. */
    s->bytes = s->sending ? (unsigned char *)(uintptr_t)r->in : r->out;
    unsigned char **bounce = s->sending ? &s->link->p2p_tx : &s->link->p2p_rx;
    if (!*bounce)
        *bounce = malloc(QD_MPI_HEAD_BYTES);
    if (!*bounce)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d bytes of message buffer", QD_MPI_HEAD_BYTES);
    if (!s->sending)
        return qd_mpi_recv(group, r->root, QD_MPI_TAG_P2P_HEAD, *bounce, QD_MPI_HEAD_BYTES, &s->head);

    int64_t length = qd_mpi_write_head(group->world, op, s->total, s->bytes, *bounce);
    s->posted = length - (int64_t)sizeof(qd_mpi_head);
    QD_TRY(qd_mpi_send(group, r->root, QD_MPI_TAG_P2P_HEAD, *bounce, length, &s->head));
    return post_next(op);
}

/* The head of the message has arrived: check it and copy what it carries. */
static qd_status greet(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    qd_mpi_head head;
    memcpy(&head, s->link->p2p_rx, sizeof head);
    head.place[sizeof head.place - 1] = '\0';
    memcpy(s->link->place, head.place, sizeof head.place);
    QD_TRY(qd_transfer_check(op, op->request.root, &head.fingerprint, head.place));
    s->link->received = head.fingerprint.sequence;
    s->greeted = true;
    if (head.carried > 0) {
        memcpy(s->bytes, s->link->p2p_rx + sizeof head, (size_t)head.carried);
        s->posted = head.carried;
        if (op->request.root != op->comm->rank)
            op->bytes += head.carried;
    }
    return QD_OK;
}

qd_status qd_mpi_p2p_poll(qd_transfer *op, bool *done, bool *moved)
{
    p2p_state *s = state_of(op);
    int flag;
    *moved = false;
    if (s->head != MPI_REQUEST_NULL) {
        QD_TRY(qd_mpi_check(MPI_Test(&s->head, &flag, MPI_STATUS_IGNORE), "MPI_Test"));
        if (flag) {
            *moved = true;
            if (!s->sending) {
                QD_TRY(greet(op));
                QD_TRY(post_next(op));
            }
        }
    }
    if (s->data != MPI_REQUEST_NULL) {
        QD_TRY(qd_mpi_check(MPI_Test(&s->data, &flag, MPI_STATUS_IGNORE), "MPI_Test"));
        if (flag) {
            *moved = true;
            if (!s->sending && op->request.root != op->comm->rank)
                op->bytes += s->chunk;
            QD_TRY(post_next(op));
        }
    }
    *done = s->head == MPI_REQUEST_NULL && s->data == MPI_REQUEST_NULL && s->posted == s->total &&
            (s->sending || s->greeted);
    if (*moved)
        atomic_store_explicit(&s->group->world->naps, 0, memory_order_relaxed);
    else
        qd_mpi_ask(s->group, op, op->request.root, &s->asked);
    return QD_OK;
}

void qd_mpi_p2p_finish(qd_transfer *op)
{
    p2p_state *s = state_of(op);
    qd_mpi_give_up(s->group->world, &s->head, 1);
    qd_mpi_give_up(s->group->world, &s->data, 1);
}

bool qd_mpi_p2p_late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    const p2p_state *s = state_of(op);
    if (peer != op->request.root)
        return false;
    report->sequence = s->sending || !s->greeted ? op->fingerprint.sequence - 1 : op->fingerprint.sequence;
    memcpy(report->place, s->link->place, sizeof report->place);
    return true;
}
