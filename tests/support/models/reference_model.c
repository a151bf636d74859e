/* The reference evaluation of declared ops, in double precision. */
#include "support/models/reference_model.h"

#include "base/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A module during its evaluation, with T rows of tokens. Rows of experts, T · per_token of them,
 * are in token order. */
typedef struct evaluation {
    reference_model *r;
    const qd_model *model;
    const qd_layer *decl;
    int module;
    int64_t rows;
    double **value; /* per declared value */
    double *port;   /* (T, d): output of the previous module; replaced by the output of this one */
    double *weight; /* (T, per_token), of the chosen experts */
    double loss, auxiliary;
} evaluation;

void reference_create(reference_model *r, const qd_ledger *ledger)
{
    *r = (reference_model){.ledger = ledger};
    r->params = calloc((size_t)ledger->param_count, sizeof *r->params);
    r->choices = calloc((size_t)ledger->module_count, sizeof *r->choices);
    for (int i = 0; i < ledger->param_count; i++)
        if (ledger->params[i].tied_to < 0)
            r->params[i] = calloc((size_t)(ledger->params[i].shape[0] * ledger->params[i].shape[1]), sizeof **r->params);
}

void reference_destroy(reference_model *r)
{
    for (int i = 0; i < r->ledger->param_count; i++)
        free(r->params[i]);
    for (int i = 0; i < r->ledger->module_count; i++)
        free(r->choices[i]);
    free(r->params);
    free(r->choices);
}

static const double *param(const evaluation *e, int index)
{
    int at = e->r->ledger->modules[e->module].param_begin + index, tied = e->r->ledger->params[at].tied_to;
    return e->r->params[tied >= 0 ? tied : at];
}

static int64_t width(const evaluation *e, qd_val v)
{
    return e->decl->values[v].cols;
}

/* Ops: x is read, y is written. */

static void embed(evaluation *e, const qd_decl_op *op, double *y)
{
    int64_t d = e->model->hidden;
    for (int64_t t = 0; t < e->rows; t++) {
        int64_t token = t % e->r->seq + op->ahead < e->r->seq ? e->r->tokens[t + op->ahead] : 0;
        for (int64_t i = 0; i < d; i++)
            y[t * d + i] = param(e, op->weight.param)[token * d + i] +
                           (op->weight2.count ? param(e, op->weight2.param)[t % e->r->seq * d + i] : 0);
    }
}

static void norm_row(const evaluation *e, const double *x, int64_t n, bool rms, double eps, const double *gain, const double *bias,
                     double *y)
{
    double mean = 0, square = 0, more = e->model->norm == QD_NORM_RMS_ONE ? 1 : 0;
    for (int64_t i = 0; i < n && !rms; i++)
        mean += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++)
        square += (x[i] - mean) * (x[i] - mean) / (double)n;
    for (int64_t i = 0; i < n; i++)
        y[i] = (x[i] - mean) / sqrt(square + (eps > 0 ? eps : e->model->norm_eps)) * (gain ? gain[i] + more : 1) + (bias ? bias[i] : 0);
}

static void norm(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    int64_t d = width(e, op->x);
    for (int64_t t = 0; t < e->rows; t++)
        norm_row(e, x + t * d, d, qd_model_norm_is_rms(e->model), op->factor, op->weight.count ? param(e, op->weight.param) : NULL,
                 op->weight2.count ? param(e, op->weight2.param) : NULL, y + t * d);
}

/* y = x · Wᵀ for one row and one matrix (n, k). */
static void times(const double *x, const double *matrix, int64_t n, int64_t k, double *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = 0;
        for (int64_t j = 0; j < k; j++)
            y[i] += x[j] * matrix[i * k + j];
    }
}

static void linear(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    int64_t in = width(e, op->x), out = width(e, op->out), first = 0;
    for (int p = 0; p < op->weight.count; p++) {
        int64_t n = e->decl->params[op->weight.param + p].rows;
        for (int64_t t = 0; t < e->rows; t++) {
            times(x + t * in, param(e, op->weight.param + p), n, in, y + t * out + first);
            for (int64_t i = 0; i < n && op->weight2.count; i++)
                y[t * out + first + i] += param(e, op->weight2.param + p)[i];
        }
        first += n;
    }
}

