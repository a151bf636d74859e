/* The cost model of communication: rings, trees and in-switch reduction on switched networks, and
 * tori. */
#include "sim/network.h"

#include <math.h>
#include <string.h>

/* Seconds from the call to the first byte: kernel launch and synchronization of the ranks. NCCL
 * needs 10 to 20 µs for 8 bytes (data/published/collectives.json), of which the hops are counted
 * separately. */
static const double START = 6e-6;
/* In-switch reduction relative to a ring: 275 GB/s of algorithm bandwidth where a ring has 364 GB/s
 * of bus bandwidth (8 H100). */
static const double NVLS_SHARE = 0.75;
/* A ring between nodes moves chunks through buffers at every network card; each pass takes this
 * much longer until they are full (32 GPUs, 64 MiB: 157 of 381 GB/s; one node reaches three
 * quarters of its best at that size). */
static const double NETWORK_FILL = 80e-6;
static const int NVLS_FROM = 5; /* ranks; below, rings are as fast and NCCL uses them */

static int slice_size(const qd_cluster *c)
{
    int size = 1;
    for (int i = 0; i < c->dim_count; i++)
        size *= c->dims[i];
    return size;
}

static void torus_place(const qd_cluster *c, int rank, int *slice, int *coords)
{
    *slice = rank / slice_size(c);
    for (int i = 0, rest = rank % slice_size(c); i < c->dim_count; i++) {
        coords[i] = rest % c->dims[i];
        rest /= c->dims[i];
    }
}

typedef struct gatherer {
    const qd_cluster *cluster;
    int home, count, local, first, last;
    uint64_t seen[QD_TORUS_DIMS]; /* coordinates, for dimensions up to 64 */
} gatherer;

static void gather(gatherer *g, int rank)
{
    const qd_cluster *c = g->cluster;
    int node = rank / c->node_size, coords[QD_TORUS_DIMS];
    if (c->network == QD_NETWORK_TORUS) {
        torus_place(c, rank, &node, coords);
        for (int i = 0; i < c->dim_count; i++)
            g->seen[i] |= 1ull << (coords[i] % 64);
    }
    if (g->count == 0) {
        g->home = node;
        g->first = g->last = rank;
    }
    g->first = rank < g->first ? rank : g->first;
    g->last = rank > g->last ? rank : g->last;
    g->local += node == g->home;
    g->count++;
}

static qd_span finish(const gatherer *g)
{
    const qd_cluster *c = g->cluster;
    qd_span s = {.size = g->count, .local = g->local, .nodes = (g->count + g->local - 1) / (g->local > 0 ? g->local : 1)};
    s.beyond = c->pod > 0 && g->first / c->pod != g->last / c->pod;
    for (int i = 0; i < c->dim_count; i++)
        s.extent[i] = __builtin_popcountll(g->seen[i]);
    return s;
}

qd_span qd_span_of_group(const qd_cluster *c, const qd_mesh *mesh, qd_group group, int rank)
{
    gatherer g = {.cluster = c};
    for (int i = 0; i < group.size; i++)
        gather(&g, qd_group_rank(mesh, group, rank, i));
    return finish(&g);
}

qd_span qd_span_of_pair(const qd_cluster *c, int rank, int other)
{
    gatherer g = {.cluster = c};
    gather(&g, rank);
    gather(&g, other);
    return finish(&g);
}

static double network_bandwidth(const qd_cluster *c, const qd_span *s)
{
    return c->network_bandwidth / (s->beyond ? c->oversubscription : 1.0);
}

/* A ring through all ranks, node by node: as many parallel rings as a node has members, each with
 * its own network card. */
static double ring_bandwidth(const qd_cluster *c, const qd_span *s)
{
    int cards = c->profile->cards > 0 && c->profile->cards < s->local ? c->profile->cards : s->local;
    double net = cards * network_bandwidth(c, s);
    if (s->nodes == 1)
        return c->node_bandwidth;
    return s->local == 1 ? net : fmin(c->node_bandwidth, net);
}

/* Once around the ring. */
static double ring_latency(const qd_cluster *c, const qd_span *s)
{
    int across = s->nodes > 1 ? s->nodes - 1 : 0, inside = s->size - 1 - across;
    /* Hops inside a node are stores through the switch. */
    return across * c->network_latency + inside * c->node_latency / 3.0 + (across > 0 && c->node_size > 1 ? NETWORK_FILL : 0.0);
}

static double tree_latency(const qd_cluster *c, const qd_span *s)
{
    double inside = s->local > 1 ? log2(s->local) * c->node_latency : 0.0;
    return inside + (s->nodes > 1 ? ceil(log2(s->nodes)) * c->network_latency : 0.0);
}

