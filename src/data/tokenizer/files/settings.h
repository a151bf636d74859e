/* Settings of a tokenizer that are stored next to its file: tokenizer_config.json and others. */
#ifndef QD_DATA_TOKENIZER_FILES_SETTINGS_H
#define QD_DATA_TOKENIZER_FILES_SETTINGS_H

#include "base/text/json.h"

#include <quadrille/strbuf.h>

/* The text of a token such as "eos_token": a string, or an object with "content". NULL: there is
 * none, or null. */
qd_status qd_settings_token(const qd_json *document, const char *name, const char **text);

/* The token that ends texts, as the files next to the tokenizer `path` state it: eos_token of
 * tokenizer_config.json or special_tokens_map.json, else eos_token_id of config.json. In a run
 * folder these files are in a folder of their own. name: appended, empty if none states it; *id:
 * otherwise -1 or the id of config.json, then without a name. file: the file that states it. */
qd_status qd_settings_end(const char *path, qd_strbuf *name, int64_t *id, qd_strbuf *file);

#endif
