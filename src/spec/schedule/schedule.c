/* Pipeline schedules: creates the classical ones (GPipe, 1F1B, interleaved), replays their timing
 * and validates schedules. */
#include "spec/schedule/schedule_impl.h"

#include <string.h>

static const char *const names[QD_SCHEDULE_KIND_COUNT] = {
#define QD_SCHEDULE_NAME(kind, name) [QD_SCHEDULE_##kind] = name,
    QD_SCHEDULE_TABLE(QD_SCHEDULE_NAME)
#undef QD_SCHEDULE_NAME
};

typedef qd_schedule_writer writer;

const char *qd_schedule_name(qd_schedule_kind kind)
{
    return names[kind];
}

char qd_pass_letter(qd_pass pass)
{
    return "FBIW"[pass];
}

static bool there_and_back(qd_schedule_kind kind)
{
    return kind == QD_SCHEDULE_ZB_V || kind == QD_SCHEDULE_DUALPIPE_V;
}

int qd_schedule_stages(qd_schedule_kind kind, bool *fixed)
{
    *fixed = kind != QD_SCHEDULE_INTERLEAVED && kind != QD_SCHEDULE_FILE;
    return there_and_back(kind) || kind == QD_SCHEDULE_INTERLEAVED ? 2 : 1;
}

int qd_schedule_rank_of(qd_schedule_kind kind, int ranks, int stage)
{
    bool back = there_and_back(kind) && stage / ranks % 2 == 1;
    return back ? ranks - 1 - stage % ranks : stage % ranks;
}

static void write_gpipe(writer *w, int rank)
{
    for (int mb = 0; mb < w->s->micro_batches; mb++)
        qd_schedule_add(w, QD_PASS_F, rank, mb);
    for (int mb = 0; mb < w->s->micro_batches; mb++)
        qd_schedule_add(w, QD_PASS_B, rank, mb);
}

/* Rank r starts with one forward pass for each rank after it, then alternates forward and
 * backward. */
static void write_1f1b(writer *w, int rank)
{
    int m = w->s->micro_batches, ahead = w->s->ranks - 1 - rank;
    for (int i = 0; i < m + ahead; i++) {
        if (i < m)
            qd_schedule_add(w, QD_PASS_F, rank, i);
        if (i >= ahead)
            qd_schedule_add(w, QD_PASS_B, rank, i - ahead);
    }
}

/* The n-th turn of a rank: groups of `ranks` micro-batches pass through its stages, forward from
 * the first to the last, backward from the last to the first. Micro-batches that the last group
 * lacks are skipped, which preserves every order. */
static void add_interleaved(writer *w, int rank, int n, bool forward)
{
    int p = w->s->ranks, v = w->s->stages / p, chunk = n % (p * v) / p;
    qd_schedule_add(w, forward ? QD_PASS_F : QD_PASS_B, (forward ? chunk : v - 1 - chunk) * p + rank, n / (p * v) * p + n % p);
}

static void write_interleaved(writer *w, int rank)
{
    int p = w->s->ranks, v = w->s->stages / p, all = (w->s->micro_batches + p - 1) / p * p * v;
    int ahead = 2 * (p - 1 - rank) + (v - 1) * p;
    ahead = ahead < all ? ahead : all;
    for (int n = 0; n < all + ahead; n++) {
        if (n < all)
            add_interleaved(w, rank, n, true);
        if (n >= ahead)
            add_interleaved(w, rank, n - ahead, false);
    }
}

/* Stage s processes micro-batch t - s at time t; its input was ready at time t - 1. */
static void write_forward(writer *w, int rank)
{
    const qd_schedule *s = w->s;
    for (int time = 0; time < s->stages + s->micro_batches - 1; time++)
        for (int stage = s->stages - 1; stage >= 0; stage--)
            if (s->rank_of[stage] == rank && stage <= time)
                qd_schedule_add(w, QD_PASS_F, stage, time - stage);
}

static void write_rank(writer *w, int rank)
{
    w->s->begin[rank] = w->count;
    if (!w->s->training) {
        write_forward(w, rank);
        return;
    }
    switch (w->s->kind) {
    case QD_SCHEDULE_GPIPE: write_gpipe(w, rank); break;
    case QD_SCHEDULE_INTERLEAVED: write_interleaved(w, rank); break;
    case QD_SCHEDULE_ZB_H1: qd_schedule_write_zb_h1(w, rank); break;
    case QD_SCHEDULE_ZB_V: qd_schedule_write_zb_v(w, rank); break;
    case QD_SCHEDULE_DUALPIPE_V: qd_schedule_write_dualpipe_v(w, rank); break;
    default: write_1f1b(w, rank); break;
    }
}

