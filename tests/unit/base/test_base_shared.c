/* The shared libraries load with every symbol resolved, and the planner's needs no BLAS, MPI or
 * CUDA. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void load(const char *path, const char *const *symbols)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail_msg("%s", dlerror());
    for (; *symbols; symbols++)
        if (!dlsym(library, *symbols))
            fail_msg("%s has no %s", path, *symbols);
    dlclose(library);
}

static void all_symbols_resolve(void **state)
{
    (void)state;
    static const char *const plan[] = {"qd_status_text", "qd_options_create", "qd_coll_bytes", NULL};
    static const char *const whole[] = {"qd_status_text", "qd_options_create", "qd_comm_all_reduce", NULL};
    load(QD_TEST_BINARY_DIR "/lib/libquadrille-plan.so", plan);
    load(QD_TEST_BINARY_DIR "/lib/libquadrille.so", whole);
}

static void the_planner_builds_anywhere(void **state)
{
    (void)state;
    FILE *pipe = popen("readelf -d " QD_TEST_BINARY_DIR "/lib/libquadrille-plan.so", "r");
    assert_non_null(pipe);
    char line[512];
    int needed = 0;
    while (fgets(line, sizeof line, pipe)) {
        if (!strstr(line, "NEEDED"))
            continue;
        needed++;
        static const char *const foreign[] = {"mpi", "blas", "dnnl", "cuda", "nccl"};
        for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++)
            if (strstr(line, foreign[i]))
                fail_msg("libquadrille-plan needs %s", line);
    }
    assert_int_equal(pclose(pipe), 0);
    assert_true(needed > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_symbols_resolve),
        cmocka_unit_test(the_planner_builds_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
