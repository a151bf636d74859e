/* Which rank the remote protocol names when messages are held back. A transport of this test stands
 * in for the other ranks: it returns what is sent to a rank as if that rank had sent it, so that
 * all ranks seem to call the same, and holds back what a rank that has stopped would hold back.
 * ctest: timeout 60 */
#include "base/clock.h"
#include "comm/remote/remote.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/ok.h"

enum { RANKS = 4, CULPRIT = 1, WAITER = 2, MESSAGES = 64, LARGE = 200000 };
static const double deadline = 0.4;

typedef struct message {
    int rank, channel;
    int64_t group, bytes;
    void *data; /* of a receive: where to; of a send: a copy */
    bool used, receive, stuck;
} message;

/* A request of a receive, or of a send that is stuck, is 1 + the index of its message. */
#define ENDED UINT64_MAX
typedef struct mirror {
    message messages[MESSAGES];
    int stuck; /* the channel on which sends to the culprit do not end */
    bool deaf; /* nothing of the first phase arrives from the culprit and from the waiter */
    qd_remote_mailbox mailbox; /* of all ranks but rank 0 and the culprit */
    qd_remote_facts facts[RANKS];
} mirror;

static void clear(void *requests, int count)
{
    memset(requests, 0, (size_t)count * sizeof(uint64_t));
}

static int add(mirror *m, const message *what)
{
    int at = 0;
    while (at < MESSAGES && m->messages[at].used) at++;
    assert_true(at < MESSAGES);
    m->messages[at] = *what;
    m->messages[at].used = true;
    return at;
}

static qd_status begin_send(void *self, int to, int64_t group, int channel, const void *data, int64_t bytes, void *requests, int index)
{
    mirror *m = self;
    message sent = {.rank = to, .group = group, .channel = channel, .bytes = bytes};
    ((uint64_t *)requests)[index] = ENDED;
    if (group == QD_REMOTE_CONTROL) return QD_OK; /* nobody answers */
    sent.stuck = to == CULPRIT && channel == m->stuck;
    sent.data = malloc((size_t)bytes);
    assert_non_null(sent.data);
    memcpy(sent.data, data, (size_t)bytes);
    if (m->deaf && channel == QD_REMOTE_TAG_FIRST && (to == CULPRIT || to == WAITER)) {
        free(sent.data);
        return QD_OK;
    }
    int at = add(m, &sent);
    if (sent.stuck) ((uint64_t *)requests)[index] = 1 + (uint64_t)at;
    return QD_OK;
}

static qd_status begin_recv(void *self, int from, int64_t group, int channel, void *data, int64_t bytes, void *requests, int index)
{
    message wanted = {.rank = from, .group = group, .channel = channel, .bytes = bytes, .data = data, .receive = true};
    ((uint64_t *)requests)[index] = 1 + (uint64_t)add(self, &wanted);
    return QD_OK;
}

static qd_status test(void *self, void *requests, int index, bool *done)
{
    mirror *m = self;
    uint64_t *request = (uint64_t *)requests + index;
    *done = *request == 0 || *request == ENDED;
    message *wanted = *done ? NULL : &m->messages[*request - 1];
    if (*done) *request = 0;
    for (int i = 0; wanted && wanted->receive && i < MESSAGES; i++) {
        message *sent = &m->messages[i];
        if (!sent->used || sent->receive || !sent->data || sent->rank != wanted->rank || sent->group != wanted->group ||
            sent->channel != wanted->channel)
            continue;
        assert_true(sent->bytes <= wanted->bytes);
        memcpy(wanted->data, sent->data, (size_t)sent->bytes);
        free(sent->data);
        sent->data = NULL;
        sent->used = sent->stuck;
        wanted->used = false;
        *request = 0;
        *done = true;
        return QD_OK;
    }
    return QD_OK;
}

/* All ranks but the culprit answer the questions in the mailbox. */
static void answer(mirror *m)
{
    qd_remote_control question;
    while (qd_remote_mailbox_recv(m->mailbox, &question, sizeof question))
        for (int r = WAITER; question.kind == QD_REMOTE_ASK && r < RANKS; r++) {
            qd_remote_control reply = {
                .kind = QD_REMOTE_ANSWER, .from = r, .group = question.group, .sequence = 1, .sent = qd_clock_now()};
            qd_remote_mailbox_send(m->mailbox, m->facts[0].mailbox, &reply, sizeof reply);
        }
}

