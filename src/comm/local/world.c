/* The local world: creates and maps the segment, joins ranks, wakes sleepers (doorbells), records
 * aborts, and manages groups as slots. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create, sched_getaffinity */
#endif
#include "comm/local/local_impl.h"
#include "base/sized.h"

#include "base/clock.h"
#include "base/memory.h"

#include <errno.h>
#include <linux/futex.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x716475616472696cu
#define MOST_SLOTS 512
#define MOST_VIRTUAL_BYTES ((int64_t)64 << 30) /* address space for all slots */
#define MOST_HEAP_BYTES ((int64_t)16 << 40)    /* and for all heaps */

struct qd_local_world {
    int fd;
    qd_local_header *header;
};

static const qd_comm_backend_ops local_backend;

static qd_local_rank *rank_lines(qd_local_header *header)
{
    size_t at = sizeof *header + (size_t)header->slot_count * sizeof header->slot_members[0];
    return (qd_local_rank *)((char *)header + qd_local_round_up((int64_t)at, QD_LOCAL_LINE));
}

/* Bytes that the creator of the world maps. Its ranks as threads use that mapping and need the
 * heaps only under no_remote_reads. */
static int64_t mapped_bytes(const qd_local_header *header)
{
    return header->no_remote_reads ? header->total_bytes : header->heap_at;
}

/* Writing beyond the limit on file size ends the process with a signal. */
static bool may_write(int64_t bytes)
{
    struct rlimit most;
    return getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur == RLIM_INFINITY || most.rlim_cur >= (rlim_t)bytes;
}

/* Shared memory does not count against the limits on a process's own memory. Where limits are set,
 * buffers are private memory, which does. */
static bool is_limited(void)
{
    struct rlimit addresses, data;
    return getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY || getrlimit(RLIMIT_DATA, &data) != 0 ||
           data.rlim_cur != RLIM_INFINITY;
}

