/* The options that say what a run does about faults: comparisons of replicas, gradients and
 * messages, restarts, and a number of ranks that changes. */
#include "spec/config/config.h"

#include <stdio.h>
#include <string.h>

qd_status qd_elastic_resolve(const qd_options *o, qd_config *c)
{
    const char *text = qd_options_string(o, "run.elastic");
    int used = 0;
    c->from_checkpoint = qd_options_enum(o, "run.recover") == 1;
    c->available = qd_options_string(o, "run.available");
    c->hosts = qd_options_string(o, "run.hosts");
    c->host_check = qd_options_string(o, "run.host_check");
    c->host_failures = (int)qd_options_int(o, "run.host_failures");
    c->elastic_least = c->elastic_most = 0;
    if (text[0] == '\0')
        return QD_OK;
    if (sscanf(text, "%9d..%9d%n", &c->elastic_least, &c->elastic_most, &used) != 2 || text[used] != '\0' || c->elastic_least < 1 ||
        c->elastic_most < c->elastic_least)
        return QD_FAIL(QD_USAGE, "run.elastic is '%s'; it must be the fewest and the most ranks, such as 5..8", text);
    return QD_OK;
}

/* Refuses keys of elastic runs and of hosts that contradict each other, here and not where ranks
 * are started, so that `check` refuses them too. */
static qd_status check_elastic(const qd_config *c)
{
    if (c->elastic_most == 0 && c->available[0] != '\0')
        return QD_FAIL(QD_USAGE, "run.available has no effect without run.elastic: set the fewest and the most ranks, such as "
                                 "run.elastic=1..%d", c->world);
    if (c->hosts[0] != '\0' && c->launcher[0] == '\0')
        return QD_FAIL(QD_USAGE, "run.hosts is for ranks that a command starts: set run.launcher, such as 'mpirun -n {ranks} --host "
                                 "{hosts}'");
    if (c->hosts[0] != '\0' && !strstr(c->launcher, "{hosts}") && !strstr(c->launcher, "{names}"))
        return QD_FAIL(QD_USAGE, "run.hosts has no effect on this run.launcher: it must have {hosts} (a:8,b:8) or {names} (a,b) in it");
    if (c->host_check[0] != '\0' && (c->hosts[0] == '\0' || !strstr(c->host_check, "{host}")))
        return QD_FAIL(QD_USAGE, "run.host_check asks each host of run.hosts: it needs run.hosts, and {host} in the command");
    if (c->elastic_most == 0)
        return QD_OK;
    if (c->launcher[0] != '\0' && !strstr(c->launcher, "{ranks}"))
        return QD_FAIL(QD_USAGE, "run.elastic changes the number of ranks, and run.launcher has no {ranks} in it, where that number "
                                 "belongs");
    if (c->restarts == 0)
        return QD_FAIL(QD_USAGE, "run.elastic is for supervised runs: set run.restarts, how often ranks may be lost");
    if (c->launcher[0] == '\0' && (c->world < c->elastic_least || c->world > c->elastic_most))
        return QD_FAIL(QD_USAGE, "run.elastic allows %d to %d ranks, and parallel.ranks is %d: start with a number in between",
                       c->elastic_least, c->elastic_most, c->world);
    if (c->launcher[0] == '\0' && c->from_checkpoint)
        return QD_FAIL(QD_USAGE, "run.recover=checkpoint starts all local ranks again, and run.elastic changes their number while they "
                                 "run: leave one of them out");
    return QD_OK;
}

static qd_status resolve_checks(const qd_options *o, qd_config *c)
{
    c->check_replicas = qd_options_int(o, "run.check_replicas");
    c->heal = qd_options_enum(o, "run.on_difference") == 1;
    c->check_messages = qd_options_bool(o, "run.check_messages");
    c->check_gradients = qd_options_int(o, "run.check_gradients");
    if (c->check_replicas < 0)
        c->check_replicas = strcmp(c->device, "cpu") == 0 ? 100 : 0;
    if (c->check_messages && strcmp(c->device, "cpu") != 0)
        return QD_FAIL(QD_USAGE, "run.check_messages takes checksums in host memory, which GPUs do not exchange: it needs run.device=cpu");
    if (c->check_gradients > 0 && strcmp(c->device, "cpu") != 0)
        return QD_FAIL(QD_USAGE, "run.check_gradients compares bits of gradients that are computed twice, which kernels of GPUs do not "
                                 "reproduce: it needs run.device=cpu");
    if (c->heal && c->check_replicas == 0)
        return QD_FAIL(QD_USAGE, "run.on_difference=heal has no effect on replicas that are not compared: set run.check_replicas to the "
                                 "steps between comparisons");
    return QD_OK;
}

qd_status qd_faults_resolve(const qd_options *o, qd_config *c)
{
    QD_TRY(resolve_checks(o, c));
    c->restarts = qd_options_int(o, "run.restarts");
    if (c->restarts > 0 && !c->save)
        return QD_FAIL(QD_USAGE, "run.restarts needs checkpoints to restart from: leave run.save=false out");
    c->launcher = qd_options_string(o, "run.launcher");
    if (c->launcher[0] != '\0' && c->restarts == 0)
        return QD_FAIL(QD_USAGE, "run.launcher is for runs that restart: set run.restarts, or call '%s quadrille train ...'", c->launcher);
    QD_TRY(qd_elastic_resolve(o, c));
    return check_elastic(c);
}
