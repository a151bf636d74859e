/* The registry of architectures and the families that declare them (QD_ARCHS in fields.h). */
#include "model/family.h"

#include <string.h>

#define FAMILY(name, word, family) [QD_ARCH_##name] = &qd_family_##family,
#define WORD(name, word, family) [QD_ARCH_##name] = word,
static const qd_family *const families[QD_ARCH_COUNT] = {QD_ARCHS(FAMILY)};
static const char *const words[QD_ARCH_COUNT] = {QD_ARCHS(WORD)};

const qd_family *qd_family_of(const qd_model *m)
{
    return families[m->arch];
}

const char *qd_arch_name(qd_arch arch)
{
    return words[arch];
}

qd_arch qd_arch_find(const char *name)
{
    int arch = 0;
    while (arch < QD_ARCH_COUNT && strcmp(words[arch], name) != 0)
        arch++;
    return (qd_arch)arch;
}

/* 0: of experts, 1: others, 2: a table that shares the values of another module's. */
static int group_of(const qd_decl_param *p)
{
    return p->tied ? 2 : p->expert < 0;
}

/* Orders the parameters of a head with prediction modules by group. Those of experts are placed on
 * ranks in another way than the others, and a module has one run of each. Ranks that do not hold
 * the table's values elsewhere store them after all others. */
static void order_params(qd_layer *b)
{
    qd_decl_param *params = QD_ARENA_NEW(b->arena, qd_decl_param, b->param_count);
    int *number = QD_ARENA_NEW(b->arena, int, b->param_count), count = 0;
    if (!params || !number) {
        b->no_memory = true;
        return;
    }
    for (int group = 0; group < 3; group++)
        for (int i = 0; i < b->param_count; i++)
            if (group_of(&b->params[i]) == group) {
                params[count] = b->params[i];
                number[i] = count++;
            }
    for (int i = 0; i < b->op_count; i++) {
        qd_weight *const weights[] = {&b->ops[i].weight, &b->ops[i].weight2};
        for (int k = 0; k < 2; k++)
            if (weights[k]->count > 0)
                weights[k]->param = number[weights[k]->param];
    }
    b->params = params;
    b->param_capacity = b->param_count;
}

qd_status qd_family_declare(const qd_family *family, const qd_model *model, int declaration, qd_arena *arena, qd_layer *out)
{
    *out = (qd_layer){.model = model, .arena = arena};
    if (declaration == 0)
        family->embed(out);
    else if (declaration <= family->variants)
        family->layer(out, declaration - 1);
    else
        family->head(out);
    if (declaration > family->variants && qd_model_ahead(model) > 0 && !out->no_memory)
        order_params(out);
    return out->no_memory ? QD_FAIL(QD_NO_MEMORY, "no memory to declare a layer of the model")
                          : qd_family_check(family, declaration, out);
}
