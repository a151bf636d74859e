/* Assertion of success in tests. Include cmocka.h first. */
#ifndef QD_TESTS_SUPPORT_OK_H
#define QD_TESTS_SUPPORT_OK_H

#include <quadrille/status.h>

/* Fails the test with the error message and trace unless the call returns QD_OK. */
#define ok(call)                                                               \
    do {                                                                       \
        if ((call) != QD_OK)                                                   \
            fail_msg("%s: %s\n%s", #call, qd_error_message(), qd_error_trace()); \
    } while (0)

#endif
