/* Collective costs against closed forms, GEMMs against the peak, and the built-in clusters. */
#include "sim/cost.h"
#include "sim/network.h"
#include "spec/config/config.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

static qd_options *options_of(const char *cluster)
{
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    qd_options *o;
    ok(qd_options_create(tables, 2, &o));
    ok(qd_cluster_load(o, cluster));
    return o;
}

static qd_cluster load(const char *cluster)
{
    qd_cluster c;
    qd_options *o = options_of(cluster);
    ok(qd_cluster_resolve(o, &c));
    qd_options_destroy(o);
    return c;
}

static void near(double a, double b, double tolerance)
{
    if (fabs(a - b) > tolerance * fabs(b))
        fail_msg("%.6g is not within %.1f %% of %.6g", a, 100.0 * tolerance, b);
}

static qd_span span_of(const qd_cluster *c, int world, int tp, int dp, qd_axis axis)
{
    qd_mesh mesh;
    int degrees[QD_AXIS_COUNT] = {[QD_AXIS_TP] = tp, [QD_AXIS_CP] = 1, [QD_AXIS_DP] = dp, [QD_AXIS_PP] = world / tp / dp};
    ok(qd_mesh_create(world, degrees, &mesh));
    return qd_span_of_group(c, &mesh, qd_group_whole(&mesh, QD_AXIS_BIT(axis)), 0);
}

/* Every built-in cluster can be read; those with figures that are not public name them. */
static void presets(void **state)
{
    (void)state;
    for (const char *const *name = qd_cluster_names(); *name; name++) {
        qd_cluster c;
        qd_options *o = options_of(*name);
        qd_status status = qd_cluster_resolve(o, &c);
        bool secret = strncmp(*name, "ascend", 6) == 0 || strcmp(*name, "cloudmatrix") == 0 || strcmp(*name, "virgo") == 0;
        assert_int_equal(status, secret ? QD_USAGE : QD_OK);
        if (secret)
            assert_non_null(strstr(qd_error_message(), "may not be public"));
        else
            assert_true(c.accelerator.product <= c.accelerator.peak && c.accelerator.memory > 0);
        qd_options_destroy(o);
    }
    qd_options *o = options_of("ascend-910b");
    ok(qd_options_assign(o, "accelerator.peak_tflops=300"));
    ok(qd_options_assign(o, "accelerator.product_tflops=250"));
    ok(qd_options_assign(o, "accelerator.bandwidth_gbs=1600"));
    ok(qd_options_assign(o, "node.bandwidth_gbs=190"));
    qd_cluster c;
    ok(qd_cluster_resolve(o, &c));
    qd_options_destroy(o);
}

static void spans(void **state)
{
    (void)state;
    qd_cluster c = load("h100");
    qd_span tp = span_of(&c, 64, 8, 8, QD_AXIS_TP), dp = span_of(&c, 64, 8, 8, QD_AXIS_DP), both = span_of(&c, 64, 1, 64, QD_AXIS_DP);
    assert_int_equal(tp.local, 8);
    assert_int_equal(tp.nodes, 1);
    assert_int_equal(dp.local, 1);
    assert_int_equal(dp.nodes, 8);
    assert_int_equal(both.local, 8);
    assert_int_equal(both.nodes, 8);
    qd_cluster t = load("tpu-v5e");
    qd_span slice = span_of(&t, 512, 16, 32, QD_AXIS_TP), across = span_of(&t, 512, 16, 32, QD_AXIS_DP);
    assert_int_equal(slice.extent[0], 16);
    assert_int_equal(slice.extent[1], 1);
    assert_int_equal(across.extent[1], 16);
    assert_int_equal(across.nodes, 2);
}

/* Large messages: bytes over bandwidth. A ring passes (n - 1)/n of the bytes once to gather, twice
 * to reduce. */
static void large_messages(void **state)
{
    (void)state;
    qd_cluster c = load("a100");
    double bytes = 64e9;
    qd_span node = span_of(&c, 8, 8, 1, QD_AXIS_TP), all = span_of(&c, 64, 1, 64, QD_AXIS_DP), rails = span_of(&c, 64, 8, 8, QD_AXIS_DP);
    near(qd_network_seconds(&c, QD_COLL_ALL_GATHER, bytes, &node), bytes * 7 / 8 / c.node_bandwidth, 0.001);
    near(qd_network_seconds(&c, QD_COLL_ALL_REDUCE, bytes, &node), 2 * bytes * 7 / 8 / c.node_bandwidth, 0.001);
    /* Between nodes eight network cards carry eight rings. */
    near(qd_network_seconds(&c, QD_COLL_REDUCE_SCATTER, bytes, &all), bytes * 63 / 64 / (8 * c.network_bandwidth), 0.001);
    near(qd_network_seconds(&c, QD_COLL_ALL_REDUCE, bytes, &rails), 2 * bytes * 7 / 8 / c.network_bandwidth, 0.001);
    near(qd_network_seconds(&c, QD_COLL_ALL_TO_ALL, bytes, &rails), bytes * 7 / 8 / c.network_bandwidth, 0.001);
    near(qd_network_seconds(&c, QD_COLL_SEND, bytes, &(qd_span){.size = 2, .local = 1, .nodes = 2}), bytes / c.network_bandwidth, 0.001);
    assert_true(qd_network_seconds(&c, QD_COLL_ALL_REDUCE, bytes, &(qd_span){.size = 1, .local = 1, .nodes = 1}) == 0.0);
}

