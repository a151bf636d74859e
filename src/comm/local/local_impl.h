/* Internal to src/comm/local: the layout of the shared segment, the rules for writing to it, and
 * what the files of this folder share.
 *
 *   segment = header | rank lines (size) | slots (slot_count) | heaps (size)
 *   slot    = marks | lanes (size) | channels (size * size, sender-major); one per communicator
 *   lane    = what one rank publishes to its group: posts, counters, small data, staging ring
 *   channel = the same for messages of one sender to one receiver
 *
 * The file is sparse: a slot uses memory only where it has been written. Every counter is written
 * by one rank only and never decreases while its communicator exists (exceptions: `claims` and
 * `moved`, which all ranks update):
 *   a counter value is (operation number << 24) + rounds,
 *   so "peer has reached round k of operation s" is one comparison.
 * A rank posts operation s in post[s & 1] and leaves an operation only after all ranks of the group
 * have posted it. So no rank is more than one operation ahead, and data of operation s may be
 * overwritten in operation s + 2 without further synchronization. The staging ring is reused within
 * an operation; `consumed` says which buffers are free.
 *
 * After the slots each rank has its own part of the file for memory that all ranks reach by address
 * (heap.c). Ranks as threads reach all memory that way (with no_remote_reads only the heaps, so
 * that every way can be tested with threads, under the thread sanitizer). The ways of a message:
 *   - Buffers that are reached by address: one pass, straight from buffer to buffer (onepass.c).
 *   - Other memory of processes, medium sizes: process_vm_readv() and process_vm_writev(), where
 *     the system allows them.
 *   - Else: the staging ring.
 *   - Small messages are always copied into the lane.
 * The way must be the same on all ranks: each post says whether its rank can reach the memory of
 * all others, and operation s + 1 uses what all have seen in operation s. Where data flows in one
 * direction only, one side reads a share of it and the other side writes the rest, so that both
 * cores copy. */
#ifndef QD_COMM_LOCAL_LOCAL_IMPL_H
#define QD_COMM_LOCAL_LOCAL_IMPL_H

#include "comm/comm_impl.h"
#include "comm/local/ways.h"

#define QD_LOCAL_SMALL_BYTES (64 * 1024) /* of one lane and parity; the largest direct all-reduce must fit */
#define QD_LOCAL_MESSAGE_SMALL 4096      /* of one channel and parity: sends up to this size do not wait */
#define QD_LOCAL_RING 4                  /* buffers in a staging ring */
#define QD_LOCAL_MESSAGE_BUFFER (64 * 1024) /* bytes of one buffer in a channel's ring */
#define QD_LOCAL_ROUND_BITS 24
#define QD_LOCAL_CORES 1024
#define QD_LOCAL_LINE 128 /* two cache lines: the prefetcher fetches pairs */

/* One call, as its rank publishes it. `posted` is stored last. */
typedef struct qd_local_post {
    _Atomic uint64_t posted; /* operation number */
    qd_fingerprint fingerprint;
    const void *in; /* addresses in the rank's process */
    void *out;
    int64_t in_at, out_at; /* the same as offsets in the file, or QD_LOCAL_NOWHERE */
    uint32_t can_read; /* this rank has read a word of every other rank's memory */
    int64_t pulled;    /* messages by system call: bytes that the receiver reads; the sender writes the rest into its memory */
    uint32_t shares;   /* messages by address: both sides claim chunks; all-to-all: others may copy for this rank (common.c) */
    int64_t chunk, chunks; /* all-to-all: size in bytes and number of the chunks of this rank's list (common.c) */
    uint32_t way;      /* qd_local_way of a message, or of this rank's blocks in an all-to-all */
} qd_local_post;

/* How data moves from one rank to another. */
typedef enum qd_local_way {
    QD_LOCAL_SMALL,  /* in the post's small buffer */
    QD_LOCAL_MEMORY, /* from the rank's own memory, by system call */
    QD_LOCAL_STAGED, /* through the ring */
    QD_LOCAL_PLACED  /* from the rank's memory, by address: in_at of its post is valid */
} qd_local_way;

/* all-to-all: the small buffer begins with one of these per rank. */
typedef struct qd_local_block {
    int64_t count;      /* elements for that rank */
    int64_t offset;     /* bytes, in the small buffer or the input */
    int64_t expected;   /* elements from that rank */
    int64_t out_offset; /* bytes, in the output */
} qd_local_block;

