/* Rotary embeddings: which elements of a head are rotated, and the tables of angles. */
#include "model/model.h"

#include <math.h>

#define TWO_PI 6.283185307179586

static qd_status validate_longrope(const qd_model *m)
{
    const qd_rope *r = &m->rope;
    const struct {
        const char *key;
        const qd_number_list *list;
    } lists[] = {{"short", &r->short_factor}, {"long", &r->long_factor}};
    if (r->original_seq < 2)
        return QD_FAIL(QD_USAGE, "model.rope_original_seq is %lld: model.rope_scaling=longrope needs at least 2",
                       (long long)r->original_seq);
    for (int i = 0; i < 2; i++) {
        if (lists[i].list->count != qd_rope_dims(m) / 2)
            return QD_FAIL(QD_USAGE, "model.rope_%s_factor has %lld numbers: model.rope_scaling=longrope needs %d, one for each pair of "
                                     "rotated elements of a head", lists[i].key, (long long)lists[i].list->count, qd_rope_dims(m) / 2);
        for (int64_t j = 0; j < lists[i].list->count; j++)
            if (!(lists[i].list->at[j] > 0.0))
                return QD_FAIL(QD_USAGE, "model.rope_%s_factor has %g: its numbers must be above 0", lists[i].key, lists[i].list->at[j]);
    }
    return QD_OK;
}

qd_status qd_rope_validate(const qd_model *m)
{
    const qd_rope *r = &m->rope;
    if (m->position != QD_POSITION_ROPE) {
        if (r->nope_every > 0 || r->fraction != 1.0)
            return QD_FAIL(QD_USAGE, "model.nope_every and model.rope_fraction are for rotary positions, which this model does not have");
        return QD_OK;
    }
    if (!(r->base > 1.0))
        return QD_FAIL(QD_USAGE, "model.rope_base is %g: it must be above 1", r->base);
    if (r->scaling != QD_ROPE_NONE && !(r->factor >= 1.0))
        return QD_FAIL(QD_USAGE, "model.rope_factor is %g: it must be at least 1", r->factor);
    if (r->scaling == QD_ROPE_LLAMA3 && !(r->high_factor > r->low_factor && r->original_seq > 0))
        return QD_FAIL(QD_USAGE, "model.rope_scaling=llama3 needs rope_high_factor > rope_low_factor and rope_original_seq >= 1");
    if (r->scaling == QD_ROPE_YARN && !(r->beta_fast >= r->beta_slow && r->beta_slow > 0.0 && r->original_seq > 0))
        return QD_FAIL(QD_USAGE, "model.rope_scaling=yarn needs rope_beta_fast >= rope_beta_slow and rope_original_seq >= 1");
    if (!(r->fraction >= 0.0 && r->fraction <= 1.0) || qd_rope_dims(m) < 2 || qd_rope_dims(m) % 2 != 0)
        return QD_FAIL(QD_USAGE, "model.rope_fraction is %g, which rotates %d of the %d elements of a head: it must be an even number",
                       r->fraction, qd_rope_dims(m), m->head_dim);
    if (r->scaling == QD_ROPE_DYNAMIC && (qd_rope_dims(m) < 4 || r->original_seq < 1))
        return QD_FAIL(QD_USAGE, "model.rope_scaling=dynamic needs heads with at least 4 rotated elements, and rope_original_seq >= 1");
    if (r->scaling == QD_ROPE_LONG)
        QD_TRY(validate_longrope(m));
    if (r->nope_every < 0 || r->nope_every == 1)
        return QD_FAIL(QD_USAGE, "model.nope_every is %d: it must be 0 or at least 2, so that some layers have positions", r->nope_every);
    if (m->window > 0 && r->local_base != 0.0 && !(r->local_base > 1.0))
        return QD_FAIL(QD_USAGE, "model.rope_local_base is %g: it must be above 1, or 0 for model.rope_base", r->local_base);
    return QD_OK;
}

int qd_rope_dims(const qd_model *m)
{
    return qd_model_is_latent(m) ? m->qk_rope_head_dim : (int)(m->head_dim * m->rope.fraction);
}

bool qd_rope_is_local(const qd_model *m)
{
    return m->window > 0 && m->rope.local_base > 0.0;
}

int qd_rope_tables(const qd_model *m)
{
    return m->position == QD_POSITION_ROPE ? 1 + qd_rope_is_local(m) : 0;
}

