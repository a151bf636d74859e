/* Measures peak arithmetic throughput and copy bandwidth of a device; see ceiling.h. */
#include "device/ceiling.h"

#include "base/clock.h"
#include "device/device_impl.h"

#include <math.h>

/* Enough runs that some are undisturbed on a busy machine. */
enum { RUNS_LEAST = 5, FMA_RUNS = 20 };

/* Far larger than the caches, so that the time to start a copy does not count. */
static int64_t copy_bytes(const qd_device *device)
{
    return device->caps.host_memory ? (int64_t)128 << 20 : (int64_t)2 << 30;
}

double qd_ceiling_of(const qd_ceiling *ceiling, qd_dtype dtype)
{
    if (dtype != QD_BF16 || ceiling->dot_flops + ceiling->amx_flops <= 0.0)
        return ceiling->fma_flops;
    return ceiling->amx_flops > 0.0 ? ceiling->amx_flops : ceiling->dot_flops;
}

/* What one run executes: multiply-adds, or a unit of bf16. */
typedef struct instructions {
    bool fma;
    qd_bf16_unit unit;
} instructions;

static qd_status run_once(qd_stream *stream, instructions of, double *flops)
{
    const qd_device_ops *ops = qd_stream_device(stream)->ops;
    *flops = 0.0;
    if (of.fma)
        return ops->run_fma(stream, flops);
    return ops->run_bf16 ? ops->run_bf16(stream, of.unit, flops) : QD_OK;
}

static qd_status measure(qd_device *device, instructions of, int runs, double *best)
{
    qd_stream *stream = qd_device_compute_stream(device);
    *best = 0.0;
    for (int i = 0; i < runs; i++) {
        double flops, start = qd_clock_now();
        QD_TRY(run_once(stream, of, &flops));
        QD_TRY(qd_stream_wait(stream));
        *best = fmax(*best, flops / (qd_clock_now() - start));
    }
    return QD_OK;
}

qd_status qd_device_measure_fma(qd_device *device, int runs, double *fma_flops)
{
    return measure(device, (instructions){.fma = true}, runs, fma_flops);
}

qd_status qd_device_measure_flops(qd_device *device, int runs, qd_ceiling *ceiling)
{
    QD_TRY(qd_device_measure_fma(device, runs, &ceiling->fma_flops));
    QD_TRY(measure(device, (instructions){.unit = QD_BF16_DOTS}, runs, &ceiling->dot_flops));
    return measure(device, (instructions){.unit = QD_BF16_AMX}, runs, &ceiling->amx_flops);
}

qd_status qd_device_average_fma(qd_device *device, int runs, double *fma_flops)
{
    qd_stream *stream = qd_device_compute_stream(device);
    double sum = 0.0, start = qd_clock_now();
    for (int i = 0; i < runs; i++) {
        double flops = 0.0;
        QD_TRY(device->ops->run_fma(stream, &flops));
        sum += flops;
    }
    QD_TRY(qd_stream_wait(stream));
    *fma_flops = sum / (qd_clock_now() - start);
    return QD_OK;
}

qd_status qd_device_measure_adds(qd_device *device, double *adds)
{
    double count = 0.0, start = qd_clock_now();
    if (device->ops->run_adds)
        QD_TRY(device->ops->run_adds(qd_device_compute_stream(device), &count));
    *adds = count / (qd_clock_now() - start);
    return QD_OK;
}

qd_status qd_device_run_tiles(qd_device *device, qd_dtype dtype, double *flops, double *seconds)
{
    *flops = *seconds = 0.0;
    return device->ops->run_tiles ? device->ops->run_tiles(qd_device_compute_stream(device), dtype, flops, seconds) : QD_OK;
}

qd_status qd_device_measure_ceiling(qd_device *device, double seconds, qd_ceiling *ceiling)
{
    qd_status status;
    qd_stream *stream = qd_device_compute_stream(device);
    void *from = NULL, *to = NULL;
    const int64_t bytes = copy_bytes(device);
    *ceiling = (qd_ceiling){0};
    QD_TRY_DONE(qd_device_alloc(device, bytes, &from));
    QD_TRY_DONE(qd_device_alloc(device, bytes, &to));
    double begin = qd_clock_now();
    for (int run = 0; run < RUNS_LEAST || qd_clock_now() - begin < seconds; run++) {
        qd_ceiling now = {0};
        QD_TRY_DONE(qd_device_measure_flops(device, FMA_RUNS, &now));
        ceiling->fma_flops = fmax(ceiling->fma_flops, now.fma_flops);
        ceiling->dot_flops = fmax(ceiling->dot_flops, now.dot_flops);
        ceiling->amx_flops = fmax(ceiling->amx_flops, now.amx_flops);
        double start = qd_clock_now();
        QD_TRY_DONE(qd_copy(stream, to, from, bytes));
        QD_TRY_DONE(qd_stream_wait(stream));
        ceiling->copy_bytes = fmax(ceiling->copy_bytes, 2.0 * (double)bytes / (qd_clock_now() - start));
    }
done:
    qd_device_free(device, from, bytes);
    qd_device_free(device, to, bytes);
    return status;
}
