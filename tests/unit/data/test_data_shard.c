/* Shards: what is written is read back; every damaged byte, every truncation and every inconsistent
 * header field is refused by name, and so are disk errors.
 * ctest: wrap pread */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "data/shard.h"
#include "data/shard_impl.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { THREADS = 2 };

static void write_shard(const char *path, int64_t vocab, const int32_t *tokens, int64_t count, const int64_t *documents,
                        int64_t document_count)
{
    qd_shard_writer *writer;
    int64_t at = 0, bytes;
    assert_int_equal(qd_shard_writer_create(path, vocab, 77, &writer), QD_OK);
    for (int64_t d = 0; d < document_count; d++) {
        assert_int_equal(qd_shard_writer_append(writer, tokens + at, documents[d] - at), QD_OK);
        assert_int_equal(qd_shard_writer_document(writer), QD_OK);
        at = documents[d];
    }
    assert_int_equal(qd_shard_writer_append(writer, tokens + at, count - at), QD_OK);
    assert_int_equal(access(path, F_OK), -1); /* nothing under the final name yet */
    assert_int_equal(qd_shard_writer_finish(writer, &bytes), QD_OK);
}

static int32_t *random_tokens(int64_t count, int64_t vocab)
{
    int32_t *tokens = malloc((size_t)count * sizeof *tokens);
    for (int64_t i = 0; i < count; i++)
        tokens[i] = (int32_t)qd_rng_below(qd_rng_key(5, "shard"), (uint64_t)i, (uint64_t)vocab);
    return tokens;
}

static int32_t token_at(const qd_shard *s, int64_t i)
{
    uint16_t narrow = 0;
    uint32_t wide = 0;
    assert_int_equal(qd_shard_tokens(s, i, 1, s->token_bytes == 2 ? (void *)&narrow : &wide), QD_OK);
    return s->token_bytes == 2 ? narrow : (int32_t)wide;
}

static int64_t document_at(const qd_shard *s, int64_t i)
{
    uint64_t document;
    assert_int_equal(qd_shard_documents(s, i, 1, &document), QD_OK);
    return (int64_t)document;
}

/* Both widths, sizes around the chunk and the padding, documents that begin at 0 or later. */
static void round_trip(void **state)
{
    static const struct {
        int64_t vocab, count, documents[3], document_count;
    } rows[] = {
        {65536, 1, {0}, 1},
        {65536, 5, {0, 2, 4}, 3},
        {65537, 7, {3}, 1},
        {200000, 600000, {0, 9}, 2},
        {256, 524288, {100, 524287}, 2},
        {256, 524287, {0}, 0},
        {1, 3, {0}, 1},
    };
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        const char *path = scratch_path(state, "a.qds");
        int32_t *tokens = random_tokens(rows[r].count, rows[r].vocab);
        write_shard(path, rows[r].vocab, tokens, rows[r].count, rows[r].documents, rows[r].document_count);
        qd_shard shard;
        assert_int_equal(qd_shard_open(path, true, THREADS, &shard), QD_OK);
        assert_int_equal(shard.token_bytes, rows[r].vocab <= 65536 ? 2 : 4);
        assert_int_equal(shard.vocab, rows[r].vocab);
        assert_int_equal(shard.tokenizer_hash, 77);
        assert_int_equal(shard.token_count, rows[r].count);
        assert_int_equal(shard.document_count, rows[r].document_count);
        for (int64_t i = 0; i < rows[r].count; i++)
            if (token_at(&shard, i) != tokens[i])
                fail_msg("token %lld differs", (long long)i);
        for (int64_t d = 0; d < rows[r].document_count; d++)
            assert_int_equal(document_at(&shard, d), rows[r].documents[d]);
        qd_shard_close(&shard);
        unlink(path);
        free(tokens);
    }
}

static void empty_documents_leave_no_trace(void **state)
{
    const char *path = scratch_path(state, "a.qds");
    const int32_t tokens[] = {1, 2, 3};
    const int64_t documents[] = {0, 0, 2, 2, 3}; /* the last has no tokens */
    write_shard(path, 10, tokens, 3, documents, 5);
    qd_shard shard;
    assert_int_equal(qd_shard_open(path, true, 1, &shard), QD_OK);
    assert_int_equal(shard.document_count, 2);
    assert_int_equal(document_at(&shard, 1), 2);
    qd_shard_close(&shard);
}

