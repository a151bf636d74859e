/* The option table: parsing, precedence, errors, saving, help. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <quadrille/options.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const qd_option config[] = {
    {.key = "model.preset", .type = QD_OPTION_STRING, .help = "name of a known model"},
    {.key = "model.rope.base", .type = QD_OPTION_FLOAT, .fallback = "10000", .help = "base of the angles"},
    {.key = "train.steps",
     .type = QD_OPTION_INT,
     .fallback = "100",
     .least = 1,
     .most = INFINITY,
     .help = "optimizer steps",
     .flag = "steps"},
    {.key = "train.lr",
     .type = QD_OPTION_FLOAT,
     .fallback = "3e-3",
     .least = 0,
     .most = 10,
     .help = "learning rate",
     .flag = "lr"},
    {.key = "parallel.tp",
     .type = QD_OPTION_INT,
     .fallback = "1",
     .least = 1,
     .most = 8192,
     .help = "ranks that share each GEMM",
     .flag = "tp"},
    {.key = "parallel.dp",
     .type = QD_OPTION_INT,
     .fallback = "-1",
     .least = -1,
     .most = 8192,
     .help = "replicas; -1 is the rest of the world",
     .flag = "dp"},
    {.key = "parallel.sp",
     .type = QD_OPTION_BOOL,
     .fallback = "false",
     .help = "split the sequence over the ranks of tp",
     .flag = "sp"},
    {.key = "parallel.recompute",
     .type = QD_OPTION_ENUM,
     .fallback = "none",
     .choices = "none|selective|full",
     .help = "what is recomputed in the backward pass"},
    {.key = "parallel.layers", .type = QD_OPTION_INT_LIST, .least = 1, .most = 1000, .help = "layers of each stage"},
    {.key = "model.factors", .type = QD_OPTION_FLOAT_LIST, .least = 0.5, .most = 64, .help = "a factor for each pair"},
    {.key = "model.layers", .type = QD_OPTION_INT, .fallback = "2", .least = 1, .most = 1000, .help = "blocks"},
};
static const qd_option command[] = {
    {.key = "json", .type = QD_OPTION_BOOL, .fallback = "false", .help = "print JSON"},
    {.key = "print", .type = QD_OPTION_INT, .fallback = "-1", .help = "rank whose program is printed"},
};

static qd_options *fresh(void)
{
    const qd_option_table tables[] = {QD_OPTION_TABLE(config), QD_OPTION_TABLE(command)};
    qd_options *options;
    assert_int_equal(qd_options_create(tables, 2, &options), QD_OK);
    return options;
}

static qd_status load(qd_options *options, const char *text)
{
    return qd_options_load_text(options, "run.yaml", text, strlen(text));
}

static void defaults(void **state)
{
    (void)state;
    qd_options *options = fresh();
    const int64_t *layers;
    assert_int_equal(qd_options_int(options, "train.steps"), 100);
    assert_true(qd_options_float(options, "train.lr") == 3e-3);
    assert_false(qd_options_bool(options, "parallel.sp"));
    assert_string_equal(qd_options_string(options, "model.preset"), "");
    assert_string_equal(qd_options_string(options, "parallel.recompute"), "none");
    assert_int_equal(qd_options_enum(options, "parallel.recompute"), 0);
    assert_int_equal(qd_options_int_list(options, "parallel.layers", &layers), 0);
    assert_false(qd_options_is_set(options, "train.steps"));
    assert_string_equal(qd_options_origin(options, "train.steps"), "default");
    assert_string_equal(qd_options_find(options, "parallel.tp")->flag, "tp");
    assert_null(qd_options_find(options, "parallel.xp"));
    qd_options_destroy(options);
    qd_options_destroy(NULL);
}

static void reads_yaml(void **state)
{
    (void)state;
    qd_options *options = fresh();
    const int64_t *layers;
    assert_int_equal(load(options, "# a run\n"
                                   "model: {preset: llama-tiny, rope: {base: 5e5}}\n"
                                   "train:\n"
                                   "  steps: 1_000\n"
                                   "  lr: 1e-3   # peak\n"
                                   "parallel.tp: 2\n"
                                   "parallel:\n"
                                   "  sp: yes\n"
                                   "  recompute: 'full'\n"
                                   "  layers: [1, 2k, 3]\n"),
                     QD_USAGE); /* 2k is out of range */
    assert_string_equal(qd_error_message(),
                        "run.yaml:10:11: parallel.layers: 1,2k,3 is out of range; it must be from 1 to 1000");
    assert_false(qd_options_is_set(options, "model.preset")); /* nothing of a refused file is kept */
    assert_int_equal(qd_options_int(options, "train.steps"), 100);
    assert_int_equal(load(options, "model: {preset: llama-tiny, rope: {base: 5e5}}\n"
                                   "train:\n"
                                   "  steps: 1_000\n"
                                   "  lr: 1e-3   # peak\n"
                                   "parallel.tp: 2\n"
                                   "parallel:\n"
                                   "  sp: yes\n"
                                   "  recompute: 'full'\n"
                                   "  layers: [1, 20, 3]\n"
                                   "model.factors: [1, 1.5e0, 0.7]\n"),
                     QD_OK);
    assert_string_equal(qd_options_string(options, "model.preset"), "llama-tiny");
    assert_true(qd_options_float(options, "model.rope.base") == 5e5);
    assert_int_equal(qd_options_int(options, "train.steps"), 1000);
    assert_int_equal(qd_options_int(options, "parallel.tp"), 2);
    assert_true(qd_options_bool(options, "parallel.sp"));
    assert_int_equal(qd_options_enum(options, "parallel.recompute"), 2);
    assert_int_equal(qd_options_int_list(options, "parallel.layers", &layers), 3);
    assert_int_equal(layers[1], 20);
    const double *factors;
    assert_int_equal(qd_options_float_list(options, "model.factors", &factors), 3);
    assert_true(factors[0] == 1.0 && factors[1] == 1.5 && factors[2] == 0.7);
    assert_int_equal(qd_options_set(options, "model.factors", "1,0.4"), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "model.factors"));
    assert_int_equal(qd_options_set(options, "model.factors", "1,two"), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "is not a list of numbers"));
    assert_true(qd_options_is_set(options, "train.lr"));
    assert_string_equal(qd_options_origin(options, "train.lr"), "run.yaml:4:7");
    qd_options_destroy(options);
}