/* Maps the first `bytes` of the file at an address aligned to huge pages; MAP_FAILED with errno. */
static void *map_file(int fd, int64_t bytes)
{
    size_t room = (size_t)(bytes + QD_HUGE_PAGE), length = (size_t)qd_local_round_up(bytes, sysconf(_SC_PAGESIZE));
    char *begin = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return MAP_FAILED;
    char *at = begin + (-(uintptr_t)begin & (uintptr_t)(QD_HUGE_PAGE - 1));
    void *header = mmap(at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
    int error = errno;
    if (header == MAP_FAILED) {
        munmap(begin, room);
        errno = error;
        return MAP_FAILED;
    }
    if (at > begin) munmap(begin, (size_t)(at - begin));
    if (at + length < begin + room) munmap(at + length, (size_t)(begin + room - (at + length)));
    return header;
}

/* Whether a file of this size is allowed and fits into the address space. */
static bool can_map(int fd, int64_t bytes)
{
    if (fd < 0 || !may_write(bytes) || ftruncate(fd, bytes) != 0) return false;
    void *at = map_file(fd, bytes);
    if (at != MAP_FAILED) munmap(at, (size_t)bytes);
    return at != MAP_FAILED;
}

/* A core dump would allocate every page of the heaps. */
static void leave_out_of_dumps(const qd_local_header *header, int64_t mapped)
{
    if (mapped > header->heap_at) (void)madvise((char *)header + header->heap_at, (size_t)(mapped - header->heap_at), MADV_DONTDUMP);
}

qd_status qd_local_world_create(int size, const qd_comm_config *given, qd_local_world **out)
{
    qd_comm_config own = qd_comm_config_default(), *config = &own;
    *out = NULL;
    QD_TRY(QD_SIZED_READ(given, qd_comm_config, &own));
    if (size < 1 || size > QD_LOCAL_MAX_RANKS)
        return QD_FAIL(QD_USAGE, "a local world of %d ranks is not possible; it can have 1 to %d", size, QD_LOCAL_MAX_RANKS);
    if (!(config->deadline_seconds > 0))
        return QD_FAIL(QD_USAGE, "a deadline of %g seconds is not possible; it must be above 0", config->deadline_seconds);
    /* Every peer must get at least one page of a ring buffer. */
    int64_t least = (int64_t)QD_LOCAL_RING * size * 4096;
    if (config->staging_bytes < least)
        return QD_FAIL(QD_USAGE, "%lld staging bytes are too few for %d ranks; at least %lld are needed",
                       (long long)config->staging_bytes, size, (long long)least);
    qd_local_header plan = {.magic = MAGIC,
                            .size = size,
                            .deadline_seconds = config->deadline_seconds,
                            .staging_bytes = config->staging_bytes,
                            .no_remote_reads = config->no_remote_reads,
                            .ways = qd_local_ways_default()};
    QD_TRY(qd_local_ways_read(config->ways, &plan.ways));
    plan.ways_mark = qd_local_ways_mark(&plan.ways);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    plan.nonce = ((uint64_t)now.tv_sec << 30 ^ (uint64_t)now.tv_nsec) * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid();
    plan.page = sysconf(_SC_PAGESIZE);
    plan.ring_bytes = config->staging_bytes / QD_LOCAL_RING / 4096 * 4096;
    plan.marks_bytes = qd_local_round_up((int64_t)sizeof(qd_local_marks), plan.page);
    plan.lane_bytes = qd_local_round_up((int64_t)sizeof(qd_local_lane) + QD_LOCAL_RING * plan.ring_bytes, plan.page);
    plan.slot_bytes = plan.marks_bytes + size * plan.lane_bytes +
                      qd_local_round_up((int64_t)size * size * (int64_t)sizeof(qd_local_channel), plan.page);
    int64_t slots = MOST_VIRTUAL_BYTES / plan.slot_bytes;
    plan.slot_count = (int32_t)(slots < 16 ? 16 : slots > MOST_SLOTS ? MOST_SLOTS : slots);
    plan.slots_at = qd_local_round_up((int64_t)sizeof plan + plan.slot_count * (int64_t)sizeof plan.slot_members[0] +
                                 QD_LOCAL_LINE + size * (int64_t)sizeof(qd_local_rank),
                             plan.page);
    plan.heap_at = qd_local_round_up(plan.slots_at + plan.slot_count * plan.slot_bytes, QD_HUGE_PAGE);
    plan.heap_bytes = MOST_HEAP_BYTES / size / QD_HUGE_PAGE * QD_HUGE_PAGE;
    int64_t machine = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (machine > 0 && plan.heap_bytes > machine) plan.heap_bytes = qd_local_round_up(machine, QD_HUGE_PAGE);
    plan.total_bytes = plan.heap_at + size * plan.heap_bytes;

    qd_local_world *world = calloc(1, sizeof *world);
    if (!world) return QD_FAIL(QD_NO_MEMORY, "no memory for a local world");
    world->fd = memfd_create("quadrille", MFD_CLOEXEC);
    world->header = MAP_FAILED;
    qd_status status = QD_OK;
    if (is_limited() || !can_map(world->fd, plan.total_bytes)) { /* then ranks share no memory by address */
        plan.heap_bytes = 0;
        plan.total_bytes = plan.heap_at;
    }
    if (!may_write(plan.total_bytes)) {
        status =
            QD_FAIL(QD_SYSTEM,
                    "ranks share a sparse file of %lld bytes in memory, and the limit on the size of files is lower: ulimit -f unlimited",
                    (long long)plan.total_bytes);
        goto done;
    }
    if (world->fd < 0 || ftruncate(world->fd, plan.total_bytes) != 0) {
        status = QD_FAIL(QD_SYSTEM, "cannot create the shared segment of %lld bytes: %s", (long long)plan.total_bytes,
                         strerror(errno));
        goto done;
    }
    world->header = map_file(world->fd, mapped_bytes(&plan));
    if (world->header == MAP_FAILED) {
        status = QD_FAIL(QD_SYSTEM, "cannot map the shared segment: %s", strerror(errno));
        goto done;
    }
    leave_out_of_dumps(memcpy(world->header, &plan, sizeof plan), mapped_bytes(&plan));
    atomic_store(&world->header->slot_members[0], size); /* slot 0 belongs to the world */
    *out = world;
done:
    if (status != QD_OK) qd_local_world_destroy(world);
    return status;
}

int qd_local_world_fd(const qd_local_world *world)
{
    return world->fd;
}

void qd_local_world_destroy(qd_local_world *world)
{
    if (!world) return;
    if (world->header != MAP_FAILED) munmap(world->header, (size_t)mapped_bytes(world->header));
    if (world->fd >= 0) close(world->fd);
    free(world);
}

static uint64_t probe_value(const qd_local_header *header, int rank)
{
    return header->nonce + (uint64_t)rank;
}

/* Copies between this process and another; false if that is not (or no longer) possible. */
static bool move(const qd_comm *comm, int rank, void *mine, void *theirs, int64_t bytes, bool push)
{
    qd_local_group *group = comm->backend_data;
    pid_t pid = (pid_t)group->ranks[comm->world_ranks[rank]].pid;
    while (bytes > 0) {
        struct iovec here = {mine, (size_t)bytes}, there = {theirs, (size_t)bytes};
        ssize_t moved = push ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                             : process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (moved <= 0) return false;
        mine = (char *)mine + moved;
        theirs = (char *)theirs + moved;
        bytes -= moved;
    }
    return qd_local_counts(group);
}

bool qd_local_pull(const qd_comm *comm, int rank, void *to, const void *from, int64_t bytes)
{
    return move(comm, rank, to, (void *)from, bytes, false);
}

bool qd_local_push(const qd_comm *comm, int rank, void *to, const void *from, int64_t bytes)
{
    return move(comm, rank, (void *)from, to, bytes, true);
}

bool qd_local_probe(const qd_comm *comm)
{
    qd_local_group *group = comm->backend_data;
    for (int r = 0; r < comm->size; r++) {
        int world_rank = comm->world_ranks[r];
        uint64_t value = 0, address = atomic_load(&group->ranks[world_rank].probe);
        if (r == comm->rank) continue;
        void *word = (void *)(uintptr_t)address;
        if (!word || !move(comm, r, &value, word, sizeof value, false) ||
            value != probe_value(group->header, world_rank) || !move(comm, r, &value, word, sizeof value, true))
            return false;
    }
    return true;
}

/* mpirun may bind each rank to one core, so the cores of all ranks are counted together. */
static void add_cores(qd_local_header *header)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return;
    for (int c = 0; c < QD_LOCAL_CORES && c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &set)) atomic_fetch_or(&header->cores[c / 64], (uint64_t)1 << c % 64);
}

