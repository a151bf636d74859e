/* Encodes TensorBoard events: the few protobuf fields that scalars need, and TFRecord framing. */
#include "train/record/tfevents.h"

#include "base/text/strbuf.h"

#include <string.h>

/* Wire types and field numbers of event.proto and summary.proto. */
enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
enum { EVENT_WALL_TIME = 1, EVENT_STEP = 2, EVENT_FILE_VERSION = 3, EVENT_SUMMARY = 5, EVENT_SESSION_LOG = 7 };
enum { SUMMARY_VALUE = 1, VALUE_TAG = 1, VALUE_SIMPLE = 2, SESSION_STATUS = 1, SESSION_START = 1 };

uint32_t qd_crc32c(const void *data, size_t bytes)
{
    const unsigned char *at = data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* Little-endian, the `bytes` low bytes. */
static void put_fixed(qd_strbuf *out, uint64_t value, int bytes)
{
    char text[8];
    for (int i = 0; i < bytes; i++)
        text[i] = (char)(value >> 8 * i & 0xff);
    qd_strbuf_append(out, text, (size_t)bytes);
}

static void put_varint(qd_strbuf *out, uint64_t value)
{
    char byte;
    do {
        byte = (char)((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
        qd_strbuf_append(out, &byte, 1);
        value >>= 7;
    } while (value > 0);
}

static void put_key(qd_strbuf *out, int field, int type)
{
    put_varint(out, (uint64_t)(field << 3 | type));
}

static void put_bytes(qd_strbuf *out, int field, const char *data, size_t bytes)
{
    put_key(out, field, BYTES);
    put_varint(out, bytes);
    qd_strbuf_append(out, data, bytes);
}

/* The checksum is rotated and offset, because a CRC of data that contains its CRC is degenerate. */
static uint32_t masked(uint32_t crc)
{
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* A record: length, its checksum, data, its checksum. Frees `event`. */
static void put_record(qd_strbuf *out, qd_strbuf *event)
{
    char length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (char)((uint64_t)event->length >> 8 * i & 0xff);
    qd_strbuf_append(out, length, sizeof length);
    put_fixed(out, masked(qd_crc32c(length, sizeof length)), 4);
    qd_strbuf_append(out, event->data, event->length);
    put_fixed(out, masked(qd_crc32c(event->data, event->length)), 4);
    out->failed = out->failed || event->failed;
    qd_strbuf_free(event);
}

/* The fields that every event begins with. */
static void begin_event(qd_strbuf *event, double wall_time, int64_t step)
{
    uint64_t bits;
    memcpy(&bits, &wall_time, sizeof bits);
    put_key(event, EVENT_WALL_TIME, FIXED64);
    put_fixed(event, bits, 8);
    if (step != 0) { /* the default is not stored */
        put_key(event, EVENT_STEP, VARINT);
        put_varint(event, (uint64_t)step);
    }
}

void qd_tf_put_version(qd_strbuf *out, double wall_time)
{
    static const char version[] = "brain.Event:2";
    qd_strbuf event = {0};
    begin_event(&event, wall_time, 0);
    put_bytes(&event, EVENT_FILE_VERSION, version, sizeof version - 1);
    put_record(out, &event);
}

void qd_tf_put_start(qd_strbuf *out, double wall_time, int64_t step)
{
    static const char log[] = {SESSION_STATUS << 3 | VARINT, SESSION_START};
    qd_strbuf event = {0};
    begin_event(&event, wall_time, step);
    put_bytes(&event, EVENT_SESSION_LOG, log, sizeof log);
    put_record(out, &event);
}

void qd_tf_put_scalars(qd_strbuf *out, double wall_time, int64_t step, const qd_tf_scalar *scalars, int count)
{
    qd_strbuf event = {0}, summary = {0}, value = {0};
    for (int i = 0; i < count; i++) {
        float number = (float)scalars[i].value;
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        qd_strbuf_clear(&value);
        put_bytes(&value, VALUE_TAG, scalars[i].tag, strlen(scalars[i].tag));
        put_key(&value, VALUE_SIMPLE, FIXED32);
        put_fixed(&value, bits, 4);
        put_bytes(&summary, SUMMARY_VALUE, value.data, value.length);
    }
    begin_event(&event, wall_time, step);
    put_bytes(&event, EVENT_SUMMARY, summary.data, summary.length);
    event.failed = event.failed || summary.failed || value.failed;
    qd_strbuf_free(&summary);
    qd_strbuf_free(&value);
    put_record(out, &event);
}
