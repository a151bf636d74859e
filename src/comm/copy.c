/* Copies that bypass the caches: non-temporal stores with software prefetch on x86, memcpy
 * elsewhere. */
#include "comm/copy.h"

#include <stdbool.h>
#include <string.h>

/* Data with several destinations is read in blocks that stay in the L1 cache (non-temporal stores)
 * or in L2 (copies through the caches). */
#define STREAM_BLOCK (8 << 10)
#define COPY_BLOCK (64 << 10)
/* Longer copies through the caches are made of calls of this size. glibc leaves `rep movsb`, which
 * does not read the lines of the target first, where a call is larger than the second-level cache
 * of an AMD processor. */
#define NEAR_BLOCK (256 << 10)

#if defined(__x86_64__)
#include <immintrin.h>

/* Copies whole cache lines with LINE; `to` is aligned to a line. Returns the bytes copied: all but
 * less than a line. Prefetches two pages ahead, also past the end, where the next copy often
 * begins: on some processors the hardware prefetcher stops at page boundaries. Page by page, one
 * prefetch for each pair of lines is enough. */
#define PAGE 4096
#define FETCH(from) _mm_prefetch((from) + 2 * PAGE, _MM_HINT_T0)
#define DEFINE_LINES(NAME, TARGET, LINE)                                                                    \
    __attribute__((target(TARGET))) static int64_t NAME(char *to, const char *from, int64_t bytes, qd_copy_way way) \
    {                                                                                                       \
        int64_t i = 0;                                                                                      \
        for (; way == QD_COPY_PAGES && i + 2 * PAGE <= bytes; i += 2 * PAGE)                                \
            for (int64_t k = i; k < i + PAGE; k += 128) {                                                   \
                FETCH(from + k);                                                                            \
                FETCH(from + k + 64);                                                                       \
                FETCH(from + k + PAGE);                                                                     \
                FETCH(from + k + PAGE + 64);                                                                \
                LINE(to + k, from + k);                                                                     \
                LINE(to + k + 64, from + k + 64);                                                           \
                LINE(to + k + PAGE, from + k + PAGE);                                                       \
                LINE(to + k + PAGE + 64, from + k + PAGE + 64);                                             \
            }                                                                                               \
        for (; way != QD_COPY_LINES && i + 256 <= bytes; i += 256) {                                        \
            FETCH(from + i);                                                                                \
            FETCH(from + i + 128);                                                                          \
            LINE(to + i, from + i);                                                                         \
            LINE(to + i + 64, from + i + 64);                                                               \
            LINE(to + i + 128, from + i + 128);                                                             \
            LINE(to + i + 192, from + i + 192);                                                             \
        }                                                                                                   \
        for (; i + 64 <= bytes; i += 64) LINE(to + i, from + i);                                            \
        return i;                                                                                           \
    }

/* Non-temporal stores avoid reading the lines of `to` first. */
#define LINE_512(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512((from)))
#define QUARTER(to, from) _mm_stream_si128((__m128i *)(to), _mm_loadu_si128((const __m128i *)(from)))
#define LINE_128(to, from)                                                                                  \
    do {                                                                                                    \
        QUARTER((to), (from));                                                                              \
        QUARTER((to) + 16, (from) + 16);                                                                    \
        QUARTER((to) + 32, (from) + 32);                                                                    \
        QUARTER((to) + 48, (from) + 48);                                                                    \
    } while (0)
#define LINE_256(to, from)                                                                                  \
    do {                                                                                                    \
        __m256i low = _mm256_loadu_si256((const __m256i *)(from));                                          \
        __m256i high = _mm256_loadu_si256((const __m256i *)((from) + 32));                                  \
        _mm256_stream_si256((__m256i *)(to), low);                                                          \
        _mm256_stream_si256((__m256i *)((to) + 32), high);                                                  \
    } while (0)
DEFINE_LINES(stream_avx512, "avx512f", LINE_512)
DEFINE_LINES(stream_avx, "avx", LINE_256)
DEFINE_LINES(stream_sse2, "sse2", LINE_128)

/* Visible to other ranks after finish_streaming(). */
static void stream(char *to, const char *from, int64_t bytes, qd_copy_way way)
{
    int64_t head = (int64_t)(-(uintptr_t)to & 63);
    if (head > bytes) head = bytes;
    memcpy(to, from, (size_t)head);
    to += head;
    from += head;
    bytes -= head;
    int64_t done = __builtin_cpu_supports("avx512f") ? stream_avx512(to, from, bytes, way)
                   : __builtin_cpu_supports("avx")   ? stream_avx(to, from, bytes, way)
                                                     : stream_sse2(to, from, bytes, way);
    memcpy(to + done, from + done, (size_t)(bytes - done));
}

static void finish_streaming(void)
{
    _mm_sfence();
}
#else
static void stream(char *to, const char *from, int64_t bytes, qd_copy_way way)
{
    (void)way;
    memcpy(to, from, (size_t)bytes);
}

static void finish_streaming(void)
{
}
#endif

void qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way)
{
    if (way != QD_COPY_NEAR) {
        stream(to, from, bytes, way);
        finish_streaming();
        return;
    }
    for (int64_t b = 0; b < bytes; b += NEAR_BLOCK)
        memcpy((char *)to + b, (const char *)from + b, (size_t)(bytes - b < NEAR_BLOCK ? bytes - b : NEAR_BLOCK));
}

void qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way)
{
    bool past = way != QD_COPY_NEAR;
    int64_t block = past ? STREAM_BLOCK : COPY_BLOCK;
    for (int64_t b = 0; b < bytes; b += block)
        for (int i = 0; i < count; i++) {
            int64_t length = bytes - b < block ? bytes - b : block;
            if (past)
                stream((char *)to[i] + b, (const char *)from + b, length, way);
            else
                memcpy((char *)to[i] + b, (const char *)from + b, (size_t)length);
        }
    if (past) finish_streaming();
}