static void head_norm(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    const qd_model *m = e->model;
    int64_t cols = width(e, op->x);
    memcpy(y, x, (size_t)(e->rows * cols) * sizeof *y);
    for (int64_t t = 0; t < e->rows; t++)
        for (int h = 0; h < m->heads + m->kv_heads; h++)
            norm_row(e, x + t * cols + h * m->head_dim, m->head_dim, true, 0,
                     param(e, h < m->heads ? op->weight.param : op->weight2.param), NULL, y + t * cols + h * m->head_dim);
}

static void qk_norm(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    const qd_model *m = e->model;
    int64_t cols = width(e, op->x), q = (int64_t)m->heads * m->head_dim, k = (int64_t)m->kv_heads * m->head_dim;
    memcpy(y, x, (size_t)(e->rows * cols) * sizeof *y);
    for (int64_t t = 0; t < e->rows; t++) {
        norm_row(e, x + t * cols, q, true, 0, param(e, op->weight.param), NULL, y + t * cols);
        norm_row(e, x + t * cols + q, k, true, 0, param(e, op->weight2.param), NULL, y + t * cols + q);
    }
}

static void rope(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    const qd_model *m = e->model;
    int64_t cols = width(e, op->x);
    int half = qd_rope_dims(m) / 2;
    float *table = calloc((size_t)(e->r->seq * m->head_dim), sizeof *table);
    qd_rope_table(m, e->r->seq, e->r->seq, op->local, table);
    memcpy(y, x, (size_t)(e->rows * cols) * sizeof *y);
    for (int64_t t = 0; t < e->rows; t++)
        for (int h = 0; h < m->heads + m->kv_heads; h++)
            for (int i = 0; i < half; i++) {
                int64_t low = t * cols + h * m->head_dim + i, high = low + half;
                const float *angle = table + (t % e->r->seq * half + i) * 2; /* cosine, sine */
                y[low] = x[low] * (double)angle[0] - x[high] * (double)angle[1];
                y[high] = x[low] * (double)angle[1] + x[high] * (double)angle[0];
            }
    free(table);
}

/* The rotary part of a head of latent attention at row t. */
static void turn(const evaluation *e, const float *table, int64_t t, const double *x, double *y)
{
    int half = e->model->qk_rope_head_dim / 2, step = e->model->rope_interleave ? 2 : 1, next = e->model->rope_interleave ? 1 : half;
    for (int i = 0; i < half; i++) {
        double c = (double)table[(t % e->r->seq * half + i) * 2], s = (double)table[(t % e->r->seq * half + i) * 2 + 1];
        y[i * step] = x[i * step] * c - x[i * step + next] * s;
        y[i * step + next] = x[i * step] * s + x[i * step + next] * c;
    }
}

static void latent_qkv(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    const qd_model *m = e->model;
    const double *kv = e->value[op->y], *k_rope = e->value[op->z];
    int64_t cols = width(e, op->out), q = width(e, op->x), nope = m->qk_nope_head_dim, pair = nope + m->v_head_dim;
    float *table = calloc((size_t)(e->r->seq * m->qk_rope_head_dim), sizeof *table);
    qd_rope_table(m, e->r->seq, e->r->seq, false, table);
    for (int64_t t = 0; t < e->rows; t++)
        for (int64_t h = 0; h < m->heads; h++) {
            double *query = y + t * cols + h * m->head_dim, *key = query + q, *value = y + t * cols + 2 * q + h * m->v_head_dim;
            const double *both = kv + t * width(e, op->y) + h * pair;
            memcpy(query, x + t * q + h * m->head_dim, (size_t)nope * sizeof *query);
            turn(e, table, t, x + t * q + h * m->head_dim + nope, query + nope);
            memcpy(key, both, (size_t)nope * sizeof *key);
            turn(e, table, t, k_rope + t * m->qk_rope_head_dim, key + nope);
            memcpy(value, both + nope, (size_t)m->v_head_dim * sizeof *value);
        }
    free(table);
}

