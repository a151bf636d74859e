/* How many of the ranks that have met without MPI take part in the run (run.elastic), in which
 * layout, and which of them. Rank 0 decides, by the rule of local ranks (launch_elastic.c). */
#include "train/launch/launch_rejoin_impl.h"

#include "base/clock.h"
#include "base/error.h"
#include "train/ranks/common.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS_BETWEEN_LOOKS 0.5

/* What a layout changes (launch_elastic.c). */
static const char *const layout_keys[] = {"parallel.ranks", "parallel.tp", "parallel.cp", "parallel.pp",  "parallel.dp",
                                          "parallel.dp_shard", "parallel.ep", "parallel.etp", "parallel.nodes", "train.micro_batch"};
enum { LAYOUT_KEYS = sizeof layout_keys / sizeof *layout_keys };

void qd_rejoin_begin_size(qd_rejoin *r)
{
    qd_config c = {.run_dir = qd_options_string(r->given, "run.dir")};
    qd_elastic_end(&r->elastic);
    if (qd_elastic_resolve(r->given, &c) != QD_OK) { /* reported when the configuration is resolved */
        qd_error_clear();
        c.elastic_most = c.elastic_least = 0;
    }
    qd_elastic_begin(&r->elastic, &c);
    if (r->rank == 0 && c.elastic_most > 0) {
        r->run->asks_rest = qd_rejoin_asks_rest;
        r->run->rest_context = r;
    }
}

void qd_rejoin_forget_size(qd_rejoin *r)
{
    if (r->rank != 0 || r->elastic.most == 0 || r->elastic.path[0] != '\0')
        return;
    qd_rejoin_begin_size(r);
    qd_elastic_forget(&r->elastic, &r->run->config);
}

/* So many ranks are there. */
static void limit(qd_rejoin *r, int ranks)
{
    char reason[64];
    snprintf(reason, sizeof reason, "%d rank%s of %d %s there", ranks, ranks == 1 ? "" : "s", r->places, ranks == 1 ? "is" : "are");
    qd_elastic_limit(&r->elastic, ranks, reason);
}

qd_status qd_rejoin_plan(qd_rejoin *r, qd_run_summary *summary)
{
    qd_error_record record;
    const qd_elastic *e = &r->elastic;
    if (e->most > 0 && (r->places < e->least || r->places > e->most))
        return QD_FAIL(QD_USAGE, "run.elastic allows %d to %d ranks, and WORLD_SIZE is %d: it must be a number in between", e->least,
                       e->most, r->places);
    const qd_status status = qd_run_plan(r->given, r->places, &r->run->config, summary);
    if (status == QD_OK || e->most == 0)
        return status;
    qd_error_keep(&record); /* what is wrong, if it is not the number of ranks */
    qd_options_destroy(r->sized);
    r->sized = NULL;
    limit(r, r->places);
    if (qd_elastic_options(&r->elastic, r->given, &r->sized) == QD_OK)
        return qd_run_plan(r->sized, e->ranks, &r->run->config, summary);
    qd_error_put_back(&record);
    return status;
}

/* The options that were given, with the layout that rank 0 has chosen. */
static qd_status take_layout(qd_rejoin *r, const int64_t *layout)
{
    char text[24];
    qd_options *sized = NULL;
    QD_TRY(qd_options_copy(r->given, &sized));
    qd_status status = QD_OK;
    for (int i = 0; i < LAYOUT_KEYS && status == QD_OK; i++) {
        snprintf(text, sizeof text, "%lld", (long long)layout[i]);
        if (qd_options_int(sized, layout_keys[i]) != layout[i])
            status = qd_options_set(sized, layout_keys[i], text);
    }
    if (status != QD_OK) {
        qd_options_destroy(sized);
        return status;
    }
    qd_options_destroy(r->sized);
    r->sized = sized;
    return QD_OK;
}

