/* Binds a program to a device and a world: memory of the planned size, a communicator for each
 * group the program names. */
#ifndef QD_PARALLEL_BIND_H
#define QD_PARALLEL_BIND_H

#include "device/device.h"
#include "spec/program/program.h"

#include <quadrille/comm.h>

typedef struct qd_bound {
    const qd_program *program;
    qd_device *device;
    qd_comm *world;
    qd_comm *groups[QD_GROUP_LIMIT];     /* of the program's groups */
    void **persistent;                   /* per buffer of the program, in device or host memory as it says; NULL: dynamic */
    int64_t host_bytes;                  /* of those in host memory */
    char *dynamic;
    bool *alive;    /* per buffer: between ALLOC and FREE */
    bool *borrowed; /* per buffer: another bound's */
    bool *reached;  /* per buffer: of qd_comm_alloc(), since collectives touch it */
    bool dynamic_reached;
    int64_t reached_bytes; /* of those, counted as the device's too */
    struct qd_shard_lists **lists; /* per first parameter of a run, and one for the norm's sums; see shard.h */
} qd_bound;

/* Collective over `world`, whose buffers are host memory; `data` (NULL: world) has the same ranks
 * and moves memory of the device. Allocates exactly program->persistent_bytes +
 * program->dynamic_bytes, and program->host_bytes of host memory. On a CPU, what collectives touch
 * comes from qd_comm_alloc(), and is given back when the bound is destroyed, before `world`. With
 * `share` (NULL: none), persistent buffers of the same kind and size are those of that bound, which
 * must outlive this one. */
qd_status qd_bind(const qd_program *program, qd_device *device, qd_comm *world, qd_comm *data, const qd_bound *share, qd_bound **bound);
void qd_bound_destroy(qd_bound *bound); /* NULL is legal */

/* Address of a buffer; QD_SYSTEM when it is used outside its ALLOC and FREE. */
qd_status qd_bound_buffer(const qd_bound *bound, int buffer, void **address);
/* Address of an element, counted from the start of the storage as the buffer's `first` is. */
qd_status qd_bound_at(const qd_bound *bound, int buffer, int64_t element, qd_dtype dtype, void **address);
/* The communicator of all ranks along some axes; NULL when the program has none. */
qd_comm *qd_bound_axes(const qd_bound *bound, unsigned axes);
/* A persistent buffer by kind; NULL when the program has none. */
void *qd_bound_kind(const qd_bound *bound, qd_buffer_kind kind);
#endif