/* Small messages: latency. A tree's grows with the logarithm of the nodes, a ring's with their
 * number. */
static void small_messages(void **state)
{
    (void)state;
    qd_cluster c = load("a100");
    qd_span few = span_of(&c, 8 * 16, 8, 16, QD_AXIS_DP), many = span_of(&c, 8 * 1024, 8, 1024, QD_AXIS_DP);
    double tree = qd_network_seconds(&c, QD_COLL_ALL_REDUCE, 8, &many), ring = qd_network_seconds(&c, QD_COLL_ALL_GATHER, 8, &many);
    near(tree - qd_network_seconds(&c, QD_COLL_ALL_REDUCE, 8, &few), 2 * 6 * c.network_latency, 0.01);
    near(ring - qd_network_seconds(&c, QD_COLL_ALL_GATHER, 8, &few), 1008 * c.network_latency, 0.01);
    assert_true(tree < ring);
}

/* Measurements: 8 H100 all-reduce 1 GiB at 466 GB/s of bus bandwidth, gather at 361; 8 A100 at
 * 229. */
static void measured(void **state)
{
    (void)state;
    qd_cluster h = load("h200"), a = load("a100");
    double gib = 1024.0 * 1024 * 1024;
    qd_span node = span_of(&h, 8, 8, 1, QD_AXIS_TP);
    near(gib * 1.75 / qd_network_seconds(&h, QD_COLL_ALL_REDUCE, gib, &node), 466e9, 0.05);
    near(16 * gib * 0.875 / qd_network_seconds(&h, QD_COLL_ALL_GATHER, 16 * gib, &node), 361e9, 0.02);
    near(gib * 1.75 / qd_network_seconds(&a, QD_COLL_ALL_REDUCE, gib, &node), 229e9, 0.05);
}

/* A torus: both directions of each dimension carry a gather; an all-to-all is limited by the
 * bisection of the widest. */
static void torus(void **state)
{
    (void)state;
    qd_cluster c = load("tpu-v5e");
    double bytes = 64e9, link = c.network_bandwidth;
    qd_span line = span_of(&c, 256, 16, 16, QD_AXIS_TP), all = span_of(&c, 256, 1, 256, QD_AXIS_DP);
    near(qd_network_seconds(&c, QD_COLL_ALL_GATHER, bytes, &line), bytes * 15 / 16 / (2 * link), 0.001);
    near(qd_network_seconds(&c, QD_COLL_ALL_GATHER, bytes, &all), bytes * 255 / 256 / (4 * link), 0.001);
    near(qd_network_seconds(&c, QD_COLL_ALL_TO_ALL, bytes, &all), bytes * 2 / link, 0.001);
    qd_span two = span_of(&c, 512, 1, 512, QD_AXIS_DP);
    near(qd_network_seconds(&c, QD_COLL_ALL_GATHER, bytes, &two),
         fmax(bytes * 255 / 256 / (4 * link), bytes / 2 / (256 * c.slice_bandwidth)), 0.001);
}

/* GEMMs: large ones are close to the best rate, small ones limited by tiles and waves, thin ones by
 * memory. */
static void products(void **state)
{
    (void)state;
    qd_cluster c = load("h100");
    double best = c.accelerator.product * c.profile->product_share;
    double large = 2.0 * 8192 * 8192 * 8192 / qd_cost_product(&c, 8192, 8192, 8192, 0);
    assert_true(large < best && large > 0.9 * best);
    double wave = qd_cost_product(&c, 256 * 11, 128 * 12, 4096, 0), more = qd_cost_product(&c, 256 * 11 + 1, 128 * 12, 4096, 0);
    assert_true(more > 1.02 * wave); /* one row more than a full wave */
    assert_true(2.0 * 4096 * 512 * 4096 / qd_cost_product(&c, 4096, 512, 4096, 0) < 0.95 * large);
    near(qd_cost_product(&c, 1, 8192, 8192, 2.0 * 8192 * 8192), qd_cost_stream(&c, 2.0 * 8192 * 8192), 0.2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets),  cmocka_unit_test(spans), cmocka_unit_test(large_messages), cmocka_unit_test(small_messages),
        cmocka_unit_test(measured), cmocka_unit_test(torus), cmocka_unit_test(products),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
