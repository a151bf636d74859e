/* Schedules as text: CSV input and output, a drawing in letters, and a drawing in SVG. */
#include "spec/schedule/schedule.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const double units[QD_PASS_COUNT] = {1.0, 2.0, 1.0, 1.0};

qd_status qd_schedule_write_csv(const qd_schedule *s, FILE *out)
{
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++)
            fprintf(out, "%d%c%d%c", s->turns[i].stage, qd_pass_letter((qd_pass)s->turns[i].pass), s->turns[i].microbatch,
                    i + 1 < s->begin[rank + 1] ? ',' : '\n');
    return ferror(out) ? QD_FAIL(QD_IO, "the schedule cannot be written") : QD_OK;
}

typedef struct reader {
    const char *name;
    qd_turn *turns;
    int count, capacity, line;
    int *begin; /* per rank */
    int ranks, rank_capacity;
} reader;

static bool grow(void **array, int count, int *capacity, size_t size)
{
    if (count < *capacity)
        return true;
    int wanted = *capacity ? 2 * *capacity : 64;
    void *larger = realloc(*array, (size_t)wanted * size);
    if (!larger)
        return false;
    *array = larger;
    *capacity = wanted;
    return true;
}

/* "3F12": digits, one letter, digits. */
static bool parse_turn(const char **text, qd_turn *turn)
{
    char *end;
    const char *at = *text;
    if (!isdigit((unsigned char)*at))
        return false;
    long stage = strtol(at, &end, 10);
    const char *letter = *end ? strchr("FBIW", toupper((unsigned char)*end)) : NULL;
    if (!letter || !isdigit((unsigned char)end[1]) || stage > 1000000)
        return false;
    long microbatch = strtol(end + 1, &end, 10);
    if (microbatch > 100000000)
        return false;
    *turn = (qd_turn){(uint8_t)(letter - "FBIW"), (int32_t)stage, (int32_t)microbatch};
    *text = end;
    return true;
}

static const char *skip(const char *text, const char *what)
{
    return text + strspn(text, what);
}

/* Cells may be empty: other programs leave gaps where a rank waits. */
static qd_status read_line(reader *r, const char *line)
{
    if (!grow((void **)&r->begin, r->ranks + 1, &r->rank_capacity, sizeof *r->begin))
        return QD_FAIL(QD_NO_MEMORY, "no memory for the schedule %s", r->name);
    r->begin[r->ranks++] = r->count;
    for (const char *at = skip(line, " \t,\r\n"); *at; at = skip(at, " \t,\r\n")) {
        qd_turn turn;
        const char *from = at;
        if (!parse_turn(&at, &turn) || (*at && !strchr(" \t,\r\n", *at)))
            return QD_FAIL(
                QD_USAGE,
                "%s, line %d: '%.12s' is not a turn; expected one like 0F3 (stage 0, forward, micro-batch 3; letters F, B, I, W)",
                r->name, r->line, from);
        if (!grow((void **)&r->turns, r->count, &r->capacity, sizeof *r->turns))
            return QD_FAIL(QD_NO_MEMORY, "no memory for the schedule %s", r->name);
        r->turns[r->count++] = turn;
    }
    if (r->begin[r->ranks - 1] == r->count)
        return QD_FAIL(QD_USAGE, "%s, line %d: has no turns, and each pipeline rank needs some", r->name, r->line);
    return QD_OK;
}

static qd_status read_all(reader *r, FILE *in)
{
    char *line = NULL;
    size_t size = 0;
    qd_status status = QD_OK;
    while (status == QD_OK && getline(&line, &size, in) >= 0) {
        const char *text = skip(line, " \t");
        r->line++;
        if (*text != '#' && *text != '\n' && *text != '\0')
            status = read_line(r, text);
    }
    if (status == QD_OK && ferror(in))
        status = QD_FAIL(QD_IO, "%s: cannot be read", r->name);
    free(line);
    return status;
}

static qd_status settle(const reader *r, qd_arena *arena, qd_schedule **schedule)
{
    qd_schedule *s = QD_ARENA_NEW(arena, qd_schedule, 1);
    if (!s)
        return QD_NO_MEMORY;
    *s = (qd_schedule){.kind = QD_SCHEDULE_FILE, .ranks = r->ranks};
    for (int i = 0; i < r->count; i++) {
        const qd_turn *t = &r->turns[i];
        s->stages = t->stage >= s->stages ? t->stage + 1 : s->stages;
        s->micro_batches = t->microbatch >= s->micro_batches ? t->microbatch + 1 : s->micro_batches;
        s->training = s->training || t->pass != QD_PASS_F;
        s->splits = s->splits || t->pass == QD_PASS_I;
    }
    if ((double)s->stages * s->micro_batches > 2.0 * r->count)
        return QD_FAIL(QD_USAGE, "%s: stages and micro-batches go up to %d and %d, but there are only %d turns", r->name, s->stages - 1,
                       s->micro_batches - 1, r->count);
    s->rank_of = QD_ARENA_NEW(arena, int, s->stages + 1);
    s->begin = QD_ARENA_NEW(arena, int, r->ranks + 1);
    s->turns = QD_ARENA_NEW(arena, qd_turn, r->count + 1);
    if (!s->rank_of || !s->begin || !s->turns)
        return QD_NO_MEMORY;
    memset(s->rank_of, 0xff, (size_t)s->stages * sizeof *s->rank_of);
    memcpy(s->turns, r->turns, (size_t)r->count * sizeof *r->turns);
    memcpy(s->begin, r->begin, (size_t)r->ranks * sizeof *r->begin);
    s->begin[r->ranks] = r->count;
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++)
            if (s->rank_of[s->turns[i].stage] < 0)
                s->rank_of[s->turns[i].stage] = rank;
    *schedule = s;
    return QD_OK;
}