qd_status qd_rejoin_fit(qd_rejoin *r, qd_comm *world, bool *agreed)
{
    const int size = qd_comm_size(world);
    int64_t layout[LAYOUT_KEYS] = {0};
    qd_options *chosen = NULL;
    qd_status status = QD_OK;
    if (r->elastic.most == 0)
        return qd_config_resolve(r->given, size, &r->run->config);
    if (qd_comm_rank(world) == 0) {
        if (r->fresh && !qd_options_bool(r->given, "run.resume")) /* the file may be of a run that is replaced */
            r->elastic.path[0] = '\0';
        limit(r, size);
        status = qd_elastic_options(&r->elastic, r->given, &chosen);
        for (int i = 0; i < LAYOUT_KEYS && status == QD_OK; i++)
            layout[i] = qd_options_int(chosen, layout_keys[i]);
        qd_options_destroy(chosen);
    }
    status = qd_agree(world, status, agreed);
    r->final = r->final || *agreed;
    QD_TRY(status);
    QD_TRY(qd_comm_broadcast(world, layout, LAYOUT_KEYS, QD_I64, 0, NULL));
    QD_TRY(take_layout(r, layout));
    return qd_config_resolve(r->sized, (int)layout[0], &r->run->config);
}

static int count(uint64_t ranks)
{
    return __builtin_popcountll(ranks);
}

/* Removes ranks from the highest on until `wanted` are left: those without the state after `step`
 * first, then those whose part of it others have. False: it needs more than these. */
static qd_status leave_out(const qd_rejoin *r, const offer *offers, int size, int64_t step, int wanted, uint64_t *members, bool *complete)
{
    uint64_t holders = 0;
    for (int p = 0; p < size; p++)
        holders |= offers[p].has == step ? (uint64_t)1 << offers[p].rank : 0;
    for (int p = size - 1; p > 0 && count(*members) > wanted; p--)
        if (offers[p].has != step)
            *members &= ~((uint64_t)1 << p);
    for (int p = size - 1; p > 0 && count(*members) > wanted; p--) {
        if (offers[p].has != step)
            continue;
        QD_TRY(qd_kept_covers(r->kept, holders & ~((uint64_t)1 << offers[p].rank), complete));
        if (!*complete)
            continue;
        holders &= ~((uint64_t)1 << offers[p].rank);
        *members &= ~((uint64_t)1 << p);
    }
    *complete = count(*members) == wanted;
    return *complete ? qd_kept_covers(r->kept, holders, complete) : QD_OK;
}

/* The same where ranks have written their parts, and all of them are needed. */
static bool leave_out_others(const offer *offers, int size, int64_t step, int wanted, uint64_t *members)
{
    for (int p = size - 1; p > 0 && count(*members) > wanted; p--)
        if (offers[p].part != step)
            *members &= ~((uint64_t)1 << p);
    return count(*members) == wanted;
}

/* Collective: the `wanted` ranks that take part. Without a state that so many have, the first. */
static qd_status choose(qd_rejoin *r, qd_comm *world, const offer *offers, int wanted, uint64_t *members)
{
    const int size = qd_comm_size(world);
    const uint64_t all = size < 64 ? ((uint64_t)1 << size) - 1 : UINT64_MAX;
    bool found = false, written = false;
    for (int64_t step, below = INT64_MAX; !found && (step = qd_rejoin_latest(offers, size, below, &written)) >= 0; below = step) {
        int root = 0;
        *members = all;
        if (written) {
            found = leave_out_others(offers, size, step, wanted, members);
            continue;
        }
        while (offers[root].has != step)
            root++;
        int64_t chosen[2] = {0};
        if (root == qd_comm_rank(world) && leave_out(r, offers, size, step, wanted, members, &found) == QD_OK && found) {
            chosen[0] = 1;
            memcpy(&chosen[1], members, sizeof chosen[1]);
        }
        qd_error_clear();
        QD_TRY(qd_comm_broadcast(world, chosen, 2, QD_I64, root, NULL));
        found = chosen[0] != 0;
        memcpy(members, &chosen[1], sizeof *members);
    }
    if (!found)
        *members = ((uint64_t)1 << wanted) - 1; /* wanted < size <= 64 */
    return QD_OK;
}