static qd_status check_numbers(qd_schedule_kind kind, int ranks, int stages, int micro_batches)
{
    bool fixed;
    int wanted = qd_schedule_stages(kind, &fixed);
    if (kind == QD_SCHEDULE_FILE)
        return QD_FAIL(QD_USAGE, "a schedule of kind file comes from parallel.schedule_file");
    if (ranks < 1 || micro_batches < 1 || stages < ranks || stages % ranks != 0)
        return QD_FAIL(QD_USAGE, "a pipeline of %d ranks cannot have %d stages: it must be a multiple of the ranks", ranks, stages);
    if (fixed && stages != wanted * ranks)
        return QD_FAIL(QD_USAGE,
                       "parallel.schedule=%s has %d stage%s per pipeline rank, not %d: remove parallel.virtual_stages, or use "
                       "parallel.schedule=interleaved",
                       names[kind], wanted, wanted > 1 ? "s" : "", stages / ranks);
    if (kind == QD_SCHEDULE_DUALPIPE_V && ranks > QD_DUALPIPE_RANKS)
        return QD_FAIL(QD_USAGE, "parallel.schedule=dualpipe_v is written for at most %d pipeline ranks", QD_DUALPIPE_RANKS);
    if (kind == QD_SCHEDULE_DUALPIPE_V && micro_batches < 2 * ranks)
        return QD_FAIL(QD_USAGE,
                       "parallel.schedule=dualpipe_v needs at least twice as many micro-batches as pipeline ranks: %d for %d ranks, but "
                       "there are %d; lower train.micro_batch or raise train.global_batch",
                       2 * ranks, ranks, micro_batches);
    return QD_OK;
}

static qd_status allocate(const qd_schedule *like, qd_arena *arena, qd_schedule **schedule)
{
    qd_schedule *s = QD_ARENA_NEW(arena, qd_schedule, 1);
    if (!s)
        return QD_NO_MEMORY;
    *s = *like;
    s->rank_of = QD_ARENA_NEW(arena, int, s->stages);
    s->begin = QD_ARENA_NEW(arena, int, s->ranks + 1);
    s->turns = QD_ARENA_NEW(arena, qd_turn, (size_t)s->stages * (size_t)s->micro_batches * (s->training ? s->splits ? 3 : 2 : 1));
    *schedule = s;
    return s->rank_of && s->begin && s->turns ? QD_OK : QD_NO_MEMORY;
}

static qd_status write_all(qd_schedule *s)
{
    writer w = {.s = s};
    for (int rank = 0; rank < s->ranks; rank++)
        write_rank(&w, rank);
    s->begin[s->ranks] = w.count;
    return qd_schedule_validate(s);
}

qd_status qd_schedule_forward(const qd_schedule *placed, int micro_batches, qd_arena *arena, qd_schedule **schedule)
{
    const qd_schedule like = {.kind = placed->kind, .ranks = placed->ranks, .stages = placed->stages, .micro_batches = micro_batches};
    QD_TRY(allocate(&like, arena, schedule));
    memcpy((*schedule)->rank_of, placed->rank_of, (size_t)placed->stages * sizeof *placed->rank_of);
    return write_all(*schedule);
}

qd_status qd_schedule_create(qd_schedule_kind kind, int ranks, int stages, int micro_batches, bool training, qd_arena *arena,
                             qd_schedule **schedule)
{
    QD_TRY(check_numbers(kind, ranks, stages, training || kind != QD_SCHEDULE_DUALPIPE_V ? micro_batches : 2 * ranks));
    const qd_schedule like = {.kind = kind, .ranks = ranks, .stages = stages, .micro_batches = micro_batches, .training = training,
                              .splits = training && (kind == QD_SCHEDULE_ZB_H1 || there_and_back(kind))};
    QD_TRY(allocate(&like, arena, schedule));
    for (int stage = 0; stage < stages; stage++)
        (*schedule)->rank_of[stage] = qd_schedule_rank_of(kind, ranks, stage);
    return write_all(*schedule);
}

/* State of a replay. End times of F, and of B or I, per (stage, micro-batch); -1: not yet. */
typedef struct replay {
    const qd_schedule *s;
    double *forward, *backward;
    int *at; /* per rank: the next turn */
} replay;

static size_t place(const qd_schedule *s, int stage, int microbatch)
{
    return (size_t)stage * (size_t)s->micro_batches + (size_t)microbatch;
}

/* The turn that a turn depends on, on another stage: that stage, and whether it is a forward pass.
 * Returns false if there is none. */
