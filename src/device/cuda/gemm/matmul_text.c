/* Choices as text, one line each, for other ranks and later runs:
 *
 *   quadrille tuning 4; NVIDIA H200, 132 multiprocessors; cuBLASLt 130002; cuDNN 91900; any order
 *   product 65536 2304 768 strides 768 768 2304 NT 1 1 1 wants 2 fused 2 converted 0 rough 0 \
 *       workspace 0 us 351.200 algorithm 3f00…        (one line in the text)
 *   attention forward …
 *
 * A `product` line is a GEMM; types are numbers of qd_dtype. Choices hold for one kind of device
 * and one version of the libraries: a text with another first line is ignored. */
#include "device/cuda/gemm/matmul_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER = 512, HEX = 2 * sizeof(cublasLtMatmulAlgo_t) };

static void write_header(const qd_cuda *cuda, char *text)
{
    snprintf(text, HEADER, "quadrille tuning 4; %s, %d multiprocessors; cuBLASLt %zu; cuDNN %zu; %s", cuda->properties.name,
             cuda->properties.multiProcessorCount, cublasLtGetVersion(), cudnnGetVersion(),
             cuda->deterministic ? "deterministic" : "any order");
}

static void write_gemm(qd_strbuf *text, const qd_gemm *p)
{
    const qd_gemm_key *k = &p->key;
    unsigned char bytes[sizeof p->choice.algorithm];
    memcpy(bytes, &p->choice.algorithm, sizeof bytes);
    qd_strbuf_printf(text, "product %lld %lld %lld strides %lld %lld %lld %c%c %d %d %d wants %d fused %d converted %d rough %d "
                           "workspace %lld us %.3f algorithm ",
                     (long long)k->m, (long long)k->n, (long long)k->k, (long long)k->lda, (long long)k->ldb,
                     (long long)k->ldc, k->trans_a ? 'T' : 'N', k->trans_b ? 'T' : 'N', (int)k->a_dtype, (int)k->b_dtype,
                     (int)k->c_dtype, (int)k->wants, (int)p->choice.fused, (int)p->choice.converted,
                     (int)p->choice.rough, (long long)p->choice.workspace_bytes, p->choice.seconds * 1e6);
    for (size_t i = 0; i < sizeof bytes; i++)
        qd_strbuf_printf(text, "%02x", bytes[i]);
    qd_strbuf_puts(text, "\n");
}

qd_status qd_cuda_tuning_get(qd_device *device, qd_strbuf *text)
{
    const qd_cuda *cuda = (const qd_cuda *)device;
    char header[HEADER];
    write_header(cuda, header);
    qd_strbuf_printf(text, "%s\n", header);
    for (int i = 0; i < cuda->gemms->capacity; i++)
        if (cuda->gemms->table[i].used && cuda->gemms->table[i].choice.seconds > 0)
            write_gemm(text, &cuda->gemms->table[i]);
    qd_cuda_attention_tuning_get(cuda, text);
    return QD_OK;
}

static bool read_hex(const char *hex, unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        unsigned value;
        if (sscanf(hex + 2 * i, "%2x", &value) != 1)
            return false;
        bytes[i] = (unsigned char)value;
    }
    return true;
}

static qd_status read_gemm(qd_cuda *cuda, const char *line)
{
    long long s[6], workspace;
    char ta, tb, hex[HEX + 1];
    int d[3], wants, fused, converted, rough;
    double us;
    _Static_assert(HEX == 128, "the format below reads 128 digits");
    if (sscanf(line, "product %lld %lld %lld strides %lld %lld %lld %c%c %d %d %d wants %d fused %d converted %d rough %d "
                     "workspace %lld us %lf algorithm %128s", &s[0], &s[1], &s[2], &s[3], &s[4], &s[5], &ta, &tb, &d[0], &d[1], &d[2],
               &wants, &fused, &converted, &rough, &workspace, &us, hex) != 18 || strlen(hex) != HEX)
        return QD_FAIL(QD_CORRUPT, "tuning text: not a valid GEMM line: %.80s", line);
    qd_gemm_key key = {
        .m = s[0], .n = s[1], .k = s[2], .lda = s[3], .ldb = s[4], .ldc = s[5], .trans_a = ta == 'T', .trans_b = tb == 'T',
        .a_dtype = d[0], .b_dtype = d[1], .c_dtype = d[2], .wants = wants, .alignment = 16,
    };
    qd_gemm_choice choice = {.fused = fused, .converted = converted, .rough = rough, .workspace_bytes = workspace, .seconds = us * 1e-6};
    unsigned char bytes[sizeof choice.algorithm];
    if (!read_hex(hex, bytes, sizeof bytes))
        return QD_FAIL(QD_CORRUPT, "tuning text: the algorithm is not hexadecimal: %.80s", line);
    memcpy(&choice.algorithm, bytes, sizeof bytes);
    qd_gemm *gemm;
    QD_TRY(qd_gemm_find(cuda->gemms, &key, &gemm));
    qd_gemm_unbuild(gemm);
    gemm->choice = choice;
    return QD_OK;
}

qd_status qd_cuda_tuning_set(qd_device *device, const char *text)
{
    qd_cuda *cuda = (qd_cuda *)device;
    char header[HEADER];
    write_header(cuda, header);
    size_t length = strlen(header);
    if (strncmp(text, header, length) != 0 || text[length] != '\n')
        return QD_OK;
    for (const char *at = text + length + 1; *at;) {
        char line[1024];
        size_t size = strcspn(at, "\n");
        if (size >= sizeof line)
            return QD_FAIL(QD_CORRUPT, "tuning text: a line of %zu characters is too long", size);
        memcpy(line, at, size);
        line[size] = '\0';
        at += size + (at[size] == '\n');
        if (strncmp(line, "product ", 8) == 0)
            QD_TRY(read_gemm(cuda, line));
        else if (strncmp(line, "attention ", 10) == 0)
            QD_TRY(qd_cuda_attention_tuning_set(cuda, line));
        else if (*line)
            return QD_FAIL(QD_CORRUPT, "tuning text: an unknown line: %.80s", line);
    }
    return QD_OK;
}
