/* Folders that appear and disappear as a whole. */
#ifndef QD_CKPT_FOLDER_H
#define QD_CKPT_FOLDER_H

#include <quadrille/status.h>

/* fsync of the folder itself: names in it are on the disk. */
qd_status qd_ckpt_sync_folder(const char *path);
/* Removes a folder with all that is in it, links as links; a folder that is not there is fine. */
qd_status qd_ckpt_remove_folder(const char *path);
#endif
