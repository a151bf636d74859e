/* The mesh: coordinates of ranks, groups along axes, and the error messages for degrees that do not
 * match the number of ranks. */
#include "spec/layout/mesh.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const char *const axis_names[QD_AXIS_COUNT] = {"tp", "cp", "dp", "pp"};

const char *qd_axis_name(qd_axis axis)
{
    return axis_names[axis];
}

/* Writes the given degrees above 1, as "pp 2 × tp 4". */
static void name_degrees(const int degrees[QD_AXIS_COUNT], char *text, size_t size)
{
    size_t used = 0;
    snprintf(text, size, "dp 1");
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        if (degrees[axis] > 1 && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%s %d", used > 0 ? " × " : "", axis_names[axis], degrees[axis]);
}

/* The number of ranks does not match the degrees. open: one degree is -1. */
static qd_status refuse_world(int world, const int degrees[QD_AXIS_COUNT], int64_t product, bool open)
{
    char given[96], there[40], next[32] = "";
    name_degrees(degrees, given, sizeof given);
    snprintf(there, sizeof there, world == 1 ? "there is %d" : "there are %d", world);
    if (!open)
        return QD_FAIL(
            QD_USAGE,
            "%s is a layout of %lld rank%s, but %s: start %lld (parallel.ranks, mpirun -n), or set parallel.dp to -1, which takes the rest",
            given, (long long)product, product == 1 ? "" : "s", there, (long long)product);
    if (world > product)
        snprintf(next, sizeof next, " or %lld", (long long)((world / product + 1) * product));
    return QD_FAIL(QD_USAGE, "%s needs %lld ranks or a multiple of that, but %s: start %lld%s (parallel.ranks, mpirun -n)", given,
                   (long long)product, there, (long long)(world > product ? world / product * product : product), next);
}

qd_status qd_mesh_create(int world, const int degrees[QD_AXIS_COUNT], qd_mesh *mesh)
{
    if (world < 1)
        return QD_FAIL(QD_USAGE, "parallel.ranks is %d: it must be at least 1", world);
    int open = -1;
    int64_t product = 1;
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++) {
        mesh->degree[axis] = degrees[axis];
        if (degrees[axis] == -1) {
            if (open >= 0)
                return QD_FAIL(QD_USAGE, "parallel.%s and parallel.%s are both -1: only one degree can be the rest of the world",
                               axis_names[axis], axis_names[open]);
            open = axis;
        } else if (degrees[axis] < 1) {
            return QD_FAIL(QD_USAGE, "parallel.%s is %d: it must be at least 1, or -1 for the rest of the world",
                           axis_names[axis], degrees[axis]);
        } else {
            product *= degrees[axis];
            if (product > INT32_MAX)
                return QD_FAIL(QD_USAGE, "the degrees of parallel.pp, dp, cp and tp make more than 2^31 ranks together: lower one of them");
        }
    }
    if (open >= 0) {
        if (world % product != 0)
            return refuse_world(world, degrees, product, true);
        mesh->degree[open] = (int)(world / product);
    } else if (product != world) {
        return refuse_world(world, degrees, product, false);
    }
    mesh->world = world;
    mesh->sp = mesh->forward = false;
    mesh->ep = mesh->etp = mesh->nodes = 1;
    mesh->by_node = false;
    return QD_OK;
}

void qd_mesh_coords(const qd_mesh *mesh, int rank, int coords[QD_AXIS_COUNT])
{
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++) {
        coords[axis] = rank % mesh->degree[axis];
        rank /= mesh->degree[axis];
    }
}

int qd_mesh_rank(const qd_mesh *mesh, const int coords[QD_AXIS_COUNT])
{
    int rank = 0;
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        rank = rank * mesh->degree[axis] + coords[axis];
    return rank;
}

int qd_mesh_group_size(const qd_mesh *mesh, unsigned mask)
{
    int size = 1;
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        if (mask & QD_AXIS_BIT(axis))
            size *= mesh->degree[axis];
    return size;
}

