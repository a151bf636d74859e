/* The kernel test harness. One table of cases per kernel drives four checks on every device,
 * instruction set and thread count of the machine:
 *
 *   values     against a plain reference in double, with random inputs (the seed is printed;
 *              --seed N repeats a run); outputs start as NaN; inputs, guard zones and the gaps of
 *              strided rows must not change
 *   threads    1, 2 and 3 compute threads give bit-identical results; on a GPU, three runs
 *   gradients  the forward reference, differentiated numerically in double, against the backward
 *              kernel and its reference
 *   speed      with --speed: time, GFLOP/s and GB/s of the speed cases (--isa NAME, --threads N
 *              choose the device)
 *
 * --cases TEXT skips the cases without this text in their names, for sanitizers, which are slow.
 *
 * A test file fills one ops_op per kernel and calls ops_main(). Comparison: |a - b| <= tol * |b|,
 * Euclidean norms. */
#ifndef QD_TESTS_SUPPORT_OPS_H
#define QD_TESTS_SUPPORT_OPS_H

#include "device/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { OPS_TENSORS = 16, OPS_GRADIENTS = 6 };

/* OPS_INOUT: random at the start and modified by the kernel (accumulation, or in place).
 * OPS_SCRATCH: not checked. OPS_ABSENT: the kernel gets NULL. */
typedef enum ops_role { OPS_ABSENT, OPS_IN, OPS_OUT, OPS_INOUT, OPS_SCRATCH } ops_role;

typedef struct ops_tensor {
    const char *name;
    ops_role role;
    qd_dtype dtype;         /* QD_F32, QD_BF16, QD_F64 or QD_I32 */
    int64_t rows, cols, ld; /* element (r, c) is at r * ld + c; ld 0 means cols; rows 0 means 1 */
    double scale, offset;   /* floats: offset + scale * N(0, 1); scale 0 means 1. int32: uniform offset + [0, scale) */
    int shares;             /* 1 + index of an earlier input with the same address, or 0 */
    bool host;              /* the kernel needs it in host memory */
    double tol;             /* 0: 5e-6 for fp32, 4e-3 for bf16, 1e-12 for fp64, exact for int32 */
    double floor;           /* |b| counts as at least floor * sqrt(elements): for results that are zero up to rounding */
} ops_tensor;

typedef struct ops_op {
    const char *kernel;
    const void *cases, *speed_cases; /* arrays of case_size bytes */
    size_t case_size;
    int case_count, speed_count;
    void (*describe)(const void *c, char *text, size_t size);
    /* Fills t (zeroed, OPS_TENSORS) and returns the number of tensors. */
    int (*tensors)(const void *c, ops_tensor *t);
    /* Optional: replaces random inputs, given as doubles, by meaningful ones (statistics of the
     * forward pass, document starts …). ops_uniform() is the source of randomness. */
    void (*derive)(const void *c, double *const *v);
    /* v[i] is tensor i as doubles, ld included: writes the expected outputs. */
    void (*reference)(const void *c, double *const *v);
    qd_status (*run)(const qd_kernels *k, qd_stream *stream, const void *c, void *const *p);
    /* Backward kernels: sum of the upstream gradient times the forward result, as a function of the
     * inputs v, and which output contains the gradient of which tensor (0-based). */
    double (*loss)(const void *c, double *const *v);
    struct {
        int of, grad;
    } gradients[OPS_GRADIENTS];
    int gradient_count;
    double (*flops)(const void *c); /* of one call; NULL: not compute-bound */
    double (*bytes)(const void *c); /* that must be read and written; NULL: not memory-bound */
    bool cpu_only; /* GPUs refuse these cases */
} ops_op;

/* Runs the table and the additional tests; returns main's exit status. */
int ops_main(int argc, char **argv, const ops_op *ops, int op_count, const struct CMUnitTest *more, int more_count);

double ops_uniform(void); /* [0, 1) */
double ops_normal(void);

/* A CPU device with `threads` compute threads, kept until the end of the process. */
qd_device *ops_device(const char *isa, int threads);

/* The instruction sets that the CPU device has kernels for, and a device for one of them, kept
 * likewise; NULL: this machine does not support it. */
enum { OPS_CPU_ISAS = 8 };
extern const char *const ops_cpu_isas[OPS_CPU_ISAS];
qd_device *ops_cpu(const char *isa);

/* The first GPU in deterministic mode, kept likewise; NULL after printing the reason. */
qd_device *ops_cuda(void);

/* Asserts that a call succeeded, showing the recorded error otherwise. */
void ops_assert_ok(qd_status status);
/* Asserts that a call failed with `status` and a message that contains `text`. */
void ops_assert_fails(qd_status got, qd_status status, const char *text);

#endif
