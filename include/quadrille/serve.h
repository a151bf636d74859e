/* A web server for one user: a page that follows runs while they train, and the planner as a page.
 *
 * Data is sent only to requests with the server's token in the header "Authorization: Bearer". The
 * token is part of the address that the user opens, after '#', which browsers do not send. Files
 * are only read, and only those of run folders below the given folders. Nothing here is
 * collective. */
#ifndef QUADRILLE_SERVE_H
#define QUADRILLE_SERVE_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_serve_options {
    size_t size;
    const char *const *folders; /* run folders, or folders that contain them up to two levels deep */
    int folder_count;
    const char *address; /* to listen on, such as "127.0.0.1" or "::"; NULL: 127.0.0.1 */
    int port;            /* 0: any free one */
} qd_serve_options;
QD_SIZED_DEFAULT(qd_serve_options)

typedef struct qd_server qd_server;

/* Whether the server is built in, which needs libmicrohttpd. */
QD_API bool qd_serve_built(void);

/* Starts the server, in threads of its own. The caller owns *server. QD_USAGE for a folder or an
 * address that does not exist, QD_BUSY for a port that is in use, QD_UNSUPPORTED if it is not built
 * in. */
QD_API qd_status qd_serve_start(const qd_serve_options *options, qd_server **server);
/* The address to open, with the token; belongs to the server. */
QD_API const char *qd_server_url(const qd_server *server);
/* Whether only programs on this machine can connect. */
QD_API bool qd_server_is_local(const qd_server *server);
/* Ends all connections and running searches of the planner, and frees the server. NULL is legal. */
QD_API void qd_server_stop(qd_server *server);

#ifdef __cplusplus
}
#endif
#endif