static void empty_files_set_nothing(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "\n\n", "# only a comment\n", "---\n", "train: {}\n", "{}"};
    qd_options *options = fresh();
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        assert_int_equal(load(options, texts[i]), QD_OK);
        assert_false(qd_options_is_set(options, "train.steps"));
    }
    qd_options_destroy(options);
}

static void number_forms(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {{"12", 12},         {"1_000", 1000},  {"4k", 4000}, {"4K", 4000}, {"1.5M", 1500000},
                {"2G", 2000000000}, {"1e6", 1000000}, {" 7 ", 7},   {"+3", 3},
                {"4.1M", 4100000},  {"16.4M", 16400000}, {"1.001k", 1001}, {"1.50e1", 15}, {"2.5e-1k", 250}, {"070.0", 70},
                {"9223372036854775807", INT64_MAX}, {"9.223372036854775807e18", INT64_MAX}, {"1_000k", 1000000}};
    static const char *const bad[] = {"",
                                      "x",
                                      "1.5",
                                      "1_",
                                      "_1",
                                      "1__0",
                                      "0x10",
                                      "1e400",
                                      "nan",
                                      "k",
                                      "12 3",
                                      "--1",
                                      "+-1",
                                      "1kk",
                                      "9223372036854775807k",
                                      "99999999999999999999",
                                      "1.5e",
                                      "1e99999999999999999999",
                                      "1.0015k",
                                      "1e-3",
                                      "1.2.3k",
                                      "1e3.",
                                      "9.223372036854775808e18",
                                      "1,2"};
    qd_options *options = fresh();
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_int_equal(qd_options_set(options, "train.steps", good[i].text), QD_OK);
        assert_int_equal(qd_options_int(options, "train.steps"), good[i].value);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(qd_options_set(options, "train.steps", bad[i]), QD_USAGE);
        assert_int_equal(qd_options_int(options, "train.steps"), 1000000); /* unchanged */
    }
    assert_int_equal(qd_options_set(options, "parallel.dp", "-1"), QD_OK);
    assert_int_equal(qd_options_int(options, "parallel.dp"), -1);
    assert_int_equal(qd_options_set(options, "print", "-9.223372036854775808e18"), QD_OK);
    assert_true(qd_options_int(options, "print") == INT64_MIN);
    assert_int_equal(qd_options_set(options, "print", "0e99"), QD_OK);
    assert_int_equal(qd_options_int(options, "print"), 0);
    static const char *const bad_floats[] = {"inf", "nan", "0x1p3", "1e999", "",     "1.2.3",
                                             "e5",  ".",   "-",     "3k",    "1e-3x"};
    for (size_t i = 0; i < sizeof bad_floats / sizeof bad_floats[0]; i++)
        assert_int_equal(qd_options_set(options, "train.lr", bad_floats[i]), QD_USAGE);
    assert_int_equal(qd_options_set(options, "train.lr", "1_0.5e-1"), QD_OK);
    assert_true(qd_options_float(options, "train.lr") == 1.05);
    qd_options_destroy(options);
}

