/* How much of a test a build runs. Plain builds run all of it. Builds with a sanitizer look for
 * memory errors and races, not at numbers, and are 5 to 20 times slower: they run fewer steps and a
 * part of each table of cases, a different part each time the table is used. The selection is
 * fixed. */
#ifndef QD_TESTS_SUPPORT_SAMPLE_H
#define QD_TESTS_SUPPORT_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QD_TEST_SANITIZED 1
#elif __has_feature(thread_sanitizer)
#define QD_TEST_SANITIZED 2
#endif
#endif
#if !defined(QD_TEST_SANITIZED) && defined(__SANITIZE_ADDRESS__)
#define QD_TEST_SANITIZED 1
#elif !defined(QD_TEST_SANITIZED) && defined(__SANITIZE_THREAD__)
#define QD_TEST_SANITIZED 2 /* slower by another factor of two */
#elif !defined(QD_TEST_SANITIZED)
#define QD_TEST_SANITIZED 0
#endif

/* `few` in builds with a sanitizer, otherwise `all`. */
static inline int sample_count(int all, int few)
{
    return QD_TEST_SANITIZED && few < all ? few : all;
}

/* Whether case `index` of a table runs in the `round`th use of the table: always, or with a
 * sanitizer one in `every`, with the thread sanitizer half of those. */
static inline bool sample_has(size_t index, size_t round, size_t every)
{
    return !QD_TEST_SANITIZED || (index + round) % (every * QD_TEST_SANITIZED) == 0;
}
#endif
