/* What a declaration must be, whatever model and layout it is for: checked before anything is
 * derived from it, so that an error names the family, the module and the value or parameter. */
#include "model/family.h"

#include <string.h>

typedef struct checking {
    const qd_family *family;
    const qd_layer *layer;
    const char *module; /* "embedding", "layer", "head" */
} checking;

static const char *name_of(const qd_layer *b, qd_val value)
{
    return b->values[value].name;
}

static int count_ops(const qd_layer *b, qd_decl_kind kind)
{
    int count = 0;
    for (int i = 0; i < b->op_count; i++)
        count += b->ops[i].kind == kind;
    return count;
}

/* One way in and one way out: rows of the residual stream, or for the head the loss. */
static qd_status check_ends(const checking *c, bool embed, bool head)
{
    const qd_layer *b = c->layer;
    const int ahead = head ? qd_model_ahead(b->model) : 0;
    const struct {
        qd_decl_kind kind;
        const char *what;
        int wanted;
    } ends[] = {{QD_DECL_INPUT, "qd_input", !embed},
                {QD_DECL_OUTPUT, "qd_output", !head},
                {QD_DECL_LOSS, "qd_head_loss", head ? 1 + ahead : 0},
                {QD_DECL_EMBED, "qd_embedding", embed ? 1 : ahead}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        int count = count_ops(b, ends[i].kind);
        if (count != ends[i].wanted && ends[i].wanted > 1)
            return QD_FAIL(QD_USAGE, "the %s family: its %s has %d losses and embeddings of model.mtp_modules, and must have %d",
                           c->family->name, c->module, count, ends[i].wanted);
        if (count != ends[i].wanted)
            return QD_FAIL(QD_USAGE, "the %s family: its %s calls %s %d times, and must %s", c->family->name, c->module, ends[i].what,
                           count, ends[i].wanted ? "once" : "not at all");
    }
    if (count_ops(b, QD_DECL_ROUTE) > 1)
        return QD_FAIL(QD_USAGE, "the %s family: its %s has %d routers; one is supported", c->family->name, c->module,
                       count_ops(b, QD_DECL_ROUTE));
    /* Tied heads use the first parameter of the model. */
    for (int i = 0; embed && i < b->op_count; i++)
        if (b->ops[i].kind == QD_DECL_EMBED && b->ops[i].weight.param != 0)
            return QD_FAIL(QD_USAGE, "the %s family: '%s' is declared before the token table, which must be the first parameter",
                           c->family->name, b->params[0].suffix);
    return QD_OK;
}

/* Values are there before they are read, and each is read: nothing is computed for nothing, and
 * every gradient has a source. */
static qd_status check_values(const checking *c)
{
    const qd_layer *b = c->layer;
    int written = 0; /* values are numbered in the order of their ops */
    for (int i = 0; i < b->op_count; i++) {
        const qd_decl_op *op = &b->ops[i];
        bool none = op->kind == QD_DECL_INPUT || op->kind == QD_DECL_EMBED;
        bool two = op->kind == QD_DECL_ADD || op->kind == QD_DECL_SEND || op->kind == QD_DECL_GROUPED_LINEAR ||
                   op->kind == QD_DECL_GROUPED_ACTIVATION || op->kind == QD_DECL_COLLECT || op->kind == QD_DECL_ADAPT;
        bool three = op->kind == QD_DECL_LATENT_QKV;
        if ((!none && (op->x < 0 || op->x >= written)) || ((two || three) && (op->y < 0 || op->y >= written)) ||
            (three && (op->z < 0 || op->z >= written)))
            return QD_FAIL(QD_USAGE, "the %s family: in its %s, '%s' is computed from a value that does not exist", c->family->name,
                           c->module, op->out >= 0 ? name_of(b, op->out) : "what leaves it");
        if (op->kind == QD_DECL_OUTPUT && b->ops[0].kind == QD_DECL_INPUT && op->x == b->ops[0].out)
            return QD_FAIL(QD_USAGE, "the %s family: its %s passes its input on as it is", c->family->name, c->module);
        if (op->kind == QD_DECL_ADD && op->x == op->y)
            return QD_FAIL(QD_USAGE, "the %s family: in its %s, '%s' is added to itself", c->family->name, c->module, name_of(b, op->x));
        written += op->out >= 0;
    }
    for (qd_val v = 0; v < b->value_count; v++) {
        bool read = false;
        for (int i = 0; i < b->op_count && !read; i++)
            read = qd_decl_reads(&b->ops[i], v);
        if (!read)
            return QD_FAIL(QD_USAGE, "the %s family: in its %s, nothing reads '%s'", c->family->name, c->module, name_of(b, v));
    }
    return QD_OK;
}

