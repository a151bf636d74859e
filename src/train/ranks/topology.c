/* Reads NUMA nodes from sysfs, and divides ranks among them in proportion to their cores. */
#include "train/ranks/topology.h"

#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>

/* A list of cores, as in "0-3,8,10-11". */
static void read_list(const char *text, qd_cores_set *set)
{
    while (*text >= '0' && *text <= '9') {
        char *end;
        long first = strtol(text, &end, 10), last = first;
        if (*end == '-')
            last = strtol(end + 1, &end, 10);
        for (long core = first; core <= last && core < QD_CORES_MOST; core++)
            set->bits[core / 64] |= (uint64_t)1 << core % 64;
        text = *end == ',' ? end + 1 : end;
    }
}

void qd_topology_read(const char *folder, qd_topology *topology)
{
    *topology = (qd_topology){0};
    for (int node = 0; node < QD_TOPOLOGY_NODES; node++) {
        char path[512], line[4096];
        snprintf(path, sizeof path, "%s/node%d/cpulist", folder, node);
        FILE *f = fopen(path, "re");
        if (!f)
            continue; /* numbers may have gaps */
        qd_cores_set *set = &topology->cores[topology->nodes];
        if (fgets(line, sizeof line, f))
            read_list(line, set);
        if (qd_cores_set_count(set) > 0) /* else it has memory only */
            topology->nodes++;
        fclose(f);
    }
}

bool qd_topology_place(const qd_topology *topology, const qd_cores_set *allowed, int rank, int ranks, qd_cores_set *cores)
{
    qd_cores_set of[QD_TOPOLOGY_NODES];
    int nodes = 0, all = 0, count[QD_TOPOLOGY_NODES];
    for (int n = 0; n < topology->nodes; n++) {
        for (int i = 0; i < QD_CORES_MOST / 64; i++)
            of[nodes].bits[i] = topology->cores[n].bits[i] & allowed->bits[i];
        count[nodes] = qd_cores_set_count(&of[nodes]);
        all += count[nodes];
        nodes += count[nodes] > 0;
    }
    if (nodes < 2 || ranks < nodes)
        return false;
    /* Node n has ranks [ranks * cores before it / all cores, …). */
    const int share = all / ranks > 1 ? all / ranks : 1;
    int mine = -1;
    for (int n = 0, before = 0; n < nodes; before += count[n++]) {
        const int first = (int)((int64_t)ranks * before / all), end = (int)((int64_t)ranks * (before + count[n]) / all);
        if (end - first < 1 || count[n] / (end - first) < share)
            return false;
        if (rank >= first && rank < end)
            mine = n;
    }
    if (mine < 0)
        return false;
    *cores = of[mine];
    return true;
}

qd_status qd_topology_bind(const char *folder, int rank, int ranks, qd_cores_set *before)
{
    qd_topology topology;
    qd_cores_set allowed, mine;
    *before = (qd_cores_set){{0}};
    if (ranks < 2 || qd_cores_allowed() < qd_cores())
        return QD_OK;
    qd_topology_read(folder, &topology);
    QD_TRY(qd_thread_cores(&allowed));
    if (!qd_topology_place(&topology, &allowed, rank, ranks, &mine))
        return QD_OK;
    QD_TRY(qd_thread_bind(&mine));
    *before = allowed;
    return QD_OK;
}

void qd_topology_release(const qd_cores_set *before)
{
    if (qd_cores_set_count(before) > 0 && qd_thread_bind(before) != QD_OK)
        qd_error_clear();
}

int qd_topology_threads(int cores, int allowed, int ranks, bool together)
{
    int share = (together ? allowed : cores) / ranks;
    share = share < allowed ? share : allowed;
    return share > 1 ? share : 1;
}
