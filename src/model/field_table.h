/* The table of fields.h as data, for the code that walks it: options, presets, saved configurations
 * and tests. */
#ifndef QD_MODEL_FIELD_TABLE_H
#define QD_MODEL_FIELD_TABLE_H

#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "model/model.h"

#include <quadrille/options.h>

typedef enum qd_field_kind { QD_FIELD_INT, QD_FIELD_SIZE, QD_FIELD_REAL, QD_FIELD_FLAG, QD_FIELD_ENUM, QD_FIELD_LIST } qd_field_kind;
typedef enum qd_field_when {
    QD_WHEN_ALWAYS, QD_WHEN_SCALED, QD_WHEN_LLAMA3, QD_WHEN_YARN, QD_WHEN_ORIGINAL, QD_WHEN_WINDOW, QD_WHEN_EXPERTS,
    QD_WHEN_QK_NORM, QD_WHEN_SHARED, QD_WHEN_CLAMPED, QD_WHEN_LATENT, QD_WHEN_MTP, QD_WHEN_LONGROPE, QD_WHEN_LENGTHS
} qd_field_when;

typedef struct qd_model_field {
    const char *member; /* "rope.base" */
    size_t offset;      /* in qd_model */
    qd_field_kind kind;
    qd_option option;   /* key NULL: none; its choices then still hold the words of an enum */
    const char *preset; /* NULL: the same as the option's key, without "model." */
    const char *hf;     /* key in config.json of most transformers families; NULL: none */
    qd_field_when when;
} qd_model_field;

const qd_model_field *qd_model_fields(int *count);
/* The option's key without "model."; NULL: it has none. */
const char *qd_field_key(const qd_model_field *field);
/* Its key in data/models.json, a.b inside an object. */
const char *qd_field_preset(const qd_model_field *field);
/* Whether the field applies to the model. */
bool qd_field_counts(const qd_model_field *field, const qd_model *model);

/* Access to values: `list` for LIST, `real` for REAL, `whole` for all other kinds. */
int64_t qd_field_whole(const qd_model_field *field, const qd_model *model);
double qd_field_real(const qd_model_field *field, const qd_model *model);
const qd_number_list *qd_field_list(const qd_model_field *field, const qd_model *model);
void qd_field_set_whole(const qd_model_field *field, int64_t value, qd_model *model);
void qd_field_set_real(const qd_model_field *field, double value, qd_model *model);
/* False: there are more than QD_NUMBERS_MOST. */
bool qd_field_set_list(const qd_model_field *field, const double *values, size_t count, qd_model *model);
/* The value as a user writes it: 12, 1e-05, true, swiglu, 1,1.5. Setting returns false for an
 * invalid value; auto changes nothing. */
enum { QD_FIELD_TEXT = QD_NUMBERS_MOST * (QD_DOUBLE_TEXT + 1) };
void qd_field_text(const qd_model_field *field, const qd_model *model, char text[QD_FIELD_TEXT]);
bool qd_field_set_text(const qd_model_field *field, const char *text, qd_model *model);

/* Copies option values to the model. `always`: defaults too; otherwise only what the user has set.
 * QD_USAGE names an old option that contradicts the ones it stands for. */
qd_status qd_model_take(const qd_options *options, bool always, qd_model *model);
/* The reverse: sets the options to the model's values (qd_options_resolve), without the name of a
 * preset. */
qd_status qd_model_put(const qd_model *model, qd_options *options);
/* Copies the members of an object of data/models.json to the model; a missing or null member
 * changes nothing. Old options are read too. */
qd_status qd_model_read(const qd_json *document, const qd_json_node *object, qd_model *model);
#endif
