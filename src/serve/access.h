/* Who may ask: the token, and which names and pages requests may come from. */
#ifndef QD_SERVE_ACCESS_H
#define QD_SERVE_ACCESS_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>

enum { QD_TOKEN_DIGITS = 32 }; /* 128 bits */

typedef struct qd_access {
    char token[QD_TOKEN_DIGITS + 1];
    char host[256]; /* this machine's name, accepted if others may connect; "": none */
} qd_access;

/* Fills `text` with `digits` random hexadecimal digits and a NUL. QD_SYSTEM if there are none. */
qd_status qd_access_random(char *text, size_t digits);

/* Whether a Host header names this server. Addresses and localhost do, whatever the port, so that
 * tunnels work. Other names do not: a page of another site could make its own name point here (DNS
 * rebinding). NULL: no header. */
bool qd_access_host(const qd_access *access, const char *host);
/* Whether the request comes from a page of this server or from no page. origin and site: the
 * headers Origin and Sec-Fetch-Site, NULL if missing. */
bool qd_access_origin(const char *host, const char *origin, const char *site);
/* Whether an Authorization header has the token. Takes the same time for any text of its length. */
bool qd_access_token(const qd_access *access, const char *authorization);
#endif
