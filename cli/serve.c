/* quadrille serve: runs and the planner as pages of a local web server. */
#include "cli.h"

#include <quadrille/serve.h>
#include <signal.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* The planner's page asks for a simulation at every move of a slider, and each needs up to 200 MB
 * for a moment. Keeps that memory in the process: getting it from the kernel again takes a third of
 * the time of an answer. */
static void keep_memory(void)
{
#ifdef __GLIBC__
    enum { LARGEST = 1 << 30 };
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_THRESHOLD, LARGEST);
    mallopt(M_TRIM_THRESHOLD, LARGEST);
#endif
}

static qd_status run(cli_call *call)
{
    static const char *const usual[] = {"runs"};
    const char *address = qd_options_string(call->options, "bind");
    qd_serve_options options = qd_serve_options_default();
    qd_server *server = NULL;
    sigset_t stop;
    int signal;
    options.folders = call->word_count > 0 ? call->words : usual;
    options.folder_count = call->word_count > 0 ? call->word_count : 1;
    options.address = address[0] ? address : NULL;
    options.port = (int)qd_options_int(call->options, "port");
    if (call->word_count == 0 && qd_serve_built() && access(usual[0], F_OK) != 0)
        return QD_FAIL(QD_USAGE, "serve: there is no folder 'runs' here: name the run folders, or a folder that contains them");
    sigemptyset(&stop); /* threads of the server inherit the mask, so that this one receives the signals */
    sigaddset(&stop, SIGINT);
    sigaddset(&stop, SIGTERM);
    sigaddset(&stop, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &stop, NULL);
    keep_memory();
    QD_TRY(qd_serve_start(&options, &server));
    printf("%s\n", qd_server_url(server));
    fflush(stdout);
    if (!qd_server_is_local(server))
        cli_on_failure(NULL, "warning: other machines can connect, and nothing is encrypted: anyone who can read the network can read "
                             "the token and your runs. A tunnel is safer: ssh -L PORT:127.0.0.1:PORT");
    cli_on_failure(NULL, "open this address in a browser; the part after # is the token. Ctrl-C ends the server");
    sigwait(&stop, &signal);
    qd_server_stop(server);
    return QD_OK;
}

static const qd_option own[] = {
    {"port", QD_OPTION_INT, "0", 0, 65535, NULL, "port to listen on; 0: any free one", NULL},
    {"bind", QD_OPTION_STRING, "", 0, 0, NULL, "address to listen on; empty: 127.0.0.1, which only this machine reaches", NULL},
};

const cli_command cli_serve = {
    .name = "serve",
    .arguments = "[FOLDER …] [--port N] [--bind ADDRESS]",
    .summary = "Shows runs live in the browser, and the planner as a page",
    .details = "FOLDER is a run folder or contains run folders; without one it is runs. Prints the address to open. Files are only\n"
               "read, so that runs can be watched while they train, also on a shared file system.",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};
