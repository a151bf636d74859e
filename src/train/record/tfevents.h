/* TensorBoard event files: records of the TFRecord format, each with an Event message of
 * tensorflow/core/util/event.proto, encoded here without a protobuf library. */
#ifndef QD_TRAIN_RECORD_TFEVENTS_H
#define QD_TRAIN_RECORD_TFEVENTS_H

#include <quadrille/strbuf.h>
#include <stdint.h>

typedef struct qd_tf_scalar {
    const char *tag;
    double value; /* stored as fp32 */
} qd_tf_scalar;

/* CRC32C (Castagnoli), as TFRecord uses it. */
uint32_t qd_crc32c(const void *data, size_t bytes);

/* Appends the first record of a file, which names the format's version. wall_time: seconds since
 * 1970. */
void qd_tf_put_version(qd_strbuf *out, double wall_time);
/* Appends a record that says that a run starts before `step`: readers drop what earlier files have
 * of that step and later ones. */
void qd_tf_put_start(qd_strbuf *out, double wall_time, int64_t step);
/* Appends a record with the scalars of a step. */
void qd_tf_put_scalars(qd_strbuf *out, double wall_time, int64_t step, const qd_tf_scalar *scalars, int count);
#endif
