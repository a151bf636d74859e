/* Optimizer state in host memory (train.offload): the buffers MASTER, MOMENT1 and MOMENT2 are
 * `host` buffers, and pass through the device in chunks, one stretch of state elements at a time.
 *
 * FETCH copies a chunk from host memory into `chunk`, a dynamic buffer; UPDATE (or MOMENTUM,
 * UPDATE_MATRICES of Muon) works on it there; STORE copies it back. A few buffers take turns.
 * Copies in and copies out have a stream each, so that both directions of the link are busy at a
 * time, and the next chunks come in while one is updated. Every element is updated by the kernel
 * that would update it in place, from the same numbers: the bits are the same.
 *
 * Of such an action, `states` says which kinds of state the chunk has, [first, first + count) which
 * elements of them, `param` a parameter that it has some of. Elements count as in MASTER and
 * MOMENT1, which are laid out alike. In the chunk each kind is a section, one after another. */
#ifndef QD_SPEC_PROGRAM_OFFLOAD_H
#define QD_SPEC_PROGRAM_OFFLOAD_H

#include "spec/program/program.h"

enum { QD_STATE_KINDS = 3 };
#define QD_STATE_BIT(kind) (1u << ((int)(kind) - (int)QD_BUFFER_MASTER)) /* of MASTER, MOMENT1, MOMENT2 */

/* A chunk's part of one kind of state. */
typedef struct qd_section {
    qd_buffer_kind kind;
    int64_t host;  /* element of the buffer in host memory at which it begins */
    int64_t chunk; /* element of the chunk */
    int64_t count; /* elements */
} qd_section;

/* The sections of an action's chunk; returns how many. */
int qd_offload_sections(const qd_program *program, const qd_action *action, qd_section sections[QD_STATE_KINDS]);
#endif