static double llama3_frequency(const qd_rope *r, double frequency)
{
    double wavelength = TWO_PI / frequency, original = (double)r->original_seq;
    if (wavelength > original / r->low_factor)
        return frequency / r->factor;
    if (wavelength < original / r->high_factor)
        return frequency;
    double blend = (original / wavelength - r->low_factor) / (r->high_factor - r->low_factor);
    return (1.0 - blend) * frequency / r->factor + blend * frequency;
}

/* The index, as a real number, of the frequency that turns so many times in original_seq tokens. */
static double index_of_turns(const qd_model *m, double turns)
{
    return qd_rope_dims(m) * log((double)m->rope.original_seq / (turns * TWO_PI)) / (2.0 * log(m->rope.base));
}

static double yarn_frequency(const qd_model *m, int i, double frequency)
{
    const qd_rope *r = &m->rope;
    double low = index_of_turns(m, r->beta_fast), high = index_of_turns(m, r->beta_slow);
    low = fmax(r->truncate ? floor(low) : low, 0.0);
    high = fmin(r->truncate ? ceil(high) : high, qd_rope_dims(m) - 1.0);
    if (low == high)
        high += 0.001;
    double divided = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
    return frequency / r->factor * divided + frequency * (1.0 - divided);
}

double qd_rope_mscale(double factor, double mscale)
{
    return factor > 1.0 ? 0.1 * mscale * log(factor) + 1.0 : 1.0;
}

/* Factor on rotated queries and keys. */
static double yarn_length(const qd_rope *r)
{
    if (r->attention_factor > 0.0)
        return r->attention_factor;
    return r->mscale > 0.0 && r->mscale_all_dim > 0.0
               ? qd_rope_mscale(r->factor, r->mscale) / qd_rope_mscale(r->factor, r->mscale_all_dim)
               : qd_rope_mscale(r->factor, 1.0);
}

/* The base of dynamic scaling for sequences of this length. */
static double dynamic_base(const qd_model *m, int64_t seq)
{
    const qd_rope *r = &m->rope;
    double longer = seq > r->original_seq ? (double)seq / (double)r->original_seq : 1.0, dims = qd_rope_dims(m);
    return r->base * pow(r->factor * longer - (r->factor - 1.0), dims / (dims - 2.0));
}

static double longrope_length(const qd_rope *r)
{
    if (r->attention_factor > 0.0)
        return r->attention_factor;
    return r->factor > 1.0 ? sqrt(1.0 + log(r->factor) / log((double)r->original_seq)) : 1.0;
}

bool qd_rope_switches(const qd_model *m, int64_t length, int64_t other)
{
    return m->position == QD_POSITION_ROPE && m->rope.scaling == QD_ROPE_LONG &&
           (length > m->rope.original_seq) != (other > m->rope.original_seq);
}

void qd_rope_table(const qd_model *m, int64_t seq, int64_t length, bool local, float *table)
{
    const qd_rope *r = &m->rope;
    const qd_rope_scaling scaling = local ? QD_ROPE_NONE : r->scaling;
    double scale = 1.0, base = local ? r->local_base : scaling == QD_ROPE_DYNAMIC ? dynamic_base(m, length) : r->base;
    const qd_number_list *divisors = length > r->original_seq ? &r->long_factor : &r->short_factor;
    int half = qd_rope_dims(m) / 2;
    if (scaling == QD_ROPE_YARN)
        scale = yarn_length(r);
    else if (scaling == QD_ROPE_LONG)
        scale = longrope_length(r);
    for (int i = 0; i < half; i++) {
        double frequency = pow(base, -2.0 * i / qd_rope_dims(m));
        if (scaling == QD_ROPE_LINEAR)
            frequency /= r->factor;
        else if (scaling == QD_ROPE_LLAMA3)
            frequency = llama3_frequency(r, frequency);
        else if (scaling == QD_ROPE_YARN)
            frequency = yarn_frequency(m, i, frequency);
        else if (scaling == QD_ROPE_LONG)
            frequency /= divisors->at[i];
        for (int64_t t = 0; t < seq; t++) {
            double angle = (double)t * frequency;
            table[(t * half + i) * 2 + 0] = (float)(scale * cos(angle));
            table[(t * half + i) * 2 + 1] = (float)(scale * sin(angle));
        }
    }
}
