/* Descriptors of a GEMM and the algorithms that cuBLASLt offers for it. Only algorithms that are
 * bit-identical on every run are requested: split-k sums are in fp32 in the workspace, in a fixed
 * order, or k is not split. */
#include "device/cuda/gemm/matmul_impl.h"

#include <string.h>

static const struct {
    int fused;
    cublasLtEpilogue_t epilogue;
} epilogues[] = {
    {QD_GEMM_GELU | QD_GEMM_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS},
    {QD_GEMM_GELU, CUBLASLT_EPILOGUE_GELU_AUX},
    {QD_GEMM_GELU_GRAD, CUBLASLT_EPILOGUE_DGELU},
    {QD_GEMM_BIAS_GRAD, CUBLASLT_EPILOGUE_BGRADB}, /* row sums over k of cuBLASLt's second operand, our a */
    {QD_GEMM_BIAS, CUBLASLT_EPILOGUE_BIAS},
    {0, CUBLASLT_EPILOGUE_DEFAULT},
};
enum { EPILOGUES = sizeof epilogues / sizeof *epilogues };

static const uint64_t most_workspace = QD_CUDA_WORKSPACE_BYTES / 2; /* the rest is for sums outside the GEMM */

static cudaDataType_t type_of(int32_t dtype)
{
    switch (dtype) {
    case QD_BF16: return CUDA_R_16BF;
    case QD_F8E4M3: return CUDA_R_8F_E4M3;
    case QD_F8E5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_32F;
    }
}

int64_t qd_gemm_span(int64_t rows, int64_t columns, int64_t ld, qd_dtype dtype)
{
    return rows < 1 ? 0 : ((rows - 1) * ld + columns) * (int64_t)qd_dtype_size(dtype);
}

int qd_gemm_ways(const qd_gemm_key *key, qd_gemm_choice *ways)
{
    int count = 0;
    const int wants = key->wants & QD_GEMM_EPILOGUES;
    const bool fp8 = qd_dtype_is_fp8((qd_dtype)key->a_dtype);
    const bool types = fp8 || (key->a_dtype == key->b_dtype && (key->a_dtype == QD_BF16 || key->c_dtype == QD_F32));
    for (int i = 0; i < EPILOGUES && types && count < QD_GEMM_WAYS - 1; i++) {
        int fused = epilogues[i].fused;
        if ((fused & wants) != fused)
            continue;
        if (fused & QD_GEMM_BIAS && (fp8 ? key->c_dtype != QD_BF16 : key->b_dtype != key->c_dtype))
            continue; /* the epilogue needs a bias of c's type, with fp8 a bf16 one */
        if (fused & QD_GEMM_GELU && (wants & QD_GEMM_BIAS) && !(fused & QD_GEMM_BIAS))
            continue; /* the bias precedes GELU */
        if (fused & (QD_GEMM_GELU | QD_GEMM_GELU_GRAD) && key->ldc % 8)
            continue; /* aux needs such rows */
        ways[count++] = (qd_gemm_choice){.fused = fused};
    }
    if (!fp8)
        ways[count++] = (qd_gemm_choice){.converted = 1};
    return count;
}

static qd_status make_layout(cublasLtMatrixLayout_t *layout, int32_t dtype, int64_t rows, int64_t columns, int64_t ld)
{
    QD_CUBLAS_TRY(cublasLtMatrixLayoutCreate(layout, type_of(dtype), (uint64_t)rows, (uint64_t)columns, ld));
    return QD_OK;
}

static qd_status set(cublasLtMatmulDesc_t how, cublasLtMatmulDescAttributes_t name, const void *value, size_t size)
{
    QD_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(how, name, value, size));
    return QD_OK;
}

