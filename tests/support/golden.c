/* Reads golden fixtures with the safetensors reader and compares tensors with them. */
#include "support/golden.h"

#include "model/field_table.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qd_golden {
    char *path;
    qd_safetensors *file;
    qd_json *config; /* parsed from __metadata__.config, or NULL */
};

/* Tests read tensors in place. */
static qd_status check_alignment(const qd_golden *g)
{
    for (int i = 0; i < qd_golden_count(g); i++) {
        const qd_golden_tensor *t = qd_golden_at(g, i);
        if ((uintptr_t)t->data % qd_dtype_size(t->dtype))
            return QD_FAIL(QD_CORRUPT, "%s: tensor %s: data is not aligned to %zu bytes", g->path, t->name, qd_dtype_size(t->dtype));
    }
    return QD_OK;
}

static qd_status read_config(qd_golden *g)
{
    const char *config = qd_golden_metadata(g, "config");
    char name[256];
    snprintf(name, sizeof name, "%s, config", g->path);
    if (config && qd_json_load_text(name, config, strlen(config), &g->config) != QD_OK)
        return QD_FAIL(QD_CORRUPT, "%s", qd_error_message());
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
    QD_TRY_DONE(qd_safetensors_load(path, &g->file));
    QD_TRY_DONE(check_alignment(g));
    QD_TRY_DONE(read_config(g));
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
    qd_json_destroy(g->config);
    qd_safetensors_close(g->file);
    free(g->path);
    free(g);
}

int qd_golden_count(const qd_golden *g)
{
    return qd_safetensors_count(g->file);
}

const qd_golden_tensor *qd_golden_at(const qd_golden *g, int index)
{
    return qd_safetensors_at(g->file, index);
}

const qd_golden_tensor *qd_golden_lookup(const qd_golden *g, const char *name)
{
    return qd_safetensors_find(g->file, name);
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
    return qd_safetensors_metadata(g->file, key);
}

/* The value at a dotted path of the config; NULL if there is none. */
static const qd_json_node *config_at(const qd_golden *g, const char *path)
{
    const qd_json_node *at = g->config ? qd_json_root(g->config) : NULL;
    while (at) {
        const char *dot = strchr(path, '.');
        if (!dot)
            return qd_json_member(at, path);
        char key[64];
        if ((size_t)snprintf(key, sizeof key, "%.*s", (int)(dot - path), path) >= sizeof key)
            return NULL;
        at = qd_json_member(at, key);
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
    return qd_json_as_int(config_at(g, path), value) ? QD_OK : no_value(g, path, "integer");
}

qd_status qd_golden_config_double(const qd_golden *g, const char *path, double *value)
{
    return qd_json_as_double(config_at(g, path), value) ? QD_OK : no_value(g, path, "number");
}

qd_status qd_golden_config_bool(const qd_golden *g, const char *path, bool *value)
{
    return qd_json_as_bool(config_at(g, path), value) ? QD_OK : no_value(g, path, "boolean");
}

qd_status qd_golden_config_string(const qd_golden *g, const char *path, const char **value)
{
    *value = qd_json_as_string(config_at(g, path));
    return *value ? QD_OK : no_value(g, path, "string");
}

qd_status qd_golden_model(const qd_golden *g, qd_model *m)
{
    const char *family;
    QD_TRY(qd_golden_config_string(g, "family", &family));
    qd_arch arch = qd_arch_find(family);
    if (arch == QD_ARCH_COUNT)
        return no_value(g, "family", "known");
    *m = qd_model_default(arch);
    return qd_model_read(g->config, qd_json_root(g->config), m);
}

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
    for (int i = 0; i < qd_golden_count(g); i++) {
        const qd_golden_tensor *t = qd_golden_at(g, i);
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
    if (!isfinite(sum)) /* also if both are infinite: inf − inf is NaN */
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
