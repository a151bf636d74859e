/* The golden fixtures are complete and consistent, and their reader refuses damaged files. No
 * training here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/golden.h"
#include "support/ok.h"

static int64_t config_int(const qd_golden *g, const char *path)
{
    int64_t value = 0;
    ok(qd_golden_config_int(g, path, &value));
    return value;
}

static bool config_bool(const qd_golden *g, const char *path)
{
    bool value = false;
    ok(qd_golden_config_bool(g, path, &value));
    return value;
}

/* Tensor `name` exists with this type and shape; d1 and d2 < 0: fewer dimensions. */
static const qd_golden_tensor *expect(const qd_golden *g, const char *name, qd_dtype dtype, int64_t d0, int64_t d1,
                                      int64_t d2)
{
    const qd_golden_tensor *t = NULL;
    ok(qd_golden_find(g, name, dtype, &t));
    const int64_t want[3] = {d0, d1, d2};
    int dims = d1 < 0 ? 1 : d2 < 0 ? 2 : 3;
    if (t->dims != dims || memcmp(t->shape, want, (size_t)dims * sizeof *want) != 0)
        fail_msg("%s has another shape", name);
    return t;
}

static void check_fixture(const char *path)
{
    qd_golden *g;
    ok(qd_golden_open(path, &g));
    assert_string_equal(qd_golden_metadata(g, "format"), "quadrille-golden-1");
    int64_t steps = config_int(g, "steps"), batch = config_int(g, "batch"), seq = config_int(g, "seq");
    int64_t hidden = config_int(g, "hidden"), vocab = config_int(g, "vocab"), head_dim = config_int(g, "head_dim");
    expect(g, "init.embed.tokens.weight", QD_F32, vocab, hidden, -1);
    if (qd_golden_lookup(g, "init.block.0.attn.kv_a.weight")) {
        expect(g, "init.block.0.attn.kv_a.weight", QD_F32, config_int(g, "mla.kv_lora_rank"), hidden, -1);
    } else {
        expect(g, "init.block.0.attn.q.weight", QD_F32, config_int(g, "heads") * head_dim, hidden, -1);
        expect(g, "init.block.0.attn.k.weight", QD_F32, config_int(g, "kv_heads") * head_dim, hidden, -1);
    }
    bool experts = qd_golden_lookup(g, "init.block.0.mlp.router.weight") != NULL;
    expect(g, experts ? "init.block.0.mlp.experts.0.down.weight" : "init.block.0.mlp.down.weight", QD_F32, hidden,
           config_int(g, experts ? "moe_ffn" : "ffn"), -1);
    const char *kind;
    ok(qd_golden_config_string(g, "norm", &kind));
    if (strcmp(kind, "layernorm_plain") != 0)
        expect(g, "init.head.norm.weight", QD_F32, hidden, -1, -1);
    assert_int_equal(qd_golden_lookup(g, "init.head.weight") == NULL, config_bool(g, "tied"));
    assert_int_equal(qd_golden_lookup(g, "init.block.0.attn.k.bias") != NULL, config_bool(g, "qkv_bias"));
    assert_int_equal(qd_golden_lookup(g, "doc_start") != NULL, config_bool(g, "packed"));

    /* Each weight has a gradient of its shape, and the norm of the gradients is the first of
     * grad_norms. */
    double squares = 0;
    for (int i = 0; i < qd_golden_count(g); i++) {
        const qd_golden_tensor *t = qd_golden_at(g, i);
        if (strncmp(t->name, "init.", 5) != 0)
            continue;
        char name[128];
        snprintf(name, sizeof name, "grad.%s", t->name + 5);
        const qd_golden_tensor *grad = NULL;
        ok(qd_golden_find(g, name, QD_F32, &grad));
        assert_int_equal(t->dims, grad->dims);
        assert_memory_equal(t->shape, grad->shape, sizeof t->shape);
        double norm = qd_norm_of(grad->data, grad->count);
        squares += norm * norm;
    }
    const double *norms = expect(g, "grad_norms", QD_F64, steps, -1, -1)->data;
    ok(qd_golden_compare_scalar("norm of the gradients", sqrt(squares), norms[0], 1e-6));

    const int32_t *tokens = expect(g, "tokens", QD_I32, steps, batch, seq)->data;
    const int32_t *targets = expect(g, "targets", QD_I32, steps, batch, seq)->data;
    for (int64_t i = 0; i < steps * batch * seq; i++) {
        assert_in_range(tokens[i], 0, vocab - 1);
        assert_in_range(targets[i], 0, vocab - 1);
        if ((i + 1) % seq)
            assert_int_equal(targets[i], tokens[i + 1]);
    }
    const double *losses = expect(g, "losses", QD_F64, steps, -1, -1)->data;
    const double *single = expect(g, "losses_f32", QD_F64, steps, -1, -1)->data;
    for (int64_t i = 0; i < steps; i++)
        ok(qd_golden_compare_scalar("float32 loss", single[i], losses[i], 1e-6));
    assert_true(losses[steps - 1] < losses[0]);
    qd_golden_close(g);
}

