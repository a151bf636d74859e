/* Schedules that split the backward pass. The gradients of inputs (I) are sent to the previous
 * stage as soon as they are known; the gradients of weights (W) are deferred to fill the bubble.
 *
 * zb_h1 and zb_v: Qi, Wan, Huang, Lin: Zero bubble pipeline parallelism (2024). dualpipe_v:
 * DeepSeek-AI, DualPipe, in the form of Sea AI Lab that folds its two directions into a V. */
#include "spec/schedule/schedule_impl.h"

typedef qd_schedule_writer writer;

/* 1F1B with W delayed by as many micro-batches as the rank has fewer in flight than rank 0, so that
 * every rank keeps as much as rank 0 of 1F1B. At the end, when no forward pass is left, a W takes
 * its place. */
void qd_schedule_write_zb_h1(writer *w, int rank)
{
    int m = w->s->micro_batches, ahead = w->s->ranks - 1 - rank, forward = 0, weight = 0;
    for (; forward < ahead; forward++)
        qd_schedule_add(w, QD_PASS_F, rank, forward);
    for (int input = 0; input < m; input++) {
        int late = forward < m ? rank : 0;
        qd_schedule_add(w, QD_PASS_F, rank, forward++);
        qd_schedule_add(w, QD_PASS_I, rank, input);
        if (input - weight >= late)
            qd_schedule_add(w, QD_PASS_W, rank, weight++);
    }
    while (weight < m)
        qd_schedule_add(w, QD_PASS_W, rank, weight++);
}

/* Turns done so far of the rank's two stages: on the way down the V (0) and on the way up (1). */
typedef struct counts {
    writer *w;
    int stage[2], forward[2], input[2], weight[2];
} counts;

static counts begin(writer *w, int rank)
{
    return (counts){.w = w, .stage = {rank, w->s->stages - 1 - rank}};
}

static void forward(counts *c, int way)
{
    qd_schedule_add(c->w, QD_PASS_F, c->stage[way], c->forward[way]++);
}

static void input(counts *c, int way)
{
    qd_schedule_add(c->w, QD_PASS_I, c->stage[way], c->input[way]++);
}

static void weight(counts *c, int way)
{
    qd_schedule_add(c->w, QD_PASS_W, c->stage[way], c->weight[way]++);
}

static void backward(counts *c, int way)
{
    qd_schedule_add(c->w, QD_PASS_B, c->stage[way], c->input[way]++);
    c->weight[way]++;
}

static void both_halves(counts *c, int way)
{
    input(c, way);
    weight(c, way);
}

/* The pattern needs 2 p - 1 micro-batches; with fewer, turns of missing micro-batches are
 * skipped. */
void qd_schedule_write_zb_v(writer *w, int rank)
{
    int p = w->s->ranks, m = w->s->micro_batches > 2 * p - 1 ? w->s->micro_batches : 2 * p - 1;
    counts c = begin(w, rank);
    for (int i = 0; i < 2 * (p - rank) - 1; i++)
        forward(&c, 0);
    for (int i = 0; i < rank; i++) {
        forward(&c, 1);
        forward(&c, 0);
    }
    for (int i = 0; i < p - rank; i++) {
        forward(&c, 1);
        both_halves(&c, 1);
    }
    while (c.forward[1] < c.forward[0] || c.forward[0] < m) {
        if (c.forward[0] < m)
            forward(&c, 0);
        both_halves(&c, 0);
        forward(&c, 1);
        both_halves(&c, 1);
    }
    for (int i = 0; i < rank; i++) {
        input(&c, 0);
        input(&c, 1);
    }
    for (int i = 0; i < p - rank; i++) {
        input(&c, 0);
        weight(&c, 0);
    }
    while (c.weight[1] < c.input[1])
        weight(&c, 1);
    while (c.weight[0] < c.input[0])
        weight(&c, 0);
}

/* Emits the deferred weight gradients in the order in which they were deferred. */
static void late_weight(counts *c, const uint8_t *late, int *taken)
{
    weight(c, late[(*taken)++]);
}

void qd_schedule_write_dualpipe_v(writer *w, int rank)
{
    int p = w->s->ranks, m = w->s->micro_batches, behind = p - rank - 1, late_count = 0, taken = 0;
    uint8_t late[2 * QD_DUALPIPE_RANKS]; /* direction of each I whose W is still to come: at most two per rank of the last phases */
    counts c = begin(w, rank);
    for (int i = 0; i < 2 * behind; i++)
        forward(&c, 0);
    for (int i = 0; i < rank + 1; i++) {
        forward(&c, 0);
        forward(&c, 1);
    }
    for (int i = 0; i < behind; i++) {
        both_halves(&c, 1);
        forward(&c, 1);
    }
    for (int i = 0; i < m - 2 * p + rank + 1; i++) {
        forward(&c, 0);
        backward(&c, 1);
        forward(&c, 1);
        backward(&c, 0);
    }
    for (int i = 0; i < behind; i++) {
        backward(&c, 1);
        forward(&c, 1);
        backward(&c, 0);
    }
    /* In the second half of the remaining turns, W is deferred. */
    for (int i = 0, half = 0; i < rank + 1; i++) {
        for (int way = 1; way >= 0; way--) {
            half = half || (i == (rank + 1) / 2 && rank % 2 == way);
            if (half) {
                input(&c, way);
                late[late_count++] = (uint8_t)way;
            } else {
                backward(&c, way);
            }
        }
    }
    for (int i = 0; i < behind; i++) {
        if (taken < late_count)
            late_weight(&c, late, &taken);
        input(&c, 0);
        late[late_count++] = 0;
    }
    while (taken < late_count)
        late_weight(&c, late, &taken);
}
