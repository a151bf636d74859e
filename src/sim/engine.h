/* The event engine: participants (ranks, or one rank per kind) with streams of items that take
 * time, depend on each other and share links. It does not depend on models or machines. */
#ifndef QD_SIM_ENGINE_H
#define QD_SIM_ENGINE_H

#include <quadrille/status.h>
#include <stdint.h>

enum { QD_SIM_STREAMS = 8, QD_SIM_LINKS = 4 };

/* Items of a stream run in list order. An item starts when the previous item of its stream, its
 * dependencies and the message it awaits are done, and, if it meets others, when they can start
 * too. */
typedef struct qd_sim_item {
    double seconds;    /* duration if its link is not shared */
    float load;        /* while it runs, items of its participant that use no link are slower by this share */
    float cores;       /* cores of the problem that it takes while it runs; 0: none */
    int8_t stream;     /* 0 .. QD_SIM_STREAMS - 1 */
    int8_t link;       /* 1 .. QD_SIM_LINKS: a link of its participant, whose bandwidth concurrent items share; 0: none */
    int32_t dep_first, dep_count; /* in the participant's deps: items of the same participant that must have ended */
    int32_t awaits;    /* message that must have been sent; -1: none */
    int32_t sends;     /* message sent at its end; -1: none. A message has one sender and any number of receivers */
    int32_t meets;     /* items with the same number start and end together, at the pace of the slowest; -1: none */
} qd_sim_item;

typedef struct qd_sim_participant {
    const qd_sim_item *items;
    int count;
    const int32_t *deps;
} qd_sim_participant;

typedef struct qd_sim_problem {
    const qd_sim_participant *participants;
    int count;
    int messages, meetings; /* numbered from 0 */
    /* Shared by all participants: concurrent items that demand more run proportionally slower; 0:
     * no limit. */
    double cores;
    /* Describes an item, for the message about a deadlock; NULL: by number alone. */
    void (*describe)(const void *context, int participant, int item, char *text, size_t size);
    const void *context;
} qd_sim_problem;

typedef struct qd_sim_times {
    double begin, end;
} qd_sim_times;

typedef struct qd_sim_result {
    double seconds;      /* end of the last item */
    int64_t items;
    qd_sim_times *times; /* of all items, participant by participant */
    int64_t *first;      /* (count + 1): offset of each participant's times */
    double *busy;        /* (count, QD_SIM_STREAMS): seconds in which the stream was running an item */
} qd_sim_result;

/* O(n log s) for n items and s concurrent streams. QD_USAGE for numbers out of range, QD_MISMATCH
 * for a deadlock, with the cycle in words. The caller frees the result, also after an error. */
qd_status qd_sim_run(const qd_sim_problem *problem, qd_sim_result *result);
void qd_sim_result_free(qd_sim_result *result);

static inline const qd_sim_times *qd_sim_times_of(const qd_sim_result *result, int participant)
{
    return result->times + result->first[participant];
}
#endif
