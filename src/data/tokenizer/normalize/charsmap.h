/* SentencePiece's character map (`Precompiled`): a double-array trie of character sequences and
 * their replacements, as stored in .model files and tokenizer.json. */
#ifndef QD_DATA_TOKENIZER_NORMALIZE_CHARSMAP_H
#define QD_DATA_TOKENIZER_NORMALIZE_CHARSMAP_H

#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_charsmap qd_charsmap;

/* `where` names it in messages. The data are copied. */
qd_status qd_charsmap_create(const char *where, const void *data, size_t length, qd_charsmap **map);
void qd_charsmap_destroy(qd_charsmap *map); /* NULL is legal */

/* Appends the mapped text as the package `tokenizers` maps it: by grapheme clusters of less than 6
 * bytes, and otherwise by characters. *zero as for qd_normalize(). Stops when `out` has more than
 * `most` bytes. */
void qd_charsmap_apply(const qd_charsmap *map, const uint8_t *text, size_t length, size_t *zero, size_t most, qd_strbuf *out);
/* The replacement of the longest key that starts the text, and the key's length; NULL: none. */
const char *qd_charsmap_longest(const qd_charsmap *map, const uint8_t *text, size_t length, size_t *key);

#endif
