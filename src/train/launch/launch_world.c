/* A rank of a world that something else has started. See launch_world.h. */
#include "train/launch/launch_world.h"

#include "base/error.h"
#include "base/process/stacks.h"
#include "comm/guard.h"
#include "train/elastic/handover.h"
#include "train/launch/launch.h"
#include "train/launch/launch_rejoin.h"
#include "train/launch/launch_told.h"
#include "train/ranks/common.h"
#include "train/ranks/long_work.h"
#include "train/ranks/patience.h"
#include "train/run/run_machine.h"
#include "train/run/run_state.h"

#include <limits.h>
#include <stdio.h>

void qd_launch_catch_stacks(const qd_config *config, int rank)
{
    char path[PATH_MAX], title[32];
    if (config->run_dir[0] == '\0' || snprintf(path, sizeof path, "%s/" QD_STACKS_FILE, config->run_dir) >= (int)sizeof path)
        return;
    snprintf(title, sizeof title, "rank %d", rank);
    qd_stacks_on_signal(path, title);
}

typedef struct readying {
    qd_run *run;
    const qd_train_observer *observer;
    qd_run_summary *summary;
} readying;

static qd_status make_ready(void *context)
{
    const readying *r = context;
    return qd_run_make_ready(&r->run->config, r->observer, r->run->stop, r->summary);
}

/* Rank 0, if there is one: notes that rank placement does not match parallel.nodes. Results are not
 * affected. */
static qd_status note_nodes(const qd_run *run, qd_comm *world)
{
    const qd_train_observer *o = run->observer;
    qd_comm_where where = qd_comm_locate(world);
    int nodes = run->config.nodes, per_node = qd_comm_size(world) / nodes;
    int32_t elsewhere = nodes > 1 && where.machine != qd_comm_rank(world) / per_node;
    char text[256];
    if (where.machines == 1 || nodes == 1) /* the same on all ranks */
        return QD_OK;
    QD_TRY(qd_comm_all_reduce(world, &elsewhere, &elsewhere, 1, QD_I32, QD_MAX, NULL));
    if (!elsewhere || qd_comm_rank(world) != 0 || !o || !o->on_note)
        return QD_OK;
    snprintf(
        text, sizeof text,
        "parallel.nodes is %d, but not each machine has %d ranks, one after another: what should stay inside a node crosses the network "
        "(mpirun --map-by slot and srun -m block deal ranks out in that order)",
        nodes, per_node);
    o->on_note(o->context, text);
    return QD_OK;
}

/* Rank 0, if there is an observer: reports the start. */
static void tell_start(const qd_comm *world, qd_run_summary *summary, const qd_train_observer *observer)
{
    if (qd_comm_rank(world) != 0 || !observer || !observer->on_start)
        return;
    summary->shown.backend = qd_comm_backend(world);
    summary->shown.ranks_as = "processes";
    summary->shown.machines = qd_comm_locate(world).machines;
    qd_common_hosts(world, summary->shown.hosts, sizeof summary->shown.hosts);
    observer->on_start(observer->context, &summary->shown);
}

/* Before this rank leaves the world: reports the failure to the observer, see on_failure. */
static void tell_failure(qd_status status, const qd_train_observer *observer, qd_launch_marks *marks)
{
    if (status == QD_OK || !observer || !observer->on_failure || !qd_train_report(status) || atomic_exchange(&marks->told, 1))
        return;
    observer->on_failure(observer->context, qd_error_message());
}

/* If this fails too, the earlier failure is the one to report. options: NULL if they cannot be
 * read. how: see qd_launch_world_join(). */
static qd_status join_world(const qd_launch_place *p, const qd_options *options, const qd_comm_join *how, const qd_launch_marks *marks,
                            const qd_comm_config *config, qd_status early, qd_comm **world)
{
    qd_error_record record;
    qd_error_keep(&record);
    qd_status status = p->joins ? qd_launch_world_join(&p->world, options, how, &marks->stop, config, world)
                                : qd_mpi_comm_create(config, world);
    if (status == QD_INTERRUPTED)
        status = qd_run_early_end(atomic_load(&marks->stop), "ranks were missing");
    if (early == QD_OK)
        return status;
    qd_error_put_back(&record);
    return status == QD_OK ? QD_OK : early;
}

/* Each rank checks its own machine; rank 0 checks the run folder. A rank that did not know the size
 * of the world in advance has no plan. */
