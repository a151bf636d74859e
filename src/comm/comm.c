/* Communicators: creation, splitting, destruction, shared memory, abort and statistics. The
 * operations are in calls.c. */
#include "comm/device.h"
#include "base/sized.h"
#include "comm/work.h"

#include "base/error.h"
#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void qd_comm_config_init(qd_comm_config *config, size_t size)
{
    const qd_comm_config own = {.deadline_seconds = 300, .staging_bytes = 1 << 20};
    qd_sized_init(config, size, &own, sizeof own);
}

void qd_comm_join_init(qd_comm_join *join, size_t size)
{
    const qd_comm_join own = {.seconds = 300};
    qd_sized_init(join, size, &own, sizeof own);
}

int qd_comm_rank(const qd_comm *comm)
{
    return comm->rank;
}

int qd_comm_size(const qd_comm *comm)
{
    return comm->size;
}

int qd_comm_world_rank(const qd_comm *comm, int rank)
{
    return rank >= 0 && rank < comm->size ? comm->world_ranks[rank] : -1;
}

const char *qd_comm_backend(const qd_comm *comm)
{
    return comm->on_device ? comm->on_device->name : comm->world->backend->name;
}

qd_comm_where qd_comm_locate(const qd_comm *comm)
{
    return comm->world->where;
}

const char *qd_comm_host(const qd_comm *comm, int rank)
{
    return comm->world->hosts ? comm->world->hosts[comm->world_ranks[rank]] : "";
}

static void comm_free(qd_comm *comm)
{
    if (!comm) return;
    if (comm->queues)
        for (int i = 0; i < 1 + 2 * comm->size; i++) {
            qd_progress_remove(comm->world, &comm->queues[i]);
            qd_queue_destroy(&comm->queues[i]);
        }
    free(comm->queues);
    free(comm->world_ranks);
    free(comm->sent);
    free(comm->received);
    pthread_mutex_destroy(&comm->stats_lock);
    free(comm);
}

static void world_free(qd_world *world)
{
    pthread_mutex_destroy(&world->lock);
    pthread_mutex_destroy(&world->serialize);
    free(world);
}

/* Sets everything except the values of world_ranks and the backend's data. */
static qd_comm *comm_new(qd_world *world, int rank, int size, const char *name, int64_t id)
{
    qd_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return NULL;
    comm->world = world;
    comm->rank = rank;
    comm->size = size;
    comm->id = id;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    pthread_mutex_init(&comm->stats_lock, NULL);
    comm->world_ranks = calloc((size_t)size, sizeof *comm->world_ranks);
    comm->sent = calloc((size_t)size, sizeof *comm->sent);
    comm->received = calloc((size_t)size, sizeof *comm->received);
    comm->queues = calloc(1 + 2 * (size_t)size, sizeof *comm->queues);
    if (comm->queues)
        for (int i = 0; i < 1 + 2 * size; i++) qd_queue_init(&comm->queues[i], world);
    if (comm->world_ranks && comm->sent && comm->received && comm->queues) return comm;
    comm_free(comm);
    return NULL;
}

/* Calls group_create and adds a reference to the world; frees the communicator on failure. */
static qd_status comm_join(qd_comm *comm)
{
    qd_world *world = comm->world;
    qd_status status;
    if (comm->on_device) {
        status = comm->on_device->create(comm);
    } else {
        qd_world_lock(world);
        status = world->backend->group_create(comm);
        qd_world_unlock(world);
    }
    if (status != QD_OK) {
        comm_free(comm);
        return status;
    }
    pthread_mutex_lock(&world->lock);
    world->refs++;
    pthread_mutex_unlock(&world->lock);
    return QD_OK;
}

qd_status qd_comm_create_world(const qd_comm_backend_ops *backend, void *backend_data, const qd_comm_config *config,
                               int rank, int size, qd_comm **out)
{
    *out = NULL;
    qd_world *world = calloc(1, sizeof *world);
    if (!world) return QD_FAIL(QD_NO_MEMORY, "no memory for the world of rank %d", rank);
    world->backend = backend;
    world->backend_data = backend_data;
    world->config = *config;
    world->rank = rank;
    world->size = size;
    world->where = (qd_comm_where){.machines = 1, .local_rank = rank, .local_ranks = size};
    world->spin = 100;
    pthread_mutex_init(&world->lock, NULL);
    pthread_mutex_init(&world->serialize, NULL);

    qd_comm *comm = comm_new(world, rank, size, "world", 0);
    qd_status status = comm ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for the world of rank %d", rank);
    if (comm) {
        for (int i = 0; i < size; i++) comm->world_ranks[i] = i;
        status = comm_join(comm);
    }
    if (status != QD_OK) {
        qd_world_lock(world);
        backend->world_destroy(world);
        qd_world_unlock(world);
        world_free(world);
        return status;
    }
    *out = comm;
    return QD_OK;
}

