/* One rank of `bench collectives`: times our calls and MPI's alternately, in the same processes,
 * and the bare copies that an operation needs at least. */
#define _GNU_SOURCE /* process_vm_readv */
#include "bench/collectives.h"

#include "base/clock.h"
#include "base/memory.h"
#include "comm/copy.h"
#include "comm/mpi/native.h"

#include <errno.h>
#include <fcntl.h>
#include <quadrille/comm.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

/* LOCAL and MPI_MEMORY: buffers allocated by the library for this purpose; the others: ordinary
 * memory. */
typedef enum side {
    LOCAL,
    PLAIN,
    COPIES,
    BARE, /* with each qd_copy_way */
    BARE_LAST = BARE + QD_COPY_WAYS - 1,
    MPI_BACKEND,
    MPI_OWN,
    MPI_MEMORY,
    SIDES
} side;

enum { SAMPLES_MOST = 41, SAMPLES_LEAST = 5, ROUNDS_MOST = 4096 };
#define WARM_TURNS 4 /* at most; each rank is the root once in a turn */
/* A sample is long compared with the clock's resolution and the scheduler's time slice. */
#define SAMPLE_SECONDS 5e-3
#define COPIES_LEAST (64 << 10) /* smaller copies measure system calls, not copies */

typedef struct bench {
    qd_bench_rank_arguments arguments;
    int rank, ranks, sides;
    qd_comm *comms[SIDES]; /* LOCAL, MPI_BACKEND; PLAIN uses LOCAL's */
    pid_t neighbour;       /* 0: its memory cannot be read */
    const float *neighbour_in;
    float *in[SIDES], *out[SIDES]; /* LOCAL, PLAIN, MPI_MEMORY; the others use PLAIN's */
    qd_bench_board *board;
} bench;

static const qd_coll_kind kinds[] = {
    QD_COLL_ALL_REDUCE, QD_COLL_REDUCE_SCATTER, QD_COLL_ALL_GATHER, QD_COLL_ALL_TO_ALL, QD_COLL_BROADCAST,
    QD_COLL_REDUCE,     QD_COLL_GATHER,         QD_COLL_SCATTER,    QD_COLL_SEND,       QD_COLL_BARRIER,
};

static qd_status ours(qd_comm *comm, qd_coll_kind kind, const float *in, float *out, int64_t count, int root)
{
    switch (kind) {
    case QD_COLL_ALL_REDUCE:
        return qd_comm_all_reduce(comm, in, out, count, QD_F32, QD_SUM, NULL);
    case QD_COLL_REDUCE_SCATTER:
        return qd_comm_reduce_scatter(comm, in, out, count, QD_F32, QD_SUM, NULL);
    case QD_COLL_ALL_GATHER:
        return qd_comm_all_gather(comm, in, out, count, QD_F32, NULL);
    case QD_COLL_ALL_TO_ALL:
        return qd_comm_all_to_all(comm, in, out, count, QD_F32, NULL);
    case QD_COLL_BROADCAST:
        return qd_comm_broadcast(comm, out, count, QD_F32, root, NULL);
    case QD_COLL_REDUCE:
        return qd_comm_reduce(comm, in, out, count, QD_F32, QD_SUM, root, NULL);
    case QD_COLL_GATHER:
        return qd_comm_gather(comm, in, out, count, QD_F32, root, NULL);
    case QD_COLL_SCATTER:
        return qd_comm_scatter(comm, in, out, count, QD_F32, root, NULL);
    case QD_COLL_SEND:
        return qd_comm_send(comm, in, count, QD_F32, root, NULL);
    case QD_COLL_RECV:
        return qd_comm_recv(comm, out, count, QD_F32, root, NULL);
    case QD_COLL_BARRIER:
    case QD_COLL_KIND_COUNT:
        break;
    }
    return qd_comm_barrier(comm, NULL);
}

/* Bytes that a rank copies from others and from itself when the ranks share an operation's copies
 * evenly. */
