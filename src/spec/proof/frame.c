/* The mesh as the proof sees it: digits of rank numbers, in the order tp, cp, dp, and which of them
 * a group spans.
 *
 * The dense fold has cuts between the axes, the fold of experts between etp, ep and edp; both also
 * have the cuts that subgroups need (kv heads shared by neighbours, copies of ZeRO, nodes). Where
 * every rank has rows of its own tokens both folds agree, and a value can be converted from one to
 * the other. */
#include "spec/layout/experts.h"
#include "spec/proof/proof_impl.h"

#include <stdio.h>
#include <string.h>

/* A cut that is incompatible with the others is left out; a group that needs it is then not a set
 * of digits, and is rejected. */
static void add_cut(proof_frame *f, int cut)
{
    for (int i = 0; i <= f->count; i++)
        if (f->cut[i] == cut || (f->cut[i] % cut != 0 && cut % f->cut[i] != 0))
            return;
    if (f->count == PROOF_DIGITS)
        return;
    int at = 0;
    while (at <= f->count && f->cut[at] < cut)
        at++;
    memmove(&f->cut[at + 1], &f->cut[at], (size_t)(f->count + 1 - at) * sizeof *f->cut);
    f->cut[at] = cut;
    f->count++;
}

typedef struct range {
    int begin, end;
} range;

/* The ranges of rank numbers along which a group varies, at most one per axis; returns their
 * number. */
static int group_ranges(const qd_mesh *mesh, qd_group group, range ranges[QD_AXIS_PP])
{
    int count = 0, own = 1, all = 1; /* number of ranks along the group's axes, and along all axes, before this one */
    for (int axis = 0; axis < QD_AXIS_PP; axis++) {
        int degree = mesh->degree[axis];
        if (group.axes & QD_AXIS_BIT(axis)) {
            int begin = group.stride > own ? group.stride : own, last = own * degree, end = group.stride * group.size;
            end = end < last ? end : last;
            if (begin < end && count > 0 && ranges[count - 1].end == all * begin / own)
                ranges[count - 1].end = all * end / own; /* adjacent axes form one range */
            else if (begin < end)
                ranges[count++] = (range){all * begin / own, all * end / own};
            own *= degree;
        }
        all *= degree;
    }
    return count;
}

qd_status qd_proof_frames_create(qd_proof *proof)
{
    const qd_mesh *mesh = proof->mesh;
    int tp = mesh->degree[QD_AXIS_TP], cp = mesh->degree[QD_AXIS_CP], all = tp * cp * mesh->degree[QD_AXIS_DP];
    int etp = mesh->etp > 1 ? mesh->etp : 1;
    proof_frame *dense = &proof->frames[FOLD_DENSE], *experts = &proof->frames[FOLD_EXPERTS];
    dense->cut[0] = experts->cut[0] = 1;
    add_cut(dense, all);
    add_cut(dense, tp);
    add_cut(dense, tp * cp);
    add_cut(experts, all);
    add_cut(experts, qd_expert_ranks(mesh));
    add_cut(experts, etp);
    const qd_ledger *ledger = proof->list[0].program->ledger;
    for (int i = 0; i < ledger->param_count; i++)
        if (ledger->params[i].value[QD_AXIS_TP].repeat > 1)
            add_cut(dense, ledger->params[i].value[QD_AXIS_TP].repeat);
    for (int p = 0; p < proof->count; p++) {
        const qd_program *program = proof->list[p].program;
        for (int g = 0; g < program->group_count; g++) {
            range ranges[QD_AXIS_PP];
            qd_group group = program->groups[g];
            bool tokens = (group.axes & QD_AXES_TOKENS) == QD_AXES_TOKENS;
            int count = group_ranges(mesh, group, ranges);
            for (int r = 0; r < count; r++) {
                add_cut(tokens ? experts : dense, ranges[r].begin);
                add_cut(tokens ? experts : dense, ranges[r].end);
            }
        }
    }
    return QD_OK;
}

unsigned qd_proof_group_digits(const qd_proof *proof, int fold, qd_group group)
{
    const proof_frame *f = &proof->frames[fold];
    range ranges[QD_AXIS_PP];
    int count = group_ranges(proof->mesh, group, ranges), size = 1;
    unsigned digits = 0;
    for (int i = 0; i < f->count; i++)
        for (int r = 0; r < count; r++)
            if (ranges[r].begin <= f->cut[i] && f->cut[i + 1] <= ranges[r].end) {
                digits |= 1u << i;
                size *= f->cut[i + 1] / f->cut[i];
            }
    return size == group.size && !(group.axes & QD_AXIS_BIT(QD_AXIS_PP)) ? digits : 0;
}