typedef struct qd_local_lane {
    _Alignas(QD_LOCAL_LINE) _Atomic uint64_t produced; /* rounds written to the staging ring */
    _Atomic uint64_t combined; /* rounds whose sum this rank has published */
    _Atomic uint64_t consumed; /* rounds for which this rank no longer needs the others' buffers */
    _Atomic uint64_t finished; /* operation number */
    _Atomic uint32_t inside;   /* this rank is accessing another rank's memory */
    _Alignas(QD_LOCAL_LINE) _Atomic uint64_t claims; /* all ranks: claimed chunks of this rank's list (qd_local_claim) */
    _Atomic uint64_t moved;    /* all ranks: finished chunks of that list, as a count of rounds */
    struct {
        _Alignas(QD_LOCAL_LINE) qd_local_post post;
        _Alignas(64) unsigned char small[QD_LOCAL_SMALL_BYTES];
        int64_t pushed[QD_LOCAL_MAX_RANKS]; /* bytes written into each peer's memory; readable with `produced` */
    } parity[2];
    /* followed by the staging ring: QD_LOCAL_RING buffers of header.ring_bytes */
} qd_local_lane;

typedef struct qd_local_channel {
    _Alignas(QD_LOCAL_LINE) _Atomic uint64_t produced; /* sender */
    struct {
        _Alignas(64) qd_local_post post; /* sender */
        _Atomic int64_t pushed;          /* sender: bytes that it has written into the receiver's memory */
        _Alignas(64) unsigned char small[QD_LOCAL_MESSAGE_SMALL];
    } parity[2];
    _Alignas(QD_LOCAL_LINE) _Atomic uint64_t entered; /* receiver: message number */
    _Atomic uint64_t consumed; /* receiver: rounds */
    _Atomic uint64_t finished; /* receiver: message number */
    _Atomic uint64_t accepted; /* receiver: number of the message that it has accepted; then valid: */
    void *out;                 /* receiver: where the sender may write its share */
    int64_t out_at;            /* receiver: the same as an offset in the file, or QD_LOCAL_NOWHERE */
    _Atomic int64_t taken;     /* receiver: bytes that it has copied of a message that both copy by address */
    _Atomic uint32_t reading;  /* receiver: accessing the sender's memory */
    _Alignas(QD_LOCAL_LINE) _Atomic uint32_t writing; /* sender: accessing the receiver's memory */
    _Alignas(QD_LOCAL_LINE) _Atomic uint64_t claims; /* both: see qd_local_claim(); initialized by the receiver */
    _Alignas(QD_LOCAL_LINE) unsigned char ring[QD_LOCAL_RING][QD_LOCAL_MESSAGE_BUFFER];
} qd_local_channel;

/* First pages of a slot. Even reading an untouched page of a shared file allocates it, so the marks
 * say which channels have ever been used. */
typedef struct qd_local_marks {
    _Atomic uint8_t channel[QD_LOCAL_MAX_RANKS * QD_LOCAL_MAX_RANKS]; /* in the order of the channels */
} qd_local_marks;

/* What a rank publishes to the whole world. */
typedef struct qd_local_rank {
    _Alignas(QD_LOCAL_LINE) _Atomic uint32_t doorbell; /* futex; changes when a sleeper must poll again */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t attached;
    int32_t pid;
    _Atomic uint64_t probe; /* address of a word with the value of probe_value() in the rank's process */
    _Alignas(QD_LOCAL_LINE) qd_wait_board board;
} qd_local_rank;

typedef struct qd_local_header {
    uint64_t magic;
    int32_t size, slot_count;
    int64_t page; /* page size: one rank's memory is counted and freed in pages and shares none with another rank's */
    int64_t marks_bytes, lane_bytes, slot_bytes, slots_at, ring_bytes;
    int64_t heap_at, heap_bytes, total_bytes; /* heap_bytes: of each rank */
    double deadline_seconds;
    int64_t staging_bytes;
    uint64_t nonce; /* identifies this world */
    int32_t no_remote_reads;
    qd_local_ways ways; /* the same for all ranks */
    uint64_t ways_mark; /* qd_local_ways_mark() */
    _Atomic uint64_t cores[QD_LOCAL_CORES / 64]; /* cores that any rank may run on: each rank adds its own when it joins */
    _Alignas(QD_LOCAL_LINE) _Atomic uint32_t abort_state; /* 0 none, 1 being written, 2 readable */
    int32_t abort_rank;
    _Atomic uint32_t excused; /* the launcher sees that a rank is held by a debugger */
    char abort_reason[QD_COMM_REASON_BYTES];
    _Alignas(QD_LOCAL_LINE) _Atomic int32_t slot_members[]; /* (slot_count) members that still hold it; 0: free */
} qd_local_header;