static void copies_of(qd_coll_kind kind, int64_t bytes, int ranks, int64_t *others, int64_t *own)
{
    *others = *own = 0;
    switch (kind) {
    case QD_COLL_ALL_GATHER:
    case QD_COLL_ALL_TO_ALL: *own = bytes / ranks; break;
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER: *own = bytes / ranks / ranks; break;
    case QD_COLL_BROADCAST: *others = bytes / ranks * (ranks - 1); return;
    case QD_COLL_SEND: *others = bytes; return;
    default: return;
    }
    *others = *own * (ranks - 1);
}

static bool is_bare(side s)
{
    return s >= BARE && s <= BARE_LAST;
}

static bool takes_part(const bench *b, side s, qd_coll_kind kind, int64_t bytes)
{
    int64_t others, own;
    copies_of(kind, bytes, b->ranks, &others, &own);
    if (is_bare(s))
        return others > 0 && bytes >= COPIES_LEAST;
    return s != COPIES || (b->neighbour && others > 0 && bytes >= COPIES_LEAST);
}

/* As many bytes as copies_of() says, between as much memory as the operation's buffers have on each
 * rank, in the same turn: a part of a message is copied from or to the place that the root's part
 * has with this root, a part that goes to several places is read for each of them, and what a
 * broadcast has written is the source of the next one. */
static qd_status copy_within(const bench *b, side s, qd_coll_kind kind, int64_t bytes, int root)
{
    const qd_copy_way way = (qd_copy_way)(s - BARE);
    const int64_t part = bytes / b->ranks, there = part * root;
    char *in = (char *)b->in[s], *out = (char *)b->out[s];
    switch (kind) {
    case QD_COLL_GATHER: qd_comm_copy(out + there, in, part, way); break;
    case QD_COLL_SCATTER: qd_comm_copy(out, in + there, part, way); break;
    case QD_COLL_ALL_GATHER:
        for (int r = 0; r < b->ranks; r++)
            qd_comm_copy(out + part * r, in, part, way);
        break;
    case QD_COLL_BROADCAST:
        for (int r = 0; r < b->ranks; r++)
            if (r != root)
                qd_comm_copy(out + part * r, out + there, part, way);
        break;
    default: qd_comm_copy(out, in, bytes, way); /* all-to-all, send */
    }
    return qd_comm_barrier(b->comms[LOCAL], NULL);
}

static qd_status copy(const bench *b, qd_coll_kind kind, int64_t bytes)
{
    int64_t others, own;
    copies_of(kind, bytes, b->ranks, &others, &own);
    struct iovec here = {b->out[COPIES], (size_t)others}, there = {(void *)(uintptr_t)b->neighbour_in, (size_t)others};
    if (process_vm_readv(b->neighbour, &here, 1, &there, 1, 0) != others)
        return QD_FAIL(QD_SYSTEM, "cannot read the neighbour's memory: %s", strerror(errno));
    memcpy((char *)b->out[COPIES] + others, b->in[COPIES], (size_t)own);
    return qd_comm_barrier(b->comms[LOCAL], NULL);
}

/* Finds the neighbour's memory, if all ranks can read that of their neighbours. */
static qd_status meet_neighbour(bench *b)
{
    struct {
        int64_t pid, in;
    } mine = {(int64_t)getpid(), (int64_t)(uintptr_t)b->in[COPIES]}, all[QD_BENCH_RANKS_MOST];
    int right = (b->rank + 1) % b->ranks;
    if (b->ranks == 1)
        return QD_OK;
    QD_TRY(qd_comm_all_gather(b->comms[LOCAL], &mine, all, 2 * b->ranks, QD_I64, NULL));
    float word;
    struct iovec here = {&word, sizeof word}, there = {(void *)(uintptr_t)all[right].in, sizeof word};
    int32_t failed = process_vm_readv((pid_t)all[right].pid, &here, 1, &there, 1, 0) != sizeof word;
    QD_TRY(qd_comm_all_reduce(b->comms[LOCAL], &failed, &failed, 1, QD_I32, QD_MAX, NULL));
    b->neighbour = failed ? 0 : (pid_t)all[right].pid;
    b->neighbour_in = (const float *)(uintptr_t)all[right].in;
    return QD_OK;
}

