/* The hosts of a supervised run that a command starts (run.hosts): which may be used, and the
 * command line for them. */
#ifndef QD_TRAIN_LAUNCH_HOSTS_H
#define QD_TRAIN_LAUNCH_HOSTS_H

#include "base/text/strbuf.h"
#include "spec/config/config.h"

typedef struct qd_host {
    char name[256];
    int slots;
    int failures;  /* runs in a row that ended because of it */
    bool excluded; /* too many: not used until the file changes */
    bool absent;   /* it did not answer */
} qd_host;

typedef struct qd_hosts {
    const char *path, *check; /* run.hosts, "": none; run.host_check, "": all answer */
    int most_failures;
    qd_host *list;
    int count;
    uint64_t text; /* a hash of the file */
    int blamed;    /* the host that the present failure is due to; -1: not known */
} qd_hosts;

/* config: outlives it. */
void qd_hosts_begin(qd_hosts *h, const qd_config *config);
void qd_hosts_end(qd_hosts *h);
/* Reads the file if it has changed, which admits excluded hosts again. QD_USAGE names the line, and
 * the hosts stay as they were. */
qd_status qd_hosts_read(qd_hosts *h);
/* Asks all hosts concurrently whether they answer, for at most ten seconds. */
void qd_hosts_ask(qd_hosts *h);
/* Ranks that the hosts which may be used can take. */
int qd_hosts_slots(const qd_hosts *h);
/* A line that the command has printed: notes the first host that it blames. */
void qd_hosts_listen(qd_hosts *h, const char *line);
/* Before an attempt, and after a failure. Returns the host that is excluded because of it; NULL:
 * none. */
void qd_hosts_attempt(qd_hosts *h);
const qd_host *qd_hosts_blame(qd_hosts *h);
/* run.launcher with {ranks}, {hosts}, {names} and {nodes} replaced for so many ranks. */
qd_status qd_hosts_command(const qd_hosts *h, const char *launcher, int ranks, qd_strbuf *text);
#endif
