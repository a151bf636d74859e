/* The registry of devices, and the calls of device.h that dispatch to a backend. */
#include "device/copies.h"
#include "device/device_impl.h"
#include "device/info.h"

#include <string.h>

static const struct {
    const char *kind;
    qd_status (*create)(const qd_device_config *config, qd_device **device);
    qd_status (*look)(int ordinal, qd_device_info *info); /* accelerators only */
    qd_status (*exists)(int ordinal, const char *isa);
} backends[] = {
    {"cpu", qd_cpu_device_create, NULL, qd_cpu_device_exists},
    {"cuda", qd_cuda_device_create, qd_cuda_device_look, qd_cuda_device_exists},
};

qd_device_config qd_device_config_default(void)
{
    return (qd_device_config){.threads = 1, .pin_first = -1, .isa = NULL, .ordinal = 0, .share = false};
}

qd_status qd_device_create(const char *kind, const qd_device_config *config, qd_device **device)
{
    *device = NULL;
    qd_device_config plain = qd_device_config_default();
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        if (strcmp(kind, backends[i].kind) == 0) {
            QD_TRY(backends[i].create(config ? config : &plain, device));
            return QD_OK;
        }
    }
    return QD_FAIL(QD_UNSUPPORTED, "device '%s': this build has no such device; it has: cpu, cuda", kind);
}

qd_status qd_device_look(const char *kind, int ordinal, qd_device_info *info)
{
    memset(info, 0, sizeof *info);
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(kind, backends[i].kind) == 0 && backends[i].look)
            return backends[i].look(ordinal, info);
    return QD_FAIL(QD_UNSUPPORTED, "'%s' is not a kind of accelerator", kind);
}

qd_status qd_device_exists(const char *kind, int ordinal, const char *isa)
{
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(kind, backends[i].kind) == 0)
            return backends[i].exists(ordinal, isa);
    return QD_FAIL(QD_UNSUPPORTED, "device '%s': this build has no such device; it has: cpu, cuda", kind);
}

void qd_device_destroy(qd_device *device)
{
    if (device)
        device->ops->destroy(device);
}

const qd_device_caps *qd_device_get_caps(const qd_device *device)
{
    return &device->caps;
}

qd_status qd_device_alloc(qd_device *device, int64_t bytes, void **address)
{
    *address = NULL;
    if (bytes < 0)
        return QD_FAIL(QD_USAGE, "allocation of %lld bytes: a size must not be negative", (long long)bytes);
    QD_TRY(device->ops->alloc(device, bytes ? bytes : 1, address));
    atomic_fetch_add(&device->allocated, bytes);
    return QD_OK;
}

void qd_device_free(qd_device *device, void *address, int64_t bytes)
{
    if (!address)
        return;
    device->ops->free(device, address, bytes ? bytes : 1);
    atomic_fetch_sub(&device->allocated, bytes);
}

void qd_device_adopt(qd_device *device, int64_t bytes)
{
    atomic_fetch_add(&device->allocated, bytes);
}

int64_t qd_device_allocated(const qd_device *device)
{
    return atomic_load(&device->allocated);
}

qd_status qd_device_memory(qd_device *device, int64_t *free_bytes, int64_t *total_bytes)
{
    return device->ops->memory(device, free_bytes, total_bytes);
}

void qd_device_describe_workspace(const qd_device *device, qd_strbuf *text)
{
    if (device->ops->describe_workspace)
        device->ops->describe_workspace(device, text);
}

qd_status qd_host_alloc(qd_device *device, int64_t bytes, void **address)
{
    return device->ops->host_alloc(device, bytes > 0 ? bytes : 1, address);
}

void qd_host_free(qd_device *device, void *address)
{
    if (address)
        device->ops->host_free(device, address);
}

qd_stream *qd_device_compute_stream(qd_device *device)
{
    return device->compute;
}

qd_stream *qd_device_comm_stream(qd_device *device)
{
    return device->comm;
}

qd_stream *qd_device_in_stream(qd_device *device)
{
    return device->in;
}

qd_stream *qd_device_out_stream(qd_device *device)
{
    return device->out;
}

qd_device *qd_stream_device(qd_stream *stream)
{
    return stream->device;
}

qd_status qd_event_create(qd_device *device, qd_event **event)
{
    *event = NULL;
    return device->ops->event_create(device, event);
}

void qd_event_destroy(qd_event *event)
{
    if (event)
        event->device->ops->event_destroy(event);
}

qd_status qd_event_record(qd_event *event, qd_stream *stream)
{
    return event->device->ops->event_record(event, stream);
}

qd_status qd_stream_wait_event(qd_stream *stream, qd_event *event)
{
    return stream->device->ops->stream_wait_event(stream, event);
}

qd_status qd_event_wait(qd_event *event)
{
    return event->device->ops->event_wait(event);
}

qd_status qd_event_done(qd_event *event, bool *done)
{
    return event->device->ops->event_done(event, done);
}

qd_status qd_event_seconds(qd_event *from, qd_event *to, double *seconds)
{
    return from->device->ops->event_seconds(from, to, seconds);
}

qd_status qd_device_reach(qd_device *device, qd_device *other)
{
    if (device->ops != other->ops)
        return QD_FAIL(QD_UNSUPPORTED, "a %s device cannot reach the memory of a %s device", device->caps.name,
                       other->caps.name);
    return device->ops->reach && device != other ? device->ops->reach(device, other) : QD_OK;
}

qd_status qd_device_make_current(qd_device *device)
{
    return device->ops->make_current ? device->ops->make_current(device) : QD_OK;
}

void *qd_stream_native(qd_stream *stream)
{
    return stream->device->ops->native ? stream->device->ops->native(stream) : NULL;
}

qd_status qd_device_tune(qd_device *device, const qd_tune_args *args, bool *searched)
{
    *searched = false;
    return device->ops->tune ? device->ops->tune(device, args, searched) : QD_OK;
}

qd_status qd_device_tune_more(qd_device *device, const qd_tune_args *args, int *left)
{
    *left = 0;
    return device->ops->tune_more ? device->ops->tune_more(device, args, left) : QD_OK;
}

qd_status qd_device_tuning_get(qd_device *device, qd_strbuf *text)
{
    return device->ops->tuning_get ? device->ops->tuning_get(device, text) : QD_OK;
}

qd_status qd_device_tuning_set(qd_device *device, const char *text)
{
    return device->ops->tuning_set ? device->ops->tuning_set(device, text) : QD_OK;
}

qd_status qd_stream_wait(qd_stream *stream)
{
    return stream->device->ops->wait(stream);
}

qd_status qd_copy(qd_stream *stream, void *to, const void *from, int64_t bytes)
{
    return bytes ? stream->device->ops->copy(stream, to, from, bytes) : QD_OK;
}

qd_status qd_fill_zero(qd_stream *stream, void *to, int64_t bytes)
{
    return bytes ? stream->device->ops->fill_zero(stream, to, bytes) : QD_OK;
}

const qd_kernels *qd_device_kernels(const qd_device *device)
{
    return device->kernels;
}
