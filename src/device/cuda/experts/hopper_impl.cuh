/* Hopper instructions (sm_90a): barriers that count bytes (mbarrier), TMA, warpgroup GEMMs (wgmma).
 * Shared by grouped_hopper.cu and grouped_pingpong.cu.
 *
 * Operands of wgmma are in shared memory as TMA writes them: lines of 128 bytes, whose 16-byte
 * pieces are swizzled by the line's number modulo 8. A line runs along depth, or along the
 * operand's side. */
#ifndef QD_DEVICE_CUDA_EXPERTS_HOPPER_IMPL_CUH
#define QD_DEVICE_CUDA_EXPERTS_HOPPER_IMPL_CUH

#include "device/cuda/tensor_impl.cuh"
#include "device/cuda/experts/tensor_map_impl.h"

enum { WARPGROUP = 128 /* threads */, LINE = 128 /* bytes */, DEPTH = 64 /* steps of k per stage */, BLOCK = DEPTH * LINE };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Barriers. */

static __device__ __forceinline__ void barrier_init(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, int phase)
{
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(phase)
                     : "memory");
}

/* TMA: copies one box of a map to shared memory. */

static __device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
                 : "memory");
}

static __device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* A ring of stages in shared memory. */

template <int STAGES> struct ring {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int steps)
    {
        phase ^= (stage + steps) / STAGES & 1;
        stage = (stage + steps) % STAGES;
    }
};

/* The high half of a wgmma operand descriptor: 128-byte swizzle, groups of 8 lines 1024 bytes
 * apart. */
enum { OPERAND_UPPER = 1024 >> 4 | 1 << 30 };

/* The low half, with the address in units of 16 bytes. Where lines run along the operand's side,
 * the next 64 of it are BLOCK bytes away. */
static __device__ __forceinline__ uint32_t describe_lower(const void *p)
{
    return shared_address(p) >> 4 & 0x3fff | (uint32_t)(BLOCK >> 4) << 16;
}
static __device__ __forceinline__ uint64_t description(uint32_t lower)
{
    return (uint64_t)OPERAND_UPPER << 32 | lower;
}
static __device__ __forceinline__ uint64_t describe(const void *p)
{
    return description(describe_lower(p));
}

static __device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_end_group()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)

/* Staging of results. */

/* 16-byte pieces of rows of 64 bf16 columns; piece p of row r is at position p ^ r % 8 of its
 * line. */
static __device__ __forceinline__ char *staged(char *staging, int row, int piece)
{
    return staging + row * LINE + (piece ^ row % 8) * 16;
}

/* 64 columns of a lane's sums, packed in pairs. */
template <int N> static __device__ __forceinline__ void words_of_sums(uint32_t (&words)[16], const float (&c)[N], int part)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        words[i] = part * 32 + 2 * i < N ? pack(c[part * 32 + 2 * i], c[part * 32 + 2 * i + 1]) : 0;
}

/* Stores four matrices of 8 x 8; TURNED: transposed. */
template <bool TURNED> static __device__ __forceinline__ void store_matrices(void *p, const uint32_t *words)
{
    if (TURNED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
}

#endif
#endif
