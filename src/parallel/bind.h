/* Binds a program to a device and a world: allocates memory of exactly the planned size, and
 * creates a communicator for each group of the program. */
#ifndef QD_PARALLEL_BIND_H
#define QD_PARALLEL_BIND_H

#include "device/device.h"
#include "spec/program/program.h"

#include <quadrille/comm.h>

typedef struct qd_bound {
    const qd_program *program;
    qd_device *device;
    qd_comm *world;
    qd_comm *groups[QD_GROUP_LIMIT];     /* per group of the program */
    void **persistent;                   /* per buffer of the program, in device or host memory as planned; NULL: dynamic */
    int64_t host_bytes;                  /* size of those in host memory */
    char *dynamic;
    bool *alive;    /* per buffer: between ALLOC and FREE */
    bool *borrowed; /* per buffer: belongs to another bound */
    bool *reached;  /* per buffer: allocated by qd_comm_alloc(), because collectives access it */
    bool dynamic_reached;
    bool dynamic_borrowed;               /* belongs to another bound */
    bool group_borrowed[QD_GROUP_LIMIT]; /* so does this communicator */
    int64_t reached_bytes; /* size of those; also counted as device memory */
    struct qd_shard_lists **lists; /* per first parameter of a run, and one for the sums of the norm; see shard.h */
} qd_bound;

/* Collective over `world`, whose buffers are in host memory; `data` (NULL: world) has the same
 * ranks and communicates device memory. Allocates exactly program->persistent_bytes +
 * program->dynamic_bytes, and program->host_bytes of host memory. On a CPU, buffers that
 * collectives access come from qd_comm_alloc(); they are freed when the bound is destroyed, which
 * must be before `world`. With `share` (NULL: none), persistent buffers of the same kind and size
 * are shared with that bound, and so are its scratch and dynamic area where they are large enough,
 * and its communicators: it must outlive this one, and the two programs never run concurrently. */
qd_status qd_bind(const qd_program *program, qd_device *device, qd_comm *world, qd_comm *data, const qd_bound *share, qd_bound **bound);
void qd_bound_destroy(qd_bound *bound); /* NULL is legal */

/* Address of a buffer; QD_SYSTEM when it is used outside its ALLOC and FREE. */
qd_status qd_bound_buffer(const qd_bound *bound, int buffer, void **address);
/* Address of an element. Elements are counted as in the buffer's `first`, from the start of the
 * storage. */
qd_status qd_bound_at(const qd_bound *bound, int buffer, int64_t element, qd_dtype dtype, void **address);
/* The communicator of all ranks along the given axes; NULL when the program has none. */
qd_comm *qd_bound_axes(const qd_bound *bound, unsigned axes);
/* A persistent buffer by kind; NULL when the program has none. */
void *qd_bound_kind(const qd_bound *bound, qd_buffer_kind kind);
#endif
