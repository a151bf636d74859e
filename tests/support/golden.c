#include "support/golden.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qd_golden {
    char *path;
    unsigned char *file; /* the whole file: 8 bytes of length, header, data */
    size_t size;
    json_t *header; /* owns the strings */
    json_t *config; /* parsed from __metadata__.config, or NULL */
    qd_golden_tensor *tensors;
    int count;
};

/* ---- reading ---- */

static qd_status read_file(qd_golden *g)
{
    FILE *f = fopen(g->path, "rb");
    if (!f)
        return QD_FAIL(QD_IO, "%s: %s", g->path, strerror(errno));
    qd_status status = QD_OK;
    long size = -1;
    if (fseek(f, 0, SEEK_END) == 0)
        size = ftell(f);
    if (size < 0 || fseek(f, 0, SEEK_SET) != 0) {
        status = QD_FAIL(QD_IO, "%s: %s", g->path, strerror(errno));
        goto done;
    }
    g->size = (size_t)size;
    g->file = malloc(g->size + 1);
    if (!g->file) {
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory for %zu bytes", g->path, g->size);
        goto done;
    }
    if (fread(g->file, 1, g->size, f) != g->size)
        status = QD_FAIL(QD_IO, "%s: could not be read to its end", g->path);
done:
    fclose(f);
    return status;
}

static uint64_t little_endian_64(const unsigned char *bytes)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | bytes[i];
    return value;
}

static bool dtype_from_name(const char *name, qd_dtype *dtype)
{
    static const struct {
        const char *name;
        qd_dtype dtype;
    } table[] = {{"F64", QD_F64}, {"F32", QD_F32}, {"BF16", QD_BF16}, {"F16", QD_F16},
                 {"I64", QD_I64}, {"I32", QD_I32}, {"U8", QD_U8}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (name && strcmp(name, table[i].name) == 0) {
            *dtype = table[i].dtype;
            return true;
        }
    return false;
}

/* Fills *t from its entry in the header. data: the first byte after the header; size: bytes there. */
static qd_status parse_tensor(const char *path, const char *name, json_t *entry, const unsigned char *data, size_t size,
                              qd_golden_tensor *t)
{
    *t = (qd_golden_tensor){.name = name, .count = 1};
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype_from_name(dtype, &t->dtype))
        return QD_FAIL(QD_CORRUPT, "%s: tensor %s: dtype \"%s\" is not one of F64 F32 BF16 F16 I64 I32 U8", path, name,
                       dtype ? dtype : "(none)");
    json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > QD_GOLDEN_MAX_DIMS)
        return QD_FAIL(QD_CORRUPT, "%s: tensor %s: shape must be a list of at most %d numbers", path, name,
                       QD_GOLDEN_MAX_DIMS);
    t->dims = (int)json_array_size(shape);
    for (int i = 0; i < t->dims; i++) {
        json_t *n = json_array_get(shape, (size_t)i);
        t->shape[i] = json_integer_value(n);
        if (!json_is_integer(n) || t->shape[i] < 0 || __builtin_mul_overflow(t->count, t->shape[i], &t->count))
            return QD_FAIL(QD_CORRUPT, "%s: tensor %s: dimension %d is not a sound size", path, name, i);
    }
    json_t *offsets = json_object_get(entry, "data_offsets");
    json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return QD_FAIL(QD_CORRUPT, "%s: tensor %s: data_offsets must be two numbers", path, name);
    json_int_t from = json_integer_value(first), to = json_integer_value(last);
    if (from < 0 || to < from || (uint64_t)to > size)
        return QD_FAIL(QD_CORRUPT, "%s: tensor %s: bytes %lld to %lld are outside the file's %zu bytes of data", path,
                       name, (long long)from, (long long)to, size);
    int64_t element = (int64_t)qd_dtype_size(t->dtype), bytes;
    if (__builtin_mul_overflow(t->count, element, &bytes) || bytes != to - from)
        return QD_FAIL(QD_CORRUPT, "%s: tensor %s: shape and dtype do not fit the %lld bytes of its data_offsets", path,
                       name, (long long)(to - from));
    t->data = data + from;
    if ((uintptr_t)t->data % (uintptr_t)element)
        return QD_FAIL(QD_CORRUPT, "%s: tensor %s: data is not aligned to %lld bytes", path, name, (long long)element);
    return QD_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const qd_golden_tensor *)a)->name, ((const qd_golden_tensor *)b)->name);
}

static int by_data(const void *a, const void *b)
{
    const qd_golden_tensor *x = a, *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->count > y->count) - (x->count < y->count); /* an empty tensor comes before its neighbour */
}

