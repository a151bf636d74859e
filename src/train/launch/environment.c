/* Ranks that torchrun, a Kubernetes operator or srun has started without MPI: where they meet,
 * which rank this is, and the secret of their world. */
#include "train/launch/environment.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SECRET_MOST = 4096, SLURM_FIRST_PORT = 20000, SLURM_PORTS = 10000 };

static int number(const char *name, int least)
{
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long value = text ? strtol(text, &end, 10) : 0;
    return text && end != text && *end == '\0' && errno == 0 && value >= least && value <= INT_MAX ? (int)value : -1;
}

bool qd_launch_world_named(qd_launch_world *world)
{
    const char *address = getenv("MASTER_ADDR"), *store = getenv("TORCHELASTIC_USE_AGENT_STORE");
    *world = (qd_launch_world){.rank = number("RANK", 0), .size = number("WORLD_SIZE", 1), .port = number("MASTER_PORT", 1)};
    if (!address || world->rank < 0 || world->size <= 1 || world->port < 0)
        return false;
    world->starter = getenv("TORCHELASTIC_RUN_ID") ? "torchrun" : "another program";
    if (store && strcmp(store, "True") == 0) /* torchrun itself listens at the port */
        world->port += world->port < 65535 ? 1 : -1;
    snprintf(world->address, sizeof world->address, "%s", address);
    return true;
}

const char *qd_launch_world_missing(void)
{
    static const struct {
        const char *name;
        int least; /* 0 to 1: of a number; -1: a text */
    } variables[] = {{"RANK", 0}, {"WORLD_SIZE", 1}, {"MASTER_ADDR", -1}, {"MASTER_PORT", 1}};
    if (!getenv("WORLD_SIZE") || number("WORLD_SIZE", 1) == 1 || (!getenv("RANK") && !getenv("MASTER_ADDR")))
        return NULL;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        if (variables[i].least < 0 ? !getenv(variables[i].name) : number(variables[i].name, variables[i].least) < 0)
            return variables[i].name;
    return NULL;
}

/* The first of "c[1-2]n[003-010,12],other": "c1n003". */
static void first_host(const char *list, char *host, size_t bytes)
{
    size_t at = 0;
    bool inside = false, past = false; /* brackets; the first number in them */
    for (const char *c = list; *c && at + 1 < bytes && (inside || *c != ','); c++) {
        past = inside && (past || *c == '-' || *c == ',');
        if (*c == '[' || *c == ']')
            inside = *c == '[';
        else if (!past)
            host[at++] = *c;
    }
    host[at] = '\0';
}

bool qd_launch_world_slurm(int rank, int size, qd_launch_world *world)
{
    const char *address = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
    int port = number("MASTER_PORT", 1), job = number("SLURM_JOB_ID", 0), step = number("SLURM_STEP_ID", 0);
    *world = (qd_launch_world){.starter = "srun", .rank = rank, .size = size, .port = port};
    if (port < 0) /* of the steps that share a machine, each its own */
        world->port = SLURM_FIRST_PORT + (int)(((int64_t)(job < 0 ? 0 : job) * 16 + (step < 0 ? 0 : step)) % SLURM_PORTS);
    if (address)
        snprintf(world->address, sizeof world->address, "%s", address);
    else if (nodes)
        first_host(nodes, world->address, sizeof world->address);
    return world->address[0] != '\0' && rank >= 0 && size > 1;
}

/* Bytes of the file without a line break at its end. It must not be open to other users. */
static qd_status read_secret(const char *path, char secret[SECRET_MOST], int64_t *bytes)
{
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    qd_status status = QD_OK;
    ssize_t n = 0;
    if (fd < 0)
        return QD_FAIL(QD_IO, "run.secret_file: %s cannot be read: %s", path, strerror(errno));
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode))
        status = QD_FAIL(QD_USAGE, "run.secret_file: %s is not a file", path);
    else if ((about.st_mode & S_IRWXO) != 0)
        status = QD_FAIL(QD_USAGE, "run.secret_file: other users can open %s: chmod 600 %s", path, path);
    else if ((n = read(fd, secret, SECRET_MOST)) < 0 || n == SECRET_MOST)
        status = QD_FAIL(QD_USAGE, "run.secret_file: %s cannot be read, or has %d bytes or more", path, SECRET_MOST);
    close(fd);
    QD_TRY(status);
    while (n > 0 && (secret[n - 1] == '\n' || secret[n - 1] == '\r'))
        n--;
    *bytes = n;
    return n > 0 ? QD_OK : QD_FAIL(QD_USAGE, "run.secret_file: %s is empty", path);
}

static bool is_asked(void *stop)
{
    return atomic_load((const atomic_int *)stop) != 0;
}

qd_status qd_launch_world_join(const qd_launch_world *world, const qd_options *options, const qd_comm_join *how, const atomic_int *stop,
                               const qd_comm_config *config, qd_comm **comm)
{
    char secret[SECRET_MOST];
    const char *file = options ? qd_options_string(options, "run.secret_file") : "", *variable = getenv("QUADRILLE_SECRET");
    qd_comm_join join = how ? *how : qd_comm_join_default();
    *comm = NULL;
    join.address = world->address;
    join.port = world->port;
    join.rank = world->rank;
    join.ranks = world->size;
    if (!join.stops) {
        join.stops = is_asked;
        join.context = (void *)(uintptr_t)stop;
    }
    if (options) {
        join.interface = qd_options_string(options, "run.interface");
        join.seconds = how ? how->seconds : qd_options_float(options, "run.join_deadline");
    }
    if (file[0] != '\0') {
        QD_TRY(read_secret(file, secret, &join.secret_bytes));
        join.secret = secret;
    } else if (variable) {
        join.secret = variable;
        join.secret_bytes = (int64_t)strlen(variable);
    }
    qd_status status = qd_ucx_comm_create(config, &join, comm);
    explicit_bzero(secret, sizeof secret);
    return status;
}