/* One line each: what is wrong, where, and the remedy. */
static void refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message;
    } rows[] = {
        {"paralel: {tp: 2}", "run.yaml:1:11: unknown key 'paralel.tp'; did you mean 'parallel.tp'?"},
        {"train: {tp: 2}", "run.yaml:1:9: unknown key 'train.tp'; did you mean 'parallel.tp'?"},
        {"train: {stpes: 2}", "run.yaml:1:9: unknown key 'train.stpes'; did you mean 'train.steps'?"},
        {"zzzzzzzz: 2", "run.yaml:1:1: unknown key 'zzzzzzzz'; the sections are model, train, parallel"},
        {"train:\n\tsteps: 3", "run.yaml:2:1: not valid YAML: indent lines with spaces, not tabs"},
        {"train: 3", "run.yaml:1:1: 'train' is a section, not a key; set its keys, for example 'train.steps'"},
        {"train:\n  steps: many\n",
         "run.yaml:2:10: train.steps: 'many' is not an integer (for example 2, 1_000 or 4k)"},
        {"train: {steps: 0}", "run.yaml:1:16: train.steps: 0 is out of range; it must be at least 1"},
        {"parallel: {tp: 9999}", "run.yaml:1:16: parallel.tp: 9999 is out of range; it must be from 1 to 8192"},
        {"parallel: {sp: maybe}", "run.yaml:1:16: parallel.sp: 'maybe' is not a truth value; write true or false"},
        {"parallel: {recompute: fulll}",
         "run.yaml:1:23: parallel.recompute: 'fulll' is not one of none, selective, full; did you mean 'full'?"},
        {"train: {steps: [1, 2]}", "run.yaml:1:16: train.steps: is a list; it must be one value"},
        {"train: {steps: }", "run.yaml:1:9: train.steps: has no value; write one or remove the line"},
        {"train: {steps: 1}\ntrain: {steps: 2}", "run.yaml:2:9: train.steps: is set twice; keep one"},
        {"train: {steps: 1}\ntrain.steps: 2", "run.yaml:2:1: train.steps: is set twice; keep one"},
        {"json: true", "run.yaml:1:1: 'json' is an option of the command, not of the configuration; write --json"},
        {"- a\n- b", "run.yaml:1:1: a configuration is a mapping, not a list; write 'key: value'"},
        {"hello", "run.yaml:1:1: a configuration is a mapping; write 'key: value'"},
        {"train: {steps: 1}\n---\ntrain: {lr: 1}",
         "run.yaml:2:1: a second document starts here; a configuration is one document"},
        {"parallel: {layers: [[1]]}", "run.yaml:1:21: parallel.layers: a list holds plain values only"},
        {"parallel: {layers: [\"1,2\"]}",
         "run.yaml:1:21: parallel.layers: an item of a list must be one value without commas"},
    };
    qd_options *options = fresh();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_int_equal(load(options, rows[i].text), QD_USAGE);
        assert_string_equal(qd_error_message(), rows[i].message);
        assert_null(strchr(qd_error_message(), '\n'));
    }
    /* The parser's own errors have a position too. */
    static const char *const broken[] = {
        "a: [1",         "a: {b",      "a: b: c", "\ta: 1", "a: \"x",     "a: 1\n b: 2",  "%YAML 9.9\n---\na: 1",
        "? {a: b}\n: c", "? [a]\n: c", "a: &x 1", "a: *x",  "a: !!int 1", "a: &x {b: 1}", "*a : b"};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        assert_int_equal(load(options, broken[i]), QD_USAGE);
        assert_memory_equal(qd_error_message(), "run.yaml:", 9);
        assert_null(strchr(qd_error_message(), '\n'));
    }
    qd_options_destroy(options);
}

