/* What a model is: its dimensions and the kinds of its parts. Pure data. */
#ifndef QD_MODEL_MODEL_H
#define QD_MODEL_MODEL_H

#include <quadrille/status.h>
#include <quadrille/types.h>

typedef enum qd_arch { QD_ARCH_GPT2, QD_ARCH_LLAMA } qd_arch;
typedef enum qd_norm_kind { QD_NORM_LAYER, QD_NORM_RMS } qd_norm_kind;
typedef enum qd_position_kind { QD_POSITION_LEARNED, QD_POSITION_ROPE } qd_position_kind;

/* Llama 3 stretches the low frequencies of the rotary embedding: wavelengths above original_seq
 * / low_factor are divided by `factor`, those below original_seq / high_factor are kept, between
 * them it blends. */
typedef struct qd_rope {
    double base;
    bool scaled;
    double factor, low_factor, high_factor;
    int64_t original_seq;
} qd_rope;

typedef enum qd_router_kind { QD_ROUTER_SOFTMAX, QD_ROUTER_SIGMOID } qd_router_kind;
typedef enum qd_balance { QD_BALANCE_SEQUENCE, QD_BALANCE_BATCH } qd_balance;
typedef enum qd_drop { QD_DROP_LAST, QD_DROP_LEAST } qd_drop;

/* Mixture of experts: the MLP of the blocks from first_dense on is a router and many small gated
 * MLPs, of which a token uses a few (docs/moe.md). */
typedef struct qd_moe {
    int experts;     /* 0: all blocks are dense */
    int per_token;   /* experts a token chooses */
    int64_t ffn;     /* inner width of one expert */
    int shared;      /* experts that every token uses, as one MLP of shared x ffn */
    int first_dense; /* blocks before the first with experts */
    qd_router_kind router;
    bool normalised;        /* weights of the chosen experts are divided by their sum */
    double scale;           /* and multiplied with this */
    int groups, top_groups; /* experts lie in so many equal groups, and a token chooses from the best of them; 1: no limit */
    double aux_loss;        /* coefficient of the load-balancing loss; 0: none */
    qd_balance balance;     /* over what it is balanced */
    double z_loss;          /* coefficient of the router's z-loss; 0: none */
    bool bias;              /* a bias per expert takes part in the choice, not in the weight */
    double bias_rate;       /* by how much it moves after a step, against the load; 0: not at all */
    double capacity;        /* an expert takes at most capacity x the mean load of a micro-batch; 0: no limit */
    qd_drop drop;           /* who is left out when it is full */
} qd_moe;

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
    bool qk_norm;               /* each head's query and key goes through an RMS norm */
    bool qkv_bias, linear_bias; /* linear_bias: attention output and MLP */
    bool tied;                  /* the head uses the token table */
    double dropout;             /* after the embedding and each residual branch */
    double init_std;
    qd_moe moe;
} qd_model;

/* Dimensions and kinds of an architecture with nothing but the sizes left to fill in. */
qd_model qd_model_default(qd_arch arch);

/* QD_USAGE with one line that names the key and says what would be right. */
qd_status qd_model_validate(const qd_model *model);

/* Number of parameters (tied ones once). */
int64_t qd_model_parameters(const qd_model *model);

/* Whether a block has experts. */
static inline bool qd_model_has_experts(const qd_model *model, int layer)
{
    return model->moe.experts > 0 && layer >= model->moe.first_dense;
}

/* moe.c: the part of qd_model_validate and qd_model_equal for experts, and how many best scores
 * make the score of a group. */
qd_status qd_moe_validate(const qd_model *model);
bool qd_moe_equal(const qd_moe *a, const qd_moe *b);
int qd_moe_group_best(const qd_moe *moe);

/* Model FLOPs per token of one training step: 6 per weight of a matrix product (the token table
 * counts where it is the head, not as a lookup; of experts those that a token uses), and
 * 12·L·T·d for non-causal attention, the convention of most published figures. */
double qd_model_flops_per_token(const qd_model *model, int64_t seq);

/* Angles: table (seq, head_dim/2, 2) = cosine, sine. */
void qd_rope_table(const qd_model *model, int64_t seq, float *table);

/* Field by field; the name does not count. */
bool qd_model_equal(const qd_model *a, const qd_model *b);

const char *qd_arch_name(qd_arch arch);
#endif