static void writer_refuses(void **state)
{
    const char *path = scratch_path(state, "refused.qds");
    qd_shard_writer *writer;
    int64_t bytes;
    const int32_t tokens[] = {1, 9, 10};
    assert_int_equal(qd_shard_writer_create(path, 10, 1, &writer), QD_OK);
    assert_int_equal(qd_shard_writer_append(writer, tokens, 2), QD_OK);
    assert_int_equal(qd_shard_writer_append(writer, tokens + 2, 1), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "token 2 would be 10"));
    assert_int_equal(access(scratch_path(state, "refused.qds.partial"), F_OK), 0);
    qd_shard_writer_abandon(writer);
    assert_int_equal(access(scratch_path(state, "refused.qds.partial"), F_OK), -1);
    assert_int_equal(access(path, F_OK), -1);

    assert_int_equal(qd_shard_writer_create(path, 10, 1, &writer), QD_OK);
    assert_int_equal(qd_shard_writer_finish(writer, &bytes), QD_USAGE);
    assert_int_equal(access(scratch_path(state, "refused.qds.partial"), F_OK), -1);
    assert_int_equal(qd_shard_writer_create(scratch_path(state, "no/a.qds"), 10, 1, &writer), QD_IO);
}

/* A shard in memory, aligned, with some documents and three chunks. */
static unsigned char *some_shard(void **state, int64_t vocab, size_t *size)
{
    const char *path = scratch_path(state, "some.qds");
    const int64_t count = vocab > 65536 ? 550000 : 1100000, documents[] = {0, 5, 70000};
    int32_t *tokens = random_tokens(count, vocab);
    write_shard(path, vocab, tokens, count, documents, 3);
    free(tokens);
    unsigned char *bytes = scratch_read(path, size);
    unlink(path);
    return bytes;
}