/* Allocated ranges of this rank's heap, sorted. */
typedef struct qd_local_range {
    int64_t begin, bytes;
} qd_local_range;
typedef struct qd_local_heap {
    pthread_mutex_t lock;
    qd_local_range *ranges;
    int count, room;
} qd_local_heap;

/* This rank's view: world->backend_data. */
typedef struct qd_local_rank_world {
    qd_local_header *header;
    qd_local_rank *ranks; /* (size) */
    bool threads;         /* ranks are threads of this process */
    bool all_reached;     /* and reach each other's memory by address (threads, unless no_remote_reads) */
    bool owns_mapping;    /* processes: unmap with the last communicator */
    _Atomic int remote;   /* ranks are processes and all can reach each other's memory; initial value of new groups */
    uint64_t probe;       /* the word that the others try to read */
    int spin;             /* the core's choice */
    qd_local_heap heap;
    struct qd_local_group *groups; /* guarded by the world's lock */
} qd_local_rank_world;

/* This rank's view of a slot: comm->backend_data. */
typedef struct qd_local_group {
    qd_local_header *header;
    qd_local_rank *ranks;
    unsigned char *slot;
    bool threads;
    qd_local_rank_world *view;
    _Atomic int remote;  /* agreed: large messages are copied between the memories of processes */
    bool met;            /* the world's group: all ranks have entered an operation, so all have joined */
    bool probed, can_read;
    uint64_t ring_used; /* the last operation that used this rank's ring */
    int rank;
    struct qd_local_group *next;
    qd_local_lane *lanes[]; /* (size) */
} qd_local_group;