void qd_comm_destroy(qd_comm *comm)
{
    if (!comm) return;
    qd_world *world = comm->world;
    pthread_mutex_lock(&world->lock);
    bool last = --world->refs == 0;
    pthread_mutex_unlock(&world->lock);
    if (last) {
        qd_progress_destroy(world);
        qd_guard_destroy(world->guard);
        world->guard = NULL;
    }
    qd_checks_destroy(comm);
    qd_comm *host = comm->owns_host ? comm->host : NULL;
    if (comm->on_device) {
        comm->on_device->destroy(comm);
    } else {
        qd_world_lock(world);
        world->backend->group_destroy(comm);
        qd_world_unlock(world);
    }
    comm_free(comm);
    if (host) qd_comm_destroy(host); /* the last of its world is therefore never on a device */
    if (last) {
        qd_world_lock(world);
        world->backend->world_destroy(world);
        qd_world_unlock(world);
        world_free(world);
    }
}

static const qd_comm_device_ops *const device_tables[] = {&qd_comm_device_threads, &qd_comm_device_nccl};

qd_status qd_comm_one_process(qd_comm *host, bool *one)
{
    int64_t pids[2] = {(int64_t)getpid(), -(int64_t)getpid()};
    QD_TRY(qd_comm_all_reduce(host, pids, pids, 2, QD_I64, QD_MAX, NULL));
    *one = pids[0] == -pids[1] && strcmp(qd_comm_backend(host), "local") == 0;
    return QD_OK;
}

qd_status qd_comm_on_device(qd_comm *host, qd_device *device, const char *backend, qd_comm **out)
{
    *out = NULL;
    const qd_comm_device_ops *table = NULL;
    bool one = false;
    if (!backend) QD_TRY(qd_comm_one_process(host, &one));
    if (!backend) backend = one ? "local" : "nccl";
    for (size_t i = 0; i < sizeof device_tables / sizeof *device_tables; i++)
        if (strcmp(device_tables[i]->name, backend) == 0) table = device_tables[i];
    if (!table) return QD_FAIL(QD_USAGE, "'%s' does not move device memory; 'local' and 'nccl' do", backend);
    if (host->on_device) return QD_FAIL(QD_USAGE, "group %s is on a device already", host->name);
    /* A unique id: the notes of waiting operations use it. */
    qd_comm *comm = comm_new(host->world, host->rank, host->size, host->name, -1 - host->id);
    if (!comm) return QD_FAIL(QD_NO_MEMORY, "no memory for group %s on a device", host->name);
    memcpy(comm->world_ranks, host->world_ranks, (size_t)host->size * sizeof *comm->world_ranks);
    comm->on_device = table;
    comm->host = host;
    comm->device = device;
    QD_TRY(comm_join(comm));
    *out = comm;
    return QD_OK;
}

bool qd_comm_watch(qd_comm *comm, qd_timeline *timeline, int id)
{
    if (comm->on_device != &qd_comm_device_threads) return false;
    comm->timeline = timeline;
    comm->timeline_id = id;
    return true;
}

/* Splits the communicator for host memory and puts the new one on the same device. */
static qd_status split_on_device(qd_comm *comm, int colour, int key, const char *name, qd_comm **group)
{
    qd_comm *host = NULL;
    QD_TRY(qd_comm_split(comm->host, colour, key, name, &host));
    if (!host) return QD_OK;
    qd_status status = qd_comm_on_device(host, comm->device, comm->on_device->name, group);
    if (status != QD_OK)
        qd_comm_destroy(host);
    else
        (*group)->owns_host = true;
    return status;
}

typedef struct split_entry {
    int64_t colour, key;
} split_entry;

/* Group ranks of `comm` with this rank's colour, ordered by (key, rank). */
static int split_members(const qd_comm *comm, const split_entry *entries, int *members)
{
    int count = 0;
    for (int r = 0; r < comm->size; r++) {
        if (entries[r].colour != entries[comm->rank].colour) continue;
        int at = count++;
        for (; at > 0 && entries[members[at - 1]].key > entries[r].key; at--) members[at] = members[at - 1];
        members[at] = r;
    }
    return count;
}