void qd_local_choose_spin(const qd_comm *comm)
{
    qd_local_rank_world *view = comm->world->backend_data;
    int cores = 0;
    for (int i = 0; i < QD_LOCAL_CORES / 64; i++)
        cores += __builtin_popcountll(atomic_load(&view->header->cores[i]));
    atomic_store(&comm->world->spin, view->header->size > cores ? 0 : view->spin);
}

static qd_status join(qd_local_header *header, int rank, bool threads, qd_comm **comm)
{
    qd_local_rank_world *view = calloc(1, sizeof *view);
    if (!view) {
        if (!threads) munmap(header, (size_t)header->total_bytes);
        return QD_FAIL(QD_NO_MEMORY, "no memory for rank %d", rank);
    }
    view->header = header;
    view->ranks = rank_lines(header);
    view->threads = threads;
    view->all_reached = threads && !header->no_remote_reads;
    view->owns_mapping = !threads;
    pthread_mutex_init(&view->heap.lock, NULL);
    qd_comm_config config = {.size = sizeof config, .deadline_seconds = header->deadline_seconds, .staging_bytes = header->staging_bytes,
                             .no_remote_reads = header->no_remote_reads};
    int size = header->size;
    if (atomic_exchange(&view->ranks[rank].attached, 1)) {
        if (!threads) munmap(header, (size_t)header->total_bytes);
        pthread_mutex_destroy(&view->heap.lock);
        free(view);
        return QD_FAIL(QD_USAGE, "rank %d has already joined this world", rank);
    }
    if (!threads && !header->no_remote_reads) {
#ifdef PR_SET_PTRACER
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* under Yama: allow the other ranks to read our memory */
#endif
        view->probe = probe_value(header, rank);
        view->ranks[rank].pid = (int32_t)getpid();
        atomic_store(&view->ranks[rank].probe, (uint64_t)(uintptr_t)&view->probe);
    }
    add_cores(header);
    QD_TRY(qd_comm_create_world(&local_backend, view, &config, rank, size, comm));
    /* A spinning rank would take the core that the awaited rank needs. Spinning is enabled once all
     * have joined and the cores are known. */
    view->spin = atomic_exchange(&(*comm)->world->spin, 0);
    return QD_OK;
}

