/* Data sets: files, folders, shards and mixtures as samples; documents, held-out windows, the
 * cache, errors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "data/data.h"
#include "data/kneser_ney.h"
#include "data/shard.h"
#include "support/ok.h"
#include "support/scratch.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SEQ = 16 };

/* Bytes, and 256 after each document. Counts the bytes it encodes. */
static _Atomic int64_t encoded_bytes;

static qd_status encode_counting(void *context, int thread, const char *text, size_t length, qd_tokens *out)
{
    encoded_bytes += (int64_t)length;
    return qd_text_encoder_bytes().encode(context, thread, text, length, out);
}

static qd_text_encoder marking_encoder(void)
{
    return (qd_text_encoder){.size = sizeof(qd_text_encoder), .encode = encode_counting, .vocab = 257, .hash = 42, .document_end = 256};
}

static qd_data_source_info source_info(const qd_data *data, int source)
{
    qd_data_source_info info = qd_data_source_info_default();
    qd_data_source_describe(data, source, &info);
    return info;
}

static qd_data *open_data(qd_data_options options)
{
    qd_data *data = NULL;
    if (qd_data_open(&options, &data) != QD_OK)
        fail_msg("%s", qd_error_message());
    return data;
}

static qd_data_options options_for(const char *path)
{
    qd_data_options o = qd_data_options_default();
    o.path = path;
    o.seq = SEQ;
    o.seed = 3;
    o.threads = 2;
    return o;
}

static void refused(qd_data_options options, qd_status status, const char *why)
{
    qd_data *data = NULL;
    assert_int_equal(qd_data_open(&options, &data), status);
    assert_null(data);
    if (!strstr(qd_error_message(), why))
        fail_msg("'%s' does not say '%s'", qd_error_message(), why);
}

/* A text in which all windows are distinct. */
static char *numbered_text(int64_t bytes)
{
    char *text = malloc((size_t)bytes + 32);
    for (int64_t at = 0, n = 0; at < bytes; n++)
        at += sprintf(text + at, "%lld ", (long long)n * 7919 % 100003);
    text[bytes] = '\0';
    return text;
}

typedef struct sample {
    int32_t tokens[SEQ], targets[SEQ], doc_start[SEQ];
} sample;

static sample fill_one(qd_batch_source source, int64_t index)
{
    sample s;
    assert_int_equal(source.fill(source.context, index, 1, SEQ, s.tokens, s.targets, s.doc_start), QD_OK);
    return s;
}

/* The window of the text with these tokens; -1: none. */
static int64_t window_of(const char *text, int64_t bytes, const sample *s)
{
    for (int64_t w = 0; (w + 1) * SEQ < bytes; w++) {
        bool same = true;
        for (int t = 0; same && t < SEQ; t++)
            same = (unsigned char)text[w * SEQ + t] == s->tokens[t] &&
                   (unsigned char)text[w * SEQ + t + 1] == s->targets[t];
        if (same)
            return w;
    }
    return -1;
}

static void an_epoch_has_each_window_once(void **state)
{
    enum { BYTES = 1000 };
    char *text = numbered_text(BYTES);
    qd_data *data = open_data(options_for(scratch_text(state, "numbers.txt", text)));
    const int64_t windows = (BYTES - 1) / SEQ;
    assert_int_equal(qd_data_windows(data), windows);
    qd_batch_source source = qd_data_source(data);
    assert_false(source.documents);
    for (int64_t epoch = 0; epoch < 3; epoch++) {
        int seen[BYTES / SEQ] = {0};
        for (int64_t i = 0; i < windows; i++) {
            sample s = fill_one(source, epoch * windows + i);
            int64_t window = window_of(text, BYTES, &s);
            assert_true(window >= 0);
            assert_int_equal(window, qd_permute(3, epoch, i, windows));
            assert_int_equal(seen[window]++, 0);
        }
    }
    /* Requested together or one at a time, by any rank: the same. */
    int32_t tokens[8 * SEQ], targets[8 * SEQ], starts[8 * SEQ];
    assert_int_equal(source.fill(source.context, 58, 8, SEQ, tokens, targets, starts), QD_OK);
    for (int i = 0; i < 8; i++) {
        sample s = fill_one(source, 58 + i);
        assert_memory_equal(s.tokens, tokens + i * SEQ, sizeof s.tokens);
        assert_memory_equal(s.targets, targets + i * SEQ, sizeof s.targets);
    }
    assert_int_equal(source.fill(source.context, 0, 1, SEQ / 2, tokens, targets, starts), QD_USAGE);
    qd_data_close(data);
    free(text);
}

