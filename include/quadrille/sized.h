/* How the structs of this interface grow without breaking programs that were compiled before.
 *
 * 1. A struct that the caller allocates, options in or a report out, begins with `size`: its sizeof
 *    in the program. NAME_default() sets it, together with the defaults:
 *
 *        qd_generate_options options = qd_generate_options_default();
 *        qd_generate_report report = qd_generate_report_default();
 *
 *    The library reads and writes that many bytes and no more. New members come last. An older
 *    program gets the default of an option that it does not have, and is not given figures that it
 *    does not know. A newer program works with an older library as long as it leaves the options
 *    that the library does not know at zero; else it gets QD_UNSUPPORTED. A size that was not set
 *    is QD_USAGE.
 *
 * 2. A struct that the library allocates and hands out through a const pointer (arguments of
 *    callbacks, qd_simulation_report(), qd_session_summary()) gets new members at its end, too.
 *
 * 3. Elements of arrays, structs inside of others, and structs that are passed by value do not
 *    change: qd_option, qd_strbuf, qd_tokens, qd_json_writer, qd_comm_where, qd_segment,
 *    qd_document_rule and the rows of reports. Additions come as another array or struct. */
#ifndef QUADRILLE_SIZED_H
#define QUADRILLE_SIZED_H

#include <stddef.h>
#include <string.h>

/* NAME_default(): zero, apart from the size. */
#define QD_SIZED_DEFAULT(name)              \
    static inline name name##_default(void) \
    {                                       \
        name value;                         \
        memset(&value, 0, sizeof value);    \
        value.size = sizeof value;          \
        return value;                       \
    }

/* NAME_default(): as the library's NAME_init() fills the first `size` bytes. */
#define QD_SIZED_DEFAULT_BY_INIT(name)      \
    static inline name name##_default(void) \
    {                                       \
        name value;                         \
        name##_init(&value, sizeof value);  \
        return value;                       \
    }

#endif