static qd_status check_rank(int rank, int size)
{
    if (rank >= 0 && rank < size) return QD_OK;
    return QD_FAIL(QD_USAGE, "rank %d does not exist in a local world of %d ranks", rank, size);
}

qd_status qd_local_comm_attach(qd_local_world *world, int rank, qd_comm **comm)
{
    *comm = NULL;
    QD_TRY(check_rank(rank, world->header->size));
    return join(world->header, rank, true, comm);
}

qd_status qd_local_comm_open(int fd, int rank, qd_comm **comm)
{
    *comm = NULL;
    qd_local_header found;
    struct stat info;
    if (pread(fd, &found, sizeof found, 0) != (ssize_t)sizeof found || found.magic != MAGIC || fstat(fd, &info) != 0 ||
        info.st_size != found.total_bytes)
        return QD_FAIL(QD_USAGE, "file descriptor %d is not the segment of a local world", fd);
    QD_TRY(check_rank(rank, found.size));
    if (qd_local_ways_mark(&found.ways) != found.ways_mark)
        return QD_FAIL(QD_MISMATCH, "rank %d and its launcher are different builds of quadrille and would move messages differently",
                       rank);
    void *header = map_file(fd, found.total_bytes);
    if (header == MAP_FAILED) return QD_FAIL(QD_SYSTEM, "cannot map the shared segment: %s", strerror(errno));
    leave_out_of_dumps(header, found.total_bytes);
    return join(header, rank, false, comm);
}

static void world_destroy(qd_world *world)
{
    qd_local_rank_world *view = world->backend_data;
    if (view->owns_mapping) munmap(view->header, (size_t)view->header->total_bytes);
    pthread_mutex_destroy(&view->heap.lock);
    free(view->heap.ranges);
    free(view);
}

/* Sleeping and waking. A sleeper increments `sleepers`, polls once more, and sleeps on the
 * doorbell. A waker stores its data, then reads `sleepers`. With a full fence between the two on
 * both sides, at least one of them sees the other. */

static void ring_line(qd_local_rank *line)
{
    if (atomic_load_explicit(&line->sleepers, memory_order_relaxed) == 0) return;
    atomic_fetch_add_explicit(&line->doorbell, 1, memory_order_seq_cst);
    syscall(SYS_futex, &line->doorbell, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

void qd_local_ring_rank(const qd_comm *comm, int rank)
{
    qd_local_group *group = comm->backend_data;
    qd_local_full_fence();
    ring_line(&group->ranks[comm->world_ranks[rank]]);
}

void qd_local_ring_all(const qd_comm *comm)
{
    qd_local_group *group = comm->backend_data;
    qd_local_full_fence();
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank) ring_line(&group->ranks[comm->world_ranks[r]]);
}

static qd_local_rank *own_line(qd_world *world)
{
    qd_local_rank_world *view = world->backend_data;
    return &view->ranks[world->rank];
}

static uint32_t sleep_prepare(qd_world *world)
{
    qd_local_rank *line = own_line(world);
    uint32_t ticket = atomic_load_explicit(&line->doorbell, memory_order_seq_cst);
    atomic_fetch_add_explicit(&line->sleepers, 1, memory_order_relaxed);
    qd_local_full_fence(); /* the poll that follows loads with acquire, which could pass the increment */
    return ticket;
}

static void sleep_cancel(qd_world *world)
{
    atomic_fetch_sub_explicit(&own_line(world)->sleepers, 1, memory_order_seq_cst);
}

static void sleep_on(qd_world *world, uint32_t ticket, double seconds)
{
    struct timespec limit = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, &own_line(world)->doorbell, FUTEX_WAIT, ticket, &limit, NULL, 0);
    sleep_cancel(world);
}

