/* NUMA nodes from folders as the kernel writes them, and which ranks run on which. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "train/ranks/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* Makes or removes a folder in which node i has the cores lists[i]; NULL: there is no such node. */
static void nodes_folder(const char *folder, const char *const *lists, int count, bool make)
{
    for (int n = 0; n < count; n++) {
        char path[128], list[160];
        if (!lists[n])
            continue;
        snprintf(path, sizeof path, "%s/node%d", folder, n);
        snprintf(list, sizeof list, "%s/cpulist", path);
        if (make) {
            assert_int_equal(mkdir(path, 0700), 0);
            FILE *f = fopen(list, "w");
            assert_non_null(f);
            fprintf(f, "%s\n", lists[n]);
            fclose(f);
        } else {
            unlink(list);
            rmdir(path);
        }
    }
    if (!make)
        rmdir(folder);
}

static qd_topology machine(const char *const *lists, int count)
{
    char folder[] = "/tmp/quadrille-nodes-XXXXXX";
    qd_topology t;
    assert_non_null(mkdtemp(folder));
    nodes_folder(folder, lists, count, true);
    qd_topology_read(folder, &t);
    nodes_folder(folder, lists, count, false);
    return t;
}

static qd_cores_set cores(int first, int last)
{
    qd_cores_set set = {0};
    for (int i = first; i <= last; i++)
        set.bits[i / 64] |= (uint64_t)1 << i % 64;
    return set;
}

static void assert_placed(const qd_topology *t, const qd_cores_set *allowed, int rank, int ranks, qd_cores_set expected)
{
    qd_cores_set got;
    assert_true(qd_topology_place(t, allowed, rank, ranks, &got));
    assert_memory_equal(&got, &expected, sizeof got);
}

static void two_sockets(void **state)
{
    (void)state;
    /* hardware threads 8 .. 15 are on the cores of 0 .. 7; node 1 has memory only */
    const qd_topology t = machine((const char *const[]){"0-3,8-11", "", "4-7,12-15"}, 3);
    const qd_cores_set all = cores(0, 15);
    qd_cores_set first = cores(0, 3), second = cores(4, 7);
    first.bits[0] |= cores(8, 11).bits[0];
    second.bits[0] |= cores(12, 15).bits[0];
    assert_int_equal(t.nodes, 2);
    for (int ranks = 2; ranks <= 16; ranks += 2)
        for (int rank = 0; rank < ranks; rank++)
            assert_placed(&t, &all, rank, ranks, rank < ranks / 2 ? first : second);
    /* only some of the cores */
    const qd_cores_set some = cores(2, 5);
    assert_placed(&t, &some, 0, 2, cores(2, 3));
    assert_placed(&t, &some, 3, 4, cores(4, 5));
}

static void uneven_nodes(void **state)
{
    (void)state;
    const qd_topology t = machine((const char *const[]){"0-63", NULL, "64-95"}, 3);
    const qd_cores_set all = cores(0, 95);
    assert_placed(&t, &all, 1, 3, cores(0, 63));
    assert_placed(&t, &all, 2, 3, cores(64, 95));
    qd_cores_set none;
    for (int rank = 0; rank < 2; rank++) /* the second rank would have 32 cores of 96 */
        assert_false(qd_topology_place(&t, &all, rank, 2, &none));
}

static void nothing_to_choose(void **state)
{
    (void)state;
    qd_cores_set got;
    const qd_cores_set all = cores(0, 7), one = cores(0, 2);
    const qd_topology single = machine((const char *const[]){"0-7"}, 1), two = machine((const char *const[]){"0-3", "4-7"}, 2);
    assert_false(qd_topology_place(&single, &all, 0, 4, &got));
    assert_false(qd_topology_place(&two, &all, 0, 1, &got));  /* a rank needs both */
    assert_false(qd_topology_place(&two, &one, 0, 2, &got));  /* all allowed cores are on one node */
    assert_false(qd_topology_place(&two, &all, 0, 16, &got)); /* more ranks than cores */
    qd_topology missing;
    qd_topology_read("/nonexistent", &missing);
    assert_int_equal(missing.nodes, 0);
    assert_false(qd_topology_place(&missing, &all, 0, 2, &got));
}

static void binding(void **state)
{
    (void)state;
    qd_cores_set before, after;
    assert_int_equal(qd_thread_cores(&before), QD_OK);
    assert_int_equal(qd_cores_set_count(&before), qd_cores_allowed());
    qd_cores_set one = {0};
    for (int i = 0; i < QD_CORES_MOST / 64 && qd_cores_set_count(&one) == 0; i++)
        one.bits[i] = before.bits[i] & -before.bits[i];
    assert_int_equal(qd_thread_bind(&one), QD_OK);
    assert_int_equal(qd_thread_cores(&after), QD_OK);
    assert_memory_equal(&after, &one, sizeof after);
    assert_int_equal(qd_thread_bind(&before), QD_OK);
}

/* mpirun --map-by slot:PE=4 on 16 cores: 4 ranks with 4 cores each. Local ranks under taskset share
 * the cores of its mask. */
static void threads_of_a_rank(void **state)
{
    (void)state;
    assert_int_equal(qd_topology_threads(16, 4, 4, false), 4);
    assert_int_equal(qd_topology_threads(16, 4, 4, true), 1);
    assert_int_equal(qd_topology_threads(16, 16, 4, false), 4);
    assert_int_equal(qd_topology_threads(16, 16, 4, true), 4);
    assert_int_equal(qd_topology_threads(16, 2, 4, false), 2);
    assert_int_equal(qd_topology_threads(2, 1, 4, true), 1);
}

/* A thread that has been a rank is free again: it may become another one. */
static void released(void **state)
{
    (void)state;
    static const char *const lists[] = {"0", "1"};
    char folder[] = "/tmp/quadrille-nodes-XXXXXX";
    qd_cores_set all, before, now;
    if (qd_cores_allowed() != qd_cores() || qd_cores() != 2)
        skip();
    assert_int_equal(qd_thread_cores(&all), QD_OK);
    assert_non_null(mkdtemp(folder));
    nodes_folder(folder, lists, 2, true);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(qd_topology_bind(folder, rank, 2, &before), QD_OK);
        assert_int_equal(qd_thread_cores(&now), QD_OK);
        assert_int_equal(now.bits[0], 1 << rank);
        qd_topology_release(&before);
        assert_int_equal(qd_thread_cores(&now), QD_OK);
        assert_memory_equal(&now, &all, sizeof now);
    }
    nodes_folder(folder, lists, 2, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(two_sockets), cmocka_unit_test(uneven_nodes), cmocka_unit_test(nothing_to_choose),
                                       cmocka_unit_test(binding), cmocka_unit_test(threads_of_a_rank), cmocka_unit_test(released)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
