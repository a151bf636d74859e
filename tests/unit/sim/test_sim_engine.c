/* The event engine: order, dependencies, messages, meetings, shared links, deadlocks; pipelines
 * against their formulas. */
#include "sim/engine.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

static qd_sim_item item(int stream, double seconds)
{
    return (qd_sim_item){.seconds = seconds, .stream = (int8_t)stream, .awaits = -1, .sends = -1, .meets = -1};
}

static void about(double a, double b)
{
    if (a - b > 1e-9 || b - a > 1e-9)
        fail_msg("%.12g is not %.12g", a, b);
}

static void streams_and_dependencies(void **state)
{
    (void)state;
    qd_sim_item items[4] = {item(0, 1.0), item(1, 5.0), item(0, 2.0), item(0, 1.0)};
    int32_t deps[] = {0, 1};
    items[1].dep_first = 0; /* the reduction starts after the first computation */
    items[1].dep_count = 1;
    items[3].dep_first = 1; /* and the last computation after the reduction */
    items[3].dep_count = 1;
    qd_sim_participant who = {items, 4, deps};
    qd_sim_problem problem = {.participants = &who, .count = 1};
    qd_sim_result r;
    ok(qd_sim_run(&problem, &r));
    about(r.times[1].begin, 1.0);
    about(r.times[2].end, 3.0);
    about(r.times[3].begin, 6.0);
    about(r.seconds, 7.0);
    about(r.busy[0], 4.0);
    about(r.busy[1], 5.0);
    qd_sim_result_free(&r);
}

/* Two transfers over one link take as long together as sequentially; one that starts later gets
 * half the link from then on. */
static void links_are_shared(void **state)
{
    (void)state;
    qd_sim_item items[4] = {item(1, 4.0), item(0, 1.0), item(2, 4.0), item(0, 10.0)};
    items[0].link = items[2].link = 1;
    items[0].load = 0.25f;
    int32_t deps[] = {1};
    items[2].dep_count = 1;
    qd_sim_participant who = {items, 4, deps};
    qd_sim_problem problem = {.participants = &who, .count = 1};
    qd_sim_result r;
    ok(qd_sim_run(&problem, &r));
    double first = 1.0 / 0.75;              /* computation overlapped with the transfer */
    about(r.times[1].end, first);
    about(r.times[0].end, first + 2.0 * (4.0 - first)); /* alone until then, then half the link */
    about(r.times[2].end, 8.0);
    /* Computation: three quarters of its speed while the first transfer runs, full speed
     * afterwards. */
    double slow = r.times[0].end - first;
    about(r.times[3].end, r.times[0].end + 10.0 - 0.75 * slow);
    qd_sim_result_free(&r);
}

/* Four items that each demand one of two cores get half a core; when two have ended, the others get
 * a full one. Items without cores are not slowed. */
static void cores_are_shared(void **state)
{
    (void)state;
    qd_sim_item items[4][1] = {{item(0, 1.0)}, {item(0, 1.0)}, {item(0, 3.0)}, {item(0, 3.0)}}, free_item[1] = {item(0, 2.5)};
    qd_sim_participant who[5];
    for (int i = 0; i < 4; i++) {
        items[i][0].cores = 1.0f;
        who[i] = (qd_sim_participant){items[i], 1, NULL};
    }
    who[4] = (qd_sim_participant){free_item, 1, NULL};
    qd_sim_problem problem = {.participants = who, .count = 5, .cores = 2.0};
    qd_sim_result r;
    ok(qd_sim_run(&problem, &r));
    about(r.times[0].end, 2.0);
    about(r.times[2].end, 4.0);
    about(r.times[4].end, 2.5);
    qd_sim_result_free(&r);
    problem.cores = 0.0; /* no limit */
    ok(qd_sim_run(&problem, &r));
    about(r.seconds, 3.0);
    qd_sim_result_free(&r);
}

static void messages_and_meetings(void **state)
{
    (void)state;
    qd_sim_item a[] = {item(0, 2.0), item(1, 0.5), item(0, 1.0)}, b[] = {item(0, 1.0), item(0, 3.0)};
    int32_t deps[] = {0};
    a[1].dep_count = 1;
    a[1].sends = 0;
    b[0].awaits = 0;
    a[2].meets = b[1].meets = 0; /* start and end together; the longer one decides */
    qd_sim_participant who[] = {{a, 3, deps}, {b, 2, NULL}};
    qd_sim_problem problem = {.participants = who, .count = 2, .messages = 1, .meetings = 1};
    qd_sim_result r;
    ok(qd_sim_run(&problem, &r));
    about(qd_sim_times_of(&r, 1)[0].begin, 2.5);
    about(qd_sim_times_of(&r, 0)[2].begin, 3.5);
    about(qd_sim_times_of(&r, 0)[2].end, 6.5);
    about(qd_sim_times_of(&r, 1)[1].end, 6.5);
    qd_sim_result_free(&r);
}

