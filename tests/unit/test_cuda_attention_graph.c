/* cuDNN accepts the attention graphs; needs its library but no GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#ifdef QD_TEST_CUDA
#include "device/cuda/gemm/search.h"

static qd_attention_args shape(int64_t batch, int64_t seq, int heads, int kv_heads, int head_dim)
{
    int64_t width = (int64_t)(heads + 2 * kv_heads) * head_dim;
    return (qd_attention_args){
        .batch = batch, .seq = seq, .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .q_stride = width,
        .k_stride = width, .v_stride = width, .o_stride = (int64_t)heads * head_dim, .dtype = QD_BF16,
    };
}

/* Values of another size, as in latent attention. */
static qd_attention_args latent(int64_t batch, int64_t seq, int heads, int head_dim, int v_dim)
{
    qd_attention_args a = shape(batch, seq, heads, heads, head_dim);
    a.q_stride = a.k_stride = a.v_stride = (int64_t)heads * (2 * head_dim + v_dim);
    a.o_stride = (int64_t)heads * v_dim;
    a.v_dim = v_dim;
    return a;
}

static void accepts_graphs(void **state)
{
    (void)state;
    qd_attention_args shapes[] = {
        shape(64, 1024, 12, 12, 64), shape(4, 4096, 32, 8, 128), shape(2, 384, 8, 1, 96),  shape(3, 200, 4, 2, 40),
        shape(1, 8192, 8, 4, 256),   shape(2, 4096, 32, 8, 128), shape(1, 8192, 8, 4, 256), latent(4, 4096, 16, 192, 128),
        latent(1, 777, 128, 192, 128),
    };
    shapes[5].window = shapes[6].window = 1024;
    shapes[4].softcap = shapes[6].softcap = 50;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int pass = 0; pass < 4; pass++) { /* the last: forward, with the largest scores of heads */
            float largest;
            shapes[i].maxima = pass == 3 ? &largest : NULL;
            if (qd_cuda_attention_graph_check(&shapes[i], pass == 1 || pass == 2, pass == 2) != QD_OK)
                fail_msg("shape %zu, pass %d: %s", i, pass, qd_error_message());
        }
    }
}

/* A test of the test: an invalid graph is refused with a message. */
static void refuses_nonsense(void **state)
{
    (void)state;
    qd_attention_args a = shape(1, -3, 1, 1, 64);
    assert_int_not_equal(qd_cuda_attention_graph_check(&a, false, false), QD_OK);
    assert_non_null(strstr(qd_error_message(), "cuDNN"));
}
#endif

int main(void)
{
#ifdef QD_TEST_CUDA
    const struct CMUnitTest tests[] = {cmocka_unit_test(accepts_graphs), cmocka_unit_test(refuses_nonsense)};
    return cmocka_run_group_tests(tests, NULL, NULL);
#else
    printf("skipped: a build without CUDA\n");
    return 77;
#endif
}