/* The format allows neither holes nor overlaps, so a wrong offset cannot hide. */
static qd_status check_cover(const qd_golden *g, const unsigned char *data, size_t size)
{
    qsort(g->tensors, (size_t)g->count, sizeof *g->tensors, by_data);
    const unsigned char *next = data;
    for (int i = 0; i < g->count; i++) {
        const qd_golden_tensor *t = &g->tensors[i];
        if (t->data != next)
            return QD_FAIL(QD_CORRUPT, "%s: tensor %s begins at byte %td of the data; expected %td", g->path, t->name,
                           (const unsigned char *)t->data - data, next - data);
        next += (size_t)t->count * qd_dtype_size(t->dtype);
    }
    if (next != data + size)
        return QD_FAIL(QD_CORRUPT, "%s: %td bytes of data belong to no tensor", g->path, data + size - next);
    return QD_OK;
}

static qd_status parse_header(qd_golden *g)
{
    if (g->size < 8)
        return QD_FAIL(QD_CORRUPT, "%s: %zu bytes are too few for a safetensors file", g->path, g->size);
    uint64_t length = little_endian_64(g->file);
    if (length > g->size - 8)
        return QD_FAIL(QD_CORRUPT, "%s: the header claims %llu bytes, the file has %zu after the length", g->path,
                       (unsigned long long)length, g->size - 8);
    json_error_t error;
    g->header = json_loadb((const char *)g->file + 8, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    if (!g->header)
        return QD_FAIL(QD_CORRUPT, "%s: header, byte %d: %s", g->path, error.position, error.text);
    if (!json_is_object(g->header))
        return QD_FAIL(QD_CORRUPT, "%s: the header is not an object", g->path);

    const unsigned char *data = g->file + 8 + length;
    size_t size = g->size - 8 - (size_t)length;
    g->tensors = calloc(json_object_size(g->header) + 1, sizeof *g->tensors);
    if (!g->tensors)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its table of tensors", g->path);
    const char *name;
    json_t *entry;
    json_object_foreach(g->header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0)
            continue;
        QD_TRY(parse_tensor(g->path, name, entry, data, size, &g->tensors[g->count]));
        g->count++;
    }
    QD_TRY(check_cover(g, data, size));
    qsort(g->tensors, (size_t)g->count, sizeof *g->tensors, by_name);

    const char *config = qd_golden_metadata(g, "config");
    if (config) {
        g->config = json_loads(config, JSON_REJECT_DUPLICATES, &error);
        if (!g->config)
            return QD_FAIL(QD_CORRUPT, "%s: config, byte %d: %s", g->path, error.position, error.text);
    }
    return QD_OK;
}

qd_status qd_golden_open(const char *path, qd_golden **golden)
{
    *golden = NULL;
    qd_golden *g = calloc(1, sizeof *g);
    qd_status status = QD_OK;
    if (!g || !(g->path = strdup(path))) {
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to open it", path);
        goto done;
    }
    QD_TRY_DONE(read_file(g));
    QD_TRY_DONE(parse_header(g));
done:
    if (status == QD_OK)
        *golden = g;
    else
        qd_golden_close(g);
    return status;
}

void qd_golden_close(qd_golden *g)
{
    if (!g)
        return;
    json_decref(g->config);
    json_decref(g->header);
    free(g->tensors);
    free(g->file);
    free(g->path);
    free(g);
}

/* ---- looking things up ---- */

int qd_golden_count(const qd_golden *g)
{
    return g->count;
}

const qd_golden_tensor *qd_golden_at(const qd_golden *g, int index)
{
    return &g->tensors[index];
}

const qd_golden_tensor *qd_golden_lookup(const qd_golden *g, const char *name)
{
    qd_golden_tensor key = {.name = name};
    return bsearch(&key, g->tensors, (size_t)g->count, sizeof *g->tensors, by_name);
}

qd_status qd_golden_find(const qd_golden *g, const char *name, qd_dtype dtype, const qd_golden_tensor **tensor)
{
    *tensor = qd_golden_lookup(g, name);
    if (!*tensor)
        return QD_FAIL(QD_USAGE, "%s: there is no tensor %s", g->path, name);
    if ((*tensor)->dtype != dtype)
        return QD_FAIL(QD_USAGE, "%s: tensor %s is %s, not %s", g->path, name, qd_dtype_name((*tensor)->dtype),
                       qd_dtype_name(dtype));
    return QD_OK;
}

const char *qd_golden_metadata(const qd_golden *g, const char *key)
{
    return json_string_value(json_object_get(json_object_get(g->header, "__metadata__"), key));
}