static void wake(qd_world *world)
{
    qd_local_full_fence();
    ring_line(own_line(world));
}

static void publish_abort(qd_local_header *header, int rank, const char *reason)
{
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&header->abort_state, &none, 1)) {
        /* Return only when the record is readable: the caller assumes that all ranks know. This is
         * quick, unless the rank that writes the record is killed. */
        for (double until = qd_clock_now() + 1; atomic_load(&header->abort_state) != 2 && qd_clock_now() < until;) sched_yield();
        return;
    }
    header->abort_rank = rank;
    snprintf(header->abort_reason, sizeof header->abort_reason, "%s", reason);
    atomic_store_explicit(&header->abort_state, 2, memory_order_seq_cst);
    qd_local_full_fence();
    qd_local_rank *lines = rank_lines(header);
    for (int r = 0; r < header->size; r++) ring_line(&lines[r]);
}

void qd_local_world_mark_dead(qd_local_world *world, int rank, const char *how)
{
    char reason[QD_COMM_REASON_BYTES], last[256];
    qd_local_world_last(world, rank, last, sizeof last);
    snprintf(reason, sizeof reason, "its process is gone (%.200s)%s%s", how, last[0] ? " " : "", last);
    publish_abort(world->header, rank, reason);
}

void qd_local_world_last(const qd_local_world *world, int rank, char *text, size_t bytes)
{
    qd_last_call_text(&rank_lines(world->header)[rank].board, text, bytes);
}

void qd_local_world_excuse(qd_local_world *world, bool excused)
{
    atomic_store_explicit(&world->header->excused, excused, memory_order_relaxed);
}

static bool is_excused(qd_world *world)
{
    const qd_local_rank_world *view = world->backend_data;
    return atomic_load_explicit(&view->header->excused, memory_order_relaxed) != 0;
}

static void abort_world(qd_world *world, const char *reason)
{
    qd_local_rank_world *view = world->backend_data;
    publish_abort(view->header, world->rank, reason);
}

static bool aborted(qd_world *world, int *rank, char *reason, size_t reason_bytes)
{
    qd_local_rank_world *view = world->backend_data;
    if (!qd_local_is_aborted(view->header)) return false;
    *rank = view->header->abort_rank;
    snprintf(reason, reason_bytes, "%s", view->header->abort_reason);
    return true;
}

static void at(qd_world *world, const char *place)
{
    qd_comm_place_set(&own_line(world)->board.place, place);
}

bool qd_local_enter(qd_local_group *group, _Atomic uint32_t *mark)
{
    atomic_store_explicit(mark, 1, memory_order_seq_cst);
    if (qd_local_counts(group)) return true;
    qd_local_leave(mark);
    return false;
}

void qd_local_wait_left(const qd_local_group *group, _Atomic uint32_t *mark)
{
    double until = group->threads ? INFINITY : qd_clock_now() + 1;
    while (atomic_load_explicit(mark, memory_order_seq_cst) && qd_clock_now() < until) sched_yield();
}

static unsigned char *slot_at(const qd_local_header *header, int64_t id)
{
    return (unsigned char *)header + header->slots_at + id * header->slot_bytes;
}

static qd_local_lane *lane_at(const qd_local_header *header, int64_t id, int rank)
{
    return (qd_local_lane *)(slot_at(header, id) + header->marks_bytes + rank * header->lane_bytes);
}

static qd_local_channel *channels_at(const qd_local_header *header, unsigned char *slot)
{
    return (qd_local_channel *)(slot + header->marks_bytes + header->size * header->lane_bytes);
}

