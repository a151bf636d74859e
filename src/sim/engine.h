/* The event engine: participants (ranks, or one rank for each kind of them) with streams of items
 * that take time, wait for each other and share links. Knows nothing of models or machines. */
#ifndef QD_SIM_ENGINE_H
#define QD_SIM_ENGINE_H

#include <quadrille/status.h>
#include <stdint.h>

enum { QD_SIM_STREAMS = 8, QD_SIM_LINKS = 4 };

/* Items of a stream run in the order of the participant's list. An item begins when the item before
 * it on its stream, its dependencies and the message it awaits are done, and, if it meets others,
 * when they can begin too. */
typedef struct qd_sim_item {
    double seconds;    /* alone on its link */
    float load;        /* while it runs, items of its participant that use no link run slower by this share */
    float cores;       /* of the problem's, which it takes while it runs; 0: none */
    int8_t stream;     /* 0 .. QD_SIM_STREAMS - 1 */
    int8_t link;       /* 1 .. QD_SIM_LINKS: a link of its participant, whose bandwidth items share that run at the same time; 0: none */
    int32_t dep_first, dep_count; /* in the participant's deps: items of the same participant that must have ended */
    int32_t awaits;    /* a message that must have been sent; -1: none */
    int32_t sends;     /* a message that it sends at its end; -1: none. Each message has one sender and any number of receivers */
    int32_t meets;     /* items with the same number begin and end together, at the pace of the slowest; -1: none */
} qd_sim_item;

typedef struct qd_sim_participant {
    const qd_sim_item *items;
    int count;
    const int32_t *deps;
} qd_sim_participant;

typedef struct qd_sim_problem {
    const qd_sim_participant *participants;
    int count;
    int messages, meetings; /* numbers run from 0 */
    /* that all participants share: items that would take more of them together run slower by as
     * much; 0: no limit */
    double cores;
    /* Says in words what an item is, for the message about a standstill; NULL: by number alone. */
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
    int64_t *first;      /* (count + 1): where each participant's times begin */
    double *busy;        /* (count, QD_SIM_STREAMS): seconds in which an item of the stream was running */
} qd_sim_result;

/* O(n log s) for n items and s streams that run at a time. QD_USAGE for numbers out of range,
 * QD_MISMATCH when the items wait for each other, with the circle in words. The result is freed by
 * the caller, also after a failure. */
qd_status qd_sim_run(const qd_sim_problem *problem, qd_sim_result *result);
void qd_sim_result_free(qd_sim_result *result);

static inline const qd_sim_times *qd_sim_times_of(const qd_sim_result *result, int participant)
{
    return result->times + result->first[participant];
}
#endif