/* Sections without keys, as when all of them are commented out. */
static void empty_sections(void **state)
{
    (void)state;
    qd_options *options = fresh();
    assert_int_equal(load(options, "model:\ntrain:\n  # lr: 1\nparallel: {}\n"), QD_OK);
    assert_false(qd_options_is_set(options, "train.lr"));
    qd_options_destroy(options);
}

/* A forgotten key is as if the file did not contain it; the command line stays. */
static void forgetting(void **state)
{
    (void)state;
    qd_options *options = fresh();
    assert_int_equal(load(options, "train: {steps: 7, lr: 0.25}"), QD_OK);
    assert_int_equal(qd_options_set(options, "train.lr", "0.5"), QD_OK);
    qd_options *other = fresh();
    assert_int_equal(qd_options_forget(options, "train.steps"), QD_OK);
    assert_int_equal(qd_options_forget(options, "train.lr"), QD_OK);
    assert_false(qd_options_is_set(options, "train.steps"));
    assert_int_equal(qd_options_int(options, "train.steps"), qd_options_int(other, "train.steps"));
    assert_string_equal(qd_options_origin(options, "train.steps"), "default");
    assert_true(qd_options_float(options, "train.lr") == 0.5);
    qd_options_destroy(other);
    qd_options_destroy(options);
}