static void attention(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    const qd_model *m = e->model;
    const int v_dim = qd_model_v_dim(m);
    int64_t cols = width(e, op->x), out = width(e, op->out), q = (int64_t)m->heads * m->head_dim, k = (int64_t)m->kv_heads * m->head_dim;
    double *p = calloc((size_t)e->r->seq, sizeof *p);
    memset(y, 0, (size_t)(e->rows * out) * sizeof *y);
    for (int64_t row = 0; row < e->rows; row++)
        for (int h = 0; h < m->heads; h++) {
            int64_t begin = row / e->r->seq * e->r->seq, from = begin + (e->r->doc_start ? e->r->doc_start[row] : 0);
            if (op->window > 0 && from < row - op->window + 1)
                from = row - op->window + 1;
            int64_t of = h / (m->heads / m->kv_heads), key = q + of * m->head_dim, value = q + k + of * v_dim;
            double sum = op->weight.count ? exp(param(e, op->weight.param)[h]) : 0; /* the sink */
            for (int64_t s = from; s <= row; s++) {
                double score = 0;
                for (int i = 0; i < m->head_dim; i++)
                    score += x[row * cols + h * m->head_dim + i] * x[s * cols + key + i];
                score *= m->score_scale > 0 ? m->score_scale : 1 / sqrt(m->head_dim);
                if (qd_model_is_latent(m) && m->rope.scaling == QD_ROPE_YARN && m->rope.mscale_all_dim > 0)
                    score *= pow(0.1 * m->rope.mscale_all_dim * log(m->rope.factor) + 1, 2);
                if (m->score_softcap > 0)
                    score = m->score_softcap * tanh(score / m->score_softcap);
                sum += p[s - begin] = exp(score);
            }
            for (int64_t s = from; s <= row; s++)
                for (int i = 0; i < v_dim; i++)
                    y[row * out + h * v_dim + i] += p[s - begin] / sum * x[s * cols + value + i];
        }
    free(p);
}

static void activation(evaluation *e, const qd_decl_op *op, int64_t rows, const double *x, double *y)
{
    int64_t n = width(e, op->out);
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = 0; i < n; i++) {
            double v = x[t * width(e, op->x) + i];
            switch (e->model->activation) {
            case QD_ACT_GELU: y[t * n + i] = v * 0.5 * (1 + erf(v / sqrt(2.0))); break;
            case QD_ACT_GELU_TANH: y[t * n + i] = v * 0.5 * (1 + tanh(sqrt(2 / acos(-1.0)) * (v + 0.044715 * v * v * v))); break;
            case QD_ACT_SWIGLU: y[t * n + i] = v / (1 + exp(-v)) * x[t * 2 * n + n + i]; break;
            case QD_ACT_GEGLU: y[t * n + i] = v * 0.5 * (1 + erf(v / sqrt(2.0))) * x[t * 2 * n + n + i]; break;
            case QD_ACT_SWIGLU_CLAMPED: {
                double limit = e->model->swiglu_limit, gate = fmin(v, limit), up = fmin(fmax(x[t * 2 * n + n + i], -limit), limit);
                y[t * n + i] = (up + 1) * gate / (1 + exp(-e->model->swiglu_alpha * gate));
                break;
            }
            case QD_ACT_GEGLU_TANH:
                y[t * n + i] = v * 0.5 * (1 + tanh(sqrt(2 / acos(-1.0)) * (v + 0.044715 * v * v * v))) * x[t * 2 * n + n + i];
                break;
            }
        }
}

static void clip(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    for (int64_t i = 0; i < e->rows * width(e, op->x); i++)
        y[i] = fmin(fmax(x[i], -e->model->clip_qkv), e->model->clip_qkv);
}

