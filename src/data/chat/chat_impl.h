/* Parts that the files of this folder share: the syntax tree of a template, values of its
 * expressions, and the state of a rendering. */
#ifndef QD_DATA_CHAT_CHAT_IMPL_H
#define QD_DATA_CHAT_CHAT_IMPL_H

#include "base/arena.h"
#include "data/chat/chat.h"

/* Limits. Published templates have up to 30 KB, nest ten levels and take some thousand steps. */
enum {
    QD_CHAT_MOST_TEXT = 256 << 10,   /* bytes of a template */
    QD_CHAT_MOST_NESTING = 100,      /* blocks and brackets within each other */
    QD_CHAT_MOST_DEPTH = 400,        /* evaluations within each other, macro calls included */
    QD_CHAT_MOST_STEPS = 5000000,    /* evaluations, and bytes / 16 of operations on long texts */
    QD_CHAT_MOST_MEMORY = 128 << 20, /* bytes of values */
    QD_CHAT_MOST_OUTPUT = 32 << 20,  /* bytes that blocks write, macros included */
    QD_CHAT_MOST_RANGE = 100000,     /* items of range(), the limit of Jinja's sandbox */
};

/* ---- values ---- */

typedef enum qd_chat_type {
    QD_CHAT_UNDEFINED,
    QD_CHAT_NONE,
    QD_CHAT_BOOL,
    QD_CHAT_INT,
    QD_CHAT_FLOAT,
    QD_CHAT_STRING,
    QD_CHAT_LIST,
    QD_CHAT_TUPLE,
    QD_CHAT_DICT,
    QD_CHAT_VIEW,      /* keys, values or items of a dict */
    QD_CHAT_RANGE,
    QD_CHAT_ITERATOR,  /* result of a filter that Jinja implements as a generator: can be read once */
    QD_CHAT_NAMESPACE,
    QD_CHAT_LOOP,
    QD_CHAT_MACRO,
    QD_CHAT_FUNCTION,
    QD_CHAT_METHOD,
} qd_chat_type;

typedef struct qd_chat_value qd_chat_value;
typedef struct qd_chat_node qd_chat_node;
typedef struct qd_chat_scope qd_chat_scope;
typedef struct qd_chat_run qd_chat_run;

typedef struct qd_chat_dict { /* keys in the order of insertion */
    qd_chat_value *keys, *values;
    size_t count, capacity;
} qd_chat_dict;

typedef struct qd_chat_sequence {
    qd_chat_value *items;
    size_t count, at; /* at: of an iterator */
} qd_chat_sequence;

typedef struct qd_chat_range {
    int64_t start, stop, step, count;
} qd_chat_range;

typedef struct qd_chat_method qd_chat_method;
typedef struct qd_chat_loop qd_chat_loop;

struct qd_chat_value {
    uint8_t type;   /* qd_chat_type */
    uint8_t detail; /* view: 'k', 'v' or 'i'; string: 1 if marked as safe; undefined: the type whose attribute is missing */
    uint32_t length; /* of a string or of an undefined name, in bytes */
    union {
        bool truth;
        int64_t integer;
        double real;
        const char *text; /* string; undefined: its name or NULL */
        qd_chat_sequence *sequence;
        qd_chat_dict *dict; /* dict, view, namespace */
        qd_chat_range *range;
        qd_chat_loop *loop;
        struct qd_chat_macro *macro;
        const struct qd_chat_function *function;
        struct qd_chat_bound *bound; /* method */
    };
};

/* Arguments of a call, a filter or a test. positional[0] of a filter or test is the value. */
typedef struct qd_chat_arguments {
    const char *callee;
    qd_chat_value *positional;
    size_t count;
    const char *const *names;
    qd_chat_value *named;
    size_t named_count;
} qd_chat_arguments;

typedef qd_status (*qd_chat_callable)(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result);

/* A builtin function, filter, test or method. */
typedef struct qd_chat_function {
    const char *name;
    qd_chat_callable call;
} qd_chat_function;