static void command_line(void **state)
{
    (void)state;
    qd_options *options = fresh();
    char *const argv[] = {"run.yaml",   "--tp", "2",      "train.steps=5", "--dp=-1",    "--sp",
                          "--print",    "0",    "--json", "false",         "--train.lr", "0.5",
                          "./a=b.yaml", "-",    "--",     "--tp",          "x=1"};
    const char *words[17];
    int count;
    assert_int_equal(qd_options_parse(options, 17, argv, words, &count), QD_OK);
    assert_int_equal(count, 5);
    assert_string_equal(words[0], "run.yaml");
    assert_string_equal(words[1], "./a=b.yaml");
    assert_string_equal(words[2], "-");
    assert_string_equal(words[3], "--tp");
    assert_int_equal(qd_options_int(options, "parallel.tp"), 2);
    assert_int_equal(qd_options_int(options, "train.steps"), 5);
    assert_int_equal(qd_options_int(options, "print"), 0);
    assert_true(qd_options_bool(options, "parallel.sp"));
    assert_false(qd_options_bool(options, "json"));
    assert_true(qd_options_float(options, "train.lr") == 0.5);
    assert_string_equal(qd_options_origin(options, "parallel.tp"), "command line");
    /* The file is read afterwards and still has lower precedence. */
    assert_int_equal(load(options, "parallel: {tp: 4, recompute: full}"), QD_OK);
    assert_int_equal(qd_options_int(options, "parallel.tp"), 2);
    assert_int_equal(qd_options_enum(options, "parallel.recompute"), 2);
    /* Short forms in assignments, as in `verify --against "tp=1"`. */
    assert_int_equal(qd_options_assign(options, "tp=1"), QD_OK);
    assert_int_equal(qd_options_int(options, "parallel.tp"), 1);
    assert_int_equal(qd_options_assign(options, "model.preset=a=b"), QD_OK);
    assert_string_equal(qd_options_string(options, "model.preset"), "a=b");
    static const struct {
        char *word;
        const char *message;
    } rows[] = {
        {"--tpp=2", "unknown option '--tpp'; did you mean '--tp'?"},
        {"--tp", "option '--tp' needs a value"},
        {"-x", "unknown option '-x'; options start with two dashes"},
        {"parallel.tpp=2", "unknown key 'parallel.tpp'; did you mean 'parallel.tp'?"},
        {"--tp=zero", "parallel.tp: 'zero' is not an integer (for example 2, 1_000 or 4k)"},
        {"json=true", "'json' is an option of the command; write --json"},
        {"parallel=2", "'parallel' is a section, not a key; set its keys, for example 'parallel.tp'"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_int_equal(qd_options_parse(options, 1, &rows[i].word, words, &count), QD_USAGE);
        assert_string_equal(qd_error_message(), rows[i].message);
    }
    /* The next word is not a value if it is an option itself; after '=' anything is. */
    static const struct {
        char *words[2];
        const char *message;
    } swallowed[] = {
        {{"--tp", "--json"}, "option '--tp' needs a value; if '--json' is it, write '--tp=--json'"},
        {{"--model.preset", "--train.lr"},
         "option '--model.preset' needs a value; if '--train.lr' is it, write '--model.preset=--train.lr'"},
        {{"--model.preset", "--steps=5"},
         "option '--model.preset' needs a value; if '--steps=5' is it, write '--model.preset=--steps=5'"},
        {{"--model.preset", "--none"}, NULL},
        {{"--model.preset=--json", "--sp"}, NULL},
    };
    for (size_t i = 0; i < sizeof swallowed / sizeof swallowed[0]; i++) {
        const char *message = swallowed[i].message;
        assert_int_equal(qd_options_parse(options, 2, swallowed[i].words, words, &count), message ? QD_USAGE : QD_OK);
        if (message)
            assert_string_equal(qd_error_message(), message);
    }
    assert_string_equal(qd_options_string(options, "model.preset"), "--json");
    assert_int_equal(qd_options_assign(options, "nothing"), QD_USAGE);
    assert_int_equal(qd_options_assign(options, "=2"), QD_USAGE);
    assert_int_equal(qd_options_set(options, "model.preset", "\xff"), QD_USAGE);
    assert_int_equal(qd_options_set(options, "model.preset", "a\x01"), QD_USAGE);
    qd_options_destroy(options);
}

static void resolve_and_copy(void **state)
{
    (void)state;
    qd_options *options = fresh(), *copy;
    assert_int_equal(load(options, "parallel: {dp: -1, layers: [3, 4]}\nmodel: {preset: x}"), QD_OK);
    assert_int_equal(qd_options_resolve(options, "parallel.dp", "4"), QD_OK);
    assert_int_equal(qd_options_resolve(options, "parallel.tp", "2"), QD_OK);
    assert_int_equal(qd_options_resolve(options, "parallel.tp", "0"), QD_USAGE);
    assert_int_equal(qd_options_int(options, "parallel.dp"), 4);
    assert_string_equal(qd_options_origin(options, "parallel.dp"), "run.yaml:1:16");
    assert_int_equal(qd_options_int(options, "parallel.tp"), 2);
    assert_false(qd_options_is_set(options, "parallel.tp"));
    assert_int_equal(qd_options_copy(options, &copy), QD_OK);
    assert_int_equal(qd_options_set(options, "parallel.layers", "9"), QD_OK);
    qd_options_destroy(options);
    const int64_t *layers;
    assert_int_equal(qd_options_int_list(copy, "parallel.layers", &layers), 2);
    assert_int_equal(layers[1], 4);
    assert_string_equal(qd_options_string(copy, "model.preset"), "x");
    assert_string_equal(qd_options_origin(copy, "parallel.dp"), "run.yaml:1:16");
    qd_options_destroy(copy);
}

static void saves_and_reads_back(void **state)
{
    (void)state;
    static const char *const texts[] = {"plain",        "",          "true",     "null", "12", "a b", "say \"x\" \\ y",
                                        "two\nlines\n", "tab\there", "#no",      "a: b", "*x", "-",   "grüße 漢字",
                                        " pad ",        "~",         "/a/b.txt", "{}",   "no", "'"};
    static const char *const rates[] = {"0.1", "3e-3", "1e-300", "0.30000000000000004", "5", "9.999999999999999"};
    char path[] = "/tmp/quadrille-options-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        qd_options *options = fresh(), *again = fresh();
        const char *rate = rates[i % (sizeof rates / sizeof rates[0])];
        assert_int_equal(qd_options_set(options, "model.preset", texts[i]), QD_OK);
        assert_int_equal(qd_options_set(options, "train.lr", rate), QD_OK);
        assert_int_equal(qd_options_set(options, "parallel.layers", i % 2 ? "1,2,3" : ""), QD_OK);
        assert_int_equal(qd_options_set(options, "model.factors", i % 2 ? "" : "0.7,1e1"), QD_OK);
        assert_int_equal(qd_options_set(options, "parallel.recompute", "selective"), QD_OK);
        assert_int_equal(qd_options_set(options, "json", "true"), QD_OK);
        assert_int_equal(qd_options_save(options, path), QD_OK);
        assert_int_equal(qd_options_load(again, path), QD_OK);
        assert_string_equal(qd_options_string(again, "model.preset"), texts[i]);
        assert_true(qd_options_float(again, "train.lr") == strtod(rate, NULL));
        const int64_t *layers;
        const double *factors;
        assert_int_equal(qd_options_int_list(again, "parallel.layers", &layers), i % 2 ? 3 : 0);
        assert_int_equal(qd_options_float_list(again, "model.factors", &factors), i % 2 ? 0 : 2);
        assert_true(i % 2 || (factors[0] == 0.7 && factors[1] == 10.0));
        assert_false(qd_options_bool(again, "json")); /* belongs to the command */
        char *first, *second;
        assert_int_equal(qd_options_to_yaml(options, &first), QD_OK);
        assert_int_equal(qd_options_to_yaml(again, &second), QD_OK);
        assert_string_equal(first, second);
        free(first);
        free(second);
        qd_options_destroy(options);
        qd_options_destroy(again);
    }
    qd_options *options = fresh();
    char *text;
    assert_int_equal(qd_options_to_yaml(options, &text), QD_OK);
    assert_string_equal(text, "model:\n  preset: \"\"\n  rope:\n    base: 10000\n  factors: []\n  layers: 2\n"
                              "train:\n  steps: 100\n  lr: 0.003\n"
                              "parallel:\n  tp: 1\n  dp: -1\n  sp: false\n  recompute: none\n  layers: []\n");
    free(text);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(qd_options_load(options, path), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), path));
    assert_int_equal(qd_options_load(options, "/tmp"), QD_USAGE);
    assert_int_equal(qd_options_save(options, "/nonexistent/folder/run.yaml"), QD_IO);
    qd_options_destroy(options);
}