static void dropout(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    char name[32];
    bool adapter = op->site >= QD_DROPOUTS_MOST;
    float p = (float)(adapter ? e->model->lora.dropout : e->model->dropout);
    int first = adapter ? QD_DROPOUTS_MOST * e->r->ledger->module_count - QD_DROPOUTS_MOST : 0;
    snprintf(name, sizeof name, "dropout.%u",
             (unsigned)(first + (adapter ? QD_ADAPTERS_MOST : QD_DROPOUTS_MOST) * e->module + op->site));
    qd_philox_key key = qd_rng_key(e->r->seed, name);
    for (int64_t i = 0; i < e->rows * width(e, op->x); i++) {
        uint32_t words[4];
        qd_philox4x32(key, (uint64_t)i / 4, e->r->step, words);
        y[i] = qd_rng_to_uniform(words[i % 4]) >= p ? x[i] / (1 - (double)p) : 0;
    }
}

static void scale(evaluation *e, const qd_decl_op *op, int64_t rows, const double *x, double *y)
{
    for (int64_t i = 0; i < rows * width(e, op->x); i++)
        y[i] = x[i] * (double)(float)op->factor;
}

/* The layer's result, plus what the adapters of some of its parts add. */
static void adapt(evaluation *e, const qd_decl_op *op, int64_t rows, const double *x, double *y)
{
    bool grouped = e->decl->params[op->weight.param].expert >= 0;
    int experts = grouped ? e->model->moe.experts : 1, adapters = op->weight.count / experts, per = op->weight2.count / experts;
    int64_t rank = e->model->lora.rank, in = width(e, op->x), out = width(e, op->out);
    double *delta = calloc((size_t)out, sizeof *delta);
    memcpy(y, e->value[op->y], (size_t)(rows * out) * sizeof *y);
    for (int64_t t = 0; t < (grouped ? rows : e->rows); t++) {
        int64_t at = 0;
        for (int part = 0, which = 0; part < per; part++) {
            int64_t cols = e->decl->params[op->weight2.param + part].rows;
            if (op->parts & 1u << part) {
                int expert = grouped ? e->r->choices[e->module][t] : 0;
                times(x + t * in + which * rank, param(e, op->weight.param + expert * adapters + which), cols, rank, delta);
                for (int64_t i = 0; i < cols; i++)
                    y[t * out + at + i] += delta[i];
                which++;
            }
            at += cols;
        }
    }
    free(delta);
}

static void add(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    for (int64_t i = 0; i < e->rows * width(e, op->x); i++)
        y[i] = x[i] + e->value[op->y][i];
}

static void gate(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    int64_t d = width(e, op->x);
    for (int64_t i = 0; i < e->rows * d; i++)
        y[i] = x[i] / (1 + exp(-e->value[op->y][i / d]));
}

/* How many of value[begin .. end) rank above one of them. */
static int better(const double *value, int begin, int end, int index)
{
    int count = 0;
    for (int i = begin; i < end; i++)
        count += value[i] > value[index] || (value[i] == value[index] && i < index);
    return count;
}

static void choose(const evaluation *e, const double *score, const double *bias, int *choice)
{
    const qd_moe *moe = &e->model->moe;
    int experts = moe->experts, groups = moe->groups > 1 ? moe->groups : 1, size = experts / groups;
    double *value = calloc((size_t)experts * 2, sizeof *value), *group = value + experts;
    for (int i = 0; i < experts; i++)
        value[i] = score[i] + (bias ? bias[i] : 0);
    for (int i = 0; i < experts; i++)
        if (better(value, i / size * size, (i / size + 1) * size, i) < qd_moe_group_best(moe))
            group[i / size] += value[i];
    for (int i = 0; i < experts && groups > 1; i++)
        if (better(group, 0, groups, i / size) >= moe->top_groups)
            value[i] = -1e30;
    for (int i = 0; i < experts; i++)
        if (better(value, 0, experts, i) < moe->per_token)
            choice[better(value, 0, experts, i)] = i;
    free(value);
}

/* Scores from a token's logits; returns the log-sum-exp. */
static double scores(const qd_moe *moe, const double *logits, double *score)
{
    double sum = 0;
    for (int i = 0; i < moe->experts; i++)
        sum += exp(logits[i]);
    for (int i = 0; i < moe->experts; i++)
        score[i] = moe->router == QD_ROUTER_SIGMOID ? 1 / (1 + exp(-logits[i])) : exp(logits[i]) / sum;
    return log(sum);
}

