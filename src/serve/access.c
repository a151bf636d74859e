/* Checks the headers of a request: see access.h. */
#include "serve/access.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

qd_status qd_access_random(char *text, size_t digits)
{
    static const char hex[] = "0123456789abcdef";
    for (size_t i = 0; i < digits; i++) {
        unsigned char byte;
        ssize_t n;
        do
            n = getrandom(&byte, 1, 0);
        while (n < 0 && errno == EINTR);
        if (n != 1)
            return QD_FAIL(QD_SYSTEM, "serve: no random numbers for a token: %s", strerror(errno));
        text[i] = hex[byte & 15];
    }
    text[digits] = '\0';
    return QD_OK;
}

/* The host of "host:port" or "[address]:port", without brackets; false if it does not look like
 * one. */
static bool split_host(const char *header, char *name, size_t size)
{
    const char *end = header[0] == '[' ? strchr(header, ']') : header + strcspn(header, ":");
    const char *begin = header[0] == '[' ? header + 1 : header;
    if (!end || end == begin || (size_t)(end - begin) >= size)
        return false;
    memcpy(name, begin, (size_t)(end - begin));
    name[end - begin] = '\0';
    const char *port = end + (*end == ']');
    if (*port == '\0')
        return true;
    size_t digits = strspn(port + 1, "0123456789");
    return *port == ':' && digits >= 1 && digits <= 5 && port[1 + digits] == '\0';
}

bool qd_access_host(const qd_access *access, const char *host)
{
    char name[256];
    unsigned char address[16];
    if (!host || !split_host(host, name, sizeof name))
        return false;
    if (host[0] == '[')
        return inet_pton(AF_INET6, name, address) == 1;
    return inet_pton(AF_INET, name, address) == 1 || strcasecmp(name, "localhost") == 0 ||
           (access->host[0] && strcasecmp(name, access->host) == 0);
}

bool qd_access_origin(const char *host, const char *origin, const char *site)
{
    if (site && strcmp(site, "same-origin") != 0 && strcmp(site, "none") != 0)
        return false;
    return !origin || (strncmp(origin, "http://", 7) == 0 && strcasecmp(origin + 7, host) == 0);
}

bool qd_access_token(const qd_access *access, const char *authorization)
{
    static const char scheme[] = "Bearer ";
    unsigned char difference = 0;
    if (!authorization || strncmp(authorization, scheme, sizeof scheme - 1) != 0)
        return false;
    const char *given = authorization + sizeof scheme - 1;
    if (strlen(given) != QD_TOKEN_DIGITS)
        return false;
    for (int i = 0; i < QD_TOKEN_DIGITS; i++)
        difference |= (unsigned char)(given[i] ^ access->token[i]);
    return difference == 0;
}