static void help_and_documentation(void **state)
{
    (void)state;
    const qd_option_table tables[] = {QD_OPTION_TABLE(config), QD_OPTION_TABLE(command)};
    char *text;
    assert_int_equal(qd_options_help(tables, 2, NULL, 80, &text), QD_OK);
    for (int i = 0; i < (int)(sizeof config / sizeof config[0]); i++)
        assert_non_null(strstr(text, config[i].key));
    assert_non_null(strstr(text, "--tp N, parallel.tp"));
    assert_non_null(strstr(text, "  --json "));
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 82);
    free(text);
    assert_int_equal(qd_options_help(tables, 2, "parallel", 200, &text), QD_OK);
    assert_non_null(strstr(text, "ranks that share each GEMM (integer, 1 to 8192; default 1)\n"));
    free(text);
    assert_int_equal(qd_options_help(tables, 2, "train", 0, &text), QD_OK);
    assert_non_null(strstr(text, "train.lr"));
    assert_null(strstr(text, "parallel"));
    free(text);
    assert_int_equal(qd_options_help(tables, 2, "", 0, &text), QD_OK);
    assert_non_null(strstr(text, "--print N"));
    assert_null(strstr(text, "train"));
    free(text);
    assert_int_equal(qd_options_to_markdown(tables, 2, &text), QD_OK);
    assert_non_null(
        strstr(text, "| `parallel.tp` | `--tp` | integer, 1 to 8192 | `1` | ranks that share each GEMM |\n"));
    assert_non_null(strstr(text, "one of: none, selective, full"));
    char *model = strstr(text, "## `model`");
    assert_non_null(model);
    assert_null(strstr(model + 1, "## `model`")); /* scattered keys of a section are grouped */
    free(text);
}

static void bad_tables(void **state)
{
    (void)state;
    const qd_option twice[] = {{.key = "a.b", .help = "x", .fallback = "1"},
                               {.key = "a.b", .help = "x", .fallback = "1"}};
    const qd_option wrong[] = {{.key = "a.b", .help = "x", .fallback = "0", .least = 1, .most = 2}};
    const qd_option flags[] = {{.key = "a.b", .help = "x", .fallback = "1", .flag = "b"},
                               {.key = "a.c", .help = "x", .fallback = "1", .flag = "b"}};
    const qd_option_table tables[] = {QD_OPTION_TABLE(twice), QD_OPTION_TABLE(wrong), QD_OPTION_TABLE(flags)};
    qd_options *options;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(qd_options_create(&tables[i], 1, &options), QD_USAGE);
        assert_null(options);
        assert_memory_equal(qd_error_message(), "option table: ", 14);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(reads_yaml),
        cmocka_unit_test(empty_files_set_nothing),
        cmocka_unit_test(number_forms),
        cmocka_unit_test(refusals),
        cmocka_unit_test(empty_sections), cmocka_unit_test(forgetting), cmocka_unit_test(command_line),
        cmocka_unit_test(resolve_and_copy),
        cmocka_unit_test(saves_and_reads_back),
        cmocka_unit_test(help_and_documentation),
        cmocka_unit_test(bad_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
