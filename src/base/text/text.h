/* The public text functions, and the distance between names that "did you mean" is based on. */
#ifndef QD_BASE_TEXT_TEXT_H
#define QD_BASE_TEXT_TEXT_H
#include <quadrille/text.h>

/* Edit distance: insertions, deletions, substitutions and transpositions of neighbours. */
int qd_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length);

/* The distance up to which a known name is close to what a user wrote. */
int qd_edit_limit(const char *written);

#endif