/* Clears the counters of the slot's previous user. Data needs no clearing, and untouched pages stay
 * unallocated. */
static void reset_slot(qd_local_header *header, int64_t id)
{
    for (int r = 0; r < header->size; r++) {
        qd_local_lane *lane = lane_at(header, id, r);
        atomic_store(&lane->produced, 0);
        atomic_store(&lane->combined, 0);
        atomic_store(&lane->consumed, 0);
        atomic_store(&lane->finished, 0);
        atomic_store(&lane->claims, 0);
        atomic_store(&lane->moved, 0);
        for (int i = 0; i < 2; i++) atomic_store(&lane->parity[i].post.posted, 0);
    }
    qd_local_marks *marks = (qd_local_marks *)slot_at(header, id);
    qd_local_channel *channels = channels_at(header, slot_at(header, id));
    for (int c = 0; c < header->size * header->size; c++) {
        if (!atomic_load(&marks->channel[c])) continue;
        atomic_store(&marks->channel[c], 0);
        atomic_store(&channels[c].produced, 0);
        atomic_store(&channels[c].consumed, 0);
        atomic_store(&channels[c].finished, 0);
        atomic_store(&channels[c].entered, 0);
        atomic_store(&channels[c].accepted, 0);
        atomic_store(&channels[c].claims, 0);
        for (int i = 0; i < 2; i++) atomic_store(&channels[c].parity[i].post.posted, 0);
    }
}

/* A slot's id is its index. A reservation counts as one member until group_create has run. */
static qd_status reserve_id(qd_comm *parent, int64_t *id)
{
    qd_local_rank_world *view = parent->world->backend_data;
    for (int i = 1; i < view->header->slot_count; i++) {
        int32_t none = 0;
        if (!atomic_compare_exchange_strong(&view->header->slot_members[i], &none, -1)) continue;
        reset_slot(view->header, i);
        *id = i;
        return QD_OK;
    }
    return QD_FAIL(QD_NO_MEMORY, "more than %d groups at once are not possible on %d local ranks",
                   view->header->slot_count - 1, view->header->size);
}

static void release_id(qd_comm *parent, int64_t id)
{
    qd_local_rank_world *view = parent->world->backend_data;
    atomic_store(&view->header->slot_members[id], 0);
}

static qd_status group_create(qd_comm *comm)
{
    qd_local_rank_world *view = comm->world->backend_data;
    qd_local_group *group = calloc(1, sizeof *group + (size_t)comm->size * sizeof group->lanes[0]);
    if (!group) return QD_FAIL(QD_NO_MEMORY, "no memory for group %s", comm->name);
    group->header = view->header;
    group->ranks = view->ranks;
    group->threads = view->threads;
    group->view = view;
    /* Every member of a new group has completed the world's first operations, so all begin with the
     * same value. */
    group->probed = comm->id > 0;
    group->can_read = atomic_load(&view->remote);
    atomic_store(&group->remote, atomic_load(&view->remote));
    group->slot = slot_at(view->header, comm->id);
    for (int r = 0; r < comm->size; r++)
        group->lanes[r] = lane_at(view->header, comm->id, r);
    /* The first member to arrive replaces the reservation by the number of members. */
    if (comm->id > 0) {
        int32_t reserved = -1;
        atomic_compare_exchange_strong(&view->header->slot_members[comm->id], &reserved, comm->size);
    }
    comm->backend_data = group;
    group->rank = comm->rank;
    pthread_mutex_lock(&comm->world->lock);
    group->next = view->groups;
    view->groups = group;
    pthread_mutex_unlock(&comm->world->lock);
    return QD_OK;
}

static void group_destroy(qd_comm *comm)
{
    qd_local_group *group = comm->backend_data;
    pthread_mutex_lock(&comm->world->lock);
    qd_local_group **link = &group->view->groups;
    while (*link != group) link = &(*link)->next;
    *link = group->next;
    pthread_mutex_unlock(&comm->world->lock);
    if (comm->id > 0) atomic_fetch_sub(&group->header->slot_members[comm->id], 1);
    free(group);
    comm->backend_data = NULL;
}