static qd_status set_epilogue(cublasLtMatmulDesc_t how, const qd_gemm_key *key, int fused)
{
    /* Addresses are set at each call, but the heuristic considers their alignment. */
    const void *some = (const void *)(uintptr_t)(4096 + key->alignment);
    for (int i = 0; i < EPILOGUES; i++)
        if (epilogues[i].fused == fused)
            QD_TRY(set(how, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogues[i].epilogue, sizeof epilogues[i].epilogue));
    if (fused & (QD_GEMM_BIAS | QD_GEMM_BIAS_GRAD)) {
        cudaDataType_t type = type_of(key->c_dtype);
        QD_TRY(set(how, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
        QD_TRY(set(how, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &some, sizeof some));
    }
    if (fused & (QD_GEMM_GELU | QD_GEMM_GELU_GRAD)) {
        QD_TRY(set(how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &key->ldc, sizeof key->ldc));
        QD_TRY(set(how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &some, sizeof some));
    }
    return QD_OK;
}

static int32_t scale_mode(const qd_gemm_key *key, int scaling)
{
    static const int32_t modes[] = {
        [QD_FP8_TENSOR] = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        [QD_FP8_ROWS] = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
        [QD_FP8_VECTORS] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        [QD_FP8_BLOCKS] = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
    };
    return modes[key->wants / scaling % 4];
}

/* Operands of fp8 have scales; their addresses are set at each call. Sums of blocks of k are scaled
 * and added outside the tensor cores, and have no fast form. */
static qd_status set_fp8(cublasLtMatmulDesc_t how, const qd_gemm_key *key)
{
    const int32_t a_mode = scale_mode(key, QD_GEMM_A_SCALING), b_mode = scale_mode(key, QD_GEMM_B_SCALING);
    const int8_t fast = (key->wants & QD_GEMM_FAST) != 0 && a_mode <= CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    const void *some = (const void *)(uintptr_t)4096;
    if (!qd_dtype_is_fp8((qd_dtype)key->a_dtype))
        return QD_OK;
    QD_TRY(set(how, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    if (a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) {
        QD_TRY(set(how, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &b_mode, sizeof b_mode));
        QD_TRY(set(how, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &a_mode, sizeof a_mode));
    }
    QD_TRY(set(how, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &some, sizeof some));
    return set(how, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &some, sizeof some);
}

static qd_status build(qd_gemm *p)
{
    const qd_gemm_key *key = &p->key;
    const cublasOperation_t plain = CUBLAS_OP_N, transposed = CUBLAS_OP_T;
    QD_CUBLAS_TRY(cublasLtMatmulDescCreate(&p->how, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    QD_TRY(set(p->how, CUBLASLT_MATMUL_DESC_TRANSA, key->trans_b ? &transposed : &plain, sizeof plain));
    QD_TRY(set(p->how, CUBLASLT_MATMUL_DESC_TRANSB, key->trans_a ? &transposed : &plain, sizeof plain));
    QD_TRY(set_epilogue(p->how, key, p->choice.fused));
    QD_TRY(set_fp8(p->how, key));
    /* A row-major (rows, columns) is a column-major (columns, rows). */
    QD_TRY(make_layout(&p->a, key->b_dtype, key->trans_b ? key->k : key->n, key->trans_b ? key->n : key->k, key->ldb));
    QD_TRY(make_layout(&p->b, key->a_dtype, key->trans_a ? key->m : key->k, key->trans_a ? key->k : key->m, key->lda));
    QD_TRY(make_layout(&p->c, key->c_dtype, key->n, key->m, key->ldc));
    return QD_OK;
}

qd_status qd_gemm_build(qd_gemm *p, const qd_gemm_choice *choice)
{
    qd_gemm_choice copy = *choice;
    qd_gemm_unbuild(p);
    p->choice = copy;
    qd_status status = build(p);
    if (status == QD_OK)
        p->built = true;
    else
        qd_gemm_unbuild(p);
    return status;
}

void qd_gemm_unbuild(qd_gemm *p)
{
    if (p->how)
        cublasLtMatmulDescDestroy(p->how);
    if (p->a)
        cublasLtMatrixLayoutDestroy(p->a);
    if (p->b)
        cublasLtMatrixLayoutDestroy(p->b);
    if (p->c)
        cublasLtMatrixLayoutDestroy(p->c);
    p->how = NULL;
    p->a = p->b = p->c = NULL;
    p->built = false;
}

static qd_status set_preference(cublasLtMatmulPreference_t wish, const qd_gemm_key *key)
{
    const uint64_t workspace = most_workspace;
    const uint32_t alignment = (uint32_t)key->alignment;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* in addition to none */
    if (key->c_dtype == QD_F32)
        schemes |= CUBLASLT_REDUCTION_SCHEME_INPLACE; /* accumulates in c's type, in order */
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    QD_CUBLAS_TRY(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                       sizeof workspace));
    QD_CUBLAS_TRY(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                                       sizeof schemes));
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++)
        QD_CUBLAS_TRY(cublasLtMatmulPreferenceSetAttribute(wish, alignments[i], &alignment, sizeof alignment));
    return QD_OK;
}

qd_status qd_gemm_candidates(qd_cuda *cuda, const qd_gemm *p, qd_gemm_choice *choices, int *count)
{
    cublasLtMatmulHeuristicResult_t results[QD_GEMM_CANDIDATES];
    cublasLtMatmulPreference_t wish;
    int found = 0;
    *count = 0;
    QD_CUBLAS_TRY(cublasLtMatmulPreferenceCreate(&wish));
    qd_status status = set_preference(wish, &p->key);
    /* A combination that the library does not support is an error there; here it means no
     * candidates. */
    if (status == QD_OK && cublasLtMatmulAlgoGetHeuristic(cuda->blas_handle, p->how, p->a, p->b, p->c, p->c, wish,
                                                          QD_GEMM_CANDIDATES, results, &found) != CUBLAS_STATUS_SUCCESS)
        found = 0;
    cublasLtMatmulPreferenceDestroy(wish);
    for (int i = 0; i < found; i++) {
        if (results[i].state != CUBLAS_STATUS_SUCCESS)
            continue;
        qd_gemm_choice *c = &choices[(*count)++];
        *c = (qd_gemm_choice){.fused = p->choice.fused,
                              .workspace_bytes = (int64_t)results[i].workspaceSize};
        memcpy(&c->algorithm, &results[i].algo, sizeof c->algorithm);
    }
    return status;
}

/* Settings that variants take from each other. Split-k and its reduction scheme belong together. */
enum { SETTINGS = 6, VALUES = 2 };
static const struct setting {
    struct {
        cublasLtMatmulAlgoConfigAttributes_t name;
        size_t size;
    } values[VALUES];
} settings[SETTINGS] = {
    {{{CUBLASLT_ALGO_CONFIG_TILE_ID, 4}}},
    {{{CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2}}},
    {{{CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4}}},
    {{{CUBLASLT_ALGO_CONFIG_STAGES_ID, 4}}},
    {{{CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4}}},
    {{{CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4}, {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4}}},
};

static uint32_t algorithm_id(const qd_gemm_choice *choice)
{
    uint32_t id = 0;
    size_t written;
    (void)cublasLtMatmulAlgoConfigGetAttribute(&choice->algorithm, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written);
    return id;
}

/* Copies the setting of `from`; false if there is none or it is equal. */
static bool take_setting(const struct setting *s, qd_gemm_choice *to, const qd_gemm_choice *from)
{
    bool changed = false;
    for (int i = 0; i < VALUES && s->values[i].size; i++) {
        uint32_t old = 0, new = 0;
        size_t size = s->values[i].size, written;
        if (cublasLtMatmulAlgoConfigGetAttribute(&to->algorithm, s->values[i].name, &old, size, &written) != CUBLAS_STATUS_SUCCESS ||
            cublasLtMatmulAlgoConfigGetAttribute(&from->algorithm, s->values[i].name, &new, size, &written) != CUBLAS_STATUS_SUCCESS ||
            cublasLtMatmulAlgoConfigSetAttribute(&to->algorithm, s->values[i].name, &new, size) != CUBLAS_STATUS_SUCCESS)
            return false;
        changed |= old != new;
    }
    return changed;
}

static bool known(const qd_gemm_choice *choice, const qd_gemm_choice *among, int count)
{
    for (int i = 0; i < count; i++)
        if (memcmp(&choice->algorithm, &among[i].algorithm, sizeof choice->algorithm) == 0)
            return true;
    return false;
}

/* waves (may be NULL): how many times the algorithm's tiles fill the GPU. */
static bool takes(qd_cuda *cuda, const qd_gemm *p, qd_gemm_choice *choice, float *waves)
{
    cublasLtMatmulHeuristicResult_t result;
    if (cublasLtMatmulAlgoCheck(cuda->blas_handle, p->how, p->a, p->b, p->c, p->c, &choice->algorithm, &result) !=
            CUBLAS_STATUS_SUCCESS ||
        result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > most_workspace)
        return false;
    choice->workspace_bytes = (int64_t)result.workspaceSize;
    if (waves)
        *waves = result.wavesCount;
    return true;
}

static int64_t scaled(int64_t size, int quarters)
{
    return (size * quarters / 4 + 63) / 64 * 64;
}

int qd_gemm_siblings(qd_cuda *cuda, const qd_gemm *p, const qd_gemm_choice *candidates, int count,
                        qd_gemm_choice *siblings)
{
    static const struct {
        int m, n, k; /* quarters of the GEMM's own sizes */
    } sizes[] = {{4, 3, 3}, {4, 6, 6}, {2, 4, 4}, {8, 4, 4}, {4, 3, 4}, {4, 6, 4}, {4, 4, 3}, {4, 4, 6}};
    int made = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        qd_gemm other = {.key = p->key};
        qd_gemm_key *k = &other.key;
        qd_gemm_choice offers[QD_GEMM_CANDIDATES];
        int offered = 0;
        k->m = scaled(k->m, sizes[s].m);
        k->n = scaled(k->n, sizes[s].n);
        k->k = scaled(k->k, sizes[s].k);
        k->lda = k->trans_a ? k->m : k->k;
        k->ldb = k->trans_b ? k->k : k->n;
        k->ldc = k->n;
        if (qd_gemm_build(&other, &p->choice) != QD_OK || qd_gemm_candidates(cuda, &other, offers, &offered) != QD_OK)
            qd_error_clear();
        for (int i = 0; i < offered && made < QD_GEMM_SIBLINGS; i++)
            if (!known(&offers[i], candidates, count) && !known(&offers[i], siblings, made) && takes(cuda, p, &offers[i], NULL))
                siblings[made++] = offers[i];
        qd_gemm_unbuild(&other);
    }
    return made;
}

int qd_gemm_transfers(qd_cuda *cuda, const qd_gemm *p, const qd_gemm_choice *candidates, int count,
                         qd_gemm_choice *transfers)
{
    const qd_gemm_key *k = &p->key;
    int made = 0;
    for (int i = 0; i < cuda->gemms->capacity && made < QD_GEMM_SIBLINGS; i++) {
        const qd_gemm *other = &cuda->gemms->table[i];
        const qd_gemm_key *o = &other->key;
        if (!other->used || other->choice.seconds <= 0 || other->choice.converted || other->choice.fused != p->choice.fused ||
            o->trans_a != k->trans_a || o->trans_b != k->trans_b || o->a_dtype != k->a_dtype || o->b_dtype != k->b_dtype ||
            o->c_dtype != k->c_dtype)
            continue;
        qd_gemm_choice t = other->choice;
        t.seconds = 0;
        if (!known(&t, candidates, count) && !known(&t, transfers, made) && takes(cuda, p, &t, NULL))
            transfers[made++] = t;
    }
    return made;
}

int qd_gemm_variants(qd_cuda *cuda, const qd_gemm *p, const qd_gemm_choice *candidates, int count,
                        qd_gemm_choice *variants)
{
    int made = 0;
    for (int s = 0; s < SETTINGS; s++) {
        const int most = made + QD_GEMM_VARIANTS / SETTINGS;
        for (int pair = 0; pair < count * count && made < most; pair++) {
            const qd_gemm_choice *from = &candidates[pair % count];
            qd_gemm_choice v = candidates[pair / count];
            if (algorithm_id(&v) == algorithm_id(from) && take_setting(&settings[s], &v, from) &&
                !known(&v, candidates, count) && !known(&v, variants, made) && takes(cuda, p, &v, NULL))
                variants[made++] = v;
        }
    }
    return made;
}

/* The values of a setting that an algorithm supports, as far as they can be queried: tiles and
 * stages are listed, the others are ranges. Returns their number. */
static int values_of(const cublasLtMatmulAlgo_t *algorithm, cublasLtMatmulAlgoConfigAttributes_t setting, uint32_t *values, int most)
{
    uint32_t last = 0;
    int count = 0;
    size_t written = 0;
    switch (setting) {
    case CUBLASLT_ALGO_CONFIG_TILE_ID:
    case CUBLASLT_ALGO_CONFIG_STAGES_ID: {
        const bool tiles = setting == CUBLASLT_ALGO_CONFIG_TILE_ID;
        if (cublasLtMatmulAlgoCapGetAttribute(algorithm, tiles ? CUBLASLT_ALGO_CAP_TILE_IDS : CUBLASLT_ALGO_CAP_STAGES_IDS, values,
                                              (size_t)most * sizeof *values, &written) != CUBLAS_STATUS_SUCCESS)
            return 0;
        return (int)(written / sizeof *values);
    }
    case CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION:
        if (cublasLtMatmulAlgoCapGetAttribute(algorithm, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, &last, sizeof last, &written) !=
            CUBLAS_STATUS_SUCCESS)
            return 0;
        break;
    case CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID:
        last = CUBLASLT_CLUSTER_SHAPE_1x16x1; /* beyond it: shapes of which no tile count is a multiple */
        break;
    case CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING:
        last = 1;
        break;
    default:
        return 0;
    }
    for (uint32_t value = 0; value <= last && count < most; value++)
        values[count++] = value;
    return count;
}

int qd_gemm_neighbours(qd_cuda *cuda, const qd_gemm *p, const qd_gemm_choice *candidates, int count,
                          qd_gemm_choice *neighbours)
{
    enum { MOST_VALUES = 1024, SMALLEST = 3 }; /* tiles of a third of the best one's size are not tried */
    uint32_t values[MOST_VALUES];
    qd_gemm_choice best = candidates[0];
    float waves = 0, best_waves = 0;
    int made = 0;
    if (!takes(cuda, p, &best, &best_waves))
        return 0;
    for (int s = SETTINGS - 1; s >= 0; s--) { /* tiles last: they have the most values */
        const cublasLtMatmulAlgoConfigAttributes_t name = settings[s].values[0].name;
        const int offered = values_of(&best.algorithm, name, values, MOST_VALUES);
        for (int i = 0; i < offered && made < QD_GEMM_NEIGHBOURS; i++) {
            qd_gemm_choice n = best;
            if (cublasLtMatmulAlgoConfigSetAttribute(&n.algorithm, name, &values[i], settings[s].values[0].size) == CUBLAS_STATUS_SUCCESS &&
                !known(&n, candidates, count) && !known(&n, neighbours, made) && takes(cuda, p, &n, &waves) &&
                waves < SMALLEST * best_waves)
                neighbours[made++] = n;
        }
    }
    return made;
}

bool qd_gemm_check(qd_cuda *cuda, const qd_gemm *p, const qd_gemm_choice *choice)
{
    cublasLtMatmulHeuristicResult_t result;
    return cublasLtMatmulAlgoCheck(cuda->blas_handle, p->how, p->a, p->b, p->c, p->c, &choice->algorithm, &result) ==
               CUBLAS_STATUS_SUCCESS &&
           result.state == CUBLAS_STATUS_SUCCESS && (int64_t)result.workspaceSize <= choice->workspace_bytes;
}