static void held_out_windows_are_never_trained_on(void **state)
{
    enum { BYTES = 2000, ALL = (BYTES - 1) / SEQ };
    char *text = numbered_text(BYTES);
    qd_data_options o = options_for(scratch_text(state, "held.txt", text));
    static const struct {
        double part;
        int64_t held;
    } rows[] = {{0.02, 2}, {0.1, 12}, {0.0001, 1}, {0.999, ALL - 1}};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        o.validation = rows[r].part;
        qd_data *data = open_data(o);
        assert_int_equal(qd_data_validation_windows(data), rows[r].held);
        assert_int_equal(qd_data_windows(data), ALL - rows[r].held);
        int seen[ALL] = {0};
        for (int64_t i = 0; i < qd_data_windows(data); i++) {
            sample s = fill_one(qd_data_source(data), i);
            seen[window_of(text, BYTES, &s)]++;
        }
        for (int64_t i = 0; i < rows[r].held; i++) {
            sample s = fill_one(qd_data_validation_source(data), i);
            int64_t window = window_of(text, BYTES, &s);
            assert_int_equal(window, ALL - rows[r].held + i); /* the end of the source, in order */
            seen[window]++;
        }
        for (int w = 0; w < ALL; w++)
            assert_int_equal(seen[w], 1);
        qd_data_close(data);
    }
    o.validation = 0;
    qd_data *data = open_data(o);
    qd_batch_source none = qd_data_validation_source(data);
    sample s;
    assert_int_equal(none.fill(none.context, 0, 1, SEQ, s.tokens, s.targets, s.doc_start), QD_USAGE);
    qd_data_close(data);
    free(text);
}

static void a_folder_is_its_text_in_order(void **state)
{
    scratch_text(state, "f/b.txt", "second ");
    scratch_text(state, "f/a/z.md", "first ");
    scratch_text(state, "f/c", "third, text by its contents \xc3\xa4 ");
    scratch_text(state, "f/.hidden.txt", "not this");
    scratch_text(state, "f/empty.txt", "");
    scratch_write(state, "f/d.bin", "\x00\x01\xff\xfe", 4);
    scratch_write(state, "f/e.dat", "\xff latin", 7);
    qd_data_options o = options_for(scratch_path(state, "f"));
    qd_data *data = open_data(o);
    qd_data_source_info info = qd_data_source_info_default();
    qd_data_source_describe(data, 0, &info);
    assert_int_equal(qd_data_source_count(data), 1);
    assert_int_equal(info.files, 3);
    assert_int_equal(info.skipped, 3);
    assert_int_equal(info.documents, 3);
    const char *expected = "first second third, text by its contents \xc3\xa4 ";
    assert_int_equal(info.tokens, strlen(expected));
    int32_t tokens[64];
    assert_int_equal(qd_data_read(data, 0, 0, info.tokens, tokens), QD_OK);
    for (int64_t i = 0; i < info.tokens; i++)
        assert_int_equal(tokens[i], (unsigned char)expected[i]);
    assert_int_equal(qd_data_read(data, 0, 1, info.tokens, tokens), QD_USAGE);
    assert_int_equal(qd_data_read(data, 1, 0, 1, tokens), QD_USAGE);
    qd_data_close(data);
}

/* The definition: concatenated tokens, and for each the document it belongs to. */
static void check_documents(qd_data *data, const int32_t *stream, const int *document, bool mask)
{
    qd_batch_source source = qd_data_source(data);
    assert_int_equal(source.documents, mask);
    const int64_t windows = qd_data_windows(data);
    for (int64_t i = 0; i < windows; i++) {
        sample s = fill_one(source, i);
        int64_t first = qd_permute(3, 0, i, windows) * SEQ;
        for (int64_t t = 0; t < SEQ; t++) {
            int64_t start = t;
            while (mask && start > 0 && document[first + start - 1] == document[first + t])
                start--;
            bool crosses = mask && document[first + t + 1] != document[first + t];
            assert_int_equal(s.tokens[t], stream[first + t]);
            assert_int_equal(s.targets[t], crosses ? -1 : stream[first + t + 1]);
            assert_int_equal(s.doc_start[t], mask ? start : 0);
        }
    }
}