static inline int64_t qd_local_round_up(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

static inline qd_local_group *qd_local_group_of(const qd_transfer *op)
{
    return op->comm->backend_data;
}

static inline unsigned char *qd_local_ring(const qd_local_group *group, int rank, int64_t round)
{
    return (unsigned char *)(group->lanes[rank] + 1) + (round % QD_LOCAL_RING) * group->header->ring_bytes;
}

qd_local_channel *qd_local_channel_of(const qd_comm *comm, int from, int to);

/* Sequentially consistent: a rank that marks itself as inside another rank's memory calls this next
 * (qd_local_enter). */
static inline bool qd_local_is_aborted(const qd_local_header *header)
{
    return atomic_load_explicit(&header->abort_state, memory_order_seq_cst) == 2;
}

/* Fences. The thread sanitizer does not support them, so under it inline assembly replaces them.
 * x86 needs one only where a load must not pass an earlier store; a locked instruction does
 * that. */
static inline void qd_local_full_fence(void)
{
#if !defined(__SANITIZE_THREAD__)
    atomic_thread_fence(memory_order_seq_cst);
#elif defined(__aarch64__)
    __asm__ volatile("dmb ish" ::: "memory");
#else
    _Atomic int word = 0;
    atomic_fetch_add_explicit(&word, 1, memory_order_seq_cst);
#endif
}

/* Orders earlier loads before later accesses. */
static inline void qd_local_read_fence(void)
{
#if !defined(__SANITIZE_THREAD__)
    atomic_thread_fence(memory_order_acquire);
#elif defined(__aarch64__)
    __asm__ volatile("dmb ishld" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* An offset in the file (for threads: an address), valid on every rank of the world. */
#define QD_LOCAL_NOWHERE INT64_MIN
int64_t qd_local_place(const qd_local_group *group, const void *memory); /* NULL, which is never accessed, has a place */
static inline void *qd_local_at(const qd_local_group *group, int64_t place)
{
    return (void *)((intptr_t)group->header + place);
}

/* Bytes of the pages that the file has allocated between two addresses. */
int64_t qd_local_filled(const void *from, const void *to);

/* heap.c: the backend's alloc and free. */
qd_status qd_local_heap_alloc(qd_world *world, int64_t bytes, void **memory);
bool qd_local_heap_free(qd_world *world, void *memory);

/* Wakes sleeping threads of one rank of the group, or of all other ranks. Call it after the store
 * that they wait for. */
void qd_local_ring_rank(const qd_comm *comm, int rank);
void qd_local_ring_all(const qd_comm *comm);

/* Mark the access to another rank's buffers. enter returns false when the world has been aborted
 * (the other rank may be gone): then do not touch the buffers. A rank that fails while others know
 * its buffers waits until their marks are cleared: without limit for threads, for a second for
 * processes, since a killed or stopped process never clears its mark. */
bool qd_local_enter(qd_local_group *group, _Atomic uint32_t *mark);
static inline void qd_local_leave(_Atomic uint32_t *mark)
{
    atomic_store_explicit(mark, 0, memory_order_release);
}
void qd_local_wait_left(const qd_local_group *group, _Atomic uint32_t *mark);
/* Call after each copy and before publishing it: false if the world was aborted meanwhile. A failed
 * rank does not wait forever, so the data that was read may have been freed or reused and must be
 * discarded. A load alone, even with acquire, could be reordered before the copy's loads. */
static inline bool qd_local_counts(const qd_local_group *group)
{
    qd_local_read_fence();
    return atomic_load_explicit(&group->header->abort_state, memory_order_seq_cst) == 0;
}

/* Work that any rank may do: where ranks outnumber cores, waiting for a rank that is not scheduled
 * costs more than doing its part. The work is cut into chunks, and `claims` counts the chunks
 * claimed from the front and from the back:
 *   (operation number << 24) + (back << 12) + front
 * The owner initializes it with the operation number and no claims. A rank that is still in an
 * earlier operation finds another number and claims nothing. Returns the claimed chunk, or -1. */
#define QD_LOCAL_CHUNKS 4095
static inline int64_t qd_local_claim(_Atomic uint64_t *claims, uint64_t base, int64_t chunks, bool back)
{
    uint64_t value = atomic_load_explicit(claims, memory_order_acquire);
    for (;;) {
        int64_t taken = (int64_t)(value - base), front = taken & QD_LOCAL_CHUNKS, behind = taken >> 12;
        if (value < base || taken >> QD_LOCAL_ROUND_BITS || front + behind >= chunks) return -1;
        if (atomic_compare_exchange_weak_explicit(claims, &value, value + (back ? (uint64_t)1 << 12 : 1), memory_order_acq_rel,
                                                  memory_order_acquire))
            return back ? chunks - 1 - behind : front;
    }
}
#define QD_LOCAL_PIECE (1 << 20) /* bytes that one poll moves, so that other operations of this rank make progress too */
/* Bytes of a chunk, in whole pages: small enough for a fair share, and large enough to amortize the
 * claim, for which the processor drains its stores. */
static inline int64_t qd_local_chunk_bytes(int64_t bytes)
{
    /* Some lists consist of blocks of several ranks, and each block may end with a partial
     * chunk. */
    int64_t chunk = bytes / 32, least = bytes / (QD_LOCAL_CHUNKS - QD_LOCAL_MAX_RANKS) + 1;
    if (chunk < 128 << 10) chunk = bytes < 512 << 10 ? bytes / 2 : 128 << 10;
    if (chunk > QD_LOCAL_PIECE) chunk = QD_LOCAL_PIECE;
    return qd_local_round_up(chunk > least ? chunk : least, 4096);
}

/* Copies from or into the memory of another process; false if that is not possible. */
bool qd_local_pull(const qd_comm *comm, int rank, void *to, const void *from, int64_t bytes);
bool qd_local_push(const qd_comm *comm, int rank, void *to, const void *from, int64_t bytes);
/* Spin while waiting if every rank has a core. Called once all ranks have joined. */
void qd_local_choose_spin(const qd_comm *comm);
/* True if this process can reach the memory of every rank of the group, all of which have
 * joined. */
bool qd_local_probe(const qd_comm *comm);

/* collective.c, message.c: the backend's op functions for their kinds. */
qd_status qd_local_collective_start(qd_transfer *op);
qd_status qd_local_collective_poll(qd_transfer *op, bool *done, bool *moved);
void qd_local_collective_finish(qd_transfer *op);
bool qd_local_collective_late(const qd_transfer *op, int peer, uint64_t *sequence);
qd_status qd_local_message_start(qd_transfer *op);
qd_status qd_local_message_poll(qd_transfer *op, bool *done, bool *moved);
void qd_local_message_finish(qd_transfer *op);
bool qd_local_message_late(const qd_transfer *op, int peer, uint64_t *sequence);

#endif