static void every_damaged_header_byte_is_found(void **state)
{
    size_t size;
    unsigned char *bytes = some_shard(state, 1000, &size);
    qd_shard shard;
    for (int bit = 0; bit < SHARD_HEADER_BYTES * 8; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        assert_int_equal(qd_shard_view("x.qds", bytes, size, false, 1, &shard), QD_CORRUPT);
        assert_non_null(strstr(qd_error_message(), "x.qds"));
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    assert_int_equal(qd_shard_view("x.qds", bytes, size, true, 1, &shard), QD_OK);
    free(bytes);
}

static void damaged_bodies_are_found(void **state)
{
    size_t size;
    unsigned char *bytes = some_shard(state, 1000, &size);
    qd_shard shard;
    for (uint64_t i = 0; i < 300; i++) {
        size_t at = SHARD_HEADER_BYTES + qd_rng_below(qd_rng_key(1, "damage"), i, size - SHARD_HEADER_BYTES);
        at = i == 0 ? SHARD_HEADER_BYTES : i == 1 ? size - 1 : i == 2 ? 2200000 + SHARD_HEADER_BYTES : at;
        bytes[at] ^= (unsigned char)(1 << i % 8);
        assert_int_equal(qd_shard_view("x.qds", bytes, size, true, THREADS, &shard), QD_CORRUPT);
        assert_non_null(strstr(qd_error_message(), "checksum"));
        bytes[at] ^= (unsigned char)(1 << i % 8);
    }
    /* The position is reported. */
    bytes[SHARD_HEADER_BYTES + SHARD_CHUNK_BYTES + 3] ^= 1;
    assert_int_equal(qd_shard_view("x.qds", bytes, size, true, THREADS, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "bytes 1048704 to 2097279 is wrong (chunk 1 of 3)"));
    /* Without verification the damage is not detected. */
    assert_int_equal(qd_shard_view("x.qds", bytes, size, false, THREADS, &shard), QD_OK);
    free(bytes);
}

static void every_cut_is_found(void **state)
{
    size_t size;
    unsigned char *bytes = some_shard(state, 1000, &size);
    qd_shard shard;
    for (size_t length = 0; length < size; length += length < 200 || length > size - 100 ? 1 : 9973) {
        /* A copy of exactly that length, so that the sanitizer sees accesses outside it. */
        unsigned char *cut = malloc(length ? length : 1);
        memcpy(cut, bytes, length);
        assert_int_equal(qd_shard_view("x.qds", cut, length, true, 1, &shard), QD_CORRUPT);
        free(cut);
    }
    unsigned char *longer = calloc(1, size + 8);
    memcpy(longer, bytes, size);
    assert_int_equal(qd_shard_view("x.qds", longer, size + 8, true, 1, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "extra bytes"));
    free(longer);
    free(bytes);
}

/* Recomputes all checksums after a change. */
static void seal(unsigned char *bytes)
{
    shard_header *h = (shard_header *)bytes;
    uint64_t *table = (uint64_t *)(bytes + h->table_offset);
    for (uint64_t at = SHARD_HEADER_BYTES, i = 0; at < h->table_offset; at += h->chunk_bytes, i++) {
        uint64_t left = h->table_offset - at;
        table[i] = XXH3_64bits(bytes + at, left < h->chunk_bytes ? left : h->chunk_bytes);
    }
    h->table_hash = XXH3_64bits(table, h->file_bytes - h->table_offset);
    h->header_hash = XXH3_64bits(h, offsetof(shard_header, header_hash));
}

static void refused_with(unsigned char *bytes, size_t size, const char *why)
{
    qd_shard shard;
    shard_header *h = (shard_header *)bytes;
    h->header_hash = XXH3_64bits(h, offsetof(shard_header, header_hash));
    assert_int_equal(qd_shard_view("x.qds", bytes, size, true, 1, &shard), QD_CORRUPT);
    if (!strstr(qd_error_message(), why))
        fail_msg("'%s' does not say '%s'", qd_error_message(), why);
}

static void right_checksums_do_not_excuse_nonsense(void **state)
{
    size_t size;
    unsigned char *bytes = some_shard(state, 1000, &size);
    const shard_header good = *(shard_header *)bytes;
    shard_header *h = (shard_header *)bytes;
#define WRONG(field, value, why)                  \
    do {                                          \
        *h = good;                                \
        h->field = (value);                       \
        refused_with(bytes, size, why);           \
    } while (0)
    WRONG(version, 2, "version 2");
    WRONG(token_bytes, 3, "tokens of 3 bytes");
    WRONG(token_bytes, 4, "offsets");
    WRONG(vocab, 0, "vocabulary of 0");
    WRONG(vocab, 65537, "vocabulary of 65537");
    WRONG(vocab, UINT64_MAX, "vocabulary");
    WRONG(token_count, 0, "empty");
    WRONG(token_count, UINT64_MAX, "do not fit");
    WRONG(token_count, UINT64_C(1) << 63, "do not fit");
    WRONG(document_count, UINT64_MAX, "do not fit");
    WRONG(document_count, good.document_count + 1, "offsets");
    WRONG(chunk_bytes, 0, "chunks of 0");
    WRONG(chunk_bytes, UINT64_MAX, "chunks of");
    WRONG(chunk_bytes, UINT64_MAX - 7, "offsets");
    WRONG(documents_offset, good.documents_offset - 8, "offsets");
    WRONG(table_offset, UINT64_MAX, "offsets");
    WRONG(file_bytes, size + 8, "truncated");
    WRONG(reserved[0], 1, "reserved");
#undef LIE
    *h = good;
    qd_shard shard;
    uint64_t *documents = (uint64_t *)(bytes + h->documents_offset);
    documents[1] = 70000;
    seal(bytes);
    assert_int_equal(qd_shard_view("x.qds", bytes, size, true, 1, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "document 2 does not begin after document 1"));
    documents[1] = 5;
    documents[2] = h->token_count;
    seal(bytes);
    assert_int_equal(qd_shard_view("x.qds", bytes, size, false, 1, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "document 2 begins at token"));
    documents[2] = 70000;
    ((uint16_t *)(bytes + SHARD_HEADER_BYTES))[123456] = 1000;
    seal(bytes);
    assert_int_equal(qd_shard_view("x.qds", bytes, size, true, THREADS, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "token 123456 is 1000, outside the vocabulary of 1000"));
    free(bytes);
    bytes = some_shard(state, 100000, &size);
    ((uint32_t *)(bytes + SHARD_HEADER_BYTES))[549999] = UINT32_MAX;
    seal(bytes);
    assert_int_equal(qd_shard_view("x.qds", bytes, size, true, THREADS, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "token 549999 is 4294967295"));
    free(bytes);
}

static void files_that_are_no_shards(void **state)
{
    qd_shard shard;
    assert_int_equal(qd_shard_open(scratch_path(state, "none"), true, 1, &shard), QD_USAGE);
    assert_int_equal(qd_shard_open(*state, true, 1, &shard), QD_USAGE);
    assert_int_equal(qd_shard_open(scratch_text(state, "empty", ""), true, 1, &shard), QD_USAGE);
    const char *text = scratch_text(state, "text",
                                    "QDTOKENX and some more than a header has, which is one hundred and "
                                    "twenty-eight bytes, so that the magic is what is looked at first");
    assert_int_equal(qd_shard_open(text, true, 1, &shard), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "not a token shard"));
    assert_false(qd_shard_recognise(text));
    assert_true(qd_shard_recognise(scratch_text(state, "other", "QDTOKENS")));
    qd_shard_close(&shard);
}

