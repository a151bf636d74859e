/* The web server: checks each request, finds what it asks for, and sends the page or JSON. The only
 * requests are those of the table `routes`. */
#include "base/sized.h"
#include "base/text/json_writer.h"
#include "report/page.h"
#include "serve/access.h"
#include "serve/patience.h"
#include "serve/planner.h"
#include "serve/runs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <quadrille/serve.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum {
    MOST_CONNECTIONS = 256,
    HEADER_BYTES = 16 << 10, /* request line and headers together */
    MOST_BODY = 64 << 10,
    IDLE_SECONDS = 20,
    QUIET_SECONDS = 30, /* to send a request */
    BUSY_SECONDS = 120, /* to receive the answer */
    CANNOT_ANSWER = 422, TOO_LARGE = 413, /* status; names differ between versions of libmicrohttpd */
};

struct qd_server {
    struct MHD_Daemon *daemon;
    qd_access access;
    qd_runs *runs;
    qd_planner *planner;
    qd_patience *watch;
    char url[256];
    bool local;
};

/* One request. */
typedef struct request {
    qd_server *server;
    struct MHD_Connection *connection;
    qd_strbuf body; /* of a POST */
    bool too_large;
} request;

typedef struct answer {
    unsigned status;
    const char *type;
    qd_strbuf text;
    char nonce[QD_TOKEN_DIGITS + 1]; /* of the page; "": none */
} answer;

static const char *argument(const request *q, const char *key)
{
    const char *value = MHD_lookup_connection_value(q->connection, MHD_GET_ARGUMENT_KIND, key);
    return value ? value : "";
}

static const char *header(const request *q, const char *key)
{
    return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, key);
}

static enum MHD_Result count_hosts(void *count, enum MHD_ValueKind kind, const char *key, const char *value)
{
    (void)kind;
    (void)value;
    *(int *)count += strcasecmp(key, "Host") == 0;
    return MHD_YES;
}

/* Whether the request names one host, and that is this server. */
static bool is_host_right(const request *q)
{
    int count = 0;
    MHD_get_connection_values(q->connection, MHD_HEADER_KIND, count_hosts, &count);
    return count == 1 && qd_access_host(&q->server->access, header(q, "Host"));
}

/* A number in the query; -1 if it is missing or not a number. */
static int64_t number(const request *q, const char *key)
{
    const char *text = argument(q, key);
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0 ? value : -1;
}

static void refuse(answer *a, unsigned status, const char *why)
{
    qd_json_writer w = qd_json_writer_on(&a->text);
    qd_strbuf_clear(&a->text);
    a->status = status;
    a->type = "application/json";
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "error", why);
    qd_json_end(&w);
}

static qd_status send_page(const request *q, answer *a)
{
    qd_strbuf live = {0};
    (void)q;
    a->type = "text/html; charset=utf-8";
    qd_strbuf_puts(&live, "{\"live\":true}");
    qd_status status = qd_access_random(a->nonce, QD_TOKEN_DIGITS);
    if (status == QD_OK)
        status = qd_report_page("runs", &live, a->nonce, &a->text);
    qd_strbuf_free(&live);
    return status;
}

/* Browsers ask for it. */
static qd_status send_icon(const request *q, answer *a)
{
    (void)q;
    a->status = MHD_HTTP_NO_CONTENT;
    return QD_OK;
}

static qd_status send_list(const request *q, answer *a)
{
    return qd_runs_list(q->server->runs, &a->text);
}

static qd_status send_progress(const request *q, answer *a)
{
    return qd_runs_progress(q->server->runs, number(q, "run"), argument(q, "epoch"), number(q, "row"), &a->text);
}

static qd_status send_report(const request *q, answer *a)
{
    return qd_runs_report(q->server->runs, number(q, "run"), &a->text);
}

static qd_status send_choices(const request *q, answer *a)
{
    (void)q;
    return qd_planner_choices(&a->text);
}

/* The body as a string. */
static qd_status read_body(const request *q, const char **text)
{
    *text = q->body.data ? q->body.data : "";
    if (q->body.failed || strlen(*text) != q->body.length)
        return QD_FAIL(QD_USAGE, "the request is not text");
    return QD_OK;
}

static qd_status send_step(const request *q, answer *a)
{
    const char *text;
    QD_TRY(read_body(q, &text));
    return qd_planner_step(q->server->planner, text, &a->text);
}

static qd_status start_search(const request *q, answer *a)
{
    const char *text;
    QD_TRY(read_body(q, &text));
    return qd_planner_search(q->server->planner, text, &a->text);
}

static qd_status send_search(const request *q, answer *a)
{
    return qd_planner_progress(q->server->planner, &a->text);
}

static qd_status stop_search(const request *q, answer *a)
{
    return qd_planner_stop(q->server->planner, &a->text);
}

