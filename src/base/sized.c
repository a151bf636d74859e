/* For programs whose headers are of another version than the loaded library: copies the part of a
 * struct that both sides know (sized.h), and tells the library's version. */
#include "base/sized.h"

#include <quadrille/version.h>

/* Beyond what this version has, and less than a size that was never set is likely to be. */
#define MOST_GROWTH 4096

static size_t size_of(const void *given)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    return size;
}

qd_status qd_sized_check(const void *given, const char *name, size_t own_size)
{
    if (!given)
        return QD_FAIL(QD_USAGE, "%s: there is none (NULL)", name);
    if (size_of(given) <= sizeof(size_t) || size_of(given) > own_size + MOST_GROWTH)
        return QD_FAIL(QD_USAGE, "%s: its size is %zu: start from %s_default()", name, size_of(given), name);
    return QD_OK;
}

qd_status qd_sized_read(const void *given, const char *name, void *own, size_t own_size)
{
    QD_TRY(qd_sized_check(given, name, own_size));
    size_t size = size_of(given);
    for (size_t i = own_size; i < size; i++)
        if (((const char *)given)[i] != 0)
            return QD_FAIL(QD_UNSUPPORTED, "%s: the program sets a member that this library (%s) does not have: it needs a newer one", name,
                           QD_VERSION);
    memcpy(own, given, size < own_size ? size : own_size);
    memcpy(own, &own_size, sizeof own_size);
    return QD_OK;
}

void qd_sized_write(void *given, const void *own, size_t own_size)
{
    if (!given)
        return;
    size_t size = size_of(given), common = size < own_size ? size : own_size;
    memcpy(given, own, common);
    memcpy(given, &size, sizeof size);
    if (size > common)
        memset((char *)given + common, 0, size - common);
}

void qd_sized_init(void *given, size_t given_size, const void *own, size_t own_size)
{
    memset(given, 0, given_size);
    memcpy(given, own, given_size < own_size ? given_size : own_size);
    memcpy(given, &given_size, sizeof given_size);
}

const char *qd_version(void)
{
    return QD_VERSION;
}