static qd_status test_some(void *self, void *requests, int count, int *completed, int *indices)
{
    *completed = 0;
    answer(self);
    for (int i = 0; i < count; i++) {
        bool done = false;
        if (((uint64_t *)requests)[i] == 0) continue;
        QD_TRY(test(self, requests, i, &done));
        if (done) indices[(*completed)++] = i;
    }
    return QD_OK;
}

static bool give_up(void *self, void *requests, int count)
{
    (void)self;
    clear(requests, count);
    return true;
}

static bool meet(void *self, bool *done)
{
    (void)self;
    *done = false;
    return false;
}

static void end(void *self, bool met, bool dirty)
{
    mirror *m = self;
    (void)met, (void)dirty;
    for (int i = 0; i < MESSAGES; i++)
        if (m->messages[i].used && !m->messages[i].receive) free(m->messages[i].data);
}

static const qd_remote_transport transport = {
    .name = "ucx",
    .clear = clear,
    .send = begin_send,
    .recv = begin_recv,
    .test = test,
    .test_some = test_some,
    .give_up = give_up,
    .meet = meet,
    .close = end,
    .most_groups = 1000,
    .carry_most = 64 << 10,
};

static void names_culprit(mirror *m, const char *what, bool sends, float *data, int64_t count)
{
    qd_remote_mailbox own;
    qd_remote_facts_find(&m->facts[0], &own);
    for (int r = 0; r < RANKS; r++) strcpy(m->facts[r].machine, "one");
    qd_comm_config config = qd_comm_config_default();
    qd_comm *world = NULL;
    config.deadline_seconds = deadline;
    ok(qd_remote_create(&transport, m, m->facts, own, 0, RANKS, &config, &world));
    qd_status status = sends ? qd_comm_send(world, data, count, QD_F32, CULPRIT, NULL)
                             : qd_comm_all_reduce(world, data, data + LARGE, count, QD_F32, QD_SUM, NULL);
    const char *text = qd_error_message();
    if (status != QD_TIMEOUT || !strstr(text, "rank 1 (last in") || strstr(text, "rank 2 (") || strstr(text, "rank 3 ("))
        fail_msg("%s: status %d: '%s' does not name rank 1 alone", what, (int)status, text);
    qd_comm_destroy(world);
}

static void test_stuck_message(void **unused)
{
    (void)unused;
    static const struct {
        const char *what;
        int channel;
        int64_t count; /* of an all-reduce, or of a send to the culprit */
        bool sends;
    } cases[] = {
        {"the head, nothing else is missing", QD_REMOTE_TAG_HEAD, 0, false},
        {"the head with its payload", QD_REMOTE_TAG_HEAD, 100, false},
        {"the head before a long payload", QD_REMOTE_TAG_HEAD, LARGE, false},
        {"the first phase", QD_REMOTE_TAG_FIRST, LARGE, false},
        {"the second phase", QD_REMOTE_TAG_SECOND, LARGE, false},
        {"the head of a message", QD_REMOTE_TAG_P2P_HEAD, 100, true},
        {"the payload of a message", QD_REMOTE_TAG_P2P, LARGE, true},
    };
    float *data = calloc(2 * LARGE, sizeof *data);
    assert_non_null(data);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mirror m = {.stuck = cases[i].channel};
        names_culprit(&m, cases[i].what, cases[i].sends, data, cases[i].count);
    }
    free(data);
}

/* The queue of this rank is blocked, so it gets neither data nor answers there: the answers come
 * another way. */
static void test_blocked_queue(void **unused)
{
    (void)unused;
    float *data = calloc(2 * LARGE, sizeof *data);
    assert_non_null(data);
    mirror m = {.stuck = -1, .deaf = true};
    qd_remote_mailbox_open(&m.mailbox, m.facts[WAITER].mailbox);
    memcpy(m.facts[WAITER + 1].mailbox, m.facts[WAITER].mailbox, sizeof m.facts[0].mailbox);
    names_culprit(&m, "a blocked queue", false, data, LARGE);
    qd_remote_mailbox_close(m.mailbox);
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stuck_message), cmocka_unit_test(test_blocked_queue)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