qd_status qd_rejoin_narrow(qd_rejoin *r, qd_comm *world, const offer *offers, bool *narrows)
{
    const int size = qd_comm_size(world), rank = qd_comm_rank(world), wanted = r->run->config.world;
    uint64_t members = 0;
    *narrows = wanted < size;
    if (!*narrows)
        return QD_OK;
    if (size <= MOST_LEFT)
        QD_TRY(choose(r, world, offers, wanted, &members));
    if (rank == 0) {
        bool *invited = calloc((size_t)r->places, sizeof *invited);
        if (!invited)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", r->places);
        for (int p = 0; p < size; p++)
            invited[offers[p].place] = size <= MOST_LEFT ? (members >> p & 1) != 0 : p < wanted;
        qd_door_invite(r->door, invited);
        free(invited);
        r->spares = size - wanted;
    }
    if (size <= MOST_LEFT ? !(members >> rank & 1) : rank >= wanted)
        qd_rejoin_forget(r);
    return QD_OK;
}

void qd_rejoin_note_size(qd_rejoin *r, const offer *offers, bool in_memory)
{
    const int now = r->run->config.world, before = r->before;
    char text[QD_ERROR_MESSAGE_BYTES], reason[128], spares[64] = "";
    qd_strbuf places = {0};
    if (r->elastic.most == 0 || r->rank != 0)
        return;
    if (r->spares > 0)
        snprintf(spares, sizeof spares, "; %d more wait%s until a layout can use them", r->spares, r->spares == 1 ? "s" : "");
    r->spares = 0;
    if (before == 0 || now == before)
        return;
    if (r->elastic.available < r->elastic.most && now < before)
        snprintf(reason, sizeof reason, "%d rank%s available", r->elastic.available, r->elastic.available == 1 ? " is" : "s are");
    else if (now > before)
        snprintf(reason, sizeof reason, "ranks have returned");
    else
        snprintf(reason, sizeof reason, "ranks that were lost did not return within %g s", qd_options_float(r->given, "run.rejoin_wait"));
    for (int p = 0; p < now; p++)
        qd_strbuf_printf(&places, "%s%lld", p ? " " : "", (long long)offers[p].place);
    qd_json_writer w = qd_journal_line(&r->journal, "resize");
    qd_json_put_int(&w, "from", before);
    qd_json_put_int(&w, "ranks", now);
    qd_json_put_string(&w, "reason", reason);
    qd_json_put_string(&w, "places", places.data ? places.data : "");
    qd_json_put_bool(&w, "in_memory", in_memory);
    qd_json_put_double(&w, "seconds", qd_clock_now() - r->journal.failed_at);
    qd_journal_end_line(&r->journal, &w);
    snprintf(text, sizeof text, "%s: the run continues with %d ranks instead of %d, which are the processes with RANK %.200s%s", reason,
             now, before, places.data ? places.data : "?", spares);
    qd_strbuf_free(&places);
    qd_journal_note(&r->journal, text);
}

qd_rest qd_rejoin_asks_rest(void *rejoin)
{
    qd_rejoin *r = rejoin;
    const int ranks = r->run->config.world;
    const double now = qd_clock_now();
    if (now - r->looked < SECONDS_BETWEEN_LOOKS)
        return QD_REST_NOT;
    r->looked = now;
    limit(r, ranks + qd_door_waiting(r->door));
    const int wanted = qd_elastic_wanted(&r->elastic, r->given, ranks);
    if (wanted < 0 && !r->noted_few) {
        r->noted_few = true;
        qd_journal_note(&r->journal, r->elastic.reason);
        raise(SIGUSR1); /* as if a scheduler had: the ranks write a checkpoint and end */
    }
    if (wanted <= 0)
        return QD_REST_NOT;
    return wanted > ranks ? QD_REST : QD_REST_SAVED;
}
