/* libFuzzer target of chat templates: any bytes are refused when they are loaded, or render a
 * conversation with tools to text or to a refusal, within the limits on steps and memory. */
#include "data/chat/chat.h"

#include <assert.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char input_text[] =
    "{\"messages\": [{\"role\": \"system\", \"content\": \" Be kind.\\n\"}, {\"role\": \"user\", \"content\": \"\\u00e9 'x' \\\"y\\\"\"},"
    " {\"role\": \"assistant\", \"content\": null, \"reasoning\": \"r\", \"tool_calls\": [{\"id\": \"abcdefghi\", \"function\":"
    " {\"name\": \"f\", \"arguments\": {\"a\": [1, 2.5, true, null]}}}]}, {\"role\": \"tool\", \"content\": \"1\"}],"
    " \"tools\": [{\"function\": {\"name\": \"f\", \"description\": \"d\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}}],"
    " \"variables\": {\"enable_thinking\": false, \"n\": 3}}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    qd_chat *chat;
    qd_json *document;
    qd_strbuf text = {0};
    qd_chat_spans spans = {0};
    qd_status status = qd_chat_load_text("fuzz", (const char *)data, size, &chat);
    assert(status == QD_OK || (status == QD_USAGE && !chat && strncmp(qd_error_message(), "fuzz", 4) == 0));
    if (status != QD_OK)
        return 0;
    status = qd_json_load_text("input", input_text, sizeof input_text - 1, &document);
    assert(status == QD_OK);
    status = qd_chat_set_token(chat, "bos_token", "<s>");
    assert(status == QD_OK);
    const qd_json_node *root = qd_json_root(document);
    qd_chat_input input = {.messages = qd_json_member(root, "messages"), .tools = qd_json_member(root, "tools"),
                           .variables = qd_json_member(root, "variables"), .date = "2025-01-31", .add_generation_prompt = true};
    status = qd_chat_render(chat, &input, &text, &spans);
    assert(status == QD_OK || (status == QD_USAGE && text.length == 0));
    assert(qd_utf8_valid(text.data ? text.data : "", text.length) == text.length);
    for (size_t i = 0; status == QD_OK && i < spans.count; i++)
        assert(spans.spans[i].begin <= spans.spans[i].end && spans.spans[i].end <= text.length);
    qd_chat_spans_free(&spans);
    qd_strbuf_free(&text);
    qd_json_destroy(document);
    qd_chat_destroy(chat);
    return 0;
}
