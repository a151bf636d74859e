/* The public JSON writer, under the name that internal code includes. */
#ifndef QD_BASE_TEXT_JSON_WRITER_H
#define QD_BASE_TEXT_JSON_WRITER_H
#include <quadrille/json_writer.h>
#endif