static void test_all_fixtures(void **state)
{
    (void)state;
    glob_t files;
    assert_int_equal(glob(QD_GOLDEN_DIR "/*.safetensors", 0, NULL, &files), 0);
    assert_true(files.gl_pathc >= 7);
    for (size_t i = 0; i < files.gl_pathc; i++)
        check_fixture(files.gl_pathv[i]);
    globfree(&files);
}

/* Writes a header and `data` bytes of zeros to a temporary file and opens it. `claim`: the header
 * length to write, 0: the true one. */
static qd_status open_text(const char *header, size_t data, uint64_t claim, qd_golden **g)
{
    char path[] = "/tmp/quadrille-golden-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "wb");
    uint64_t length = claim ? claim : strlen(header);
    for (int i = 0; i < 8; i++)
        fputc((int)(length >> (8 * i) & 255), f);
    fputs(header, f);
    for (size_t i = 0; i < data; i++)
        fputc(0, f);
    assert_int_equal(fclose(f), 0);
    qd_status status = qd_golden_open(path, g);
    unlink(path);
    return status;
}

static void test_damaged_files(void **state)
{
    (void)state;
    static const struct {
        const char *header, *message;
        size_t data;
        uint64_t claim;
    } cases[] = {
        {"{}", "longer than the file", 0, 1u << 20},
        {"{}", "longer than the file", 0, UINT64_MAX},
        {"{\"a\":", "not valid JSON", 0, 0},
        {"[]", "not a JSON object", 0, 0},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", "dtype", 4, 0},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", "dtype", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", "an invalid size", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", "an invalid size", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", "disagree", 0, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", "at most 8", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", "outside", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", "outside", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", "outside", 4, 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", "disagree", 4, 0},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "longer than its tensors", 2, 0},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", "'b': its data does not follow", 3, 0},
        {"{\"__metadata__\":{\"config\":\"{\"}}", "config", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_golden *g;
        qd_status status = open_text(cases[i].header, cases[i].data, cases[i].claim, &g);
        assert_null(g);
        if (status != QD_CORRUPT || !strstr(qd_error_message(), cases[i].message))
            fail_msg("%s: status %d, \"%s\" does not say \"%s\"", cases[i].header, status, qd_error_message(),
                     cases[i].message);
    }
    qd_golden *g;
    assert_int_equal(qd_golden_open(QD_GOLDEN_DIR "/none.safetensors", &g), QD_CORRUPT);
    ok(open_text("{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, 0, &g));
    const qd_golden_tensor *t;
    assert_int_equal(qd_golden_find(g, "b", QD_F32, &t), QD_USAGE);
    assert_int_equal(qd_golden_find(g, "a", QD_U8, &t), QD_USAGE);
    ok(qd_golden_find(g, "b", QD_U8, &t));
    int64_t layers;
    assert_int_equal(qd_golden_config_int(g, "layers", &layers), QD_USAGE);
    qd_golden_close(g);
}

static void test_comparison(void **state)
{
    (void)state;
    const float want[3] = {3, 0, 4}, near[3] = {3, 0, 4.00004f}, bad[3] = {3, NAN, 4}, zero[3] = {0, 0, 0};
    const float noise[3] = {0, 1e-6f, 0};
    qd_golden_tensor t = {.name = "t", .dtype = QD_F32, .dims = 1, .shape = {3}, .count = 3, .data = want};
    assert_true(fabs(qd_norm_of(want, 3) - 5) < 1e-12);
    ok(qd_golden_compare(near, 3, &t, 5, 1e-5)); /* 4e-5 / 5 = 8e-6 */
    assert_int_equal(qd_golden_compare(near, 3, &t, 5, 7e-6), QD_DIFFERENT);
    assert_non_null(strstr(qd_error_message(), "element 2"));
    assert_int_equal(qd_golden_compare(bad, 3, &t, 5, 1e9), QD_DIFFERENT);
    assert_non_null(strstr(qd_error_message(), "element 1"));
    assert_int_equal(qd_golden_compare(want, 2, &t, 5, 1), QD_DIFFERENT);
    /* A gradient that should be zero is compared relative to the others: 1e-6 / (1e-3 · 200) =
     * 5e-6. */
    t.data = zero;
    ok(qd_golden_compare(noise, 3, &t, 200, 1e-5));
    assert_int_equal(qd_golden_compare(noise, 3, &t, 50, 1e-5), QD_DIFFERENT);
    assert_int_equal(qd_golden_compare(noise, 3, &t, 0, 1e-5), QD_DIFFERENT);
    ok(qd_golden_compare(zero, 3, &t, 0, 0));
    ok(qd_golden_compare_scalar("x", 1.00009, 1, 1e-4));
    assert_int_equal(qd_golden_compare_scalar("x", 1.0002, 1, 1e-4), QD_DIFFERENT);
    assert_int_equal(qd_golden_compare_scalar("x", NAN, 1, 1e-4), QD_DIFFERENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_fixtures),
        cmocka_unit_test(test_damaged_files),
        cmocka_unit_test(test_comparison),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
