/* The handshake of a rendezvous, with libsodium.
 *
 *   rank 0 to rank   nonce
 *   rank to rank 0   version, rank, size, flags, nonce, public key; HMAC-SHA256 of both nonces and
 *                    these
 *   rank 0 to rank   public key; HMAC-SHA256 of everything so far
 *
 * Both codes are made with the key of the world. The rank proves first, so a stranger gets a random
 * number and nothing else, not even the version. Both nonces are fresh: a recorded hello or welcome
 * fits no other connection. The public keys (X25519) belong to this connection: who learns the
 * secret later cannot read what was recorded before. Messages then use ChaCha20-Poly1305 with one
 * key per direction and a counter as nonce: none can be repeated, dropped or moved. */
#include "comm/rendezvous/handshake.h"

#include <sodium.h>
#include <string.h>

_Static_assert((int)QD_KEY_BYTES == (int)crypto_auth_hmacsha256_KEYBYTES && (int)QD_MAC_BYTES == (int)crypto_auth_hmacsha256_BYTES &&
                   (int)QD_KEY_BYTES == (int)crypto_scalarmult_BYTES && (int)QD_SEAL_BYTES == (int)crypto_aead_chacha20poly1305_ietf_ABYTES,
               "the sizes of libsodium");

static const char magic[8] = "QDRANKS";
static const unsigned char of_rank[8] = "rank", of_root[8] = "root";

qd_status qd_handshake_key(const void *secret, size_t bytes, unsigned char key[QD_KEY_BYTES])
{
    static const unsigned char purpose[] = "quadrille rendezvous 1";
    if (sodium_init() < 0)
        return QD_FAIL(QD_SYSTEM, "libsodium cannot be initialized: the system gives no random numbers");
    crypto_generichash_state state;
    crypto_generichash_init(&state, NULL, 0, QD_KEY_BYTES);
    crypto_generichash_update(&state, purpose, sizeof purpose);
    crypto_generichash_update(&state, secret, bytes);
    crypto_generichash_final(&state, key, QD_KEY_BYTES);
    return QD_OK;
}

static void make_keys(qd_handshake *h, unsigned char public_key[QD_KEY_BYTES])
{
    randombytes_buf(h->private_key, sizeof h->private_key);
    crypto_scalarmult_base(public_key, h->private_key);
}

static void code_of(const qd_handshake *h, const unsigned char world[QD_KEY_BYTES], const qd_welcome *welcome,
                    unsigned char mac[QD_MAC_BYTES])
{
    crypto_auth_hmacsha256_state state;
    crypto_auth_hmacsha256_init(&state, world, QD_KEY_BYTES);
    crypto_auth_hmacsha256_update(&state, welcome ? of_root : of_rank, sizeof of_rank);
    crypto_auth_hmacsha256_update(&state, (const unsigned char *)&h->greeting, sizeof h->greeting);
    crypto_auth_hmacsha256_update(&state, (const unsigned char *)&h->hello, welcome ? sizeof h->hello : offsetof(qd_hello, mac));
    if (welcome)
        crypto_auth_hmacsha256_update(&state, welcome->key, sizeof welcome->key);
    crypto_auth_hmacsha256_final(&state, mac);
}

/* False for a public key that makes no secret. */
static bool derive(const qd_handshake *h, const unsigned char world[QD_KEY_BYTES], const unsigned char theirs[QD_KEY_BYTES],
                   const unsigned char root_key[QD_KEY_BYTES], bool root, qd_channel *channel)
{
    unsigned char shared[crypto_scalarmult_BYTES], keys[2 * QD_KEY_BYTES];
    if (crypto_scalarmult(shared, h->private_key, theirs) != 0)
        return false;
    crypto_generichash_state state;
    crypto_generichash_init(&state, world, QD_KEY_BYTES, sizeof keys);
    crypto_generichash_update(&state, shared, sizeof shared);
    crypto_generichash_update(&state, (const unsigned char *)&h->greeting, sizeof h->greeting);
    crypto_generichash_update(&state, (const unsigned char *)&h->hello, sizeof h->hello);
    crypto_generichash_update(&state, root_key, QD_KEY_BYTES);
    crypto_generichash_final(&state, keys, sizeof keys);
    memcpy(root ? channel->send_key : channel->receive_key, keys, QD_KEY_BYTES);
    memcpy(root ? channel->receive_key : channel->send_key, keys + QD_KEY_BYTES, QD_KEY_BYTES);
    channel->sent = channel->received = 0;
    sodium_memzero(shared, sizeof shared);
    sodium_memzero(keys, sizeof keys);
    return true;
}

