/* Reads the samples of a micro-batch: tokens, targets, document starts and what pairs have in
 * addition. A rank of cp selects its rows. */
#include "train/exec/interpret.h"

int64_t qd_input_whole(const qd_program *p)
{
    const qd_strategy *s = &p->strategy;
    int coord;
    return qd_program_cp(p, &coord) > 1 ? (3 + (s->preference.kind ? QD_PAIR_PARTS : 0)) * s->micro_batch * s->seq : 0;
}

static qd_status fill_pairs(const qd_strategy *s, const qd_batch_source *source, int64_t first, int32_t *to)
{
    if (!s->preference.kind)
        return QD_OK;
    if (!source->fill_pairs)
        return QD_FAIL(QD_USAGE, "the data has no pairs of completions, which the loss compares");
    return source->fill_pairs(source->context, first, s->micro_batch, s->seq, s->preference.kind == QD_PREFERENCE_IPO, to);
}

qd_status qd_input_fill(const qd_program *p, const qd_batch_source *source, int64_t first, int32_t *whole, int32_t *host)
{
    const qd_strategy *s = &p->strategy;
    const int64_t rows = s->micro_batch * s->seq; /* of whole sequences */
    int coord, cp = qd_program_cp(p, &coord);
    int32_t *to = cp > 1 ? whole : host;
    QD_TRY(source->fill(source->context, first, s->micro_batch, s->seq, to, to + rows, to + 2 * rows));
    QD_TRY(fill_pairs(s, source, first, to + 3 * rows));
    qd_context_ahead(s->micro_batch, s->seq, cp, coord, qd_program_ahead(p), to, host + qd_program_input_ahead(p));
    if (cp == 1)
        return QD_OK;
    qd_context_select(s->micro_batch, s->seq, cp, coord, s->cp_mode == QD_CP_ULYSSES, whole, host);
    if (s->preference.kind)
        qd_context_select_parts(s->micro_batch, s->seq, cp, coord, QD_PAIR_PARTS, whole + 3 * rows, host + qd_program_pairs(p));
    return QD_OK;
}