static const struct route {
    const char *path, *method;
    bool open; /* needs no token: contains nothing but the program's own page */
    qd_status (*send)(const request *q, answer *a);
} routes[] = {
    {"/", "GET", true, send_page},
    {"/favicon.ico", "GET", true, send_icon},
    {"/api/runs", "GET", false, send_list},
    {"/api/progress", "GET", false, send_progress},
    {"/api/report", "GET", false, send_report},
    {"/api/choices", "GET", false, send_choices},
    {"/api/step", "POST", false, send_step},
    {"/api/search", "POST", false, start_search},
    {"/api/search", "GET", false, send_search},
    {"/api/stop", "POST", false, stop_search},
};

static void respond(const request *q, const struct route *route, answer *a)
{
    qd_status status = route->send(q, a);
    if (status == QD_OK && a->text.failed)
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the answer");
    if (status == QD_OK)
        return;
    bool wrong = status == QD_USAGE || status == QD_UNSUPPORTED || status == QD_CORRUPT || status == QD_NO_MEMORY;
    unsigned code = wrong ? CANNOT_ANSWER : status == QD_BUSY ? MHD_HTTP_SERVICE_UNAVAILABLE : MHD_HTTP_INTERNAL_SERVER_ERROR;
    refuse(a, code, qd_error_message());
    qd_error_clear();
}

/* Everything that does not depend on the body. NULL: refused. */
static const struct route *admit(const request *q, const char *url, const char *method, answer *a)
{
    const char *host = header(q, "Host"), *length = header(q, "Content-Length");
    const struct route *route = NULL;
    bool known = false;
    if (!is_host_right(q)) {
        refuse(a, MHD_HTTP_FORBIDDEN, "the header Host does not name this server");
        return NULL;
    }
    for (size_t i = 0; i < sizeof routes / sizeof *routes && !route; i++)
        if (strcmp(routes[i].path, url) == 0) {
            known = true;
            route = strcmp(routes[i].method, method) == 0 ? &routes[i] : NULL;
        }
    if (!known)
        refuse(a, MHD_HTTP_NOT_FOUND, "there is no such page");
    else if (!route)
        refuse(a, MHD_HTTP_METHOD_NOT_ALLOWED, "this method is not allowed here");
    else if (!route->open && !qd_access_origin(host, header(q, "Origin"), header(q, "Sec-Fetch-Site")))
        refuse(a, MHD_HTTP_FORBIDDEN, "the request comes from a page of another site");
    else if (!route->open && !qd_access_token(&q->server->access, header(q, "Authorization")))
        refuse(a, MHD_HTTP_UNAUTHORIZED, "the token is missing or wrong: open the address that quadrille serve has printed");
    else if (length && strtoull(length, NULL, 10) > MOST_BODY)
        refuse(a, TOO_LARGE, "the request is too large");
    else
        return route;
    return NULL;
}

static enum MHD_Result deliver(const request *q, answer *a)
{
    char policy[320], script[80] = "'none'";
    if (a->text.failed)
        return MHD_NO;
    if (a->nonce[0])
        snprintf(script, sizeof script, "'nonce-%s'", a->nonce);
    snprintf(policy, sizeof policy,
             "default-src 'none'; script-src %s; style-src %s; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
             "frame-ancestors 'none'",
             script, script);
    const char *const headers[][2] = {
        {"Content-Type", a->type},
        {"Content-Security-Policy", policy},
        {"Cache-Control", "no-store"},
        {"X-Content-Type-Options", "nosniff"},
        {"X-Frame-Options", "DENY"},
        {"Referrer-Policy", "no-referrer"},
        {"Cross-Origin-Resource-Policy", "same-origin"},
        {"Cross-Origin-Opener-Policy", "same-origin"},
    };
    size_t length = a->text.length;
    struct MHD_Response *response = MHD_create_response_from_buffer(length, a->text.data, MHD_RESPMEM_MUST_FREE);
    if (!response)
        return MHD_NO;
    a->text = (qd_strbuf){0}; /* belongs to the response */
    bool good = true;
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        good = good && MHD_add_response_header(response, headers[i][0], headers[i][1]) == MHD_YES;
    enum MHD_Result result = good ? MHD_queue_response(q->connection, a->status, response) : MHD_NO;
    MHD_destroy_response(response);
    return result;
}

static int *watch_number(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

static void set_busy(qd_server *s, struct MHD_Connection *connection, bool busy)
{
    const int *place = watch_number(connection);
    if (place)
        (busy ? qd_patience_busy : qd_patience_quiet)(s->watch, *place);
}

/* Called once when the headers have arrived, then for each part of the body, then at its end. */
static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *bytes, void **own)
{
    request *q = *own;
    answer a = {.status = MHD_HTTP_OK, .type = "application/json"};
    (void)version;
    if (!q) {
        if (!(q = calloc(1, sizeof *q)))
            return MHD_NO;
        *own = q;
        q->server = context;
        q->connection = connection;
        set_busy(q->server, connection, true);
        if (admit(q, url, method, &a))
            return MHD_YES; /* answered when the body, if any, has arrived; refusals do not wait for it */
        enum MHD_Result refused = deliver(q, &a);
        qd_strbuf_free(&a.text);
        return refused;
    }
    if (*bytes > 0) {
        q->too_large = q->too_large || q->body.length + *bytes > MOST_BODY;
        if (!q->too_large)
            qd_strbuf_append(&q->body, data, *bytes);
        *bytes = 0;
        return q->too_large ? MHD_NO : MHD_YES;
    }
    const struct route *route = admit(q, url, method, &a);
    if (route)
        respond(q, route, &a);
    enum MHD_Result result = deliver(q, &a);
    qd_strbuf_free(&a.text);
    return result;
}

