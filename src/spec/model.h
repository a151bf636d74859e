/* What a model is: its dimensions and the kinds of its parts. Pure data. */
#ifndef QD_SPEC_MODEL_H
#define QD_SPEC_MODEL_H

#include <quadrille/status.h>
#include <quadrille/types.h>

typedef enum qd_arch { QD_ARCH_GPT2, QD_ARCH_LLAMA } qd_arch;
typedef enum qd_norm_kind { QD_NORM_LAYER, QD_NORM_RMS } qd_norm_kind;
typedef enum qd_position_kind { QD_POSITION_LEARNED, QD_POSITION_ROPE } qd_position_kind;

/* Llama 3 stretches the low frequencies of the rotary embedding: wavelengths above original_seq / low_factor are
 * divided by `factor`, those below original_seq / high_factor are kept, between them it blends. */
typedef struct qd_rope {
    double base;
    bool scaled;
    double factor, low_factor, high_factor;
    int64_t original_seq;
} qd_rope;

typedef struct qd_model {
    char name[64];
    qd_arch arch;
    int layers;
    int heads, kv_heads, head_dim;
    int64_t hidden, ffn, vocab;
    int64_t max_seq; /* rows of the position table; upper bound of seq for learned positions */
    qd_norm_kind norm;
    double norm_eps;
    qd_position_kind position;
    qd_rope rope;
    qd_activation activation;
    bool qkv_bias, linear_bias; /* linear_bias: attention output and MLP */
    bool tied;                  /* the head uses the token table */
    double dropout;             /* after the embedding and each residual branch */
    double init_std;
} qd_model;

/* Dimensions and kinds of an architecture with nothing but the sizes left to fill in. */
qd_model qd_model_default(qd_arch arch);

/* QD_USAGE with one line that names the key and says what would be right. */
qd_status qd_model_validate(const qd_model *model);

/* Number of parameters (tied ones once). */
int64_t qd_model_parameters(const qd_model *model);

/* Model FLOPs per token of one training step: 6 per weight of a matrix product (the token table counts where it is the
 * head, not as a lookup), and 12·L·T·d for non-causal attention, the convention of most published figures. */
double qd_model_flops_per_token(const qd_model *model, int64_t seq);

/* Angles: table (seq, head_dim/2, 2) = cosine, sine. */
void qd_rope_table(const qd_model *model, int64_t seq, float *table);

/* Field by field; the name does not count. */
bool qd_model_equal(const qd_model *a, const qd_model *b);

const char *qd_arch_name(qd_arch arch);
#endif
