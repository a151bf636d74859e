/* Weights that are stored as fp8 with one scale per block, as in the folders of DeepSeek V3, Kimi
 * K2 and the FP8 variants of Qwen3: value = fp8 x scale of its block. The product is exact up to
 * one rounding to fp32. */
#include "ckpt/huggingface_impl.h"

#include "base/half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCALE_END "_scale_inv"

static qd_status read_block_size(const qd_json *document, const qd_json_node *sizes, qd_hf_blocks *blocks)
{
    if (qd_json_count(sizes) != 2 || !qd_json_as_int(qd_json_item(sizes, 0), &blocks->rows) ||
        !qd_json_as_int(qd_json_item(sizes, 1), &blocks->cols) || blocks->rows < 1 || blocks->cols < 1 ||
        blocks->rows > INT32_MAX || blocks->cols > INT32_MAX)
        return QD_FAIL(QD_UNSUPPORTED, "%s: 'weight_block_size' of 'quantization_config' must be a list of two sizes, such as [128, 128]: "
                                       "use the original weights", qd_json_name(document));
    return QD_OK;
}

qd_status qd_hf_quantization_read(const qd_json *document, const qd_json_node *config, qd_hf_blocks *blocks)
{
    const char *name = qd_json_name(document), *method = qd_json_as_string(qd_json_member(config, "quant_method")),
               *format = qd_json_as_string(qd_json_member(config, "fmt"));
    if (!method || strcmp(method, "fp8") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "%s: the model is quantized ('quantization_config', quant_method '%s'): only fp8 with scales of "
                                       "blocks can be imported; use the original weights", name, method ? method : "");
    if (format && strcmp(format, "e4m3") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "%s: 'fmt' of 'quantization_config' is '%s': only e4m3 can be imported", name, format);
    return read_block_size(document, qd_json_member(config, "weight_block_size"), blocks);
}

bool qd_hf_scale_name(const char *weight, char *name, size_t size)
{
    return (size_t)snprintf(name, size, "%s" SCALE_END, weight) < size;
}

static int64_t blocks_of(int64_t size, int64_t block)
{
    return (size + block - 1) / block;
}

qd_status qd_hf_scale_check(const char *folder, const qd_safetensors_entry *weight, const qd_safetensors_entry *scale,
                            qd_hf_blocks blocks)
{
    if (weight->dims != 2)
        return QD_FAIL(QD_UNSUPPORTED, "%s: tensor '%s' is fp8 and not a matrix: only matrices have scales of blocks", folder,
                       weight->name);
    if (scale->dtype != QD_F32 && scale->dtype != QD_BF16)
        return QD_FAIL(QD_UNSUPPORTED, "%s: tensor '%s' has type %s: scales must be fp32 or bf16", folder, scale->name,
                       qd_dtype_name(scale->dtype));
    int64_t rows = blocks_of(weight->shape[0], blocks.rows), cols = blocks_of(weight->shape[1], blocks.cols);
    if (scale->dims != 2 || scale->shape[0] != rows || scale->shape[1] != cols)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' must have one scale per block of %lld x %lld, %lld x %lld in all", folder, scale->name,
                       (long long)blocks.rows, (long long)blocks.cols, (long long)rows, (long long)cols);
    return QD_OK;
}

qd_status qd_hf_scale_apply(const qd_safetensors_entry *scale, qd_hf_blocks blocks, int64_t first, int64_t left, int64_t rows,
                            int64_t cols, float *values)
{
    const size_t size = qd_dtype_size(scale->dtype);
    char *scales = malloc((size_t)scale->count * size + 1);
    if (!scales)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld elements of '%s'", (long long)scale->count, scale->name);
    qd_status status = qd_safetensors_read(scale, 0, scale->count, scales);
    for (int64_t r = 0; r < rows && status == QD_OK; r++)
        for (int64_t c = 0; c < cols; c++) {
            int64_t block = (first + r) / blocks.rows * scale->shape[1] + (left + c) / blocks.cols;
            float single;
            uint16_t half;
            if (scale->dtype == QD_BF16) {
                memcpy(&half, scales + block * (int64_t)size, sizeof half);
                single = qd_bf16_to_f32(half);
            } else {
                memcpy(&single, scales + block * (int64_t)size, sizeof single);
            }
            values[r * cols + c] *= single;
        }
    free(scales);
    return status;
}
