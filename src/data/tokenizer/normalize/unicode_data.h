/* Unicode data of the normalizers and pre-tokenizers, exactly as the package `tokenizers` has them.
 * Its parts follow different versions of Unicode (normal forms 9, categories 8, case 17), so a
 * library of one version would differ: tools/normalize_table.py writes these tables by trying every
 * character, and tools/tokenizer_families.py compares them. */
#ifndef QD_DATA_TOKENIZER_NORMALIZE_UNICODE_DATA_H
#define QD_DATA_TOKENIZER_NORMALIZE_UNICODE_DATA_H

#include <stddef.h>
#include <stdint.h>

enum {
    QD_PUNCTUATION = 1,    /* a piece of its own for Punctuation and BertPreTokenizer */
    QD_NUMERIC = 2,        /* Digits */
    QD_ACCENT = 4,         /* removed by StripAccents */
    QD_NONSPACING = 8,     /* removed by BertNormalizer's strip_accents */
    QD_UNCLEAN = 16,       /* removed by BertNormalizer's clean_text */
    QD_CHINESE = 32,       /* BertNormalizer puts spaces around it */
    QD_NFC_CHANGES = 64,   /* may change, or change its neighbours, in this form */
    QD_NFD_CHANGES = 128,
    QD_NFKC_CHANGES = 256,
    QD_NFKD_CHANGES = 512,
    QD_JOINS = 1024,       /* extends the grapheme cluster before it */
    QD_PREPENDS = 2048,    /* is in a grapheme cluster with what follows */
    QD_BREAKS = 4096,      /* control characters: a cluster of their own */
    QD_PICTOGRAPH = 8192,  /* joined by U+200D */
};

extern const uint16_t qd_property_bits[];   /* kind -> bits */
extern const uint32_t qd_property_blocks;   /* length of the index; characters beyond have no bits */
extern const uint16_t qd_property_index[];  /* character / 128 -> block */
extern const uint64_t qd_property_kinds[];  /* (blocks, 16): 8 kinds of 8 bits each */

static inline unsigned qd_properties(uint32_t character)
{
    uint32_t block = character >> 7;
    if (block >= qd_property_blocks)
        return 0;
    uint64_t kinds = qd_property_kinds[qd_property_index[block] * 16u + (character >> 3 & 15u)];
    return qd_property_bits[kinds >> 8 * (character & 7u) & 255u];
}

/* Sorted by character: first << 32 | (last - first) << 8 | combining class. */
extern const uint32_t qd_combining_count;
extern const uint64_t qd_combining_runs[];
/* Sorted: first << 42 | second << 21 | composed. */
extern const uint32_t qd_compose_count;
extern const uint64_t qd_compose_pairs[];

/* Every `step`-th character from first to last has its lower case `delta` further. */
typedef struct qd_lower_run {
    uint32_t first, last, step;
    int32_t delta;
} qd_lower_run;
extern const uint32_t qd_lower_count;
extern const qd_lower_run qd_lower_runs[];

/* Full decompositions, sorted by character: character << 20 | offset in the pool << 5 | length. The
 * second table has the characters whose compatibility decomposition differs from the canonical
 * one. Hangul syllables are in neither. */
extern const uint32_t qd_canonical_count, qd_compatible_count;
extern const uint64_t qd_canonical_keys[], qd_compatible_keys[];
extern const uint32_t qd_canonical_pool[], qd_compatible_pool[];

#endif
