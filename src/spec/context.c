#include "spec/context.h"

#include <quadrille/types.h>

int qd_context_runs(int64_t seq, int cp, int coord, qd_row_run runs[QD_CONTEXT_RUNS])
{
    int count = 0;
    int64_t row = 0;
    for (int i = 0; i < 2; i++) {
        int64_t position, length;
        qd_slice(seq, 2 * cp, i == 0 ? coord : 2 * cp - 1 - coord, &position, &length);
        if (length > 0 && count > 0 && runs[count - 1].position + runs[count - 1].count == position)
            runs[count - 1].count += length;
        else if (length > 0)
            runs[count++] = (qd_row_run){row, position, length};
        row += length;
    }
    return count;
}

int64_t qd_context_rows(int64_t seq, int cp, int coord)
{
    qd_row_run runs[QD_CONTEXT_RUNS];
    int64_t rows = 0;
    for (int i = qd_context_runs(seq, cp, coord, runs) - 1; i >= 0; i--)
        rows += runs[i].count;
    return rows;
}

qd_status qd_context_check(int64_t seq, int cp)
{
    if (cp > 1 && seq < 2 * (int64_t)cp)
        return QD_FAIL(QD_USAGE, "data.seq is %lld and parallel.cp %d: a sequence is cut into two pieces per rank and needs at least %d "
                                 "positions", (long long)seq, cp, 2 * cp);
    return QD_OK;
}