qd_status qd_schedule_read_csv(FILE *in, const char *name, qd_arena *arena, qd_schedule **schedule)
{
    reader r = {.name = name};
    qd_status status = read_all(&r, in);
    if (status == QD_OK && r.count == 0)
        status = QD_FAIL(QD_USAGE, "%s: has no turns; expected one line per pipeline rank with turns like 0F0,0F1,0B0", name);
    if (status == QD_OK)
        status = settle(&r, arena, schedule);
    if (status == QD_OK) {
        status = qd_schedule_validate(*schedule);
        if (status != QD_OK)
            status = qd_error_prefix(status, "%s: ", name);
    }
    free(r.turns);
    free(r.begin);
    return status;
}

static int digits(int number)
{
    int count = 1;
    for (; number >= 10; number /= 10)
        count++;
    return count;
}

/* One cell per unit of time; later stages of a rank in lowercase letters. */
qd_status qd_schedule_draw_text(const qd_schedule *s, FILE *out)
{
    qd_arena *arena;
    qd_schedule_times times;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_schedule_replay(s, units, 0.0, arena, &times);
    int width = digits(s->micro_batches - 1) + 2;
    for (int rank = 0; rank < s->ranks && status == QD_OK; rank++) {
        int column = 0;
        fprintf(out, "%*d |", digits(s->ranks - 1), rank);
        for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++) {
            const qd_turn *t = &s->turns[i];
            for (; column < (int)times.start[i]; column++)
                fprintf(out, "%*s", width, ".");
            char letter = qd_pass_letter((qd_pass)t->pass);
            char cell[24];
            snprintf(cell, sizeof cell, "%c%d", t->stage >= s->ranks ? tolower((unsigned char)letter) : letter, t->microbatch);
            fprintf(out, "%*s", width, cell);
            for (column++; column < (int)times.end[i]; column++)
                fprintf(out, "%*s", width, "-");
        }
        fputc('\n', out);
    }
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_schedule_draw_svg(const qd_schedule *s, FILE *out)
{
    static const char *const colours[2][QD_PASS_COUNT] = {{"#4a90d9", "#5bb37a", "#7cc894", "#e0a93f"},
                                                          {"#9cc3ec", "#9ad4ae", "#b5e2c3", "#f0d092"}};
    enum { CELL = 22, ROW = 26, LEFT = 60, TOP = 8 };
    qd_arena *arena;
    qd_schedule_times times;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_schedule_replay(s, units, 0.0, arena, &times);
    if (status == QD_OK) {
        fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"11\">\n",
                LEFT + (int)times.makespan * CELL + 8, 2 * TOP + s->ranks * ROW);
        fprintf(out, "<title>%s: %d ranks, %d stages, %d micro-batches, bubble %.1f %%</title>\n", qd_schedule_name(s->kind), s->ranks,
                s->stages, s->micro_batches, 100.0 * times.bubble);
        fprintf(out, "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n");
    }
    for (int rank = 0; rank < s->ranks && status == QD_OK; rank++) {
        int y = TOP + rank * ROW;
        fprintf(out, "<text x=\"8\" y=\"%d\">rank %d</text>\n", y + 15, rank);
        fprintf(out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"20\" fill=\"#eeeeee\"/>\n", LEFT, y, (int)times.makespan * CELL);
        for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++) {
            const qd_turn *t = &s->turns[i];
            int x = LEFT + (int)times.start[i] * CELL, width = (int)(times.end[i] - times.start[i]) * CELL;
            fprintf(out,
                    "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"20\" fill=\"%s\" stroke=\"#ffffff\"><title>stage %d, %c, micro-batch "
                    "%d</title></rect>",
                    x, y, width, colours[t->stage >= s->ranks][t->pass], t->stage, qd_pass_letter((qd_pass)t->pass), t->microbatch);
            fprintf(out, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", x + width / 2, y + 14, t->microbatch);
        }
    }
    if (status == QD_OK)
        fprintf(out, "</svg>\n");
    qd_arena_destroy(arena);
    return status == QD_OK && ferror(out) ? QD_FAIL(QD_IO, "the drawing cannot be written") : status;
}
