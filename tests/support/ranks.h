/* Runs a test body on several ranks: as threads, as processes, or under MPI.
 *
 * A test's main() first calls qd_ranks_main() with a table of all its bodies: processes and MPI
 * ranks execute the test program again, which finds its body there by name and does not return from
 * the call. */
#ifndef QD_TEST_RANKS_H
#define QD_TEST_RANKS_H

#include <quadrille/comm.h>

typedef enum qd_ranks_mode {
    QD_RANKS_THREADS,
    QD_RANKS_PROCESSES,
    QD_RANKS_STAGED, /* processes that do not read each other's memory (qd_comm_config.no_remote_reads) */
    QD_RANKS_MPI,
    QD_RANKS_UCX, /* processes that meet by themselves (qd_ucx_comm_create) */
    QD_RANKS_DEVICE, /* threads; the body gets a communicator on a CPU device of its rank (comm/device.h) */
    QD_RANKS_MODE_COUNT
} qd_ranks_mode;
const char *qd_ranks_mode_name(qd_ranks_mode mode);
/* False for MPI and UCX in builds without them, or if mpirun is missing. */
bool qd_ranks_mode_available(qd_ranks_mode mode);

/* The `arg` of a body. */
typedef struct qd_ranks_call {
    const char *text; /* from the options; "" if none */
    qd_ranks_mode mode;
    uint64_t value; /* set by the body; returned in its result */
} qd_ranks_call;

typedef qd_status (*qd_ranks_body)(qd_comm *world, void *arg);
typedef struct qd_ranks_entry {
    const char *name;
    qd_ranks_body body;
} qd_ranks_entry;

/* Runs the body and exits if this process is a rank; otherwise returns. The table must stay
 * valid. */
void qd_ranks_main(int argc, char **argv, const qd_ranks_entry *bodies, int count);

typedef struct qd_ranks_options {
    const char *text;
    double deadline_seconds; /* of the world; 0: 20 */
    int64_t staging_bytes;   /* of the world; 0: 256 KiB, so that medium-sized messages already use the ring */
    double limit_seconds;    /* after which everything is killed; 0: 60 */
    bool no_remote_reads;    /* of the world, for threads too */
    const char *ways;        /* of the world; NULL: those of a machine that was not measured */
    bool tell_deaths;        /* processes: the parent reports a rank's death to the others, as the launcher does */
} qd_ranks_options;

typedef struct qd_ranks_result {
    bool returned; /* the body returned; otherwise the rank was killed */
    qd_status status;
    char message[512];
    uint64_t value;
    double seconds; /* from the start of the run to the end of the body, approximately */
} qd_ranks_result;

/* results: (size). Fails if the ranks could not be started or the limit has passed. Leaves no
 * process behind. */
qd_status qd_ranks_run(const char *body, qd_ranks_mode mode, int size, const qd_ranks_options *options,
                       qd_ranks_result *results);

/* The same, but fails with the first rank's message unless every body returned QD_OK. */
qd_status qd_ranks_run_ok(const char *body, qd_ranks_mode mode, int size, const qd_ranks_options *options,
                          qd_ranks_result *results);

#endif
