/* Which layers have adapters, and the factor of their results. */
#include "model/lora.h"

#include <math.h>
#include <string.h>

static const struct {
    const char *word, *part;
} table[QD_LORA_TARGET_COUNT] = {
#define QD_LORA_TARGET_ROW(name, word, part) [QD_LORA_##name] = {word, part},
    QD_LORA_TARGETS(QD_LORA_TARGET_ROW)
#undef QD_LORA_TARGET_ROW
};

double qd_lora_scale(const qd_lora *lora)
{
    return lora->alpha / (lora->rslora ? sqrt((double)lora->rank) : (double)lora->rank);
}

bool qd_lora_takes(const qd_lora *lora, const char *name)
{
    const char *dot = strrchr(name, '.'), *part = dot ? dot + 1 : name;
    if (lora->rank == 0)
        return false;
    if (lora->targets & QD_LORA_ALL_LINEAR && strcmp(part, table[QD_LORA_ROUTER].part) != 0)
        return true;
    for (int i = 0; i < QD_LORA_TARGET_COUNT; i++)
        if (lora->targets & 1u << i && strcmp(part, table[i].part) == 0)
            return true;
    return false;
}

unsigned qd_lora_find(const char *word)
{
    for (int i = 0; i < QD_LORA_TARGET_COUNT; i++)
        if (strcmp(word, table[i].word) == 0)
            return 1u << i;
    return strcmp(word, QD_LORA_ALL_WORD) == 0 ? QD_LORA_ALL_LINEAR : 0;
}

const char *qd_lora_word(qd_lora_target target)
{
    return table[target].word;
}
