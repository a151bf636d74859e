#ifndef QD_CKPT_CHECKPOINT_IMPL_H
#define QD_CKPT_CHECKPOINT_IMPL_H

#include "ckpt/checkpoint.h"
#include "ckpt/folder.h"

#define QD_CKPT_FORMAT "quadrille checkpoint"
#define QD_CKPT_VERSION 1
#define QD_CKPT_MANIFEST "manifest.json"
#define QD_CKPT_MANIFEST_HASH "manifest.xxh3"
#define QD_CKPT_HASH_TEXT 17

extern const char *const qd_ckpt_kind_names[QD_CKPT_KIND_COUNT];

char *qd_ckpt_path(const char *folder, const char *name); /* folder/name; free it; NULL when memory is out */
void qd_ckpt_hash_text(uint64_t hash, char text[QD_CKPT_HASH_TEXT]);
#endif
