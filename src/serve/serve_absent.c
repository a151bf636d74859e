/* Replaces the server in builds without libmicrohttpd. */
#include <quadrille/serve.h>

bool qd_serve_built(void)
{
    return false;
}

qd_status qd_serve_start(const qd_serve_options *options, qd_server **server)
{
    (void)options;
    *server = NULL;
    return QD_FAIL(QD_UNSUPPORTED, "serve: this version was built without libmicrohttpd (Debian: libmicrohttpd-dev); install it and build "
                                   "again, or draw a run with quadrille report");
}

const char *qd_server_url(const qd_server *server)
{
    (void)server;
    return "";
}

bool qd_server_is_local(const qd_server *server)
{
    (void)server;
    return true;
}

void qd_server_stop(qd_server *server)
{
    (void)server;
}