typedef struct qd_chat_bound {
    const qd_chat_function *method;
    qd_chat_value self;
} qd_chat_bound;

typedef struct qd_chat_macro {
    const qd_chat_node *node;
    qd_chat_scope *scope; /* where it was defined */
} qd_chat_macro;

/* ---- the syntax tree ---- */

typedef enum qd_chat_kind {
    /* expressions */
    QD_CHAT_N_CONST, /* constant */
    QD_CHAT_N_NAME,  /* symbol */
    QD_CHAT_N_LIST,  /* items */
    QD_CHAT_N_TUPLE,
    QD_CHAT_N_DICT,  /* items: key, value, key, value */
    QD_CHAT_N_ATTR,  /* a.text */
    QD_CHAT_N_ITEM,  /* a[b] */
    QD_CHAT_N_SLICE, /* a[items[0]:items[1]:items[2]], NULL where absent */
    QD_CHAT_N_CALL,  /* a(items, names = items + count) */
    QD_CHAT_N_FILTER,
    QD_CHAT_N_TEST,
    QD_CHAT_N_NOT, /* a */
    QD_CHAT_N_NEG,
    QD_CHAT_N_POS,
    QD_CHAT_N_BINARY, /* a op b */
    QD_CHAT_N_CONCAT, /* items */
    QD_CHAT_N_COMPARE, /* a, then ops[i] items[i] */
    QD_CHAT_N_AND,
    QD_CHAT_N_OR,
    QD_CHAT_N_COND,  /* a if b else c (NULL) */
    QD_CHAT_N_MEMBER, /* target: attribute `text` of namespace `symbol` */
    /* statements, linked by next */
    QD_CHAT_N_TEXT,
    QD_CHAT_N_PRINT,      /* a */
    QD_CHAT_N_IF,         /* a, body; otherwise: other */
    QD_CHAT_N_FOR,        /* target a in b if c, body, other */
    QD_CHAT_N_SET,        /* target a = b */
    QD_CHAT_N_SET_BLOCK,  /* target a, body, filter b (or NULL) */
    QD_CHAT_N_MACRO,      /* symbol, items: N_NAME parameters, then defaults of the last named_count */
    QD_CHAT_N_WITH,       /* items: target, value, …; body */
    QD_CHAT_N_FILTER_BLOCK, /* filter a, body */
    QD_CHAT_N_GENERATION, /* body */
    QD_CHAT_N_BREAK,
    QD_CHAT_N_CONTINUE,
} qd_chat_kind;

/* Operators: their characters, packed. */
#define QD_CHAT_OP(a, b) ((a) | (b) << 8)
enum { QD_CHAT_OP_IN = QD_CHAT_OP('i', 'n'), QD_CHAT_OP_NOT_IN = QD_CHAT_OP('n', 'i') };

typedef struct qd_chat_hidden { /* variables that start undefined in a scope */
    int32_t *symbols;
    uint32_t count;
} qd_chat_hidden;

struct qd_chat_node {
    uint8_t kind;
    uint16_t op;
    uint32_t at; /* byte in the template */
    int32_t symbol;
    uint32_t count, named_count;
    qd_chat_node *a, *b, *c;
    qd_chat_node **items;
    const char **names;  /* of named arguments */
    uint16_t *ops;
    const char *text;    /* NUL-terminated */
    size_t length;
    const qd_chat_function *function; /* of a filter or test */
    qd_chat_value constant;
    qd_chat_node *body, *other, *next;
    qd_chat_hidden hidden, hidden_other; /* of the scopes of body and other */
};

typedef struct qd_chat_named { /* a special token */
    char *variable, *text;
} qd_chat_named;

struct qd_chat {
    qd_arena *arena;
    const char *name;
    const char *text; /* line ends are "\n" */
    size_t length;
    qd_chat_node *body;
    bool generation;
    const char **symbols; /* names by number */
    size_t symbol_count, symbol_capacity;
    int32_t *table; /* hash table of symbols; -1: empty */
    size_t table_size;
    qd_chat_named *tokens;
    size_t token_count;
    int32_t loop_symbol;
    qd_chat_hidden hidden;
};

