/* The encoder structure, shared by the files that encode. */
#ifndef QD_DATA_TOKENIZER_ENCODE_IMPL_H
#define QD_DATA_TOKENIZER_ENCODE_IMPL_H

#include "data/tokenizer/bpe.h"
#include "data/tokenizer/tokenizer_impl.h"
#include "data/tokenizer/word_cache.h"

struct qd_encoder {
    const qd_tokenizer *tokenizer;
    qd_bpe_work work;
    qd_unigram_work unigram;
    qd_normal_work normal;
    qd_word_cache cache;
    qd_regex_state *regex[QD_MOST_STAGES]; /* for the stages that use one */
    qd_strbuf texts[QD_MOST_STAGES];       /* for the stages that rewrite the text */
    uint8_t *allowed;       /* (added_count): special tokens allowed in this call */
    qd_strbuf replaced;
    qd_tokens *out;
    size_t last_piece;      /* token count of the last piece */
};

/* Appends ids to encoder->out. */
qd_status qd_encoder_put(qd_encoder *encoder, const uint32_t *ids, size_t count);
/* Encodes a piece of text that is not split any further. slot: where the cache stores it, or
 * NULL. */
qd_status qd_encoder_piece(qd_encoder *encoder, const uint8_t *piece, size_t length, qd_word *slot);
/* Splits the text by the stages from number `stage` on and encodes the pieces. zero: how many bytes
 * at its start belong to the first character of the document. */
qd_status qd_encoder_stages(qd_encoder *encoder, int stage, const uint8_t *text, size_t length, size_t zero);

#endif