static void documents_do_not_see_each_other(void **state)
{
    /* Forty documents of 1 to 50 bytes, each with its end mark. */
    enum { DOCUMENTS = 40 };
    int32_t stream[DOCUMENTS * 60];
    int document[DOCUMENTS * 60], count = 0;
    for (int d = 0; d < DOCUMENTS; d++) {
        char name[32], text[64];
        int length = 1 + (int)qd_rng_below(qd_rng_key(2, "documents"), (uint64_t)d, 50);
        for (int i = 0; i < length; i++) {
            text[i] = (char)('a' + (d * 5 + i) % 26);
            stream[count] = text[i];
            document[count++] = d;
        }
        stream[count] = 256;
        document[count++] = d;
        snprintf(name, sizeof name, "docs/%03d.txt", d);
        scratch_write(state, name, text, (size_t)length);
    }
    document[count] = -1;
    qd_text_encoder encoder = marking_encoder();
    qd_data_options o = options_for(scratch_path(state, "docs"));
    o.vocab = 300;
    o.encoder = &encoder;
    for (int mask = 0; mask < 2; mask++) {
        o.document_mask = mask;
        qd_data *data = open_data(o);
        assert_int_equal(source_info(data, 0).tokens, count);
        assert_int_equal(source_info(data, 0).documents, DOCUMENTS);
        check_documents(data, stream, document, mask);
        qd_data_close(data);
    }
    /* Shards of any size give the same, also if a document continues in the next one or two. */
    static const int64_t sizes[] = {7, 64, 100000};
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, "shards%d", i);
        qd_tokenize_options t = qd_tokenize_options_default();
        const char *inputs[] = {scratch_path(state, "docs")};
        t.inputs = inputs;
        t.input_count = 1;
        t.output = scratch_path(state, name);
        t.encoder = &encoder;
        t.shard_tokens = sizes[i];
        qd_tokenize_report report = qd_tokenize_report_default();
        assert_int_equal(qd_tokenize_files(&t, &report), QD_OK);
        assert_int_equal(report.shards, (count + sizes[i] - 1) / sizes[i]);
        qd_data_options s = options_for(t.output);
        s.vocab = 257;
        s.document_mask = true;
        qd_data *data = open_data(s);
        assert_int_equal(source_info(data, 0).files, report.shards);
        check_documents(data, stream, document, true);
        qd_data_close(data);
    }
}

static void mixtures(void **state)
{
    char *text = numbered_text(4000), path[512];
    const char *a = scratch_write(state, "mix/a.txt", text, 1500),
               *b = scratch_write(state, "mix/b.txt", text + 1500, 900);
    snprintf(path, sizeof path, "%s:3,%s:1", a, b);
    qd_data *data = open_data(options_for(path));
    assert_int_equal(qd_data_source_count(data), 2);
    assert_true(fabs(source_info(data, 0).weight - 0.75) < 1e-12);
    assert_string_equal(source_info(data, 1).path, b);
    assert_int_equal(qd_data_windows(data), 1499 / SEQ + 899 / SEQ);
    int64_t from_a = 0;
    for (int64_t i = 0; i < QD_MIXTURE_BLOCK; i++) {
        sample s = fill_one(qd_data_source(data), i);
        bool in_a = window_of(text, 1500, &s) >= 0;
        assert_true(in_a || window_of(text + 1500, 900, &s) >= 0);
        from_a += in_a;
    }
    assert_int_equal(from_a, QD_MIXTURE_BLOCK * 3 / 4);
    qd_data_close(data);

    /* Without weights: one source, as if it were one file. */
    snprintf(path, sizeof path, "%s,%s", a, b);
    data = open_data(options_for(path));
    assert_int_equal(qd_data_source_count(data), 1);
    assert_int_equal(qd_data_windows(data), 2399 / SEQ);
    for (int64_t i = 0; i < qd_data_windows(data); i++) {
        sample s = fill_one(qd_data_source(data), i);
        assert_int_equal(window_of(text, 2400, &s), qd_permute(3, 0, i, 2399 / SEQ));
    }
    qd_data_close(data);

    /* A file whose name looks like a mixture is a file. */
    data = open_data(options_for(scratch_write(state, "odd:0.5,name.txt", text, 600)));
    assert_int_equal(qd_data_windows(data), 599 / SEQ);
    qd_data_close(data);
    snprintf(path, sizeof path, "%s:1,%s", a, b);
    refused(options_for(path), QD_USAGE, "1 of 2 sources have weights");
    snprintf(path, sizeof path, "%s:0,%s:1", a, b);
    refused(options_for(path), QD_USAGE, "above 0");
    snprintf(path, sizeof path, "%s:nan,%s:1", a, b);
    refused(options_for(path), QD_USAGE, "above 0");
    snprintf(path, sizeof path, "%s,,%s", a, b);
    refused(options_for(path), QD_USAGE, "between commas");
    snprintf(path, sizeof path, "%s:1,nowhere:1", a);
    refused(options_for(path), QD_USAGE, "nowhere: cannot be opened");
    free(text);
}

