/* Draws losses as a character plot: braille dots in UTF-8 locales, asterisks in others. */
#include "curve.h"

#include "cli.h"

#include <math.h>
#include <string.h>

/* A character cell is a grid of dots: 2 x 4 in braille, 1 x 1 otherwise. */
enum { MOST_COLUMNS = 160, MOST_ROWS = 32, LABEL = 8 };

typedef struct canvas {
    int columns, rows;       /* cells */
    int cell_width, cell_height;
    unsigned char dots[MOST_ROWS][MOST_COLUMNS]; /* per cell: bits in braille's order */
} canvas;

static void set_dot(canvas *c, int x, int y)
{
    static const unsigned char braille[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    c->dots[y / c->cell_height][x / c->cell_width] |= braille[y % c->cell_height][x % c->cell_width];
}

/* The value at column x of `width`: the mean of its values, or an interpolation if there are fewer
 * values than columns. */
static double column_value(const double *values, int64_t count, int x, int width)
{
    if (count < width) {
        double at = (double)x * (double)(count - 1) / (width - 1);
        int64_t left = (int64_t)at < count - 1 ? (int64_t)at : count - 2;
        return values[left] + (values[left + 1] - values[left]) * (at - (double)left);
    }
    int64_t from = count * x / width, to = count * (x + 1) / width;
    double sum = 0.0;
    for (int64_t i = from; i < to; i++)
        sum += values[i];
    return sum / (double)(to - from);
}

static void put_cell(FILE *out, const canvas *c, int row, int column)
{
    unsigned dots = c->dots[row][column];
    if (c->cell_height == 1)
        fputc(dots ? '*' : ' ', out);
    else if (dots == 0)
        fputc(' ', out);
    else /* U+2800 + dots */
        fprintf(out, "%c%c%c", 0xE2, (int)(0xA0 | dots >> 6), (int)(0x80 | (dots & 0x3F)));
}

static void put_rows(FILE *out, const canvas *c, double low, double high)
{
    const char *side = c->cell_height == 1 ? "|" : "┤";
    for (int row = 0; row < c->rows; row++) {
        double value = c->rows > 1 ? high - (high - low) * row / (c->rows - 1) : high;
        if (row % 2 == 0 || row == c->rows - 1)
            fprintf(out, "%*.3f %s", LABEL, value, side);
        else
            fprintf(out, "%*s %s", LABEL, "", c->cell_height == 1 ? "|" : "│");
        for (int column = 0; column < c->columns; column++)
            put_cell(out, c, row, column);
        fputc('\n', out);
    }
}

static void put_axis(FILE *out, const canvas *c, int64_t first, int64_t last)
{
    char left[40], right[40];
    fprintf(out, "%*s %s", LABEL, "", c->cell_height == 1 ? "+" : "└");
    for (int column = 0; column < c->columns; column++)
        fputs(c->cell_height == 1 ? "-" : "─", out);
    snprintf(left, sizeof left, "step %lld", (long long)first);
    snprintf(right, sizeof right, "%lld", (long long)last);
    int gap = c->columns - (int)(strlen(left) + strlen(right));
    fprintf(out, "\n%*s  %s%*s%s\n", LABEL, "", left, gap > 1 ? gap : 1, "", right);
}

void curve_draw(FILE *out, const double *values, int64_t count, int64_t first, int64_t last, int columns, int rows)
{
    bool utf8 = cli_utf8();
    canvas c = {.cell_width = utf8 ? 2 : 1, .cell_height = utf8 ? 4 : 1};
    c.columns = columns > MOST_COLUMNS ? MOST_COLUMNS : columns;
    c.rows = rows > MOST_ROWS ? MOST_ROWS : rows;
    if (count < 2 || c.columns < 8 || c.rows < 2)
        return;
    int width = c.columns * c.cell_width, height = c.rows * c.cell_height;
    double low = INFINITY, high = -INFINITY;
    for (int x = 0; x < width; x++) {
        double value = column_value(values, count, x, width);
        low = fmin(low, value);
        high = fmax(high, value);
    }
    int before = -1;
    for (int x = 0; x < width; x++) {
        double value = column_value(values, count, x, width);
        int y = high > low ? (int)lround((high - value) / (high - low) * (height - 1)) : height / 2;
        int from = before < 0 || before == y ? y : before < y ? before + 1 : before - 1;
        for (int step = from <= y ? 1 : -1, at = from;; at += step) { /* connects the dots of steep parts */
            set_dot(&c, x, at);
            if (at == y)
                break;
        }
        before = y;
    }
    put_rows(out, &c, low, high);
    put_axis(out, &c, first, last);
}
