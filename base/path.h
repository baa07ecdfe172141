#pragma once

/* Folders and files. */

#include <stddef.h>
#include <sys/types.h>

#include "base/buf.h"

struct err;

/* Create @path and its missing parents with mode 0700 (parents 0777 less the
 * umask). An existing folder is fine. */
int path_make_dirs(const char *path, struct err *err);

/* The same, and refuse (-EPERM) a folder that another user owns or may write. */
int path_private_dir(const char *path, struct err *err);

/* Write @path as a whole: a temporary file beside it, then a rename, so that a
 * reader sees the old bytes or the new ones. */
int path_write_file(const char *path, struct slice data, mode_t mode, struct err *err);

/* Read a file of at most @max bytes (-EFBIG beyond) into @out. */
int path_read_file(struct buf *out, const char *path, size_t max, struct err *err);

/* Find an executable regular file called @name in the folders of @search (a
 * PATH; an empty part is the working folder). Returns 0 with *@ret allocated,
 * or -ENOENT, or -EACCES when only unexecutable ones were there. */
int path_find(char **ret, const char *name, const char *search);

/* Write all of it, whatever it takes. Returns 0 or -errno. */
int fd_write_all(int fd, const void *data, size_t len);

/* Open /dev/null wherever one of the standard descriptors is closed, so that
 * nothing opened later takes its place. */
void fd_open_standard(void);
