#include "train/row_sums.h"

/* Additions of one sum wait for one another; so several sums are under way, each in its own order. */
enum { CHAINS = 8 };
typedef struct chain {
    const double *at;
    int64_t left;
    int param;
} chain;

/* Rows of `active` sums until the first of them has ended. */
static void add_rows(chain *chains, double *sums, int active)
{
    int64_t rows = chains[0].left;
    for (int c = 1; c < active; c++)
        rows = chains[c].left < rows ? chains[c].left : rows;
    if (active == CHAINS) {
        const double *at[CHAINS];
        double sum[CHAINS];
        for (int c = 0; c < CHAINS; c++) {
            at[c] = chains[c].at;
            sum[c] = sums[c];
        }
        for (int64_t r = 0; r < rows; r++)
            for (int c = 0; c < CHAINS; c++)
                sum[c] += at[c][r];
        for (int c = 0; c < CHAINS; c++)
            sums[c] = sum[c];
    } else {
        for (int c = 0; c < active; c++)
            for (int64_t r = 0; r < rows; r++)
                sums[c] += chains[c].at[r];
    }
    for (int c = 0; c < active; c++) {
        chains[c].at += rows;
        chains[c].left -= rows;
    }
}

/* Parameters whose rows lie one after another, because their family is in one part. */
static void sum_whole(const qd_program *p, const double *squares, int64_t *const *cursors, double *sums)
{
    chain chains[CHAINS];
    double under_way[CHAINS];
    int active = 0, next = 0;
    do {
        for (; active < CHAINS && next < p->ledger->param_count; next++) {
            int family = p->ledger->params[next].family;
            if (p->storage.share[family].parts > 1 || p->ledger->params[next].tied_to >= 0)
                continue;
            chains[active] = (chain){squares + *cursors[family], qd_storage_part(&p->storage, next, 1, 0).rows, next};
            *cursors[family] += chains[active].left;
            under_way[active++] = 0.0;
        }
        if (active > 0)
            add_rows(chains, under_way, active);
        for (int c = active - 1; c >= 0; c--) {
            if (chains[c].left > 0)
                continue;
            sums[chains[c].param] = under_way[c];
            chains[c] = chains[--active];
            under_way[c] = under_way[active];
        }
    } while (active > 0 || next < p->ledger->param_count);
}

/* Parameters whose rows lie in several parts. */
static double sum_parts(const qd_program *p, const double *squares, int param, int parts, int64_t *cursor)
{
    double sum = 0.0;
    for (int part = 0; part < parts; part++) {
        int64_t rows = qd_storage_part(&p->storage, param, parts, part).rows;
        for (int64_t r = 0; r < rows; r++)
            sum += squares[cursor[part]++];
    }
    return sum;
}

void qd_row_sums(const qd_program *p, const double *squares, int64_t *cursor, double *sums)
{
    int64_t *cursors[QD_FAMILY_COUNT] = {cursor, cursor + p->storage.share[0].parts};
    for (int family = 0; family < QD_FAMILY_COUNT; family++)
        for (int part = 0; part < p->storage.share[family].parts; part++)
            cursors[family][part] = qd_program_square_base(p, family, part);
    sum_whole(p, squares, cursors, sums);
    for (int i = 0; i < p->ledger->param_count; i++) {
        int family = p->ledger->params[i].family, parts = p->storage.share[family].parts;
        if (p->ledger->params[i].tied_to >= 0)
            sums[i] = 0.0;
        else if (parts > 1)
            sums[i] = sum_parts(p, squares, i, parts, cursors[family]);
        if (!qd_ledger_counts_in_norm(p->ledger, i, p->rank))
            sums[i] = 0.0;
    }
}