static bool needs(const qd_schedule *s, const qd_turn *t, int *stage, bool *forward)
{
    *forward = t->pass == QD_PASS_F;
    *stage = *forward ? t->stage - 1 : t->stage + 1;
    return t->pass != QD_PASS_W && *stage >= 0 && *stage < s->stages;
}

/* The time at which a turn can start; -1: its input is not ready. */
static double ready(const replay *r, const qd_turn *t, double transfer)
{
    int stage;
    bool forward;
    if (!needs(r->s, t, &stage, &forward))
        return 0.0;
    double end = (forward ? r->forward : r->backward)[place(r->s, stage, t->microbatch)];
    return end < 0.0 ? -1.0 : r->s->rank_of[stage] == r->s->rank_of[t->stage] ? end : end + transfer;
}

static qd_status explain_wait(const replay *r)
{
    const qd_schedule *s = r->s;
    for (int rank = 0; rank < s->ranks; rank++) {
        if (r->at[rank] == s->begin[rank + 1])
            continue;
        const qd_turn *t = &s->turns[r->at[rank]];
        int stage;
        bool forward;
        needs(s, t, &stage, &forward);
        int other = s->rank_of[stage];
        const qd_turn *there = r->at[other] < s->begin[other + 1] ? &s->turns[r->at[other]] : NULL;
        char at[48] = "has ended";
        if (there)
            snprintf(at, sizeof at, "is at %d%c%d", there->stage, qd_pass_letter((qd_pass)there->pass), there->microbatch);
        return QD_FAIL(QD_USAGE, "schedule: deadlock: rank %d, turn %d (%d%c%d) waits for stage %d of rank %d, which %s", rank,
                       r->at[rank] - s->begin[rank], t->stage, qd_pass_letter((qd_pass)t->pass), t->microbatch, stage, other, at);
    }
    return QD_OK;
}

qd_status qd_schedule_replay(const qd_schedule *s, const double seconds[QD_PASS_COUNT], double transfer, qd_arena *arena,
                             qd_schedule_times *times)
{
    size_t cells = (size_t)s->stages * (size_t)s->micro_batches, turns = (size_t)s->begin[s->ranks];
    replay r = {.s = s, .forward = QD_ARENA_NEW(arena, double, 2 * cells), .at = QD_ARENA_NEW(arena, int, s->ranks)};
    *times = (qd_schedule_times){.start = QD_ARENA_NEW(arena, double, turns + 1), .end = QD_ARENA_NEW(arena, double, turns + 1),
                                 .busy = QD_ARENA_NEW(arena, double, s->ranks)};
    double *clock = QD_ARENA_NEW(arena, double, s->ranks);
    if (!r.forward || !r.at || !times->start || !times->end || !times->busy || !clock)
        return QD_NO_MEMORY;
    r.backward = r.forward + cells;
    for (size_t i = 0; i < 2 * cells; i++)
        r.forward[i] = -1.0;
    memcpy(r.at, s->begin, (size_t)s->ranks * sizeof *r.at);
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < s->ranks; rank++) {
            for (; r.at[rank] < s->begin[rank + 1]; r.at[rank]++) {
                const qd_turn *t = &s->turns[r.at[rank]];
                double from = ready(&r, t, transfer);
                if (from < 0.0)
                    break;
                from = from > clock[rank] ? from : clock[rank];
                clock[rank] = from + seconds[t->pass];
                times->start[r.at[rank]] = from;
                times->end[r.at[rank]] = clock[rank];
                times->busy[rank] += seconds[t->pass];
                if (t->pass != QD_PASS_W)
                    (t->pass == QD_PASS_F ? r.forward : r.backward)[place(s, t->stage, t->microbatch)] = clock[rank];
                moved = true;
            }
        }
    }
    QD_TRY(explain_wait(&r));
    double busy = 0.0;
    for (int rank = 0; rank < s->ranks; rank++) {
        times->makespan = clock[rank] > times->makespan ? clock[rank] : times->makespan;
        busy += times->busy[rank];
    }
    times->bubble = times->makespan > 0.0 ? 1.0 - busy / (times->makespan * s->ranks) : 0.0;
    return QD_OK;
}

int qd_schedule_in_flight(const qd_schedule *s, int rank)
{
    int now = 0, most = 0;
    for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++) {
        qd_pass pass = (qd_pass)s->turns[i].pass;
        now += pass == QD_PASS_F ? 1 : pass == QD_PASS_B || pass == QD_PASS_W ? -1 : 0;
        most = now > most ? now : most;
    }
    return most;
}