void qd_handshake_greet(qd_handshake *h)
{
    randombytes_buf(&h->greeting, sizeof h->greeting);
}

qd_hello_verdict qd_handshake_judge(const qd_handshake *h, const unsigned char world[QD_KEY_BYTES], qd_welcome *welcome,
                                    qd_channel *channel)
{
    unsigned char mac[QD_MAC_BYTES];
    if (memcmp(h->hello.magic, magic, sizeof magic) != 0)
        return QD_HELLO_JUNK;
    if (h->hello.version != QD_HANDSHAKE_VERSION)
        return QD_HELLO_VERSION;
    code_of(h, world, NULL, mac);
    if (sodium_memcmp(mac, h->hello.mac, sizeof mac) != 0)
        return QD_HELLO_SECRET;
    qd_handshake own = *h;
    make_keys(&own, welcome->key);
    code_of(&own, world, welcome, welcome->mac);
    bool good = derive(&own, world, h->hello.key, welcome->key, true, channel);
    sodium_memzero(&own, sizeof own);
    return good ? QD_HELLO_GOOD : QD_HELLO_SECRET;
}

void qd_handshake_answer(qd_handshake *h, const unsigned char world[QD_KEY_BYTES], int rank, int size, uint32_t flags)
{
    h->hello = (qd_hello){.version = QD_HANDSHAKE_VERSION, .rank = (uint32_t)rank, .size = (uint32_t)size, .flags = flags};
    memcpy(h->hello.magic, magic, sizeof magic);
    randombytes_buf(h->hello.nonce, sizeof h->hello.nonce);
    make_keys(h, h->hello.key);
    code_of(h, world, NULL, h->hello.mac);
}

bool qd_handshake_accept(qd_handshake *h, const unsigned char world[QD_KEY_BYTES], const qd_welcome *welcome, qd_channel *channel)
{
    unsigned char mac[QD_MAC_BYTES];
    code_of(h, world, welcome, mac);
    bool good = sodium_memcmp(mac, welcome->mac, sizeof mac) == 0 && derive(h, world, welcome->key, welcome->key, false, channel);
    sodium_memzero(h->private_key, sizeof h->private_key);
    return good;
}

static void nonce_of(uint64_t count, unsigned char nonce[crypto_aead_chacha20poly1305_ietf_NPUBBYTES])
{
    memset(nonce, 0, crypto_aead_chacha20poly1305_ietf_NPUBBYTES);
    memcpy(nonce, &count, sizeof count);
}

void qd_channel_seal(qd_channel *c, const void *text, size_t bytes, unsigned char *sealed)
{
    unsigned char nonce[crypto_aead_chacha20poly1305_ietf_NPUBBYTES];
    nonce_of(c->sent++, nonce);
    crypto_aead_chacha20poly1305_ietf_encrypt(sealed, NULL, text, bytes, NULL, 0, NULL, nonce, c->send_key);
}

bool qd_channel_open(qd_channel *c, const unsigned char *sealed, size_t bytes, void *text)
{
    unsigned char nonce[crypto_aead_chacha20poly1305_ietf_NPUBBYTES];
    nonce_of(c->received++, nonce);
    return crypto_aead_chacha20poly1305_ietf_decrypt(text, NULL, NULL, sealed, bytes, NULL, 0, nonce, c->receive_key) == 0;
}

void qd_handshake_wipe(void *memory, size_t bytes)
{
    sodium_memzero(memory, bytes);
}
