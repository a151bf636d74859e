/* Follows the rows of each parameter through the parts of SQUARES. */
#include "train/exec/row_sums.h"

#include "spec/layout/experts.h"

#include <stdlib.h>

qd_status qd_row_runs(const qd_program *p, qd_sum_run **runs, int64_t *count)
{
    const qd_storage *s = &p->storage;
    int64_t all = s->share[0].parts + s->share[1].parts, most = 0;
    for (int i = 0; i < p->ledger->param_count; i++)
        most += s->rows[i] > 0 ? qd_storage_share(s, i).parts : 0;
    int64_t *cursor = calloc((size_t)all, sizeof *cursor); /* per family and part: its next row */
    *runs = calloc((size_t)(most > 0 ? most : 1), sizeof **runs);
    *count = 0;
    if (!cursor || !*runs) {
        free(cursor);
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rows of the gradient norm");
    }
    int place = qd_group_coord(&p->ledger->mesh, qd_norm_group(&p->ledger->model, &p->ledger->mesh), p->rank);
    int64_t *cursors[QD_FAMILY_COUNT] = {cursor, cursor + s->share[0].parts};
    for (int family = 0; family < QD_FAMILY_COUNT; family++)
        for (int part = 0; part < s->share[family].parts; part++)
            cursors[family][part] = qd_program_square_base(p, family, part);
    for (int i = 0; i < p->ledger->param_count; i++) {
        const qd_param *param = &p->ledger->params[i];
        if (param->tied_to >= 0 || param->frozen)
            continue;
        bool counts = place < p->norm[i].holders && place % p->norm[i].repeat == 0;
        for (int part = 0; part < s->share[param->family].parts; part++) {
            int64_t rows = qd_storage_part(s, i, s->share[param->family].parts, part).rows, *at = &cursors[param->family][part];
            if (counts && rows > 0)
                (*runs)[(*count)++] = (qd_sum_run){.first = *at, .count = rows, .sum = i};
            *at += rows;
        }
    }
    free(cursor);
    return QD_OK;
}