/* How often an expert is chosen, relative to the mean, among the tokens that `t` is balanced
 * with. */
static double relative_load(const evaluation *e, int64_t t, int expert)
{
    const qd_moe *moe = &e->model->moe;
    bool sequence = moe->balance == QD_BALANCE_SEQUENCE;
    int64_t first = sequence ? t / e->r->seq * e->r->seq : 0, count = sequence ? e->r->seq : e->rows, chosen = 0;
    for (int64_t i = first * moe->per_token; i < (first + count) * moe->per_token; i++)
        chosen += e->r->choices[e->module][i] == expert;
    return (double)chosen * moe->experts / (double)(moe->per_token * count);
}

static void route(evaluation *e, const qd_decl_op *op, const double *x)
{
    const qd_moe *moe = &e->model->moe;
    int k = moe->per_token, **choice = &e->r->choices[e->module];
    double *score = calloc((size_t)(e->rows * moe->experts), sizeof *score);
    bool first = !*choice;
    if (first)
        *choice = calloc((size_t)(e->rows * k), sizeof **choice);
    e->weight = calloc((size_t)(e->rows * k), sizeof *e->weight);
    for (int64_t t = 0; t < e->rows; t++) {
        double *s = score + t * moe->experts, all = scores(moe, x + t * moe->experts, s), sum = 0;
        if (first)
            choose(e, s, op->weight.count ? param(e, op->weight.param) : NULL, *choice + t * k);
        for (int j = 0; j < k; j++)
            sum += s[(*choice)[t * k + j]];
        for (int j = 0; j < k; j++)
            e->weight[t * k + j] = s[(*choice)[t * k + j]] * moe->scale / (moe->normalised ? sum : 1);
        e->auxiliary += moe->z_loss * all * all / (double)e->rows;
    }
    for (int64_t t = 0; t < e->rows && moe->aux_loss > 0; t++) {
        const double *s = score + t * moe->experts;
        double total = 0;
        for (int i = 0; i < moe->experts; i++)
            total += s[i];
        for (int i = 0; i < moe->experts; i++)
            e->auxiliary += moe->aux_loss * relative_load(e, t, i) * s[i] / total / (double)e->rows;
    }
    free(score);
}

static void send(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    int64_t d = width(e, op->x), k = e->model->moe.per_token;
    for (int64_t a = 0; a < e->rows * k; a++)
        memcpy(y + a * d, x + a / k * d, (size_t)d * sizeof *y);
}

static void grouped_linear(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    int per = op->weight.count / e->model->moe.experts;
    int64_t in = width(e, op->x), out = width(e, op->out), n = out / per;
    for (int64_t a = 0; a < e->rows * e->model->moe.per_token; a++)
        for (int p = 0; p < per; p++) {
            int which = e->r->choices[e->module][a] * per + p;
            times(x + a * in, param(e, op->weight.param + which), n, in, y + a * out + p * n);
            for (int64_t i = 0; i < n && op->weight2.count; i++)
                y[a * out + p * n + i] += param(e, op->weight2.param + which)[i];
        }
}

static void collect(evaluation *e, const qd_decl_op *op, const double *x, double *y)
{
    int64_t d = width(e, op->x), k = e->model->moe.per_token;
    memset(y, 0, (size_t)(e->rows * d) * sizeof *y);
    for (int64_t a = 0; a < e->rows * k; a++)
        for (int64_t i = 0; i < d; i++)
            y[a / k * d + i] += e->weight[a] * x[a * d + i];
}