static qd_status call(const bench *b, side s, qd_coll_kind kind, int64_t count, int root)
{
    int64_t bytes = count * 4 * (kind == QD_COLL_ALL_TO_ALL ? b->ranks : 1);
    if (s == COPIES)
        return copy(b, kind, bytes);
    if (is_bare(s))
        return copy_within(b, s, kind, bytes, root);
    if (s == MPI_OWN || s == MPI_MEMORY)
        return qd_mpi_native_call(kind, b->in[s], b->out[s], count, root);
    return ours(b->comms[s], kind, b->in[s], b->out[s], count, root);
}

/* Makes `rounds` calls; *seconds: of one on this rank. */
static qd_status sample(const bench *b, side s, qd_coll_kind kind, int64_t count, int64_t rounds, double *seconds)
{
    int right = (b->rank + 1) % b->ranks, left = (b->rank + b->ranks - 1) % b->ranks;
    double begin = 0;
    /* Warm up: these calls bring this side's buffers back into the caches after the other sides
     * have run. A shared cache keeps lines only once they are used again, so one turn is not
     * enough; without more, sides that share their buffers with the one before look faster. */
    const int64_t warm = rounds < b->ranks ? b->ranks : rounds < WARM_TURNS * b->ranks ? rounds : WARM_TURNS * b->ranks;
    for (int64_t i = -warm; i < rounds; i++) {
        if (i == 0) {
            QD_TRY(qd_comm_barrier(b->comms[LOCAL], NULL));
            begin = qd_clock_now();
        }
        if (kind != QD_COLL_SEND || s == COPIES || is_bare(s)) {
            QD_TRY(call(b, s, kind, count, (int)((i + warm) % b->ranks)));
            continue;
        }
        /* Even ranks send first, so that a send that waits for its receiver meets one. */
        for (int turn = 0; turn < 2; turn++) {
            bool sends = (b->rank + turn) % 2 == 0;
            QD_TRY(call(b, s, sends ? QD_COLL_SEND : QD_COLL_RECV, count, sends ? right : left));
        }
    }
    *seconds = (qd_clock_now() - begin) / (double)rounds;
    return QD_OK;
}

