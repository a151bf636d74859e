/* SentencePiece models (.model files): their normalization, BPE and decoding, which differ from
 * those of tokenizer.json. The Unigram search is shared (unigram.h). */
#ifndef QD_DATA_TOKENIZER_SENTENCEPIECE_H
#define QD_DATA_TOKENIZER_SENTENCEPIECE_H

#include "data/tokenizer/bpe.h"

typedef struct qd_sentencepiece {
    bool dummy_prefix;    /* a space before the text, or behind it: */
    bool suffix;
    bool remove_spaces;   /* at both ends, and all but one between words */
    bool escape_spaces;   /* as ▁ */
    qd_charsmap *map;     /* NULL: none */
    qd_trie user;         /* user-defined symbols, never normalized and never merged; values are ids */
    bool has_user;
    qd_vocab characters;  /* characters that are not tokens, but start or end some; ids from 0 */
    char unknown_text[64]; /* what unknown tokens decode to */
    uint8_t *kinds;       /* (vocab.size): qd_piece_kind */
} qd_sentencepiece;

/* As in the files. */
typedef enum qd_piece_kind {
    QD_PIECE_NORMAL = 1,
    QD_PIECE_UNKNOWN,
    QD_PIECE_CONTROL,
    QD_PIECE_USER,
    QD_PIECE_UNUSED,
    QD_PIECE_BYTE
} qd_piece_kind;

void qd_sentencepiece_destroy(qd_sentencepiece *model); /* NULL is legal */

/* Appends the normalized text; invalid bytes become U+FFFD, each by itself. */
void qd_sentencepiece_normalize(const qd_sentencepiece *model, const uint8_t *text, size_t length, qd_strbuf *out);

/* Merges the characters of the text, as qd_bpe(). Pairs are merged by the score of what they form;
 * neither side has to be a token. */
qd_status qd_sentencepiece_bpe(const qd_tokenizer *tokenizer, qd_bpe_work *work, const uint8_t *text, size_t length,
                               const uint32_t **ids, size_t *count);
/* Adds the pairs that form tokens; scores (vocab.size), higher ones first. */
qd_status qd_sentencepiece_merges(qd_tokenizer *tokenizer, const float *scores);

/* Appends the text of tokens, which exist. skip_special: without control symbols. */
qd_status qd_sentencepiece_decode(const qd_tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special, qd_strbuf *text);
#endif
