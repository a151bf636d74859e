/* Optimizer state in host memory (train.offload): MASTER, MOMENT1 and MOMENT2 are `host` buffers,
 * and move through the device in chunks, each a range of state elements.
 *
 * FETCH copies a chunk from host memory to `chunk`, a dynamic buffer; UPDATE (or MOMENTUM and
 * UPDATE_MATRICES of Muon; then CLIP, where it has weights of queries or keys) works on it there;
 * STORE copies it back. A few buffers rotate. Copies in and out have a stream each, so that both
 * directions of the link are busy concurrently and the next chunks arrive while one is updated.
 * Every element is updated by the same kernel from the same numbers as it would be in place, so
 * results are bit-identical.
 *
 * In such an action, `states` tells which kinds of state the chunk has, [first, first + count)
 * which elements of them, `param` is a parameter with elements in the chunk. Elements count as in
 * MASTER and MOMENT1, which have the same layout. In the chunk each kind is a section; the sections
 * follow each other. */
#ifndef QD_SPEC_PROGRAM_OFFLOAD_H
#define QD_SPEC_PROGRAM_OFFLOAD_H

#include "spec/program/program.h"

enum { QD_STATE_KINDS = 3 };
#define QD_STATE_BIT(kind) (1u << ((int)(kind) - (int)QD_BUFFER_MASTER)) /* of MASTER, MOMENT1, MOMENT2 */

/* The part of a chunk with one kind of state. */
typedef struct qd_section {
    qd_buffer_kind kind;
    int64_t host;  /* index of its first element in the buffer in host memory */
    int64_t chunk; /* index of its first element in the chunk */
    int64_t count; /* elements */
} qd_section;

/* The sections of an action's chunk; returns their number. */
int qd_offload_sections(const qd_program *program, const qd_action *action, qd_section sections[QD_STATE_KINDS]);
#endif
