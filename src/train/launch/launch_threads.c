/* Ranks as threads of this process; a single rank runs on the calling thread. */
#include "train/launch/launch.h"

#include "train/ranks/rank_threads.h"
#include "train/launch/collective_ways.h"

static qd_status run_rank(void *context, qd_comm *world)
{
    return qd_run_rank(context, world, NULL);
}

static qd_status run_single(const qd_run *run, const qd_comm_config *config)
{
    qd_local_world *local = NULL;
    qd_comm *world = NULL;
    QD_TRY(qd_local_world_create(1, config, &local));
    qd_status status = qd_local_comm_attach(local, 0, &world);
    if (status == QD_OK)
        status = qd_run_rank(run, world, NULL);
    qd_comm_destroy(world);
    qd_local_world_destroy(local);
    return status;
}

qd_status qd_launch_threads(const qd_run *run)
{
    qd_comm_config config = qd_comm_config_default();
    qd_rank_threads *threads = NULL;
    config.deadline_seconds = run->config.deadline;
    if (run->config.world == 1)
        return run_single(run, &config);
    /* A measurement would count as memory of this process, which is that of the ranks. */
    qd_collective_ways ways;
    qd_collective_ways_find(run->config.collectives, false, &ways);
    config.ways = ways.text;
    QD_TRY(qd_rank_threads_create(run->config.world, &config, &threads));
    qd_status status = qd_rank_threads_call(threads, run_rank, (void *)(uintptr_t)run);
    qd_rank_threads_destroy(threads);
    return status;
}