static void loss(evaluation *e, const qd_decl_op *op, const double *x)
{
    int64_t d = width(e, op->x), vocab = e->model->vocab;
    double *logits = calloc((size_t)vocab, sizeof *logits);
    for (int64_t t = 0; t < e->rows; t++) {
        double sum = 0;
        times(x + t * d, param(e, op->weight.param), vocab, d, logits);
        for (int64_t i = 0; i < vocab; i++) {
            if (e->model->logit_softcap > 0)
                logits[i] = e->model->logit_softcap * tanh(logits[i] / e->model->logit_softcap);
            sum += exp(logits[i]);
        }
        int64_t last = t + op->ahead; /* the token before the target, in the same sequence and document */
        if (last / e->r->seq != t / e->r->seq || (e->r->doc_start && e->r->doc_start[last] != e->r->doc_start[t]))
            continue;
        double term = (log(sum) - logits[e->r->targets[last]]) / (double)e->rows;
        if (op->ahead == 0)
            e->loss += term;
        else
            e->auxiliary += e->model->mtp_weight / e->model->mtp_modules * term;
    }
    free(logits);
}

static void evaluate_op(evaluation *e, const qd_decl_op *op)
{
    int64_t assignments = e->rows * (e->model->moe.experts > 0 ? e->model->moe.per_token : 1);
    const double *x = op->x >= 0 ? e->value[op->x] : NULL;
    double *y = op->out >= 0 ? e->value[op->out] = calloc((size_t)(assignments * width(e, op->out)), sizeof *y) : NULL;
    switch (op->kind) {
    case QD_DECL_INPUT: memcpy(y, e->port, (size_t)(e->rows * e->model->hidden) * sizeof *y); break;
    case QD_DECL_OUTPUT: memcpy(e->port, x, (size_t)(e->rows * e->model->hidden) * sizeof *x); break;
    case QD_DECL_EMBED: embed(e, op, y); break;
    case QD_DECL_NORM: norm(e, op, x, y); break;
    case QD_DECL_LINEAR: linear(e, op, x, y); break;
    case QD_DECL_HEAD_NORM: head_norm(e, op, x, y); break;
    case QD_DECL_QK_NORM: qk_norm(e, op, x, y); break;
    case QD_DECL_CLIP: clip(e, op, x, y); break;
    case QD_DECL_ROPE: rope(e, op, x, y); break;
    case QD_DECL_LATENT_QKV: latent_qkv(e, op, x, y); break;
    case QD_DECL_ATTENTION: attention(e, op, x, y); break;
    case QD_DECL_ACTIVATION: activation(e, op, e->rows, x, y); break;
    case QD_DECL_SCALE: scale(e, op, assignments, x, y); break;
    case QD_DECL_ADAPT: adapt(e, op, assignments, x, y); break;
    case QD_DECL_DROPOUT: dropout(e, op, x, y); break;
    case QD_DECL_ADD: add(e, op, x, y); break;
    case QD_DECL_GATE: gate(e, op, x, y); break;
    case QD_DECL_ROUTE: route(e, op, x); break;
    case QD_DECL_SEND: send(e, op, x, y); break;
    case QD_DECL_GROUPED_LINEAR: grouped_linear(e, op, x, y); break;
    case QD_DECL_GROUPED_ACTIVATION: activation(e, op, assignments, x, y); break;
    case QD_DECL_COLLECT: collect(e, op, x, y); break;
    case QD_DECL_LOSS: loss(e, op, x); break;
    case QD_DECL_KIND_COUNT: break;
    }
}

double reference_loss(reference_model *r, double *auxiliary)
{
    evaluation e = {.r = r, .model = &r->ledger->model, .rows = r->batch * r->seq};
    e.port = calloc((size_t)(e.rows * e.model->hidden), sizeof *e.port);
    for (e.module = 0; e.module < r->ledger->module_count; e.module++) {
        e.decl = &r->ledger->decls[r->ledger->modules[e.module].decl];
        e.value = calloc((size_t)e.decl->value_count + 1, sizeof *e.value);
        for (int i = 0; i < e.decl->op_count; i++)
            evaluate_op(&e, &e.decl->ops[i]);
        for (int i = 0; i < e.decl->value_count; i++)
            free(e.value[i]);
        free(e.value);
        free(e.weight);
        e.weight = NULL;
    }
    free(e.port);
    *auxiliary = e.auxiliary;
    return e.loss;
}