static void on_end(void *context, struct MHD_Connection *connection, void **own, enum MHD_RequestTerminationCode code)
{
    request *q = *own;
    (void)code;
    set_busy(context, connection, false);
    if (q) {
        qd_strbuf_free(&q->body);
        free(q);
        *own = NULL;
    }
}

static void on_connection(void *context, struct MHD_Connection *connection, void **own, enum MHD_ConnectionNotificationCode code)
{
    qd_server *s = context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        int *place = malloc(sizeof *place);
        if (place)
            *place = info ? qd_patience_add(s->watch, info->connect_fd) : -1;
        *own = place;
    } else if (*own) {
        qd_patience_remove(s->watch, *(int *)*own);
        free(*own);
        *own = NULL;
    }
}

/* An address and port to listen on. */
static qd_status resolve(const char *text, int port, struct sockaddr_storage *address, bool *local)
{
    struct sockaddr_in *four = (struct sockaddr_in *)address;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)address;
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons((uint16_t)port);
        *local = ntohl(four->sin_addr.s_addr) >> 24 == 127;
        return QD_OK;
    }
    if (inet_pton(AF_INET6, text, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons((uint16_t)port);
        *local = IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
        return QD_OK;
    }
    return QD_FAIL(QD_USAGE, "serve: '%s' is not an address to listen on, such as 127.0.0.1, 0.0.0.0 or ::1", text);
}

static qd_status listen_on(qd_server *s, const char *text, int port)
{
    struct sockaddr_storage address;
    QD_TRY(resolve(text, port, &address, &s->local));
    bool six = address.ss_family == AF_INET6, any = strcmp(text, "0.0.0.0") == 0 || strcmp(text, "::") == 0;
    if (!s->local && gethostname(s->access.host, sizeof s->access.host - 1) != 0)
        s->access.host[0] = '\0';
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | (six ? MHD_USE_IPv6 : 0u);
    s->daemon = MHD_start_daemon(flags, (uint16_t)port, NULL, NULL, on_request, s, MHD_OPTION_SOCK_ADDR, &address,
                                 MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT,
                                 (unsigned)IDLE_SECONDS, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES,
                                 MHD_OPTION_NOTIFY_COMPLETED, on_end, s, MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_END);
    if (!s->daemon)
        return QD_FAIL(errno == EADDRINUSE ? QD_BUSY : QD_SYSTEM, "serve: cannot listen on %s port %d: %s", text, port, strerror(errno));
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_BIND_PORT);
    const char *name = any && s->access.host[0] ? s->access.host : text;
    snprintf(s->url, sizeof s->url, six && name == text ? "http://[%.200s]:%d/#%s" : "http://%.200s:%d/#%s", name, info ? info->port : port,
             s->access.token);
    return QD_OK;
}

bool qd_serve_built(void)
{
    return true;
}

qd_status qd_serve_start(const qd_serve_options *given, qd_server **server)
{
    qd_serve_options o = qd_serve_options_default();
    *server = NULL;
    QD_TRY(QD_SIZED_READ(given, qd_serve_options, &o));
    if (o.port < 0 || o.port > 65535)
        return QD_FAIL(QD_USAGE, "serve: the port is %d; it must be between 0 and 65535", o.port);
    qd_server *s = calloc(1, sizeof *s);
    if (!s)
        return QD_FAIL(QD_NO_MEMORY, "serve: no memory");
    qd_status status = qd_access_random(s->access.token, QD_TOKEN_DIGITS);
    if (status == QD_OK)
        status = qd_runs_create(o.folders, o.folder_count, &s->runs);
    if (status == QD_OK)
        status = qd_planner_create(&s->planner);
    if (status == QD_OK)
        status = qd_patience_create(MOST_CONNECTIONS, QUIET_SECONDS, BUSY_SECONDS, &s->watch);
    if (status == QD_OK)
        status = listen_on(s, o.address ? o.address : "127.0.0.1", o.port);
    if (status != QD_OK) {
        qd_server_stop(s);
        return status;
    }
    *server = s;
    return QD_OK;
}

const char *qd_server_url(const qd_server *s)
{
    return s->url;
}

bool qd_server_is_local(const qd_server *s)
{
    return s->local;
}

void qd_server_stop(qd_server *s)
{
    if (!s)
        return;
    if (s->daemon)
        MHD_stop_daemon(s->daemon);
    qd_patience_destroy(s->watch);
    qd_planner_destroy(s->planner);
    qd_runs_destroy(s->runs);
    free(s);
}