static qd_status check_start(const qd_run *run, const qd_comm *world, qd_run_summary *summary)
{
    if (qd_comm_rank(world) == 0 && !run->state_in_memory)
        QD_TRY(qd_run_resume_check(&run->config));
    if (summary->plan.world == 0 || run->ranks_stay)
        return QD_OK;
    return qd_run_machine_check(&run->config, &summary->plan, qd_comm_locate(world).local_ranks, summary->shown.warning);
}

/* Whether this rank reports the loss of another one (below 0: none is lost). Rank 0 does. If it is
 * lost itself, the other ranks of its machine may be as well, and the first one elsewhere does. */
static bool speaks_for(const qd_comm *world, int lost)
{
    const qd_comm_where where = qd_comm_locate(world);
    if (lost != 0)
        return lost > 0 && qd_comm_rank(world) == 0;
    return where.machines > 1 ? where.machine == 1 && where.local_rank == 0 : qd_comm_rank(world) == 1;
}

/* This rank, in all of its worlds. */
typedef struct member {
    const qd_launch_place *place;
    qd_run *run;
    qd_run_summary *summary;
    const qd_train_observer *given;
    qd_launch_marks *marks;
    qd_rejoin *rejoin; /* NULL: it ends with its world */
    bool shown;        /* the observer has been shown the run */
} member;

/* Most errors show before the world is joined; checks that need its size come later. An error may
 * concern one machine only, so the other ranks must be informed. Whether the run may use its folder
 * shows only once it is known whether it continues. */
static qd_status check_early(const member *m)
{
    qd_run *run = m->run;
    if (m->rejoin)
        return qd_rejoin_stayed(m->rejoin) ? QD_OK : qd_rejoin_plan(m->rejoin, m->summary);
    return m->place->size > 0 ? qd_run_prepare(run->options, m->place->size, run->stop, &run->config, m->summary)
                              : qd_config_resolve(run->options, 0, &run->config);
}

/* Collective. Configuration, run folder and text of the run in this world. */
static qd_status prepare(member *m, qd_comm *world, const qd_train_observer *observer, bool *agreed, bool *complete, bool *narrows)
{
    qd_run *run = m->run;
    const int size = qd_comm_size(world);
    int first = 0;
    *complete = false;
    if (m->rejoin)
        QD_TRY(qd_rejoin_settle(m->rejoin, world, &first));
    QD_TRY(qd_common_setup(world, run->options, m->rejoin != NULL, first, agreed));
    if (m->rejoin)
        QD_TRY(qd_rejoin_agree(m->rejoin, world, agreed, complete, narrows));
    else
        QD_TRY(qd_config_resolve(run->options, size, &run->config));
    if (*complete || *narrows)
        return QD_OK;
    if (m->rejoin && !run->ranks_stay && m->summary->plan.world != size) /* fewer than were expected */
        QD_TRY(qd_agree_alone(world, qd_run_plan(run->options, size, &run->config, m->summary), agreed));
    qd_launch_catch_stacks(&run->config, qd_comm_rank(world));
    run->observer = observer;
    if (m->rejoin) {
        QD_TRY(qd_agree_alone(world, qd_run_folder_check(run->options, &run->config, run->stop), agreed));
        qd_rejoin_begun(m->rejoin);
    } else if (qd_comm_rank(world) == 0 && m->place->size != size) {
        QD_TRY(qd_run_prepare(run->options, size, run->stop, &run->config, m->summary));
    }
    if (run->config.run_dir[0] != '\0')
        QD_TRY(qd_common_folder(world, run->config.run_dir, agreed));
    QD_TRY(qd_agree_alone(world, check_start(run, world, m->summary), agreed));
    readying r = {run, observer, m->summary};
    QD_TRY(qd_agree(world, qd_long_work_run(world, make_ready, &r), agreed));
    if (!m->shown)
        tell_start(world, m->summary, observer);
    m->shown = true;
    return run->ranks_stay ? QD_OK : note_nodes(run, world);
}

/* What has been agreed on before the first step is final, and so is the end that the user asked
 * for. A thread that hangs in a write of a checkpoint uses the state of this rank: its process
 * ends. */
static bool may_rest(const member *m, qd_status status, bool agreed, bool ran, const qd_kept *kept)
{
    const bool hangs = ran && !kept && (status == QD_REMOTE || status == QD_TIMEOUT);
    return m->rejoin && status != QD_OK && !qd_ended_in_order(status) && !agreed && !hangs;
}