qd_local_channel *qd_local_channel_of(const qd_comm *comm, int from, int to)
{
    qd_local_group *group = comm->backend_data;
    int64_t index = (int64_t)from * group->header->size + to;
    _Atomic uint8_t *mark = &((qd_local_marks *)group->slot)->channel[index];
    if (!atomic_load_explicit(mark, memory_order_relaxed)) atomic_store_explicit(mark, 1, memory_order_relaxed);
    return &channels_at(group->header, group->slot)[index];
}

int64_t qd_local_filled(const void *from, const void *to)
{
    enum { TOGETHER = 1024 };
    unsigned char there[TOGETHER];
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)from / page * page;
    int64_t bytes = 0;
    while (at < (uintptr_t)to) {
        uintptr_t pages = ((uintptr_t)to - at + page - 1) / page;
        pages = pages < TOGETHER ? pages : TOGETHER;
        bool known = mincore((void *)at, pages * page, there) == 0;
        for (uintptr_t i = 0; known && i < pages; i++) bytes += there[i] & 1 ? (int64_t)page : 0;
        at += pages * page;
    }
    return bytes;
}

/* A rank's lane and its send channels are filled by that rank only. */
static int64_t shared_bytes(qd_world *world, int64_t *staging)
{
    qd_local_rank_world *view = world->backend_data;
    const qd_local_header *header = view->header;
    if (view->threads) return -1;
    int64_t bytes = 0;
    pthread_mutex_lock(&view->heap.lock);
    for (int i = 0; i < view->heap.count; i++) bytes += view->heap.ranges[i].bytes;
    pthread_mutex_unlock(&view->heap.lock);
    pthread_mutex_lock(&world->lock);
    for (const qd_local_group *group = view->groups; group; group = group->next) {
        const qd_local_channel *first = channels_at(header, group->slot) + (int64_t)group->rank * header->size;
        const qd_local_lane *lane = group->lanes[group->rank];
        *staging += qd_local_filled(lane, (const char *)lane + header->lane_bytes) +
                    qd_local_filled(first, first + header->size);
    }
    pthread_mutex_unlock(&world->lock);
    return bytes + *staging;
}

static bool is_message(const qd_transfer *op)
{
    return op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
}

static qd_status start(qd_transfer *op)
{
    return is_message(op) ? qd_local_message_start(op) : qd_local_collective_start(op);
}

static qd_status poll_op(qd_transfer *op, bool *done, bool *moved)
{
    return is_message(op) ? qd_local_message_poll(op, done, moved) : qd_local_collective_poll(op, done, moved);
}

static void finish(qd_transfer *op)
{
    if (is_message(op))
        qd_local_message_finish(op);
    else
        qd_local_collective_finish(op);
}

static bool late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    qd_local_group *group = qd_local_group_of(op);
    bool is_late = is_message(op) ? qd_local_message_late(op, peer, &report->sequence)
                                  : qd_local_collective_late(op, peer, &report->sequence);
    if (is_late) qd_comm_place_get(&group->ranks[op->comm->world_ranks[peer]].board.place, report->place);
    return is_late;
}

static qd_wait_board *board(qd_world *world, int rank)
{
    qd_local_rank_world *view = world->backend_data;
    return &view->ranks[rank].board;
}

static const qd_comm_backend_ops local_backend = {
    .name = "local",
    .start = start,
    .poll = poll_op,
    .finish = finish,
    .late = late,
    .board = board,
    .sleep_prepare = sleep_prepare,
    .sleep_cancel = sleep_cancel,
    .sleep = sleep_on,
    .wake = wake,
    .abort = abort_world,
    .aborted = aborted,
    .excused = is_excused,
    .alloc = qd_local_heap_alloc,
    .free = qd_local_heap_free,
    .shared_bytes = shared_bytes,
    .at = at,
    .reserve_id = reserve_id,
    .release_id = release_id,
    .group_create = group_create,
    .group_destroy = group_destroy,
    .world_destroy = world_destroy,
};
