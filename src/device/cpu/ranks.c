/* Kernels between ranks. They run in the calling thread and do not use the pool: the communication
 * progress thread calls them while the rank's own thread computes with the pool. */
#include "device/cpu/cpu_impl.h"
#include "device/sum.h"

#include <string.h>

enum { BLOCK_BYTES = 8192 }; /* block size of a sum: the other outputs are copied from the first while it is in L1 */

qd_status qd_cpu_sum_ranks(qd_stream *stream, const qd_sum_ranks_args *a)
{
    (void)stream;
    int64_t size = (int64_t)qd_dtype_size(a->dtype);
    for (int s = 0; s < a->segment_count; s++) {
        qd_sum_segment segment = a->segments[s];
        int64_t block = a->out_count > 1 ? BLOCK_BYTES / size : segment.count;
        for (int64_t at = 0; at < segment.count; at += block) {
            int64_t length = segment.count - at < block ? segment.count - at : block;
            const void *sources[QD_SUM_RANKS_MOST];
            for (int k = 0; k < a->source_count; k++)
                sources[k] = (const char *)a->sources[k] + (segment.in + at) * size;
            char *first = (char *)a->outs[0] + (segment.out + at) * size;
            qd_sum_tree(first, sources, a->source_count, length, a->dtype, a->reduce);
            for (int j = 1; j < a->out_count; j++)
                memcpy((char *)a->outs[j] + (segment.out + at) * size, first, (size_t)(length * size));
        }
    }
    return QD_OK;
}

qd_status qd_cpu_copy_pieces(qd_stream *stream, const qd_copy_pieces_args *a)
{
    (void)stream;
    for (int i = 0; i < a->count; i++)
        memcpy(a->pieces[i].to, a->pieces[i].from, (size_t)a->pieces[i].bytes);
    return QD_OK;
}