/* The value at a dotted path of the config, NULL when there is none. */
static json_t *config_at(const qd_golden *g, const char *path)
{
    json_t *at = g->config;
    while (at) {
        const char *dot = strchr(path, '.');
        if (!dot)
            return json_object_get(at, path);
        char key[64];
        if ((size_t)snprintf(key, sizeof key, "%.*s", (int)(dot - path), path) >= sizeof key)
            return NULL;
        at = json_object_get(at, key);
        path = dot + 1;
    }
    return NULL;
}

static qd_status no_value(const qd_golden *g, const char *path, const char *type)
{
    return QD_FAIL(QD_USAGE, "%s: config has no %s \"%s\"", g->path, type, path);
}

qd_status qd_golden_config_int(const qd_golden *g, const char *path, int64_t *value)
{
    json_t *v = config_at(g, path);
    if (!json_is_integer(v))
        return no_value(g, path, "integer");
    *value = json_integer_value(v);
    return QD_OK;
}

qd_status qd_golden_config_double(const qd_golden *g, const char *path, double *value)
{
    json_t *v = config_at(g, path);
    if (!json_is_number(v))
        return no_value(g, path, "number");
    *value = json_number_value(v);
    return QD_OK;
}

qd_status qd_golden_config_bool(const qd_golden *g, const char *path, bool *value)
{
    json_t *v = config_at(g, path);
    if (!json_is_boolean(v))
        return no_value(g, path, "truth value");
    *value = json_is_true(v);
    return QD_OK;
}

qd_status qd_golden_config_string(const qd_golden *g, const char *path, const char **value)
{
    json_t *v = config_at(g, path);
    if (!json_is_string(v))
        return no_value(g, path, "string");
    *value = json_string_value(v);
    return QD_OK;
}

bool qd_golden_config_null(const qd_golden *g, const char *path)
{
    json_t *v = config_at(g, path);
    return !v || json_is_null(v);
}

/* ---- comparing ---- */

double qd_norm_of(const float *a, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)a[i] * a[i];
    return sqrt(sum);
}

double qd_golden_rms_norm(const qd_golden *g, const char *prefix)
{
    double sum = 0;
    int n = 0;
    for (int i = 0; i < g->count; i++) {
        const qd_golden_tensor *t = &g->tensors[i];
        if (t->dtype != QD_F32 || strncmp(t->name, prefix, strlen(prefix)) != 0)
            continue;
        double norm = qd_norm_of(t->data, t->count);
        sum += norm * norm;
        n++;
    }
    return n ? sqrt(sum / n) : 0;
}

double qd_relative_error(const float *a, const float *b, int64_t count, double rms_norm)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        double d = (double)a[i] - b[i];
        sum += d * d;
    }
    if (!isfinite(sum)) /* also when both are infinite: inf − inf is NaN */
        return INFINITY;
    if (sum == 0)
        return 0;
    return sqrt(sum) / fmax(qd_norm_of(b, count), 1e-3 * rms_norm);
}

qd_status qd_golden_compare(const float *a, int64_t count, const qd_golden_tensor *b, double rms_norm,
                            double tolerance)
{
    if (b->dtype != QD_F32)
        return QD_FAIL(QD_USAGE, "%s is %s; only fp32 can be compared", b->name, qd_dtype_name(b->dtype));
    if (count != b->count)
        return QD_FAIL(QD_DIFFERENT, "%s has %lld elements, expected %lld", b->name, (long long)count,
                       (long long)b->count);
    const float *want = b->data;
    double error = qd_relative_error(a, want, count, rms_norm);
    if (error <= tolerance)
        return QD_OK;
    int64_t worst = 0;
    double largest = -1;
    for (int64_t i = 0; i < count; i++) {
        double d = fabs((double)a[i] - want[i]);
        if (!isfinite(d)) {
            worst = i;
            break;
        }
        if (d > largest) {
            largest = d;
            worst = i;
        }
    }
    return QD_FAIL(QD_DIFFERENT, "%s: relative error %.3g is above %.3g; most at element %lld: %.9g, expected %.9g",
                   b->name, error, tolerance, (long long)worst, a[worst], want[worst]);
}

qd_status qd_golden_compare_scalar(const char *what, double a, double b, double tolerance)
{
    if (fabs(a - b) <= tolerance * fabs(b)) /* false for NaN */
        return QD_OK;
    return QD_FAIL(QD_DIFFERENT, "%s: %.12g, expected %.12g; relative error %.3g is above %.3g", what, a, b,
                   fabs(a - b) / fabs(b), tolerance);
}