double qd_schedule_theory(const qd_schedule *s)
{
    double p = s->ranks, m = s->micro_batches, v = (double)s->stages / p;
    switch (s->kind) {
    case QD_SCHEDULE_GPIPE:
    case QD_SCHEDULE_1F1B: return (p - 1) / (m + p - 1);
    case QD_SCHEDULE_INTERLEAVED: return s->micro_batches % s->ranks == 0 ? (p - 1) / (v * m + p - 1) : -1.0;
    default: return -1.0;
    }
}

enum { SEEN_F = 1, SEEN_B = 2, SEEN_I = 4, SEEN_W = 8 };

static qd_status wrong(const qd_schedule *s, int rank, int index, const char *why)
{
    const qd_turn *t = &s->turns[index];
    return QD_FAIL(QD_USAGE, "schedule: rank %d, turn %d (%d%c%d): %s", rank, index - s->begin[rank], t->stage,
                   qd_pass_letter((qd_pass)t->pass), t->microbatch, why);
}

/* next[stage * QD_PASS_COUNT + pass]: the micro-batch expected next. B counts as both I and W. */
static qd_status check_turn(const qd_schedule *s, int rank, int index, uint8_t *seen, int *next)
{
    const qd_turn *t = &s->turns[index];
    if (t->stage < 0 || t->stage >= s->stages || t->microbatch < 0 || t->microbatch >= s->micro_batches)
        return wrong(s, rank, index, "there is no such stage or micro-batch");
    if (s->rank_of[t->stage] != rank)
        return wrong(s, rank, index, "the stage belongs to another rank");
    uint8_t *cell = &seen[place(s, t->stage, t->microbatch)];
    int *order = &next[t->stage * QD_PASS_COUNT];
    bool input = t->pass == QD_PASS_B || t->pass == QD_PASS_I, weight = t->pass == QD_PASS_B || t->pass == QD_PASS_W;
    if (t->pass != QD_PASS_F && !s->training)
        return wrong(s, rank, index, "the step has no backward pass");
    if (*cell & 1u << t->pass || (input && *cell & (SEEN_B | SEEN_I)) || (weight && *cell & (SEEN_B | SEEN_W)))
        return wrong(s, rank, index, "it occurs twice");
    if (input && !(*cell & SEEN_F))
        return wrong(s, rank, index, "its forward pass comes later");
    if (t->pass == QD_PASS_W && !(*cell & SEEN_I))
        return wrong(s, rank, index, "the gradients of its inputs have not been computed");
    *cell |= (uint8_t)(1u << t->pass);
    if ((t->pass == QD_PASS_F && order[QD_PASS_F]++ != t->microbatch) || (input && order[QD_PASS_I]++ != t->microbatch) ||
        (weight && order[QD_PASS_W]++ != t->microbatch))
        return wrong(s, rank, index, "micro-batches must be in ascending order, so that sums do not depend on the schedule");
    return QD_OK;
}

static qd_status check_complete(const qd_schedule *s, const uint8_t *seen)
{
    for (int stage = 0; stage < s->stages; stage++)
        for (int mb = 0; mb < s->micro_batches; mb++) {
            uint8_t cell = seen[place(s, stage, mb)];
            if (cell != (s->training ? cell & SEEN_B ? SEEN_F | SEEN_B : SEEN_F | SEEN_I | SEEN_W : SEEN_F))
                return QD_FAIL(QD_USAGE, "schedule: stage %d never does the %s pass of micro-batch %d", stage,
                               !(cell & SEEN_F) ? "forward" : cell & SEEN_I ? "backward (weights)" : "backward", mb);
        }
    return QD_OK;
}

qd_status qd_schedule_validate(const qd_schedule *s)
{
    qd_arena *arena;
    QD_TRY(qd_arena_create(&arena));
    uint8_t *seen = QD_ARENA_NEW(arena, uint8_t, (size_t)s->stages * (size_t)s->micro_batches);
    int *next = QD_ARENA_NEW(arena, int, (size_t)s->stages * QD_PASS_COUNT);
    qd_status status = seen && next ? QD_OK : QD_NO_MEMORY;
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = s->begin[rank]; i < s->begin[rank + 1] && status == QD_OK; i++)
            status = check_turn(s, rank, i, seen, next);
    if (status == QD_OK)
        status = check_complete(s, seen);
    qd_schedule_times times;
    if (status == QD_OK)
        status = qd_schedule_replay(s, (const double[]){1.0, 2.0, 1.0, 1.0}, 0.0, arena, &times);
    qd_arena_destroy(arena);
    return status;
}
