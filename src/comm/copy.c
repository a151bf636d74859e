#include "comm/comm_impl.h"

#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

/* Whole lines of `to` are written past the caches, which saves reading them first. */
static void copy_streaming(char *to, const char *from, int64_t bytes)
{
    int64_t head = (int64_t)(-(uintptr_t)to & 63);
    if (head > bytes) head = bytes;
    memcpy(to, from, (size_t)head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + i + 48));
        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    _mm_sfence();
    memcpy(to + i, from + i, (size_t)(bytes - i));
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
