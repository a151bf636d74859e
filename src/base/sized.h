/* Public structs that begin with their size, on their way into and out of the library. See
 * <quadrille/sized.h>. */
#ifndef QD_BASE_SIZED_H
#define QD_BASE_SIZED_H

#include <quadrille/sized.h>
#include <quadrille/status.h>

/* Fills `own`, which holds the defaults, from the caller's struct. QD_USAGE when that has no size,
 * QD_UNSUPPORTED when it sets members that this version does not have. name: of the type. */
qd_status qd_sized_read(const void *given, const char *name, void *own, size_t own_size);
#define QD_SIZED_READ(given, type, own) qd_sized_read((given), #type, (own), sizeof(type))

/* Whether a struct that is to be filled has a size, and is there at all. */
qd_status qd_sized_check(const void *given, const char *name, size_t own_size);
#define QD_SIZED_CHECK(given, type) qd_sized_check((given), #type, sizeof(type))

/* Hands over what the caller's struct has a place for; its size stays. What it has beyond that
 * becomes zero. given NULL: nothing happens. */
void qd_sized_write(void *given, const void *own, size_t own_size);
#define QD_SIZED_WRITE(given, own) qd_sized_write((given), (own), sizeof *(own))

/* NAME_init(): `own` holds the defaults. */
void qd_sized_init(void *given, size_t given_size, const void *own, size_t own_size);
#endif
