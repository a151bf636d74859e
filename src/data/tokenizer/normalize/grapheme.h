/* Grapheme clusters, as far as SentencePiece's character maps need them. */
#ifndef QD_DATA_TOKENIZER_NORMALIZE_GRAPHEME_H
#define QD_DATA_TOKENIZER_NORMALIZE_GRAPHEME_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the extended grapheme cluster at `at` (< end). Conjuncts (consonants joined by a virama,
 * always 9 bytes or more) count as several clusters. */
size_t qd_grapheme(const uint8_t *at, const uint8_t *end);

#endif