/* Number of a name; -1 if `add` is false and it does not occur, or without memory. */
int32_t qd_chat_symbol(qd_chat *chat, const char *name, size_t length, bool add);

/* QD_USAGE "name:line:column: message". */
qd_status qd_chat_fail(const qd_chat *chat, size_t at, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- lexer and parser ---- */

typedef enum qd_chat_lexeme {
    QD_CHAT_L_END,
    QD_CHAT_L_DATA,
    QD_CHAT_L_PRINT_BEGIN, /* {{ */
    QD_CHAT_L_PRINT_END,
    QD_CHAT_L_BLOCK_BEGIN, /* {% */
    QD_CHAT_L_BLOCK_END,
    QD_CHAT_L_NAME,
    QD_CHAT_L_STRING,
    QD_CHAT_L_INT,
    QD_CHAT_L_FLOAT,
    QD_CHAT_L_OP,
} qd_chat_lexeme;

typedef struct qd_chat_lexed {
    uint8_t kind;
    uint16_t op;
    uint32_t at, length;
    const char *text; /* data, names and decoded strings */
    union {
        int64_t integer;
        double real;
    };
} qd_chat_lexed;

/* All lexemes of the template, the last one being L_END; freed with free(). */
qd_status qd_chat_lex(qd_chat *chat, qd_chat_lexed **lexemes, size_t *count);

typedef struct qd_chat_parser {
    qd_chat *chat;
    const qd_chat_lexed *at;
    int nesting, loops; /* loops: around this statement, within its macro */
    bool captured;      /* inside a macro, a set block or a filter block */
    bool generating;    /* inside a generation block */
    bool in_macro;
} qd_chat_parser;

qd_status qd_chat_parse(qd_chat *chat, const qd_chat_lexed *lexemes); /* sets body */
qd_status qd_chat_analyze(qd_chat *chat);                              /* sets hidden variables */
/* The parser of expressions, and what it shares with that of statements. */
typedef enum qd_chat_tuple_mode { QD_CHAT_ANY, QD_CHAT_NO_CONDITION, QD_CHAT_PARENTHESES } qd_chat_tuple_mode;
qd_status qd_chat_parse_tuple(qd_chat_parser *p, qd_chat_tuple_mode mode, qd_chat_node **node);
qd_status qd_chat_parse_expression(qd_chat_parser *p, qd_chat_node **node);
qd_status qd_chat_parse_name(qd_chat_parser *p, qd_chat_node **node); /* or true, false, none */
qd_status qd_chat_parse_filters(qd_chat_parser *p, bool first, qd_chat_node **node);
qd_chat_node *qd_chat_node_new(qd_chat_parser *p, qd_chat_kind kind, const qd_chat_lexed *at);
qd_status qd_chat_node_add(qd_chat_parser *p, qd_chat_node *node, qd_chat_node *item);
/* Arrays of nodes grow at powers of two. grown: NULL without memory. */
bool qd_chat_full(size_t count);
void *qd_chat_grown(qd_chat_parser *p, const void *old, size_t count, size_t size);
bool qd_chat_is_op(const qd_chat_parser *p, int op);
bool qd_chat_is_word(const qd_chat_parser *p, const char *word);
bool qd_chat_skip_op(qd_chat_parser *p, int op);
bool qd_chat_skip_word(qd_chat_parser *p, const char *word);
qd_status qd_chat_expect_op(qd_chat_parser *p, int op);
qd_status qd_chat_unexpected(const qd_chat_parser *p, const char *expected);
qd_status qd_chat_enter(qd_chat_parser *p); /* one level of nesting; p->nesting-- leaves it */

/* ---- a rendering ---- */

struct qd_chat_scope {
    qd_chat_scope *parent;
    struct qd_chat_variable {
        int32_t symbol;
        qd_chat_value value;
    } *variables;
    uint32_t count, capacity;
};

typedef enum qd_chat_flow { QD_CHAT_GO_ON, QD_CHAT_BREAKS, QD_CHAT_CONTINUES } qd_chat_flow;

struct qd_chat_run {
    const qd_chat *chat;
    const qd_chat_input *input;
    qd_arena *arena;
    qd_chat_scope *scope;
    qd_strbuf *out;       /* where blocks write now */
    size_t out_start;     /* of the text, in the caller's buffer */
    qd_chat_spans *spans; /* or NULL */
    size_t at;            /* position for messages */
    size_t used, written, steps;
    size_t macros; /* defined so far */
    int depth;
    char *growing; /* buffer of the string that was concatenated last, to append in place */
    size_t growing_length, growing_capacity;
};

/* One fault: message with the position of the current expression. */
#define QD_CHAT_FAIL(run, ...) qd_chat_fail((run)->chat, (run)->at, __VA_ARGS__)

qd_status qd_chat_take(qd_chat_run *run, size_t bytes, void *memory); /* *(void **)memory, zeroed */
qd_status qd_chat_spend(qd_chat_run *run, size_t steps);
qd_status qd_chat_write(qd_chat_run *run, qd_strbuf *to, const char *text, size_t length);
/* The text of `from` as a value; empties it. */
qd_status qd_chat_captured(qd_chat_run *run, qd_strbuf *from, qd_chat_value *value);

qd_status qd_chat_execute(qd_chat_run *run, const qd_chat_node *body, qd_chat_flow *flow);
qd_status qd_chat_evaluate(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value);
qd_status qd_chat_assign(qd_chat_run *run, const qd_chat_node *target, qd_chat_value value);
qd_status qd_chat_define(qd_chat_run *run, qd_chat_scope *scope, int32_t symbol, qd_chat_value value);
bool qd_chat_lookup(qd_chat_run *run, int32_t symbol, qd_chat_value *value);
qd_status qd_chat_scope_enter(qd_chat_run *run, qd_chat_scope *parent, const qd_chat_hidden *hidden, qd_chat_scope **old);
qd_status qd_chat_apply(qd_chat_run *run, const qd_chat_node *node, qd_chat_value subject, qd_chat_value *value); /* filter, test */
qd_status qd_chat_call(qd_chat_run *run, qd_chat_value callee, const qd_chat_arguments *arguments, qd_chat_value *value);
qd_status qd_chat_call_macro(qd_chat_run *run, const qd_chat_macro *macro, const qd_chat_arguments *arguments, qd_chat_value *value);

/* ---- values: construction and Python's operations ---- */

static inline qd_chat_value qd_chat_bool(bool truth)
{
    return (qd_chat_value){.type = QD_CHAT_BOOL, .truth = truth};
}
static inline qd_chat_value qd_chat_int(int64_t integer)
{
    return (qd_chat_value){.type = QD_CHAT_INT, .integer = integer};
}
static inline qd_chat_value qd_chat_real(double real)
{
    return (qd_chat_value){.type = QD_CHAT_FLOAT, .real = real};
}
static inline qd_chat_value qd_chat_none(void)
{
    return (qd_chat_value){.type = QD_CHAT_NONE};
}
static inline qd_chat_value qd_chat_string(const char *text, size_t length) /* length < 4 GiB by the limits */
{
    return (qd_chat_value){.type = QD_CHAT_STRING, .text = text, .length = (uint32_t)length};
}
qd_chat_value qd_chat_literal(const char *text); /* a string of static or longer life */
qd_chat_value qd_chat_undefined(const char *name, size_t length, qd_chat_type owner);

qd_status qd_chat_copy(qd_chat_run *run, const char *text, size_t length, qd_chat_value *value); /* a string */
qd_status qd_chat_sequence_new(qd_chat_run *run, qd_chat_type type, size_t count, qd_chat_value *value);
qd_status qd_chat_dict_new(qd_chat_run *run, qd_chat_type type, size_t capacity, qd_chat_value *value);
qd_status qd_chat_dict_put(qd_chat_run *run, qd_chat_dict *dict, qd_chat_value key, qd_chat_value value);
qd_status qd_chat_dict_find(qd_chat_run *run, const qd_chat_dict *dict, qd_chat_value key, bool *found, qd_chat_value *value);
bool qd_chat_dict_text(const qd_chat_dict *dict, const char *key, size_t length, qd_chat_value *value);
qd_status qd_chat_from_json(qd_chat_run *run, const qd_json_node *node, qd_chat_value *value);

const char *qd_chat_type_name(qd_chat_value value); /* as Python names it: "str" */
qd_status qd_chat_bad_type(qd_chat_run *run, const char *operation, qd_chat_value value);
bool qd_chat_is_undefined(qd_chat_value value);
/* Fails with "'name' is undefined". */
qd_status qd_chat_refuse_undefined(qd_chat_run *run, qd_chat_value value);
bool qd_chat_truth(qd_chat_value value);
bool qd_chat_is_number(qd_chat_value value); /* bool included */
int64_t qd_chat_as_int(qd_chat_value value); /* of bool or int */
double qd_chat_as_real(qd_chat_value value);
qd_status qd_chat_equal(qd_chat_run *run, qd_chat_value a, qd_chat_value b, bool *equal);
qd_status qd_chat_less(qd_chat_run *run, qd_chat_value a, qd_chat_value b, const char *op, int *order); /* -1, 0, 1; 2: unordered */
qd_status qd_chat_contains(qd_chat_run *run, qd_chat_value container, qd_chat_value item, bool *found);
qd_status qd_chat_compare(qd_chat_run *run, int op, qd_chat_value a, qd_chat_value b, bool *result);
qd_status qd_chat_binary(qd_chat_run *run, int op, qd_chat_value a, qd_chat_value b, qd_chat_value *value);
qd_status qd_chat_concat(qd_chat_run *run, qd_chat_value a, qd_chat_value b, qd_chat_value *value); /* of strings */
qd_status qd_chat_size(qd_chat_run *run, qd_chat_value value, size_t *size); /* len() */
qd_status qd_chat_attribute(qd_chat_run *run, qd_chat_value object, const char *name, size_t length, qd_chat_value *value);
qd_status qd_chat_item(qd_chat_run *run, qd_chat_value object, qd_chat_value key, qd_chat_value *value);
qd_status qd_chat_slice(qd_chat_run *run, qd_chat_value object, const qd_chat_value bounds[3], qd_chat_value *value);

/* str() and repr(); appends to `to`. */
qd_status qd_chat_print(qd_chat_run *run, qd_chat_value value, qd_strbuf *to);
qd_status qd_chat_repr(qd_chat_run *run, qd_chat_value value, qd_strbuf *to, int depth);
/* The value itself if it is a string, otherwise str() of it. */
qd_status qd_chat_to_string(qd_chat_run *run, qd_chat_value value, qd_chat_value *string);
enum { QD_CHAT_NUMBER_TEXT = 40 };
void qd_chat_real_text(double value, char *text); /* as Python's repr() */

typedef struct qd_chat_iterator {
    qd_chat_value source;
    size_t at;
} qd_chat_iterator;
qd_status qd_chat_iterate(qd_chat_run *run, qd_chat_value value, qd_chat_iterator *iterator);
qd_status qd_chat_next(qd_chat_run *run, qd_chat_iterator *iterator, bool *more, qd_chat_value *value);
/* All (remaining) items as a list. */
qd_status qd_chat_items(qd_chat_run *run, qd_chat_value value, qd_chat_value *list);

/* A for loop while it runs, which `loop` refers to. */
struct qd_chat_loop {
    qd_chat_iterator iterator;
    const qd_chat_node *node; /* its target and filter */
    qd_chat_scope *outer;
    qd_chat_value current, before, after;
    bool has_after, ended;
    int64_t index0, length; /* length: -1 until it is needed */
};
qd_status qd_chat_loop_next(qd_chat_run *run, qd_chat_loop *loop, bool *more);
qd_status qd_chat_loop_attribute(qd_chat_run *run, qd_chat_loop *loop, const char *name, size_t length, qd_chat_value *value);

/* ---- tables ---- */

const qd_chat_function *qd_chat_find_filter(const char *name);
const qd_chat_function *qd_chat_find_test(const char *name);
const qd_chat_function *qd_chat_find_global(const char *name);
/* Method of a string, list, tuple or dict; NULL: none. *missing: Python has it, but it is not
 * available. */
typedef enum qd_chat_missing { QD_CHAT_ABSENT, QD_CHAT_NOT_IMPLEMENTED, QD_CHAT_MODIFIES } qd_chat_missing;
const qd_chat_function *qd_chat_find_method(qd_chat_type type, const char *name, size_t length, qd_chat_missing *missing);
/* Names that exist in Jinja or Python but not here, for messages at load time. */
bool qd_chat_known_filter(const char *name);
bool qd_chat_known_test(const char *name);
bool qd_chat_known_global(const char *name);

/* Binds arguments to parameters: `parameters` is a list "name name? …", '?' marking optional ones,
 * whose value stays as it is in `values`. Excess and unknown arguments fail. */
qd_status qd_chat_bind(qd_chat_run *run, const qd_chat_arguments *arguments, const char *parameters, qd_chat_value *values);

qd_status qd_chat_tojson(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result);
qd_status qd_chat_strftime(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result);

/* ---- text: UTF-8 and Python's rules ---- */

uint32_t qd_chat_code_point(const char *text, size_t left, size_t *bytes); /* of valid UTF-8 */
size_t qd_chat_put_utf8(uint32_t code, char *text);
bool qd_chat_is_space(uint32_t code); /* str.isspace() */
size_t qd_chat_space_length(const char *text, size_t length); /* bytes of white space at the start */
size_t qd_chat_without_space(const char *text, size_t length); /* length without white space at the end */
size_t qd_chat_text_length(const char *text, size_t length); /* code points */
size_t qd_chat_text_offset(const char *text, size_t length, size_t index); /* byte of a code point */
bool qd_chat_is_ascii(const char *text, size_t length);
const char *qd_chat_search(const char *text, size_t length, const char *part, size_t part_length); /* memmem() */
const char *qd_chat_search_last(const char *text, size_t length, qd_chat_value part);
/* Steps of a search; the one for the last occurrence compares at every position. */
size_t qd_chat_search_steps(qd_chat_value s, qd_chat_value part, bool last);
/* separator: none for white space, or a string that is not empty. */
qd_status qd_chat_split(qd_chat_run *run, qd_chat_value s, qd_chat_value separator, int64_t most, bool from_right, qd_chat_value *result);
qd_status qd_chat_split_lines(qd_chat_run *run, qd_chat_value s, bool with_ends, qd_chat_value *result);
/* Length of the line at the start without its end; *all: with it (str.splitlines()). */
size_t qd_chat_line(const char *text, size_t length, size_t *all);

qd_status qd_chat_strip(qd_chat_run *run, qd_chat_value string, qd_chat_value characters, bool left, bool right, qd_chat_value *value);
qd_status qd_chat_replace(qd_chat_run *run, qd_chat_value s, qd_chat_value from, qd_chat_value to, int64_t count, qd_chat_value *value);
qd_status qd_chat_join(qd_chat_run *run, qd_chat_value between, qd_chat_value items, bool strict, qd_chat_value *value);
typedef enum qd_chat_case { QD_CHAT_UPPER, QD_CHAT_LOWER, QD_CHAT_TITLE, QD_CHAT_TITLE_FILTER, QD_CHAT_CAPITALIZE } qd_chat_case;
qd_status qd_chat_change_case(qd_chat_run *run, qd_chat_value string, qd_chat_case to, qd_chat_value *value);

#endif