static void name(const void *context, int participant, int index, char *text, size_t size)
{
    snprintf(text, size, "%s %d.%d", (const char *)context, participant, index);
}

static void standstill_is_explained(void **state)
{
    (void)state;
    qd_sim_item a[] = {item(0, 1.0), item(0, 1.0)}, b[] = {item(0, 1.0), item(0, 1.0)};
    a[0].awaits = 1; /* each receives before it sends */
    a[1].sends = 0;
    b[0].awaits = 0;
    b[1].sends = 1;
    qd_sim_participant who[] = {{a, 2, NULL}, {b, 2, NULL}};
    qd_sim_problem problem = {.participants = who, .count = 2, .messages = 2, .describe = name, .context = "action"};
    qd_sim_result r;
    assert_int_equal(qd_sim_run(&problem, &r), QD_MISMATCH);
    assert_non_null(strstr(qd_error_message(), "waits for the message of item 1 of participant 1 (action 1.1)"));
    assert_non_null(strstr(qd_error_message(), "action 0.0"));
    qd_sim_result_free(&r);
    a[0].awaits = 0;
    a[1].sends = -1;
    assert_int_equal(qd_sim_run(&problem, &r), QD_MISMATCH);
    assert_non_null(strstr(qd_error_message(), "no item sends"));
    qd_sim_result_free(&r);
    a[0] = item(0, 1.0);
    a[0].stream = QD_SIM_STREAMS;
    assert_int_equal(qd_sim_run(&problem, &r), QD_USAGE);
    qd_sim_result_free(&r);
}

/* Meetings in different order on two participants deadlock. */
static void crossed_meetings(void **state)
{
    (void)state;
    qd_sim_item a[] = {item(0, 1.0), item(0, 1.0)}, b[] = {item(0, 1.0), item(0, 1.0)};
    a[0].meets = b[1].meets = 0;
    a[1].meets = b[0].meets = 1;
    qd_sim_participant who[] = {{a, 2, NULL}, {b, 2, NULL}};
    qd_sim_problem problem = {.participants = who, .count = 2, .meetings = 2};
    qd_sim_result r;
    assert_int_equal(qd_sim_run(&problem, &r), QD_MISMATCH);
    assert_non_null(strstr(qd_error_message(), "meets"));
    qd_sim_result_free(&r);
}

/* GPipe and 1F1B over p stages and m micro-batches: (m + p - 1)(f + b), so the bubble is (p - 1)/m
 * of the work. */
static double pipeline(int stages, int micros, bool one_f_one_b, double f, double b)
{
    int per = 2 * micros;
    qd_sim_item *items = calloc((size_t)(stages * per), sizeof *items);
    qd_sim_participant *who = calloc((size_t)stages, sizeof *who);
    for (int s = 0; s < stages; s++) {
        int at = 0, forward = 0, backward = 0, warm = one_f_one_b ? (stages - s < micros ? stages - s : micros) : micros;
        while (at < per) {
            bool fwd = forward < micros && (forward < warm || forward - backward < warm);
            qd_sim_item *i = &items[s * per + at++];
            *i = item(0, fwd ? f : b);
            int mb = fwd ? forward++ : backward++;
            /* Messages: forward out of stage s at 2 (s m + mb), backward out of it at the next. */
            i->sends = 2 * (s * micros + mb) + !fwd;
            if (fwd && s > 0)
                i->awaits = 2 * ((s - 1) * micros + mb);
            if (!fwd && s < stages - 1)
                i->awaits = 2 * ((s + 1) * micros + mb) + 1;
        }
        who[s] = (qd_sim_participant){items + s * per, per, NULL};
    }
    qd_sim_problem problem = {.participants = who, .count = stages, .messages = 2 * stages * micros};
    qd_sim_result r;
    ok(qd_sim_run(&problem, &r));
    for (int s = 0; s < stages; s++)
        about(r.busy[s * QD_SIM_STREAMS], micros * (f + b));
    double seconds = r.seconds;
    qd_sim_result_free(&r);
    free(items);
    free(who);
    return seconds;
}

static void bubbles(void **state)
{
    (void)state;
    static const int stages[] = {1, 2, 4, 8}, micros[] = {1, 4, 8, 32};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            for (int kind = 0; kind < 2; kind++)
                about(pipeline(stages[i], micros[j], kind, 1.0, 2.0), (micros[j] + stages[i] - 1) * 3.0);
}

/* A million items, to show that the size of a run does not matter: about a second without
 * optimization. */
static void large(void **state)
{
    (void)state;
    about(pipeline(64, 4096, true, 1.0, 2.0), (4096 + 63) * 3.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_and_dependencies),
        cmocka_unit_test(links_are_shared),
        cmocka_unit_test(cores_are_shared),
        cmocka_unit_test(messages_and_meetings),
        cmocka_unit_test(standstill_is_explained),
        cmocka_unit_test(crossed_meetings),
        cmocka_unit_test(bubbles),
        cmocka_unit_test(large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
