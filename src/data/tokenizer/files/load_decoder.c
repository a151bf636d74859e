/* Reads the decoder of tokenizer.json. */
#include "data/tokenizer/files/load_impl.h"

#include "data/tokenizer/split/unicode.h"

#include <string.h>

static qd_status add_step(qd_loader *load, qd_decode_kind kind, qd_decode_step **step)
{
    qd_decoder *decoder = &load->tokenizer->decoder;
    if (decoder->count == QD_MOST_DECODE_STEPS)
        return QD_LOAD_FAIL("decoder: more than %d steps are not supported", QD_MOST_DECODE_STEPS);
    *step = &decoder->steps[decoder->count++];
    **step = (qd_decode_step){.kind = kind};
    return QD_OK;
}

qd_status qd_load_decoder(qd_loader *load, const char *at, int depth)
{
    static const struct {
        const char *name;
        qd_decode_kind kind;
    } kinds[] = {{"ByteLevel", QD_DECODE_BYTES}, {"Metaspace", QD_DECODE_METASPACE}, {"Replace", QD_DECODE_REPLACE},
                 {"Strip", QD_DECODE_STRIP}, {"ByteFallback", QD_DECODE_BYTE_FALLBACK}, {"Fuse", QD_DECODE_FUSE},
                 {"WordPiece", QD_DECODE_WORDPIECE}, {"BPEDecoder", QD_DECODE_BPE}};
    enum { TYPE, LIST, PATTERN, CONTENT, START, STOP, REPLACEMENT, SCHEME, PREFIX, CLEANUP, SUFFIX, OLD_SCHEME, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"decoders", NULL}, {"pattern", NULL}, {"content", NULL}, {"start", NULL},
                                   {"stop", NULL}, {"replacement", NULL}, {"prepend_scheme", NULL}, {"prefix", NULL},
                                   {"cleanup", NULL}, {"suffix", NULL}, {"add_prefix_space", NULL}};
    qd_json_reader *reader = &load->reader;
    qd_json_text text;
    qd_decode_step *step = NULL;
    size_t length;
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "decoder", places, COUNT));
    QD_TRY(qd_load_string(load, places[TYPE].at, "decoder.type", &text));
    if (qd_json_text_is(text, "Sequence") && depth < 4)
        return qd_load_list(load, places[LIST].at, "decoder.decoders", depth + 1, qd_load_decoder);
    for (size_t i = 0; !step && i < sizeof kinds / sizeof *kinds; i++)
        if (qd_json_text_is(text, kinds[i].name))
            QD_TRY(add_step(load, kinds[i].kind, &step));
    if (!step)
        return QD_LOAD_FAIL("decoder.type '%.*s' is not supported; ByteLevel, Metaspace, Replace, Strip, ByteFallback, Fuse, "
                            "WordPiece, BPEDecoder and Sequence are", (int)text.length, text.data);
    switch (step->kind) {
    case QD_DECODE_REPLACE:
        QD_TRY(qd_load_pattern(load, places[PATTERN].at, "decoder: Replace", &step->pattern, &length, &step->regex));
        return qd_load_copy(load, places[CONTENT].at, "decoder: the content of Replace", &step->content, &length);
    case QD_DECODE_STRIP:
        if (!places[START].at || !places[STOP].at)
            return QD_LOAD_FAIL("decoder: Strip has no %s", places[START].at ? "stop" : "start");
        QD_TRY(qd_load_copy(load, places[CONTENT].at, "decoder: the content of Strip", &step->content, &length));
        if (length == 0)
            return QD_LOAD_FAIL("decoder: the content of Strip is empty");
        reader->at = places[START].at;
        QD_TRY(qd_json_reader_integer(reader, "decoder: start", 0, INT32_MAX, &step->start));
        reader->at = places[STOP].at;
        return qd_json_reader_integer(reader, "decoder: stop", 0, INT32_MAX, &step->stop);
    case QD_DECODE_METASPACE: {
        bool prefix = true;
        QD_TRY(qd_load_copy(load, places[REPLACEMENT].at, "decoder: replacement", &step->content, &length));
        if (places[SCHEME].at) {
            QD_TRY(qd_load_string(load, places[SCHEME].at, "decoder: prepend_scheme", &text));
            prefix = !qd_json_text_is(text, "never");
        } else if (places[OLD_SCHEME].at) {
            QD_TRY(qd_load_boolean(load, places[OLD_SCHEME].at, "decoder: add_prefix_space", &prefix));
        }
        step->flag = !prefix;
        return QD_OK;
    }
    case QD_DECODE_WORDPIECE:
        QD_TRY(qd_load_copy(load, places[PREFIX].at, "decoder: prefix", &step->content, &length));
        return qd_load_boolean(load, places[CLEANUP].at, "decoder: cleanup", &step->flag);
    case QD_DECODE_BPE: return qd_load_copy(load, places[SUFFIX].at, "decoder: suffix", &step->content, &length);
    default: return QD_OK;
    }
}