static void refusals(void **state)
{
    refused(options_for(NULL), QD_USAGE, "data.path is not set");
    refused(options_for(scratch_path(state, "missing.txt")), QD_USAGE, "missing.txt");
    refused(options_for(scratch_text(state, "nothing.txt", "")), QD_USAGE, "nothing.txt: the file is empty");
    refused(options_for(scratch_text(state, "short.txt", "0123456789abcdef")), QD_USAGE,
            "has 16 tokens, but one sample needs data.seq + 1 = 17");
    refused(options_for("/dev/null"), QD_USAGE, "neither a file nor a folder");
    scratch_write(state, "pictures/a.png", "\x89PNG\r\n\x1a\n\0", 9);
    refused(options_for(scratch_path(state, "pictures")), QD_USAGE, "pictures: the folder contains no text");
    scratch_text(state, "blank/a.jsonl", "\n\n");
    refused(options_for(scratch_path(state, "blank")), QD_USAGE, "no tokens");

    const char *text = scratch_text(state, "fine.txt", "0123456789abcdef0");
    qd_data_options o = options_for(text);
    o.vocab = 1000;
    refused(o, QD_USAGE, "set data.tokenizer, or model.vocab=256");
    o = options_for(text);
    o.validation = 0.1;
    refused(o, QD_USAGE, "nothing is left to train on");
    o.validation = 1;
    refused(o, QD_USAGE, "data.validation is 1");
    qd_text_encoder encoder = marking_encoder();
    o = options_for(text);
    o.encoder = &encoder;
    refused(o, QD_USAGE, "the tokenizer has 257 tokens, but model.vocab is 256");
}

static const char *make_shard(void **state, const char *name, int64_t vocab, uint64_t hash, int32_t last)
{
    const char *path = scratch_path(state, name);
    qd_shard_writer *writer;
    int64_t bytes;
    assert_int_equal(qd_shard_writer_create(path, vocab, hash, &writer), QD_OK);
    for (int32_t i = 0; i < 40; i++)
        assert_int_equal(qd_shard_writer_append(writer, i == 39 ? &last : &i, 1), QD_OK);
    assert_int_equal(qd_shard_writer_finish(writer, &bytes), QD_OK);
    return path;
}