qd_status qd_comm_split(qd_comm *comm, int colour, int key, const char *name, qd_comm **group)
{
    qd_status status = QD_OK;
    qd_world *world = comm->world;
    *group = NULL;
    if (comm->on_device) return split_on_device(comm, colour, key, name, group);
    split_entry *entries = calloc((size_t)comm->size, sizeof *entries);
    int64_t *ids = calloc((size_t)comm->size, sizeof *ids);
    int *members = calloc((size_t)comm->size, sizeof *members);
    if (!entries || !ids || !members) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory to split group %s", comm->name);
        goto done;
    }
    entries[comm->rank] = (split_entry){colour, key};
    QD_TRY_DONE(qd_comm_all_gather(comm, &entries[comm->rank], entries, 2 * (int64_t)comm->size, QD_I64, NULL));

    /* The first member of each group reserves an id; -1 tells the others that it failed. */
    int count = colour >= 0 ? split_members(comm, entries, members) : 0;
    bool leads = count > 0 && members[0] == comm->rank;
    qd_status reserve_status = QD_OK;
    if (leads) {
        qd_world_lock(world);
        reserve_status = world->backend->reserve_id(comm, &ids[comm->rank]);
        qd_world_unlock(world);
        if (reserve_status != QD_OK) ids[comm->rank] = -1;
    }
    char reason[QD_COMM_REASON_BYTES] = "";
    if (reserve_status != QD_OK) snprintf(reason, sizeof reason, "%s", qd_error_message());
    status = qd_comm_all_gather(comm, &ids[comm->rank], ids, comm->size, QD_I64, NULL);
    if (status != QD_OK) {
        if (leads && ids[comm->rank] > 0) {
            qd_world_lock(world);
            world->backend->release_id(comm, ids[comm->rank]);
            qd_world_unlock(world);
        }
        qd_error_frame(__FILE__, __LINE__, __func__);
        goto done;
    }
    if (reserve_status != QD_OK) {
        status = QD_FAIL(reserve_status, "%s", reason);
        goto done;
    }
    if (count == 0) goto done;
    if (ids[members[0]] < 0) {
        status = QD_FAIL(QD_REMOTE, "rank %d could not make group %s", comm->world_ranks[members[0]], name);
        goto done;
    }
    int rank = 0;
    while (members[rank] != comm->rank) rank++;
    qd_comm *made = comm_new(world, rank, count, name, ids[members[0]]);
    if (!made) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory for group %s", name);
        goto done;
    }
    for (int i = 0; i < count; i++) made->world_ranks[i] = comm->world_ranks[members[i]];
    QD_TRY_DONE(comm_join(made));
    *group = made;
done:
    free(entries);
    free(ids);
    free(members);
    return status;
}

qd_status qd_comm_alloc(qd_comm *comm, int64_t bytes, void **memory)
{
    *memory = NULL;
    if (bytes < 0)
        return QD_FAIL(QD_USAGE, "shared memory of %lld bytes: the size must not be negative", (long long)bytes);
    if (comm->world->backend->alloc) QD_TRY(comm->world->backend->alloc(comm->world, bytes, memory));
    if (!*memory) *memory = qd_memory_take(bytes > 0 ? bytes : 1);
    return *memory ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for a buffer of %lld bytes", (long long)bytes);
}

void qd_comm_free(qd_comm *comm, void *memory)
{
    if (!memory) return;
    if (!comm->world->backend->free || !comm->world->backend->free(comm->world, memory)) free(memory);
}

int64_t qd_comm_shared_bytes(qd_comm *comm, int64_t *staging)
{
    *staging = 0;
    return comm->world->backend->shared_bytes ? comm->world->backend->shared_bytes(comm->world, staging) : -1;
}

int qd_comm_lost(const qd_comm *comm)
{
    return atomic_load(&comm->world->lost) - 1;
}

void qd_comm_at(qd_comm *comm, const char *place)
{
    qd_world *world = comm->world;
    qd_comm_place_set(&world->place, place);
    if (world->guard) qd_comm_place_set(&qd_guard_board(world->guard)->place, place);
    qd_world_lock(world);
    world->backend->at(world, place);
    qd_world_unlock(world);
}

void qd_comm_abort(qd_comm *comm, const char *reason)
{
    qd_world *world = comm->world;
    qd_error_record kept; /* keeps the caller's own error as this thread's message */
    qd_error_keep(&kept);
    qd_world_lock(world);
    world->backend->abort(world, reason);
    qd_world_unlock(world);
    if (atomic_load(&world->failed) == QD_OK) qd_world_check(world);
    qd_world_wake(world);
    qd_error_put_back(&kept);
}

void qd_comm_get_stats(const qd_comm *comm, qd_comm_stats *stats)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&comm->stats_lock;
    pthread_mutex_lock(lock);
    QD_SIZED_WRITE(stats, &comm->stats);
    pthread_mutex_unlock(lock);
}

void qd_comm_reset_stats(qd_comm *comm)
{
    pthread_mutex_lock(&comm->stats_lock);
    comm->stats = (qd_comm_stats){0};
    pthread_mutex_unlock(&comm->stats_lock);
}
