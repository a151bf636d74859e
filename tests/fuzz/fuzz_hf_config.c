/* libFuzzer target of Hugging Face's config.json: any bytes are a model or one clear error. */
#include "memory_file.h"

#include "ckpt/huggingface_impl.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    qd_strbuf notes = {0};
    qd_hf_config config;
    const char *path = memory_file(data, size);
    if (!path)
        return 0;
    qd_status status = qd_hf_config_read(path, &notes, &config);
    assert(status == QD_OK || status == QD_USAGE || status == QD_UNSUPPORTED);
    if (status == QD_OK)
        assert(config.family && config.model.layers > 0 && config.model.hidden > 0);
    qd_strbuf_free(&notes);
    return 0;
}