/* One world. *again: the ranks are to meet again. */
static qd_status live(member *m, bool *again)
{
    qd_run *run = m->run;
    qd_status early = check_early(m);
    qd_comm_config comm_config = qd_comm_config_default();
    if (early == QD_OK)
        comm_config.deadline_seconds = run->config.deadline;
    qd_comm *world = NULL;
    qd_kept *kept = NULL;
    qd_told told;
    qd_comm_join how = qd_comm_join_default();
    bool agreed = false, ran = false, complete = false, narrows = false; /* agreed: all ranks know of the failure: no abort is needed */
    if (m->rejoin)
        qd_rejoin_how(m->rejoin, &how);
    qd_status status = join_world(m->place, run->options, m->rejoin ? &how : NULL, m->marks, &comm_config, early, &world);
    *again = status != QD_OK && early == QD_OK && m->rejoin && qd_rejoin_tries(m->rejoin, &status);
    if (status != QD_OK || !world)
        return status;
    qd_told_begin(&told, m->given, &m->marks->told);
    told.journal = m->rejoin ? qd_rejoin_journal(m->rejoin) : NULL;
    int size = qd_comm_size(world);
    if (m->place->size > 1 && size == 1 && !m->place->joins)
        QD_TRY_DONE(QD_FAIL(QD_USAGE,
                            "%s started %d processes, but MPI sees one: start them with the mpirun of the MPI library that quadrille was "
                            "built with, or in a way that "
                            "this library understands (srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH)",
                            m->place->starter, m->place->size));
    atomic_store(&m->marks->joined, 1);
    /* First, as ranks do that cannot read their configuration: qd_train_not_started(). */
    QD_TRY_DONE(qd_agree_alone(world, early, &agreed));
    QD_TRY_DONE(qd_comm_guard_start(world, qd_patience_stopped(&(qd_patience){0}, comm_config.deadline_seconds),
                                    m->rejoin ? NULL : qd_told_lost, &told));
    QD_TRY_DONE(prepare(m, world, &told.observer, &agreed, &complete, &narrows));
    agreed = false; /* from here on qd_run_rank() aborts the others itself */
    ran = !complete && !narrows;
    if (ran)
        status = qd_run_rank(run, world, m->rejoin ? &kept : NULL);
done:
    if (status != QD_OK && status != QD_REMOTE && !qd_ended_in_order(status) && qd_error_message()[0] != '\0' && !agreed && !ran)
        qd_comm_abort(world, qd_error_message());
    qd_handover_close(run->handover);
    run->handover = NULL;
    atomic_store(&m->marks->speaks_for_lost, speaks_for(world, qd_comm_lost(world)));
    *again = may_rest(m, status, agreed, ran, kept);
    const bool parts = agreed && !ran && m->rejoin && qd_rejoin_parts(m->rejoin, world, &status, again);
    if (*again && !parts) {
        *again = qd_rejoin_rests(m->rejoin, world, kept, &status);
    } else if (kept) {
        qd_rejoin_pauses(m->rejoin, world, kept);
        *again = true;
    } else {
        *again = *again || narrows;
        tell_failure(status, &told.observer, m->marks);
        qd_kept_destroy(kept);
        qd_comm_destroy(world);
    }
    qd_told_end(&told);
    run->observer = m->given;
    return status;
}

qd_status qd_launch_member(const qd_launch_place *place, qd_run *run, qd_run_summary *summary, const qd_train_observer *observer,
                           qd_launch_marks *marks)
{
    member m = {.place = place, .run = run, .summary = summary, .given = observer, .marks = marks};
    qd_status status = QD_OK;
    if (place->joins && qd_options_int(run->options, "run.restarts") > 0)
        status = qd_rejoin_create(run, place->rank, place->size, observer, &m.rejoin);
    for (bool again = status == QD_OK; again;)
        status = live(&m, &again);
    qd_rejoin_destroy(m.rejoin, status);
    return status;
}

qd_status qd_launch_not_started(const qd_launch_place *p, qd_status status, const qd_train_observer *observer, qd_launch_marks *marks)
{
    qd_comm_config config = qd_comm_config_default();
    qd_comm *world = NULL;
    bool agreed;
    if (join_world(p, NULL, NULL, marks, &config, status, &world) != QD_OK)
        return status;
    if (qd_comm_size(world) == 1) { /* the other ranks cannot be reached this way */
        qd_comm_destroy(world);
        return status;
    }
    atomic_store(&marks->joined, 1);
    status = qd_agree_alone(world, status, &agreed);
    tell_failure(status, observer, marks);
    qd_comm_destroy(world);
    return status;
}

