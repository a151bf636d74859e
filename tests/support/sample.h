/* How much of a test a build runs. Plain builds run all of it. Builds with a sanitizer look for memory errors and races, not
 * at numbers, and are 5 to 20 times as slow: they make fewer steps and run a part of each table of cases, another part in
 * each body or round that goes through the table, so that every case is run somewhere. The selection is fixed. */
#ifndef QD_TESTS_SUPPORT_SAMPLE_H
#define QD_TESTS_SUPPORT_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define QD_TEST_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QD_TEST_SANITIZED 1
#endif
#ifndef QD_TEST_SANITIZED
#define QD_TEST_SANITIZED 0
#endif

/* `few` in builds with a sanitizer. */
static inline int sample_count(int all, int few)
{
    return QD_TEST_SANITIZED && few < all ? few : all;
}

/* Whether case `index` of a table is run the `round`th time that the table is gone through: all of them, or with a sanitizer
 * one in `every`. */
static inline bool sample_has(size_t index, size_t round, size_t every)
{
    return !QD_TEST_SANITIZED || (index + round) % every == 0;
}
#endif