/* Position of a rank along the axes in `mask`, tp fastest. */
static int position(const qd_mesh *mesh, unsigned mask, int rank)
{
    int coords[QD_AXIS_COUNT], result = 0;
    qd_mesh_coords(mesh, rank, coords);
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        if (mask & QD_AXIS_BIT(axis))
            result = result * mesh->degree[axis] + coords[axis];
    return result;
}

int qd_mesh_group_coord(const qd_mesh *mesh, unsigned mask, int rank)
{
    return position(mesh, mask, rank);
}

unsigned qd_mesh_spread(const qd_mesh *mesh, unsigned mask)
{
    unsigned axes = 0;
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        if (mesh->degree[axis] > 1)
            axes |= mask & QD_AXIS_BIT(axis);
    return axes;
}

int qd_mesh_group_colour(const qd_mesh *mesh, unsigned mask, int rank)
{
    return position(mesh, ~mask, rank);
}

int qd_mesh_group_rank(const qd_mesh *mesh, unsigned mask, int colour_of, int coord)
{
    int coords[QD_AXIS_COUNT];
    qd_mesh_coords(mesh, colour_of, coords);
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++) {
        if (mask & QD_AXIS_BIT(axis)) {
            coords[axis] = coord % mesh->degree[axis];
            coord /= mesh->degree[axis];
        }
    }
    return qd_mesh_rank(mesh, coords);
}

void qd_mesh_mask_name(unsigned mask, char *text, size_t size)
{
    size_t used = 0;
    if (size > 0)
        text[0] = '\0';
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--) {
        if (!(mask & QD_AXIS_BIT(axis)) || used >= size)
            continue;
        int n = snprintf(text + used, size - used, "%s%s", used ? "×" : "", axis_names[axis]);
        used += n > 0 ? (size_t)n : 0;
    }
}

qd_group qd_group_whole(const qd_mesh *mesh, unsigned axes)
{
    return (qd_group){axes, qd_mesh_group_size(mesh, axes), 1};
}

bool qd_group_equal(qd_group a, qd_group b)
{
    return a.axes == b.axes && a.size == b.size && a.stride == b.stride;
}

/* The positions of the whole group form blocks of size × stride; a block holds `stride` interleaved
 * subgroups. */
int qd_group_colour(const qd_mesh *mesh, qd_group group, int rank)
{
    int at = qd_mesh_group_coord(mesh, group.axes, rank), block = group.size * group.stride;
    int parts = qd_mesh_group_size(mesh, group.axes) / group.size;
    return qd_mesh_group_colour(mesh, group.axes, rank) * parts + at / block * group.stride + at % group.stride;
}

int qd_group_coord(const qd_mesh *mesh, qd_group group, int rank)
{
    return qd_mesh_group_coord(mesh, group.axes, rank) % (group.size * group.stride) / group.stride;
}

int qd_group_rank(const qd_mesh *mesh, qd_group group, int colour_of, int coord)
{
    int at = qd_mesh_group_coord(mesh, group.axes, colour_of), block = group.size * group.stride;
    return qd_mesh_group_rank(mesh, group.axes, colour_of, at / block * block + at % group.stride + coord * group.stride);
}

void qd_group_name(const qd_mesh *mesh, qd_group group, char *text, size_t size)
{
    char axes[32];
    qd_mesh_mask_name(group.axes, axes, sizeof axes);
    if (group.stride > 1)
        snprintf(text, size, "%s (%d, %d apart)", axes, group.size, group.stride);
    else if (group.size < qd_mesh_group_size(mesh, group.axes))
        snprintf(text, size, "%s (%d)", axes, group.size);
    else
        snprintf(text, size, "%s", axes);
}

void qd_degree_nearest(int degree, int most, bool (*works)(const void *context, int degree), const void *context, char *text, size_t size)
{
    int below = degree - 1, above = degree + 1;
    while (below > 0 && !works(context, below))
        below--;
    while (above <= most && !works(context, above))
        above++;
    if (below > 0 && above <= most)
        snprintf(text, size, ": take %d or %d", below, above);
    else if (below > 0 || above <= most)
        snprintf(text, size, ": take %d", below > 0 ? below : above);
    else
        text[0] = '\0';
}
