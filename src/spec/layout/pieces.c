/* Plans the checkpoint pieces of a rank: divides the boxes that it shares with its replicas evenly,
 * by rows. */
#include "spec/layout/pieces.h"

bool qd_pieces_omit(const qd_ledger *ledger, int param)
{
    return ledger->params[param].frozen && ledger->model.lora.stored;
}

unsigned qd_pieces_kinds(const qd_program *p)
{
    unsigned kinds = 1u << QD_CKPT_VALUE;
    if (p->persistent[QD_BUFFER_MOMENT1] >= 0)
        kinds |= 1u << QD_CKPT_MOMENT1;
    if (p->persistent[QD_BUFFER_MOMENT2] >= 0)
        kinds |= 1u << QD_CKPT_MOMENT2;
    return kinds;
}

static const qd_buffer_kind buffers[QD_CKPT_KIND_COUNT] = {QD_BUFFER_PARAM, QD_BUFFER_MOMENT1, QD_BUFFER_MOMENT2};

/* The box of a parameter that the rank may have to write. Under ZeRO that is its shard. */
static qd_atom box_of(const qd_program *p, unsigned kinds, int kind, int param)
{
    qd_atom box = qd_program_holding(p, buffers[kind], param).box;
    /* Another rank of tp may hold the same box and write it. */
    if (!qd_ledger_counts(p->ledger, param, p->rank) || (!(kinds & QD_PIECES_OMITTED) && qd_pieces_omit(p->ledger, param)))
        box.length[0] = 0;
    return box;
}

int qd_pieces_tensors(const qd_program *p)
{
    int tensors = 0;
    for (int i = 0; i < p->ledger->param_count; i++)
        if (p->ledger->params[i].tied_to < 0 && !qd_pieces_omit(p->ledger, i))
            tensors += 1 + qd_program_keeps(p, QD_BUFFER_MOMENT1, i) + qd_program_keeps(p, QD_BUFFER_MOMENT2, i);
    return tensors;
}

static int replicas_of(const qd_program *p, int param, int *replica)
{
    qd_group group = qd_ledger_data_group(p->ledger, p->ledger->params[param].family);
    int parts = qd_program_share(p, QD_BUFFER_PARAM, param).parts;
    *replica = qd_group_coord(&p->ledger->mesh, group, p->rank) / parts;
    return group.size / parts;
}

static void add_piece(qd_state_pieces *pieces, int param, int kind, const qd_atom *box, int64_t first_row, int64_t rows)
{
    int64_t row = box->length[1], most = QD_PIECE_BYTES / (int64_t)sizeof(float) / row;
    most = most > 0 ? most : 1;
    for (int64_t done = 0; done < rows; done += most) {
        qd_state_piece piece = {.param = param, .kind = (qd_ckpt_kind)kind, .box = *box, .before = pieces->elements};
        piece.box.begin[0] += first_row + done;
        piece.box.length[0] = rows - done < most ? rows - done : most;
        piece.count = piece.box.length[0] * row;
        if (pieces->list)
            pieces->list[pieces->count] = piece;
        pieces->count++;
        pieces->elements += piece.count;
        pieces->largest = piece.count > pieces->largest ? piece.count : pieces->largest;
    }
}

/* Parameters of one list have the same replicas: frozen ones may be whole where others are
 * sharded. */
enum { LISTS = 2 * QD_FAMILY_COUNT };
static int list_of(const qd_param *param)
{
    return param->family + (param->frozen ? QD_FAMILY_COUNT : 0);
}

/* The boxes of a family, concatenated, form one list of elements. Each replica writes an even range
 * of it, rounded to rows. So most tensors are written whole: n replicas cut at most n - 1 tensors
 * per family and kind. */
static void walk(const qd_program *p, unsigned kinds, qd_state_pieces *pieces)
{
    *pieces = (qd_state_pieces){.list = pieces->list};
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++) {
        int64_t totals[LISTS] = {0}, before[LISTS] = {0};
        if (!(kinds & 1u << kind))
            continue;
        for (int i = 0; i < p->ledger->param_count; i++) {
            qd_atom box = box_of(p, kinds, kind, i);
            totals[list_of(&p->ledger->params[i])] += p->ledger->params[i].tied_to < 0 ? box.length[0] * box.length[1] : 0;
        }
        for (int i = 0; i < p->ledger->param_count; i++) {
            qd_atom box = box_of(p, kinds, kind, i);
            int64_t row = box.length[1], count = box.length[0] * row;
            if (p->ledger->params[i].tied_to >= 0 || count == 0)
                continue;
            int list = list_of(&p->ledger->params[i]), replica, replicas = replicas_of(p, i, &replica);
            int64_t begin, length, at = before[list];
            qd_slice(totals[list], replicas, replica, &begin, &length);
            /* A row belongs to the range that contains its first element. */
            int64_t from = begin <= at ? 0 : (begin - at + row - 1) / row;
            int64_t to = begin + length <= at ? 0 : (begin + length - at + row - 1) / row;
            to = to < box.length[0] ? to : box.length[0];
            if (from < to)
                add_piece(pieces, i, kind, &box, from, to - from);
            before[list] += count;
        }
    }
}

