/* Builds tensor maps for TMA with the driver's encoder, which is looked up at run time. */
#include "device/cuda/experts/tensor_map_impl.h"

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                    const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The encoder function of the driver, which is not linked. NULL if the driver has none. */
static encode_function find_encode()
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    return (encode_function)found;
}

static encode_function encode()
{
    static const encode_function found = find_encode();
    return found;
}

bool qd_cuda_has_tensor_maps(void)
{
    return encode() != NULL;
}

qd_status qd_cuda_tensor_map(CUtensorMap *map, const void *p, int64_t tables, int64_t rows, int64_t cols, int box_rows)
{
    const cuuint64_t sizes[] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)tables};
    const cuuint64_t strides[] = {(cuuint64_t)cols * 2, (cuuint64_t)(rows * cols) * 2};
    const cuuint32_t box[] = {64, (cuuint32_t)box_rows, 1}, steps[] = {1, 1, 1};
    CUresult result = encode()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, tables ? 3 : 2, (void *)p, sizes, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return QD_FAIL(QD_SYSTEM, "cuda: cuTensorMapEncodeTiled: error %d for %lld tables of (%lld, %lld)", (int)result, (long long)tables,
                       (long long)rows, (long long)cols);
    return QD_OK;
}