static double switched_seconds(const qd_cluster *c, qd_coll_kind kind, double bytes, const qd_span *s)
{
    double n = s->size, bandwidth = ring_bandwidth(c, s), part = (n - 1.0) / n * bytes / bandwidth;
    switch (kind) {
    case QD_COLL_ALL_GATHER:
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER: return START + ring_latency(c, s) + part;
    case QD_COLL_BROADCAST:
    case QD_COLL_REDUCE: return START + tree_latency(c, s) + bytes / bandwidth;
    case QD_COLL_ALL_REDUCE: {
        double ring = 2.0 * ring_latency(c, s) + 2.0 * part;
        double tree = 2.0 * tree_latency(c, s) + 2.0 * bytes / bandwidth;
        double best = fmin(ring, tree);
        if (c->nvls && s->local >= NVLS_FROM && s->nodes == 1)
            best = fmin(best, 2.0 * c->node_latency + bytes / (NVLS_SHARE * c->node_bandwidth));
        return START + best;
    }
    case QD_COLL_ALL_TO_ALL: {
        double inside = s->local > 1 ? bytes * (s->local - 1.0) / n / c->node_bandwidth : 0.0;
        double across = s->nodes > 1 ? bytes * (n - s->local) / n / network_bandwidth(c, s) : 0.0;
        return START + tree_latency(c, s) + fmax(inside, across);
    }
    default: {
        bool remote = s->nodes > 1;
        return START + (remote ? c->network_latency : c->node_latency) + bytes / (remote ? network_bandwidth(c, s) : c->node_bandwidth);
    }
    }
}

/* Both directions of every dimension that the group spans are used concurrently; a part of a
 * dimension has no wrap-around link. */
static double torus_seconds(const qd_cluster *c, qd_coll_kind kind, double bytes, const qd_span *s)
{
    double bandwidth = 0.0, hops = 0.0, widest = 0.0, spread = 0.0;
    for (int i = 0; i < c->dim_count; i++) {
        if (s->extent[i] < 2)
            continue;
        bool closed = s->extent[i] == c->dims[i] && c->dims[i] > 2;
        bandwidth += (closed ? 2.0 : 1.0) * c->network_bandwidth;
        hops += closed ? s->extent[i] / 2.0 : s->extent[i] - 1.0;
        /* All-to-all: mean distance over the links that carry it. */
        spread = fmax(spread, (closed ? s->extent[i] / 8.0 : s->extent[i] / 3.0));
        widest = fmax(widest, s->extent[i]);
    }
    double inside = 0.0, n = s->local, all = s->size;
    double across = s->nodes > 1 ? bytes * (1.0 - 1.0 / s->nodes) / (n * c->slice_bandwidth) + s->nodes * c->network_latency : 0.0;
    switch (kind) {
    case QD_COLL_ALL_GATHER:
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER: inside = bandwidth > 0.0 ? (n - 1.0) / n * bytes / bandwidth : 0.0; break;
    case QD_COLL_ALL_REDUCE:
        inside = bandwidth > 0.0 ? 2.0 * (n - 1.0) / n * bytes / bandwidth : 0.0;
        across *= 2.0;
        hops *= 2.0;
        break;
    case QD_COLL_ALL_TO_ALL:
        inside = bytes * spread / c->network_bandwidth;
        across = s->nodes > 1 ? bytes * (all - n) / all / c->slice_bandwidth : 0.0;
        break;
    case QD_COLL_BROADCAST:
    case QD_COLL_REDUCE: inside = bandwidth > 0.0 ? bytes / bandwidth : 0.0; break;
    default:
        if (s->nodes > 1)
            return START + c->network_latency + bytes / c->slice_bandwidth;
        return START + fmax(hops, 1.0) * c->network_latency + bytes / c->network_bandwidth;
    }
    return START / 3.0 + hops * c->network_latency + fmax(inside, across); /* compiled into the program: no launch */
}

double qd_network_message(qd_coll_kind kind, double elements, qd_dtype dtype, int group_size)
{
    double bytes = elements * (double)qd_dtype_size(dtype);
    if (group_size < 2)
        return bytes;
    switch (kind) {
    case QD_COLL_ALL_TO_ALL: return bytes / (group_size - 1.0); /* total that leaves its rank */
    case QD_COLL_RECV: return bytes / group_size;
    default: return bytes;
    }
}

double qd_network_seconds(const qd_cluster *c, qd_coll_kind kind, double bytes, const qd_span *s)
{
    if (s->size < 2)
        return 0.0;
    if (c->processor.cores > 0)
        return qd_processor_exchange(&c->processor, kind, bytes, s->size);
    return c->network == QD_NETWORK_TORUS ? torus_seconds(c, kind, bytes, s) : switched_seconds(c, kind, bytes, s);
}