static int fail_after = -1; /* reads that still succeed; -1: none fails */
ssize_t __real_pread(int fd, void *data, size_t count, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t count, off_t offset);

ssize_t __wrap_pread(int fd, void *data, size_t count, off_t offset)
{
    if (fail_after < 0 || fail_after-- > 0)
        return __real_pread(fd, data, count, offset);
    fail_after = 0;
    errno = EIO;
    return -1;
}

/* Disk errors, and a file that is truncated while it is in use, are errors that name the file, not
 * a SIGBUS. */
static void disks_that_fail(void **state)
{
    const char *path = scratch_path(state, "failing.qds");
    const int64_t documents[] = {0, 5};
    int32_t *tokens = random_tokens(9000, 1000);
    write_shard(path, 1000, tokens, 9000, documents, 2);
    qd_shard shard;
    for (int n = 0; n < 4; n++) { /* header, table, body, documents */
        fail_after = n;
        assert_int_equal(qd_shard_open(path, true, 1, &shard), QD_IO);
        assert_non_null(strstr(qd_error_message(), "failing.qds: byte "));
        assert_non_null(strstr(qd_error_message(), "Input/output error"));
        fail_after = -1;
    }
    assert_int_equal(qd_shard_open(path, true, 1, &shard), QD_OK);
    assert_int_equal(truncate(path, 4096), 0);
    uint16_t some[16];
    uint64_t document;
    assert_int_equal(qd_shard_tokens(&shard, 100, 16, some), QD_OK);
    assert_int_equal(qd_shard_tokens(&shard, 8000, 16, some), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "failing.qds: ends before byte "));
    assert_int_equal(qd_shard_documents(&shard, 1, 1, &document), QD_CORRUPT);
    qd_shard_close(&shard);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20);
    assert_int_equal(qd_shard_open(path, true, 1, &shard), QD_USAGE);
    alarm(0);
    unlink(path);
    free(tokens);
}

/* More shards than the process may open. One that was replaced in the meantime is detected. */
static void more_files_than_descriptors(void **state)
{
    enum { SHARDS = 100, TOKENS = 50 };
    struct rlimit before, few;
    qd_shard shards[SHARDS];
    char name[32];
    const int64_t documents[] = {0};
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = 64;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int s = 0; s < SHARDS; s++) {
        int32_t tokens[TOKENS];
        for (int i = 0; i < TOKENS; i++)
            tokens[i] = s + i;
        snprintf(name, sizeof name, "many-%d.qds", s);
        write_shard(scratch_path(state, name), 1000, tokens, TOKENS, documents, 1);
        assert_int_equal(qd_shard_open(scratch_path(state, name), true, 1, &shards[s]), QD_OK);
    }
    for (int i = 0; i < 3 * SHARDS; i++) {
        int s = i * 37 % SHARDS;
        if (token_at(&shards[s], i % TOKENS) != s + i % TOKENS)
            fail_msg("shard %d: another token", s);
    }
    uint16_t token;
    char first[512];
    snprintf(first, sizeof first, "%s", scratch_path(state, "many-0.qds"));
    write_shard(scratch_path(state, "new.qds"), 1000, (int32_t[]){1}, 1, documents, 1);
    assert_int_equal(token_at(&shards[0], 0), 0);
    for (int s = 1; s < 60; s++) /* the first is the least recently used */
        token_at(&shards[s], 0);
    assert_int_equal(rename(scratch_path(state, "new.qds"), first), 0);
    assert_int_equal(qd_shard_tokens(&shards[0], 0, 1, &token), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "many-0.qds: the file was replaced"));
    for (int s = 0; s < SHARDS; s++)
        qd_shard_close(&shards[s]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(empty_documents_leave_no_trace),
        cmocka_unit_test(writer_refuses),
        cmocka_unit_test(every_damaged_header_byte_is_found),
        cmocka_unit_test(damaged_bodies_are_found),
        cmocka_unit_test(every_cut_is_found),
        cmocka_unit_test(right_checksums_do_not_excuse_nonsense),
        cmocka_unit_test(files_that_are_no_shards),
        cmocka_unit_test(disks_that_fail),
        cmocka_unit_test(more_files_than_descriptors),
    };
    return cmocka_run_group_tests_name("shards", tests, scratch_setup, scratch_teardown);
}
