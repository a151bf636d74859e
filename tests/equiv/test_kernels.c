/* bf16 GEMMs and attention with tiles and with dot products, emulated where the machine has none:
 * threads, ZeRO stages, schedules and recompute change no bit.
 * ctest: timeout 120 */
#include "support/ops.h"
#include "support/trained.h"

#include <stdio.h>
#include <string.h>

#define MODEL "model.layers=2 model.hidden=64 model.heads=2 model.kv_heads=1 model.vocab=67 data.seq=40 "
#define RUN                                                                                                                            \
    "train.global_batch=8 train.micro_batch=2 train.lr=1e-3 train.schedule=constant train.steps=50 train.precision=bf16 "               \
    "train.grad_sync=per_microbatch parallel.ranks=2 "

static void same_bits(void **state)
{
    (void)state;
    static const char *const layouts[] = {"run.threads=3",   "parallel.zero=1",       "parallel.zero=2",
                                          "parallel.zero=3", "train.recompute=full", "parallel.overlap=false parallel.bucket_mb=0.01"};
    static const char *const schedules[] = {"parallel.schedule=gpipe", "parallel.schedule=zb_h1", "run.threads=3"};
    for (int i = 0; i < OPS_CPU_ISAS; i++) {
        const char *isa = ops_cpu_isas[i];
        char base[512];
        if ((!strstr(isa, "amx") && !strstr(isa, "bf16")) || !ops_cpu(isa)) /* other tests run the others */
            continue;
        snprintf(base, sizeof base, MODEL RUN "run.kernels=%s ", isa);
        TRAINED_COMPARE(base, layouts, 3, 1, .seed = 5);
        snprintf(base, sizeof base, MODEL RUN "parallel.pp=2 run.kernels=%s ", isa);
        TRAINED_COMPARE(base, schedules, 3, 1, .seed = 6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
