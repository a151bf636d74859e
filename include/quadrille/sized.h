/* Binary compatibility: how the structs of this interface grow without breaking compiled programs.
 *
 * 1. A struct that the caller allocates, for options in or a report out, begins with `size`, its
 *    sizeof in the program. NAME_default() sets it, together with the defaults:
 *
 *        qd_generate_options options = qd_generate_options_default();
 *        qd_generate_report report = qd_generate_report_default();
 *
 *    The library reads and writes exactly that many bytes. New members are added at the end. An
 *    older program gets the defaults of options that it does not have, and does not receive figures
 *    that it does not know. A newer program works with an older library if it leaves options that
 *    the library does not know at zero; otherwise it gets QD_UNSUPPORTED. A size that is not set is
 *    QD_USAGE.
 *
 * 2. A struct that the library allocates and returns through a const pointer (arguments of
 *    callbacks, qd_simulation_report(), qd_session_summary()) also gets new members at its end.
 *
 * 3. Array elements, nested structs and structs passed by value do not change: qd_option,
 *    qd_strbuf, qd_tokens, qd_json_writer, qd_comm_where, qd_segment, qd_document_rule, qd_prompt
 *    and the rows of reports. Additions come as another array or struct. */
#ifndef QUADRILLE_SIZED_H
#define QUADRILLE_SIZED_H

#include <stddef.h>
#include <string.h>

/* Defines NAME_default(): all zero except the size. */
#define QD_SIZED_DEFAULT(name)              \
    static inline name name##_default(void) \
    {                                       \
        name value;                         \
        memset(&value, 0, sizeof value);    \
        value.size = sizeof value;          \
        return value;                       \
    }

/* Defines NAME_default() by NAME_init() of the library, which fills the first `size` bytes. */
#define QD_SIZED_DEFAULT_BY_INIT(name)      \
    static inline name name##_default(void) \
    {                                       \
        name value;                         \
        name##_init(&value, sizeof value);  \
        return value;                       \
    }

#endif
