#include "comm/copy.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

/* Whole lines, LINE by LINE; `to` is on a line. Returns how much was copied: all but less than a line. Long copies take
 * two pages at a time and fetch the next two meanwhile, beyond the end too, where the next copy often begins: one stream of
 * loads alone does not keep the memory busy. */
#define PAGE 4096
#define DEFINE_LINES(NAME, TARGET, LINE)                                                                    \
    __attribute__((target(TARGET))) static int64_t NAME(char *to, const char *from, int64_t bytes)          \
    {                                                                                                       \
        int64_t i = 0;                                                                                      \
        for (; bytes > 2 * PAGE && i + 2 * PAGE <= bytes; i += 2 * PAGE)                           \
            for (int64_t k = i; k < i + PAGE; k += 128) {                                                   \
                _mm_prefetch(from + k + 2 * PAGE, _MM_HINT_T0);                                             \
                _mm_prefetch(from + k + 2 * PAGE + 64, _MM_HINT_T0);                                        \
                _mm_prefetch(from + k + 3 * PAGE, _MM_HINT_T0);                                             \
                _mm_prefetch(from + k + 3 * PAGE + 64, _MM_HINT_T0);                                        \
                LINE(to + k, from + k);                                                                     \
                LINE(to + k + 64, from + k + 64);                                                           \
                LINE(to + k + PAGE, from + k + PAGE);                                                       \
                LINE(to + k + PAGE + 64, from + k + PAGE + 64);                                             \
            }                                                                                               \
        for (; i + 256 <= bytes; i += 256) {                                                                \
            LINE(to + i, from + i);                                                                         \
            LINE(to + i + 64, from + i + 64);                                                               \
            LINE(to + i + 128, from + i + 128);                                                             \
            LINE(to + i + 192, from + i + 192);                                                             \
        }                                                                                                   \
        for (; i + 64 <= bytes; i += 64) LINE(to + i, from + i);                                            \
        return i;                                                                                           \
    }

/* Past the caches, which saves reading the lines of `to` first. */
#define LINE_512(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512((from)))
#define QUARTER(to, from) _mm_stream_si128((__m128i *)(to), _mm_loadu_si128((const __m128i *)(from)))
#define LINE_128(to, from)                                                                                  \
    do {                                                                                                    \
        QUARTER((to), (from));                                                                              \
        QUARTER((to) + 16, (from) + 16);                                                                    \
        QUARTER((to) + 32, (from) + 32);                                                                    \
        QUARTER((to) + 48, (from) + 48);                                                                    \
    } while (0)
DEFINE_LINES(stream_avx512, "avx512f", LINE_512)
DEFINE_LINES(stream_sse2, "sse2", LINE_128)

static void copy_streaming(char *to, const char *from, int64_t bytes)
{
    int64_t head = (int64_t)(-(uintptr_t)to & 63);
    if (head > bytes) head = bytes;
    memcpy(to, from, (size_t)head);
    to += head;
    from += head;
    bytes -= head;
    int64_t done = __builtin_cpu_supports("avx512f") ? stream_avx512(to, from, bytes) : stream_sse2(to, from, bytes);
    _mm_sfence();
    memcpy(to + done, from + done, (size_t)(bytes - done));
}
#else
static void copy_streaming(char *to, const char *from, int64_t bytes)
{
    memcpy(to, from, (size_t)bytes);
}
#endif

void qd_comm_copy(void *to, const void *from, int64_t bytes, bool large)
{
    if (large)
        copy_streaming(to, from, bytes);
    else
        memcpy(to, from, (size_t)bytes);
}
