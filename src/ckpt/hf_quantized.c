/* Weights that are stored as fp8 with one scale per block, as in the folders of DeepSeek V3, Kimi
 * K2 and the FP8 variants of Qwen3: value = fp8 x scale of its block. The product is exact up to
 * one rounding to fp32. And experts that are stored as MXFP4, as in those of GPT-OSS: value = 4-bit
 * float x a power of 2, which is exact. */
#include "ckpt/huggingface_impl.h"

#include "base/half.h"

#include <math.h>
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

qd_status qd_hf_quantization_read(const qd_json *document, const qd_json_node *config, const qd_hf_family *family, qd_hf_blocks *blocks)
{
    const char *name = qd_json_name(document), *method = qd_json_as_string(qd_json_member(config, "quant_method")),
               *format = qd_json_as_string(qd_json_member(config, "fmt"));
    if (method && strcmp(method, "mxfp4") == 0 && family->stacked) {
        blocks->fp4 = true;
        return QD_OK;
    }
    if (!method || strcmp(method, "fp8") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "%s: the model is quantized ('quantization_config', quant_method '%s'): only fp8 with scales of "
                                       "blocks, and mxfp4 of gpt_oss, can be imported; use the original weights", name,
                       method ? method : "");
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

/* Values that share an exponent, and the bytes they take. */
enum { FP4_BLOCK = 32, FP4_BYTES = FP4_BLOCK / 2, FP4_BIAS = 127 };

qd_status qd_hf_fp4_check(const char *folder, const qd_hf_tensor *tensor, const qd_safetensors_entry *blocks,
                          const qd_safetensors_entry *scales)
{
    const int64_t experts = tensor->shape[0], in = tensor->shape[1], outputs = tensor->shape[2];
    if (blocks->dtype != QD_U8 || scales->dtype != QD_U8)
        return QD_FAIL(QD_UNSUPPORTED, "%s: tensors '%s' and '%s' must have type uint8", folder, blocks->name, scales->name);
    if (in % FP4_BLOCK != 0 || blocks->dims != 4 || blocks->shape[0] != experts || blocks->shape[1] != outputs ||
        blocks->shape[2] != in / FP4_BLOCK || blocks->shape[3] != FP4_BYTES)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' must be %lld x %lld x %g x %d, for inputs in blocks of %d", folder, blocks->name,
                       (long long)experts, (long long)outputs, (double)in / FP4_BLOCK, FP4_BYTES, FP4_BLOCK);
    if (scales->dims != 3 || scales->shape[0] != experts || scales->shape[1] != outputs || scales->shape[2] != in / FP4_BLOCK)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' must be %lld x %lld x %lld, one exponent per block", folder, scales->name,
                       (long long)experts, (long long)outputs, (long long)(in / FP4_BLOCK));
    return QD_OK;
}

/* Sign, two bits of exponent, one of mantissa. */
static float fp4(unsigned bits)
{
    static const float values[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return bits & 8u ? -values[bits & 7u] : values[bits & 7u];
}

qd_status qd_hf_fp4_read(const qd_safetensors_entry *blocks, const qd_safetensors_entry *scales, int64_t expert, int64_t output,
                         int64_t step, int64_t rows, int64_t left, int64_t cols, float *out)
{
    const int64_t groups = scales->shape[2], row_bytes = groups * FP4_BYTES;
    uint8_t *bytes = malloc((size_t)(row_bytes + groups) + 1), *exponents = bytes ? bytes + row_bytes : NULL;
    if (!bytes)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld bytes of '%s'", (long long)row_bytes, blocks->name);
    qd_status status = QD_OK;
    for (int64_t r = 0; r < rows && status == QD_OK; r++) {
        int64_t row = expert * blocks->shape[1] + output + r * step;
        status = qd_safetensors_read(blocks, row * row_bytes, row_bytes, bytes);
        if (status == QD_OK)
            status = qd_safetensors_read(scales, row * groups, groups, exponents);
        for (int64_t c = 0; c < cols && status == QD_OK; c++) {
            int64_t at = left + c;
            unsigned both = bytes[at / 2], bits = at % 2 ? both >> 4 : both & 15u; /* the lower half comes first */
            out[r * cols + c] = ldexpf(fp4(bits), exponents[at / FP4_BLOCK] - FP4_BIAS);
        }
    }
    free(bytes);
    return status;
}
