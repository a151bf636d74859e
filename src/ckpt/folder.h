/* Durable creation and recursive removal of folders. */
#ifndef QD_CKPT_FOLDER_H
#define QD_CKPT_FOLDER_H

#include <quadrille/status.h>

/* fsync of the folder itself, which makes the names in it durable. */
qd_status qd_ckpt_sync_folder(const char *path);
/* Removes a folder recursively without following links; a missing folder is fine. */
qd_status qd_ckpt_remove_folder(const char *path);
#endif
