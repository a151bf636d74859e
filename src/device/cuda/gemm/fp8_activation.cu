/* Codes of the results of activation functions, and of the gradients of their inputs, without
 * storing these in between: the largest magnitude is found in a pass of its own, which reads the
 * inputs only, and the cast computes the values again. The gradient also recomputes the result
 * for the weight gradient, whose scale is known from the forward pass. */
#include "device/cuda/gemm/fp8_impl.cuh"
#include "device/cuda/rowwise/activation_impl.cuh"

namespace {

using namespace qd_fp8;

template <int KIND> struct activation_result {
    enum { OUTPUTS = 1, GRADS = 1, SUMMED = 0 };
    qd_activation_args a;
    __device__ __forceinline__ void load(int64_t row, int64_t col, uint32_t (&pairs)[1][VECTOR / 2]) const
    {
        float x[VECTOR], up[VECTOR], y[VECTOR];
        activation_values<KIND, bf16, VECTOR, false>(a, row, col, x, up, y);
#pragma unroll
        for (int k = 0; k < VECTOR / 2; k++)
            pairs[0][k] = pack(y[2 * k], y[2 * k + 1]);
    }
};

/* Outputs: the gradients of the input, or of gate and up, and the result. */
template <int KIND> struct activation_gradient {
    enum { GRADS = gated<KIND>::value ? 2 : 1, OUTPUTS = GRADS + 1, SUMMED = GRADS == 1 };
    qd_activation_args a;
    __device__ __forceinline__ void load(int64_t row, int64_t col, uint32_t (&pairs)[OUTPUTS][VECTOR / 2]) const
    {
        float x[VECTOR], up[VECTOR], y[VECTOR];
        activation_values<KIND, bf16, VECTOR, true>(a, row, col, x, up, y);
#pragma unroll
        for (int k = 0; k < VECTOR / 2; k++) {
            pairs[0][k] = pack(x[2 * k], x[2 * k + 1]);
            if constexpr (GRADS == 2)
                pairs[1][k] = pack(up[2 * k], up[2 * k + 1]);
            pairs[GRADS][k] = pack(y[2 * k], y[2 * k + 1]);
        }
    }
};

template <int KIND> struct kind_constant {
    enum { value = KIND };
};

/* Calls body with the kind as a constant. Kinds were checked. */
template <typename F> qd_status with_kind(qd_activation kind, F body)
{
    switch (kind) {
    case QD_ACT_GELU_TANH: return body(kind_constant<QD_ACT_GELU_TANH>());
    case QD_ACT_GELU: return body(kind_constant<QD_ACT_GELU>());
    case QD_ACT_GEGLU_TANH: return body(kind_constant<QD_ACT_GEGLU_TANH>());
    case QD_ACT_GEGLU: return body(kind_constant<QD_ACT_GEGLU>());
    case QD_ACT_SWIGLU_CLAMPED: return body(kind_constant<QD_ACT_SWIGLU_CLAMPED>());
    case QD_ACT_SWIGLU: break;
    }
    return body(kind_constant<QD_ACT_SWIGLU>());
}

qd_status check(const qd_activation_args *of)
{
    QD_TRY(qd_activation_check("fp8_cast", of));
    if (of->dtype != QD_BF16 || of->rows % CHUNK != 0 || of->cols % CHUNK != 0 || !can_vector(of->cols, of->x, of->dy))
        return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: activations of %lld rows and %lld columns of %s; multiples of %d of bf16 are supported",
                       (long long)of->rows, (long long)of->cols, qd_dtype_name(of->dtype), (int)CHUNK);
    return QD_OK;
}

template <int KIND, bool E5M2> qd_status cast_gradient(qd_stream *stream, const qd_fp8_cast_args *a)
{
    using source = activation_gradient<KIND>;
    outputs to = {};
    for (int o = 0; o < source::GRADS; o++)
        to.of[o] = {(uint8_t *)a->to, (uint8_t *)a->transposed, a->amax, a->cols, o * a->of->cols};
    to.of[source::GRADS] = {NULL, (uint8_t *)a->result_transposed, a->result_amax, a->of->cols, 0};
    return write_codes<source, E5M2>(stream, {*a->of}, to, a, a->of->cols);
}

} // namespace

qd_status qd_cuda_fp8_amax_activation(qd_stream *stream, const qd_amax_args *a)
{
    QD_TRY(check(a->of));
    return with_kind(a->of->kind, [&](auto kind) -> qd_status {
        constexpr int KIND = decltype(kind)::value;
        if (a->of->dy)
            return find_largest<activation_gradient<KIND>>(stream, {*a->of}, a->of->rows, a->of->cols, a->amax);
        return find_largest<activation_result<KIND>>(stream, {*a->of}, a->of->rows, a->of->cols, a->amax);
    });
}

qd_status qd_cuda_fp8_cast_activation(qd_stream *stream, const qd_fp8_cast_args *a)
{
    QD_TRY(check(a->of));
    return with_kind(a->of->kind, [&](auto kind) -> qd_status {
        constexpr int KIND = decltype(kind)::value;
        if (a->of->dy)
            return a->to_dtype == QD_F8E5M2 ? cast_gradient<KIND, true>(stream, a) : cast_gradient<KIND, false>(stream, a);
        outputs to = {};
        to.of[0] = {(uint8_t *)a->to, (uint8_t *)a->transposed, a->amax, a->cols, 0};
        return write_codes<activation_result<KIND>, false>(stream, {*a->of}, to, a, a->cols);
    });
}
