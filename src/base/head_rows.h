/* Which rows of a weight, or elements of a bias, belong to which heads: what QK-Clip rescales. */
#ifndef QD_BASE_HEAD_ROWS_H
#define QD_BASE_HEAD_ROWS_H

typedef enum qd_head_rows {
    QD_HEAD_ROWS_NONE,          /* not a weight of queries or keys */
    QD_HEAD_ROWS_QUERY,         /* head_dim rows per head */
    QD_HEAD_ROWS_KEY,           /* head_dim rows per key head, which heads / kv_heads query heads share */
    QD_HEAD_ROWS_LATENT_QUERY,  /* per head `nope` rows without positions, then rotary ones */
    QD_HEAD_ROWS_LATENT_KEY     /* per head `nope` rows of its key, then v_dim of its value */
} qd_head_rows;
#endif