qd_status qd_pieces_plan(const qd_program *p, unsigned kinds, qd_arena *arena, qd_state_pieces *pieces)
{
    *pieces = (qd_state_pieces){0};
    walk(p, kinds, pieces);
    pieces->list = QD_ARENA_NEW(arena, qd_state_piece, pieces->count + 1);
    if (!pieces->list)
        return QD_NO_MEMORY;
    walk(p, kinds, pieces);
    return QD_OK;
}

/* The box of a parameter that a rank holds in a kind of buffer: its shard under ZeRO. */
static qd_atom box_on(const qd_program *p, qd_buffer_kind buffer, int param, int rank)
{
    qd_group data = qd_ledger_data_group(p->ledger, p->ledger->params[param].family);
    const int parts = qd_program_share(p, buffer, param).parts;
    qd_atom box = qd_ledger_atom(p->ledger, param, rank);
    int64_t first, rows;
    qd_slice(box.length[0], parts, qd_group_coord(&p->ledger->mesh, data, rank) % parts, &first, &rows);
    box.begin[0] += first;
    box.length[0] = rows;
    return box;
}

static bool same_box(const qd_atom *a, const qd_atom *b)
{
    return a->begin[0] == b->begin[0] && a->begin[1] == b->begin[1] && a->length[0] == b->length[0] && a->length[1] == b->length[1];
}

/* One tensor: adds this rank's piece, if it has one, and returns the elements of all ranks'. The
 * ranks that hold a box take turns, by parameter. */
static int64_t walk_left(const qd_program *p, int kind, int param, uint64_t left, qd_state_pieces *pieces)
{
    qd_atom boxes[64];
    int64_t elements = 0;
    const int world = p->ledger->mesh.world;
    for (int r = 0; r < world; r++)
        boxes[r] = left >> r & 1 ? box_on(p, buffers[kind], param, r) : (qd_atom){{0, 0}, {0, 0}};
    for (int r = 0; r < world; r++) {
        int holders[64], count = 0;
        bool first = boxes[r].length[0] * boxes[r].length[1] > 0;
        for (int other = 0; other < world; other++)
            if (left >> other & 1 && same_box(&boxes[other], &boxes[r])) {
                first = first && other >= r;
                holders[count++] = other;
            }
        if (!first)
            continue;
        elements += boxes[r].length[0] * boxes[r].length[1];
        if (holders[param % count] == p->rank)
            add_piece(pieces, param, kind, &boxes[r], 0, boxes[r].length[0]);
    }
    return elements;
}

static bool walk_all_left(const qd_program *p, unsigned kinds, uint64_t left, qd_state_pieces *pieces)
{
    bool complete = true;
    *pieces = (qd_state_pieces){.list = pieces->list};
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        for (int i = 0; i < p->ledger->param_count; i++) {
            const qd_param *param = &p->ledger->params[i];
            if (!(kinds & 1u << kind) || param->tied_to >= 0 || !qd_program_keeps(p, buffers[kind], i) ||
                (!(kinds & QD_PIECES_OMITTED) && qd_pieces_omit(p->ledger, i)))
                continue;
            complete = walk_left(p, kind, i, left, pieces) == param->shape[0] * param->shape[1] && complete;
        }
    return complete;
}

qd_status qd_pieces_left(const qd_program *p, unsigned kinds, uint64_t left, qd_arena *arena, qd_state_pieces *pieces, bool *complete)
{
    *pieces = (qd_state_pieces){0};
    *complete = false;
    if (p->ledger->mesh.world > 64) /* the bits of `left` */
        return QD_OK;
    walk_all_left(p, kinds, left, pieces);
    pieces->list = QD_ARENA_NEW(arena, qd_state_piece, pieces->count + 1);
    if (!pieces->list)
        return QD_NO_MEMORY;
    *complete = walk_all_left(p, kinds, left, pieces);
    return QD_OK;
}

int64_t qd_pieces_bytes(const qd_program *p)
{
    qd_state_pieces pieces = {0};
    walk(p, qd_pieces_kinds(p), &pieces);
    return pieces.elements * (int64_t)sizeof(float);
}
