/* The mesh: the arrangement of ranks. world = pp × dp × cp × tp, tp fastest and pp slowest, so that
 * neighbours along tp are neighbours in the machine. */
#ifndef QD_SPEC_LAYOUT_MESH_H
#define QD_SPEC_LAYOUT_MESH_H

#include <quadrille/status.h>
#include <quadrille/types.h>

typedef enum qd_axis { QD_AXIS_TP, QD_AXIS_CP, QD_AXIS_DP, QD_AXIS_PP, QD_AXIS_COUNT } qd_axis;
#define QD_AXIS_BIT(axis) (1u << (axis))
/* Axes whose ranks hold different tokens and the same parameters; gradients are summed over
 * them. */
#define QD_AXES_DATA (QD_AXIS_BIT(QD_AXIS_DP) | QD_AXIS_BIT(QD_AXIS_CP))

/* Axes whose ranks hold different tokens, or under sp different slices of their rows. */
#define QD_AXES_TOKENS (QD_AXES_DATA | QD_AXIS_BIT(QD_AXIS_TP))
#define QD_AXES_ALL (QD_AXES_TOKENS | QD_AXIS_BIT(QD_AXIS_PP))

typedef struct qd_mesh {
    int degree[QD_AXIS_COUNT];
    int world;
    int ep, etp; /* expert-parallel ranks, and ranks that share each expert; 0 or 1: none */
    int nodes;   /* machines with equally many consecutive ranks each; 0 or 1: a single machine */
    bool by_node; /* dispatch sends each row to a node once (spec/layout/nodes.h) */
    bool forward; /* passes without gradients only: without sp, ranks of tp send the same rows to experts */
    bool sp; /* sequence parallelism: between GEMMs, ranks of tp hold slices of the rows instead of all rows */
} qd_mesh;

const char *qd_axis_name(qd_axis axis);

/* One degree may be -1: the rest of the world. QD_USAGE when the degrees do not multiply to
 * `world`. */
qd_status qd_mesh_create(int world, const int degrees[QD_AXIS_COUNT], qd_mesh *mesh);

void qd_mesh_coords(const qd_mesh *mesh, int rank, int coords[QD_AXIS_COUNT]);
int qd_mesh_rank(const qd_mesh *mesh, const int coords[QD_AXIS_COUNT]);

/* A group is the set of ranks that differ only along the axes in `mask`. */
int qd_mesh_group_size(const qd_mesh *mesh, unsigned mask);
unsigned qd_mesh_spread(const qd_mesh *mesh, unsigned mask); /* the axes of `mask` with more than one rank */
int qd_mesh_group_colour(const qd_mesh *mesh, unsigned mask, int rank); /* equal for all ranks of a group */
int qd_mesh_group_coord(const qd_mesh *mesh, unsigned mask, int rank);  /* position in the group, tp fastest */
/* World rank at position `coord` in the group that rank `colour_of` belongs to. */
int qd_mesh_group_rank(const qd_mesh *mesh, unsigned mask, int colour_of, int coord);
/* Writes "dp", "dp×cp", … to text. */
void qd_mesh_mask_name(unsigned mask, char *text, size_t size);

/* A subgroup: `size` positions of such a group, `stride` apart. size · stride divides the size of
 * the whole group. */
typedef struct qd_group {
    unsigned axes;
    int size, stride;
} qd_group;
qd_group qd_group_whole(const qd_mesh *mesh, unsigned axes);
bool qd_group_equal(qd_group a, qd_group b);
int qd_group_colour(const qd_mesh *mesh, qd_group group, int rank);
int qd_group_coord(const qd_mesh *mesh, qd_group group, int rank);
int qd_group_rank(const qd_mesh *mesh, qd_group group, int colour_of, int coord);
/* Writes "dp", "dp (4)", "dp (2, 4 apart)", … to text. */
void qd_group_name(const qd_mesh *mesh, qd_group group, char *text, size_t size);

/* ": take 2 or 4": the values nearest to a degree that work, below it and above it up to `most`. */
void qd_degree_nearest(int degree, int most, bool (*works)(const void *context, int degree), const void *context, char *text, size_t size);
#endif
