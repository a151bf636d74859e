/* The registry of model families. */
#include "model/family.h"

const qd_family *qd_family_of(const qd_model *m)
{
    (void)m;
    return &qd_family_prenorm;
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
    return out->no_memory ? QD_FAIL(QD_NO_MEMORY, "no memory to declare a layer of the model") : QD_OK;
}