bool qd_proof_place_convert(const qd_proof *proof, proof_place *place, int fold)
{
    const proof_frame *from = &proof->frames[place->fold], *to = &proof->frames[fold];
    proof_place out = {.fold = (uint8_t)fold};
    if (place->fold == fold)
        return true;
    for (int i = 0; i < to->count; i++) {
        int code = -1;
        for (int k = 0; k < from->count; k++) {
            if (from->cut[k] >= to->cut[i + 1] || to->cut[i] >= from->cut[k + 1])
                continue;
            if (code >= 0 && code != place->code[k])
                return false;
            code = place->code[k];
        }
        out.code[i] = (uint8_t)code;
    }
    *place = out;
    return true;
}

int qd_proof_digit_size(const qd_proof *proof, int fold, int digit)
{
    return proof->frames[fold].cut[digit + 1] / proof->frames[fold].cut[digit];
}

qd_axis qd_proof_digit_axis(const qd_proof *proof, int digit)
{
    int begin = proof->frames[FOLD_DENSE].cut[digit], tp = proof->mesh->degree[QD_AXIS_TP];
    return begin < tp ? QD_AXIS_TP : begin < tp * proof->mesh->degree[QD_AXIS_CP] ? QD_AXIS_CP : QD_AXIS_DP;
}

void qd_proof_digit_name(const qd_proof *proof, int fold, int digit, char *text, size_t size)
{
    const proof_frame *f = &proof->frames[fold];
    int etp = proof->mesh->etp > 1 ? proof->mesh->etp : 1;
    if (fold == FOLD_DENSE)
        snprintf(text, size, "%s", qd_axis_name(qd_proof_digit_axis(proof, digit)));
    else
        snprintf(text, size, "%s", f->cut[digit] < etp ? "etp" : f->cut[digit] < qd_expert_ranks(proof->mesh) ? "ep" : "edp");
}

bool qd_proof_place_equal(const qd_proof *proof, const proof_place *a, const proof_place *b)
{
    proof_place other = *b;
    return qd_proof_place_convert(proof, &other, a->fold) && memcmp(a->code, other.code, (size_t)proof->frames[a->fold].count) == 0;
}

proof_place qd_proof_param_place(const qd_proof *proof, const qd_ledger *ledger, int param)
{
    const qd_param *p = &ledger->params[param];
    const qd_place *tp = &p->value[QD_AXIS_TP];
    proof_place place = {.fold = p->expert >= 0 ? FOLD_EXPERTS : FOLD_DENSE};
    const proof_frame *f = &proof->frames[place.fold];
    int etp = proof->mesh->etp > 1 ? proof->mesh->etp : 1;
    for (int i = 0; i < f->count; i++) {
        int code = CODE_SAME;
        if (place.fold == FOLD_EXPERTS && f->cut[i] < qd_expert_ranks(proof->mesh))
            code = f->cut[i] >= etp ? CODE_EXPERTS : p->expert_dim == 0 ? CODE_ROWS : CODE_COLS;
        else if (place.fold == FOLD_DENSE && qd_proof_digit_axis(proof, i) == QD_AXIS_TP && tp->kind == QD_SHARD && f->cut[i] >= tp->repeat)
            code = tp->dim == 0 ? CODE_ROWS : CODE_COLS;
        place.code[i] = (uint8_t)code;
    }
    return place;
}

int qd_proof_place_exchange(const qd_proof *proof, proof_place *place, qd_group group, proof_code from, proof_code to)
{
    unsigned digits = qd_proof_group_digits(proof, place->fold, group);
    if (digits == 0) {
        proof_place other = *place;
        int fold = place->fold == FOLD_DENSE ? FOLD_EXPERTS : FOLD_DENSE;
        digits = qd_proof_group_digits(proof, fold, group);
        if (digits == 0 || !qd_proof_place_convert(proof, &other, fold))
            return -2;
        *place = other;
    }
    for (int i = 0; i < proof->frames[place->fold].count; i++)
        if (digits & 1u << i) {
            if (place->code[i] != from)
                return i;
            place->code[i] = (uint8_t)to;
        }
    return -1;
}

const char *qd_proof_code_text(proof_code code)
{
    static const char *const texts[] = {[CODE_SAME] = "replicated",         [CODE_ROWS] = "sharded by rows",
                                        [CODE_COLS] = "sharded by columns", [CODE_EXPERTS] = "sharded by experts",
                                        [CODE_SUM] = "a partial sum",       [CODE_MAX] = "a partial maximum",
                                        [CODE_PART] = "a ZeRO shard"};
    return texts[code];
}