/* Where an op needs a width, its operand has it. */
static qd_status check_widths(const checking *c)
{
    const qd_layer *b = c->layer;
    const qd_model *m = b->model;
    for (int i = 0; i < b->op_count; i++) {
        const qd_decl_op *op = &b->ops[i];
        int64_t wanted = -1, has = op->x >= 0 ? b->values[op->x].cols : -1;
        switch (op->kind) {
        case QD_DECL_OUTPUT:
        case QD_DECL_LOSS:
        case QD_DECL_SEND: wanted = m->hidden; break;
        case QD_DECL_HEAD_NORM:
        case QD_DECL_QK_NORM:
        case QD_DECL_CLIP:
        case QD_DECL_ROPE:
        case QD_DECL_ATTENTION: wanted = qd_model_qkv(m, m->heads, m->kv_heads); break;
        case QD_DECL_LATENT_QKV: wanted = (int64_t)m->heads * m->head_dim; break;
        case QD_DECL_ACTIVATION: wanted = b->values[op->out].cols * (qd_activation_is_gated(m->activation) ? 2 : 1); break;
        case QD_DECL_ROUTE: wanted = m->moe.experts; break;
        case QD_DECL_ADD:
            wanted = has;
            has = b->values[op->y].cols;
            break;
        case QD_DECL_ADAPT: wanted = __builtin_popcount(op->parts) * (int64_t)m->lora.rank; break;
        default: break;
        }
        if (wanted >= 0 && has != wanted)
            return QD_FAIL(QD_USAGE, "the %s family: in its %s, '%s' has %lld columns where %lld are needed", c->family->name, c->module,
                           name_of(b, op->kind == QD_DECL_ADD ? op->y : op->x), (long long)has, (long long)wanted);
    }
    return QD_OK;
}

/* Checkpoints and initial values go by names. Those of experts have numbers. */
static qd_status check_names(const checking *c)
{
    const qd_layer *b = c->layer;
    for (int i = 0; i < b->param_count; i++)
        for (int k = 0; k < i && b->params[i].expert < 0; k++)
            if (b->params[k].expert < 0 && strcmp(b->params[i].suffix, b->params[k].suffix) == 0)
                return QD_FAIL(QD_USAGE, "the %s family: its %s declares two parameters named '%s'", c->family->name, c->module,
                               b->params[i].suffix);
    return QD_OK;
}

qd_status qd_family_check(const qd_family *family, int declaration, const qd_layer *layer)
{
    bool embed = declaration == 0, head = declaration == family->variants + 1;
    const checking c = {family, layer, embed ? "embedding" : head ? "head" : "layer"};
    if (layer->model->moe.experts == 0 && count_ops(layer, QD_DECL_ROUTE) > 0)
        return QD_FAIL(QD_USAGE, "the %s family: its %s has a router, and the model no experts: set model.experts", family->name, c.module);
    if (layer->site > QD_DROPOUTS_MOST)
        return QD_FAIL(QD_USAGE, "the %s family declares a module with more than %d dropouts", family->name, QD_DROPOUTS_MOST - 1);
    if (layer->adapters > QD_ADAPTERS_MOST)
        return QD_FAIL(QD_USAGE, "the %s family declares a module with more than %d linear layers with adapters", family->name,
                       QD_ADAPTERS_MOST);
    QD_TRY(check_ends(&c, embed, head));
    QD_TRY(check_values(&c));
    QD_TRY(check_widths(&c));
    return check_names(&c);
}