static void shards_must_fit(void **state)
{
    char path[512];
    const char *a = make_shard(state, "one.qds", 300, 7, 1), *b = make_shard(state, "two.qds", 256, 8, 1);
    refused(options_for(a), QD_USAGE, "vocabulary of 300, but model.vocab is 256");
    qd_data_options o = options_for(path);
    o.vocab = 300;
    snprintf(path, sizeof path, "%s,%s", a, b);
    refused(o, QD_USAGE, "two.qds was made with another tokenizer");
    qd_text_encoder encoder = marking_encoder();
    o.path = b;
    o.encoder = &encoder;
    refused(o, QD_USAGE, "another tokenizer (0000000000000008) than data.tokenizer (000000000000002a)");

    /* A damaged shard is reported if verified; otherwise no token outside the vocabulary is
     * returned. */
    size_t size;
    unsigned char *bytes = scratch_read(b, &size);
    bytes[128 + 20 * 2 + 1] = 0x7f; /* token 20 */
    const char *damaged = scratch_write(state, "damaged.qds", bytes, size);
    refused(options_for(damaged), QD_CORRUPT, "damaged.qds: the checksum of bytes 128 to");
    o = options_for(damaged);
    o.verify = false;
    qd_data *data = open_data(o);
    qd_batch_source source = qd_data_source(data);
    int32_t room[2 * 3 * SEQ];
    assert_int_equal(source.fill(source.context, 0, 2, SEQ, room, room + 2 * SEQ, room + 4 * SEQ), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "damaged.qds: token 20 is 32532, outside the vocabulary of 256"));
    qd_data_close(data);
    /* With a damaged magic it is still a shard by name, and refused as one. */
    bytes[0] = 'x';
    refused(options_for(scratch_write(state, "magic.qds", bytes, size)), QD_CORRUPT, "magic.qds: not a token shard");
    free(bytes);
}

typedef struct opening {
    qd_data_options options;
    qd_data *data;
} opening;

static void *open_in_thread(void *argument)
{
    opening *o = argument;
    if (qd_data_open(&o->options, &o->data) != QD_OK)
        o->data = NULL;
    return NULL;
}

