/* Proof of the world's secret between rank 0 and another rank, and messages under the keys that
 * result. Sizes are fixed, so that a stranger can make the other side read no more than a hello. */
#ifndef QD_COMM_RENDEZVOUS_HANDSHAKE_H
#define QD_COMM_RENDEZVOUS_HANDSHAKE_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QD_HANDSHAKE_VERSION 3
enum { QD_KEY_BYTES = 32, QD_NONCE_BYTES = 32, QD_MAC_BYTES = 32, QD_SEAL_BYTES = 16 };

/* Rank 0 to a stranger: a fresh number, which tells nothing. */
typedef struct qd_greeting {
    unsigned char nonce[QD_NONCE_BYTES];
} qd_greeting;

#define QD_HELLO_STAYS 1u /* flags: this process was in an earlier world of the run */

/* The answer. Numbers are little-endian on all machines that this runs on. */
typedef struct qd_hello {
    char magic[8];
    uint32_t version, rank, size, flags;
    unsigned char nonce[QD_NONCE_BYTES], key[QD_KEY_BYTES]; /* key: the public half of one made for this connection */
    unsigned char mac[QD_MAC_BYTES];
} qd_hello;

/* Rank 0 to a rank whose hello was right. */
typedef struct qd_welcome {
    unsigned char key[QD_KEY_BYTES], mac[QD_MAC_BYTES];
} qd_welcome;

/* One end of a connection. */
typedef struct qd_channel {
    unsigned char send_key[QD_KEY_BYTES], receive_key[QD_KEY_BYTES];
    uint64_t sent, received;
} qd_channel;

/* The key of the world, from its secret. QD_SYSTEM if the library cannot be used. */
qd_status qd_handshake_key(const void *secret, size_t bytes, unsigned char key[QD_KEY_BYTES]);

typedef struct qd_handshake {
    qd_greeting greeting;
    qd_hello hello;
    unsigned char private_key[QD_KEY_BYTES];
} qd_handshake;

/* Rank 0: greets; judges the hello and answers it. */
void qd_handshake_greet(qd_handshake *h);
typedef enum qd_hello_verdict { QD_HELLO_GOOD, QD_HELLO_JUNK, QD_HELLO_VERSION, QD_HELLO_SECRET } qd_hello_verdict;
qd_hello_verdict qd_handshake_judge(const qd_handshake *h, const unsigned char world[QD_KEY_BYTES], qd_welcome *welcome,
                                    qd_channel *channel);
/* Another rank: answers the greeting, with QD_HELLO_… flags; false if rank 0 does not know the
 * secret. */
void qd_handshake_answer(qd_handshake *h, const unsigned char world[QD_KEY_BYTES], int rank, int size, uint32_t flags);
bool qd_handshake_accept(qd_handshake *h, const unsigned char world[QD_KEY_BYTES], const qd_welcome *welcome, qd_channel *channel);

/* Sealed text: QD_SEAL_BYTES longer. open: false if it is not what the other end sealed next. */
void qd_channel_seal(qd_channel *c, const void *text, size_t bytes, unsigned char *sealed);
bool qd_channel_open(qd_channel *c, const unsigned char *sealed, size_t bytes, void *text);
void qd_handshake_wipe(void *memory, size_t bytes);

#endif