/* The maximum of each value over the ranks. */
static qd_status slowest(const bench *b, double *values, int count)
{
    return qd_comm_all_reduce(b->comms[LOCAL], values, values, count, QD_F64, QD_MAX, NULL);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bus_bytes(qd_coll_kind kind, int64_t bytes, int ranks)
{
    double part = (double)(ranks - 1) / ranks;
    switch (kind) {
    case QD_COLL_ALL_REDUCE:
        return 2 * part * (double)bytes;
    case QD_COLL_BROADCAST:
    case QD_COLL_REDUCE:
    case QD_COLL_SEND:
        return ranks > 1 ? (double)bytes : 0;
    case QD_COLL_BARRIER:
        return 0;
    default:
        return part * (double)bytes;
    }
}

/* Operations whose message has one part per rank. */
static bool in_parts(qd_coll_kind kind)
{
    return kind == QD_COLL_REDUCE_SCATTER || kind == QD_COLL_ALL_GATHER || kind == QD_COLL_ALL_TO_ALL ||
           kind == QD_COLL_GATHER || kind == QD_COLL_SCATTER;
}

static qd_status measure(bench *b, qd_coll_kind kind, int64_t bytes)
{
    int64_t count = kind == QD_COLL_ALL_TO_ALL ? bytes / 4 / b->ranks : bytes / 4;
    /* Warm up and estimate; the slowest side decides how many samples fit into the time. */
    double estimate[SIDES] = {0}, slow = 0;
    for (int turn = 0; turn < 2; turn++)
        for (int s = 0; s < b->sides; s++)
            if (takes_part(b, (side)s, kind, bytes))
                QD_TRY(sample(b, (side)s, kind, count, 1 + 2 * turn, &estimate[s]));
    QD_TRY(slowest(b, estimate, b->sides));
    int64_t rounds[SIDES];
    for (int s = 0; s < b->sides; s++) {
        double fit = SAMPLE_SECONDS / (estimate[s] > 1e-9 ? estimate[s] : 1e-9);
        rounds[s] = fit < 1 ? 1 : fit > ROUNDS_MOST ? ROUNDS_MOST : (int64_t)fit;
        /* Every rank is the root equally often. */
        rounds[s] = (rounds[s] + b->ranks - 1) / b->ranks * b->ranks;
        slow += estimate[s] * (double)rounds[s];
    }
    int samples = (int)(b->arguments.seconds / (slow > 1e-6 ? slow : 1e-6));
    if (samples > SAMPLES_MOST)
        samples = SAMPLES_MOST;
    if (samples < SAMPLES_LEAST)
        samples = SAMPLES_LEAST;

    double times[SIDES][SAMPLES_MOST], median[SIDES] = {0};
    for (int i = 0; i < samples; i++)
        for (int s = 0; s < b->sides; s++)
            if (takes_part(b, (side)s, kind, bytes))
                QD_TRY(sample(b, (side)s, kind, count, rounds[s], &times[s][i]));
    for (int s = 0; s < b->sides; s++) {
        if (!takes_part(b, (side)s, kind, bytes))
            continue;
        QD_TRY(slowest(b, times[s], samples));
        qsort(times[s], (size_t)samples, sizeof times[s][0], by_value);
        median[s] = times[s][samples / 2];
    }
    if (b->rank != 0 || b->board->count == QD_BENCH_ROWS_MOST)
        return QD_OK;
    double moved = bus_bytes(kind, bytes, b->ranks);
    bool mpi = b->sides == SIDES;
    double bare = median[BARE];
    for (int s = BARE; s <= BARE_LAST; s++)
        bare = median[s] < bare ? median[s] : bare;
    double theirs = median[MPI_OWN] < median[MPI_MEMORY] ? median[MPI_OWN] : median[MPI_MEMORY];
    b->board->rows[b->board->count++] = (qd_bench_collectives_row){
        .kind = kind,
        .ranks = b->ranks,
        .bytes = kind == QD_COLL_BARRIER ? 0 : bytes,
        .local_seconds = median[LOCAL],
        .plain_seconds = median[PLAIN],
        .mpi_backend_seconds = median[MPI_BACKEND],
        .mpi_seconds = theirs,
        .copy_seconds = median[COPIES],
        .bare_seconds = bare,
        .ratio = mpi ? theirs / median[LOCAL] : 0,
        .local_bandwidth = moved / median[LOCAL],
        .mpi_backend_bandwidth = mpi ? moved / median[MPI_BACKEND] : 0,
        .mpi_bandwidth = mpi ? moved / theirs : 0,
    };
    return QD_OK;
}

static qd_status parse(int count, char *const *arguments, qd_bench_rank_arguments *out)
{
    if (count != QD_BENCH_RANK_ARGUMENTS)
        return QD_FAIL(QD_USAGE, "ranks of bench collectives are started by quadrille, not by hand (%d arguments, not %d)",
                       count, QD_BENCH_RANK_ARGUMENTS);
    *out = (qd_bench_rank_arguments){
        .rank = atoi(arguments[0]),
        .ranks = atoi(arguments[1]),
        .smallest_bytes = atoll(arguments[2]),
        .largest_bytes = atoll(arguments[3]),
        .seconds = atof(arguments[4]),
        .operation = atoi(arguments[5]),
        .world_path = arguments[6],
        .board_path = arguments[7],
    };
    return QD_OK;
}

static qd_status open_board(bench *b)
{
    int fd = open(b->arguments.board_path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_IO, "cannot open %s: %s", b->arguments.board_path, strerror(errno));
    void *at = mmap(NULL, sizeof *b->board, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return QD_FAIL(QD_SYSTEM, "cannot map %s: %s", b->arguments.board_path, strerror(errno));
    b->board = at;
    return QD_OK;
}

static qd_status open_worlds(bench *b)
{
    bool mpi = b->arguments.rank < 0;
    b->rank = b->arguments.rank;
    b->ranks = b->arguments.ranks;
    b->sides = mpi ? SIDES : BARE_LAST + 1;
    if (mpi) {
        QD_TRY(qd_mpi_native_open(&b->rank, &b->ranks));
        if (b->ranks != b->arguments.ranks)
            return QD_FAIL(QD_SYSTEM, "mpirun created a world of %d ranks, not %d; does it belong to another MPI library?",
                           b->ranks, b->arguments.ranks);
    }
    int fd = open(b->arguments.world_path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_IO, "cannot open %s: %s", b->arguments.world_path, strerror(errno));
    qd_status status = qd_local_comm_open(fd, b->rank, &b->comms[LOCAL]);
    close(fd);
    QD_TRY(status);
    b->comms[PLAIN] = b->comms[LOCAL];
    if (mpi)
        QD_TRY(qd_mpi_comm_create(NULL, &b->comms[MPI_BACKEND]));
    return QD_OK;
}

static qd_status take_buffers(bench *b, int64_t bytes)
{
    for (int i = 0; i < 2; i++) {
        float **set = i ? b->out : b->in;
        QD_TRY(qd_comm_alloc(b->comms[LOCAL], bytes, (void **)&set[LOCAL]));
        set[PLAIN] = qd_memory_take(bytes);
        if (!set[PLAIN])
            return QD_FAIL(QD_NO_MEMORY, "no memory for two buffers of %lld bytes", (long long)bytes);
        for (int s = COPIES; s <= MPI_OWN; s++)
            set[s] = set[PLAIN];
        if (b->sides == SIDES)
            QD_TRY(qd_mpi_native_alloc(bytes, (void **)&set[MPI_MEMORY]));
        for (int64_t k = 0; k < bytes / 4; k++) {
            set[LOCAL][k] = set[PLAIN][k] = (float)(k % 1000) * 0.001f;
            if (set[MPI_MEMORY])
                set[MPI_MEMORY][k] = set[PLAIN][k];
        }
    }
    return QD_OK;
}

static void give_buffers(bench *b)
{
    for (int i = 0; i < 2; i++) {
        float **set = i ? b->out : b->in;
        if (set[LOCAL])
            qd_comm_free(b->comms[LOCAL], set[LOCAL]);
        free(set[PLAIN]);
        if (set[MPI_MEMORY])
            qd_mpi_native_free(set[MPI_MEMORY]);
    }
}

static qd_status measure_all(bench *b)
{
    size_t bytes = (size_t)b->arguments.largest_bytes + 64 * (size_t)b->ranks;
    QD_TRY(take_buffers(b, (int64_t)bytes));
    QD_TRY(meet_neighbour(b));
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int64_t size = b->arguments.smallest_bytes, last = 0; size <= b->arguments.largest_bytes; size *= 4) {
            int64_t bytes_here = size / 4 * 4, whole = 4 * (int64_t)b->ranks;
            if ((kinds[k] == QD_COLL_SEND && b->ranks == 1) ||
                (b->arguments.operation >= 0 && b->arguments.operation != (int)kinds[k]))
                break;
            /* All ranks have equal parts of at least one element. */
            if (in_parts(kinds[k]))
                bytes_here = size < whole ? whole : size / whole * whole;
            if (bytes_here == last)
                continue;
            last = bytes_here;
            QD_TRY(measure(b, kinds[k], bytes_here));
            if (kinds[k] == QD_COLL_BARRIER)
                break; /* no size */
        }
    return QD_OK;
}

qd_status qd_bench_collectives_rank(int count, char *const *arguments)
{
    bench b = {0};
    qd_status status;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* no process is left behind when the measurement is ended */
    QD_TRY_DONE(parse(count, arguments, &b.arguments));
    QD_TRY_DONE(open_board(&b));
    QD_TRY_DONE(open_worlds(&b));
    QD_TRY_DONE(measure_all(&b));

done:
    if (status != QD_OK) {
        /* A rank that failed because another one did has nothing to add. */
        if (b.board && status != QD_REMOTE && !atomic_exchange(&b.board->failed, 1)) {
            b.board->status = (int)status;
            snprintf(b.board->message, sizeof b.board->message, "rank %d: %s", b.rank, qd_error_message());
        }
        if (b.comms[LOCAL])
            qd_comm_abort(b.comms[LOCAL], qd_error_message());
        qd_mpi_end(1);
    }
    give_buffers(&b);
    qd_comm_destroy(b.comms[MPI_BACKEND]);
    qd_comm_destroy(b.comms[LOCAL]);
    if (b.arguments.rank < 0)
        qd_mpi_native_close();
    if (b.board)
        munmap(b.board, sizeof *b.board);
    return status;
}