static void text_becomes_tokens_once(void **state)
{
    char *text = numbered_text(30000);
    qd_text_encoder encoder = marking_encoder();
    qd_data_options o = options_for(scratch_text(state, "cached.txt", text));
    o.vocab = 257;
    o.encoder = &encoder;
    o.cache = scratch_path(state, "cache/below");
    encoded_bytes = 0;
    /* Four ranks concurrently. */
    opening ranks[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        ranks[i].options = o;
        assert_int_equal(pthread_create(&threads[i], NULL, open_in_thread, &ranks[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    sample first = {0};
    for (int i = 0; i < 4; i++) {
        assert_non_null(ranks[i].data);
        sample s = fill_one(qd_data_source(ranks[i].data), 11);
        if (i == 0)
            first = s;
        assert_memory_equal(&s, &first, sizeof s);
        qd_data_close(ranks[i].data);
    }
    assert_int_equal(encoded_bytes, 30000);
    qd_data_close(open_data(o));
    assert_int_equal(encoded_bytes, 30000);
    /* The same tokens in memory. */
    qd_data_options plain = o;
    plain.cache = NULL;
    qd_data *data = open_data(plain);
    sample s = fill_one(qd_data_source(data), 11);
    assert_memory_equal(&s, &first, sizeof s);
    qd_data_close(data);
    assert_int_equal(encoded_bytes, 60000);
    /* Other text or another tokenizer: encoded again. */
    text[17] = '!';
    scratch_text(state, "cached.txt", text);
    qd_data_close(open_data(o));
    assert_int_equal(encoded_bytes, 90000);
    encoder.hash = 43;
    qd_data_close(open_data(o));
    assert_int_equal(encoded_bytes, 120000);
    /* A damaged shard of the cache is named, with the remedy. */
    DIR *dir = opendir(o.cache);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));)
        if (entry->d_name[0] != '.' && !strchr(entry->d_name, '.')) {
            char name[512];
            size_t size;
            snprintf(name, sizeof name, "cache/below/%s/shard-00000.qds", entry->d_name);
            unsigned char *bytes = scratch_read(scratch_path(state, name), &size);
            bytes[size / 2] ^= 1;
            scratch_write(state, name, bytes, size);
            free(bytes);
        }
    closedir(dir);
    refused(o, QD_CORRUPT, "to recreate them): ");
    assert_non_null(strstr(qd_error_message(), "shard-00000.qds: the checksum of bytes"));
    free(text);
}

/* The trigram loss by definition: counts of the training tokens, targets of the held-out
 * windows. */
static void trigram_loss(void **state)
{
    char text[3001];
    for (int i = 0; i < 3000; i++)
        text[i] = (char)('a' + (i % 3 == 2 ? text[i - 1] + text[i - 2]
                                           : (int)qd_rng_below(qd_rng_key(1, "t"), (uint64_t)i, 5)) %
                                   26);
    text[3000] = '\0';
    qd_data_options o = options_for(scratch_text(state, "trigram.txt", text));
    o.validation = 0.2;
    qd_data *data = open_data(o);
    qd_trigram_report report = qd_trigram_report_default();
    assert_int_equal(qd_data_trigram(data, &report), QD_OK);
    const int64_t train = qd_data_windows(data) * SEQ, all = train + qd_data_validation_windows(data) * SEQ;
    qd_kn *model;
    double sum = 0;
    assert_int_equal(qd_kn_create(256, &model), QD_OK);
    for (int64_t i = 0; i <= train; i++) {
        int32_t token = text[i];
        assert_int_equal(qd_kn_add(model, &token, 1), QD_OK);
    }
    assert_int_equal(qd_kn_finish(model), QD_OK);
    for (int64_t i = train + 1; i <= all; i++)
        sum -= log(qd_kn_probability(model, text[i - 2], text[i - 1], text[i]));
    assert_int_equal(report.scored, all - train);
    assert_int_equal(report.trained, train + 1);
    assert_true(fabs(report.loss - sum / (double)(all - train)) < 1e-12);
    assert_true(report.loss < log(26));
    qd_kn_destroy(model);
    qd_data_close(data);

    /* With documents: targets that begin one are not scored, and contexts do not cross them. */
    o.document_mask = true;
    o.documents.separator = "aaa"; /* not a line of this text */
    data = open_data(o);
    qd_trigram_report same = qd_trigram_report_default();
    assert_int_equal(qd_data_trigram(data, &same), QD_OK);
    assert_true(same.loss == report.loss && same.scored == report.scored);
    qd_data_close(data);
    for (int i = 0; i < 2990; i += 10)
        memcpy(text + i, "\n##\n", 4);
    scratch_text(state, "trigram.txt", text);
    o.documents.separator = "##";
    data = open_data(o);
    qd_data_source_info info = qd_data_source_info_default();
    qd_data_source_describe(data, 0, &info);
    assert_int_equal(qd_data_trigram(data, &same), QD_OK);
    int64_t targets = 0;
    for (int64_t i = 0; i < info.validation_windows; i++) {
        sample s = fill_one(qd_data_validation_source(data), i);
        for (int t = 0; t < SEQ; t++)
            targets += s.targets[t] >= 0;
    }
    assert_true(targets < info.validation_windows * SEQ);
    assert_int_equal(same.scored, targets);
    qd_data_close(data);
}

static void a_text_that_becomes_shorter_is_named(void **state)
{
    scratch_text(state, "live.txt", "a text that is saved anew while it is read, and a text that is saved anew while it is read");
    char path[4096];
    snprintf(path, sizeof path, "%s", scratch_path(state, "live.txt"));
    qd_data *data;
    int32_t tokens[8];
    ok(qd_data_open_bytes(path, 8, 1, &data));
    ok(qd_data_read(data, 0, 40, 8, tokens));
    assert_int_equal(truncate(path, 4), 0);
    assert_int_equal(qd_data_read(data, 0, 40, 8, tokens), QD_CORRUPT);
    assert_non_null(strstr(qd_error_message(), "live.txt: ends before byte 40: it has shrunk"));
    qd_data_close(data);
    /* A file that was replaced is not read as the original. */
    scratch_text(state, "live.txt", "a text that is saved anew while it is read, and a text that is saved anew while it is read");
    ok(qd_data_open_bytes(path, 8, 1, &data));
    scratch_text(state, "other.txt", "short");
    assert_int_equal(rename(scratch_path(state, "other.txt"), path), 0);
    ok(qd_data_read(data, 0, 40, 8, tokens));
    qd_data_close(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_epoch_has_each_window_once),
        cmocka_unit_test(held_out_windows_are_never_trained_on),
        cmocka_unit_test(a_folder_is_its_text_in_order),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(mixtures),
        cmocka_unit_test(refusals),
        cmocka_unit_test(shards_must_fit),
        cmocka_unit_test(text_becomes_tokens_once),
        cmocka_unit_test(trigram_loss),
        cmocka_unit_test(a_text_that_becomes_shorter_is_named),
    };
    return cmocka_run_group_tests_name("data sets", tests, scratch_setup, scratch_teardown);
}
