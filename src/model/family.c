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

qd_status qd_family_declare(const qd_family *family, const qd_model *model, int declaration, qd_arena *arena, qd_layer *out)
{
    *out = (qd_layer){.model = model, .arena = arena};
    if (declaration == 0)
        family->embed(out);
    else if (declaration <= family->variants)
        family->layer(out, declaration - 1);
    else
        family->head(out);
    return out->no_memory ? QD_FAIL(QD_NO_MEMORY, "no memory to declare a layer of the model")
                          : qd_family_check(family, declaration, out);
}
