/*
 * Folders and files, by path: making, checking, reading and writing whole. No
 * knowledge of what accel keeps where.
 */

#include "base/path.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/own.h"

enum {
	NAME_TRIES = 16,
	READ_STEP = 2048,
};

/* --- folders --- */

static int make_parents(const char *path)
{
	OWN_MEM char *part = strdup(path);
	size_t len = strlen(path);

	if (!part)
		return -ENOMEM;
	while (len > 1 && part[len - 1] == '/')
		part[--len] = 0;
	/* Those that exist may be closed to us (EEXIST comes first), which is fine as
	 * long as the last one can be made. */
	for (char *p = strchr(part + 1, '/'); p; p = strchr(p + 1, '/')) {
		*p = 0;
		if (mkdir(part, 0777) < 0 && errno != EEXIST)
			return -errno;
		*p = '/';
	}
	return 0;
}

int path_make_dirs(const char *path, struct err *err)
{
	struct stat st;
	int r = mkdir(path, 0700) < 0 ? -errno : 0;

	if (r == -ENOENT && *path) {
		r = make_parents(path);
		if (r == 0 && mkdir(path, 0700) < 0)
			r = -errno;
	}
	if (r == -EEXIST) {
		r = stat(path, &st) < 0 ? -errno : 0;
		if (r == 0 && !S_ISDIR(st.st_mode))
			r = -ENOTDIR;
	}
	if (r < 0)
		return err_set(err, r, "create folder %s: %s", path, strerror(-r));
	return 0;
}

int path_private_dir(const char *path, struct err *err)
{
	struct stat link, st;
	int r = path_make_dirs(path, err);

	if (r < 0)
		return r;
	/* In a folder like /tmp anybody can have put a link here that leads to a place
	 * of his choice, even to one of ours. */
	if (lstat(path, &link) < 0 || stat(path, &st) < 0)
		return err_sys(err, "folder %s", path);
	if (S_ISLNK(link.st_mode) && link.st_uid != geteuid() && link.st_uid)
		return err_set(err, -EPERM, "folder %s: is a link made by another user",
			       path);
	if (st.st_uid != geteuid())
		return err_set(err, -EPERM, "folder %s: belongs to another user", path);
	if (st.st_mode & (S_IWGRP | S_IWOTH))
		return err_set(err, -EPERM,
			       "folder %s: other users may write there (mode %04o)", path,
			       st.st_mode & 07777);
	return 0;
}

/* --- files --- */

int fd_write_all(int fd, const void *data, size_t len)
{
	const char *p = data;

	while (len) {
		ssize_t n = write(fd, p, len);

		if (n >= 0) {
			p += n;
			len -= (size_t)n;
		} else if (errno == EAGAIN) {
			/* The descriptor's owner may have made it nonblocking for
			 * everybody, as with a terminal that is shared. */
			struct pollfd wait = { .fd = fd, .events = POLLOUT };

			(void)poll(&wait, 1, -1);
		} else if (errno != EINTR) {
			return -errno;
		}
	}
	return 0;
}

/* Writing goes to a new file and never through a link or into one that somebody
 * has open: what is at @path stays whole until the rename. */

/* Open a new file beside @path. Returns it with *@ret_name allocated. */
static int open_beside(char **ret_name, const char *path, mode_t mode)
{
	for (int i = 0; i < NAME_TRIES; i++) {
		OWN_MEM char *name = NULL;
		unsigned long long chance;
		int fd;

		if (getrandom(&chance, sizeof(chance), 0) < 0)
			return -errno;
		if (asprintf(&name, "%s.%016llx", path, chance) < 0) {
			name = NULL;
			return -ENOMEM;
		}
		fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
			  mode);
		if (fd >= 0) {
			*ret_name = take(name);
			return fd;
		}
		if (errno != EEXIST)
			return -errno;
	}
	return -EEXIST;
}

static int write_and_rename(const char *name, int *fd, const char *path,
			    struct slice data)
{
	int r = fd_write_all(*fd, data.data, data.len);

	/* Some file systems tell of a full disk only here. */
	if (close(take_fd(fd)) < 0 && r == 0)
		r = -errno;
	if (r == 0 && rename(name, path) < 0)
		r = -errno;
	if (r < 0)
		(void)unlink(name);
	return r;
}

int path_write_file(const char *path, struct slice data, mode_t mode, struct err *err)
{
	OWN_MEM char *name = NULL;
	OWN_FD int fd = open_beside(&name, path, mode);
	int r = fd;

	if (r >= 0)
		r = write_and_rename(name, &fd, path, data);
	if (r < 0)
		return err_set(err, r, "write %s: %s", path, strerror(-r));
	return 0;
}

/* Returns 0 at the end of the file, 1 after some bytes. */
static int read_step(struct buf *out, int fd)
{
	uint8_t *to = buf_reserve(out, READ_STEP);
	size_t room = out->cap - out->end; /* it grows by doubling */
	ssize_t n;

	if (!to)
		return -ENOMEM;
	do
		n = read(fd, to, room);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	buf_grow(out, (size_t)n);
	return n > 0;
}

int path_read_file(struct buf *out, const char *path, size_t max, struct err *err)
{
	OWN_FD int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	size_t had = buf_len(out);
	int r = fd < 0 ? -errno : 1;

	while (r > 0) {
		r = read_step(out, fd);
		if (r > 0 && buf_len(out) - had > max)
			r = -EFBIG;
	}
	if (r == 0)
		return 0;
	out->end = out->start + had;
	return err_set(err, r, "read %s: %s", path, strerror(-r));
}

/* 0, -ENOENT, or -EACCES for a file that is there and may not be executed. */
static int check_program(const char *path)
{
	struct stat st;

	if (stat(path, &st) < 0)
		return -ENOENT;
	if (!S_ISREG(st.st_mode))
		return -EACCES;
	return faccessat(AT_FDCWD, path, X_OK, AT_EACCESS) < 0 ? -EACCES : 0;
}

int path_find(char **ret, const char *name, const char *search)
{
	const char *p = *name && !strchr(name, '/') ? search : NULL;
	int found = -ENOENT;

	/* A name with a slash is a path, and nothing to search for. */
	while (p) {
		size_t len = strcspn(p, ":");
		OWN_MEM char *path = NULL;
		int r;

		if (asprintf(&path, "%.*s/%s", len ? (int)len : 1, len ? p : ".", name) <
		    0) {
			path = NULL;
			return -ENOMEM;
		}
		r = check_program(path);
		if (r == 0) {
			*ret = take(path);
			return 0;
		}
		if (r == -EACCES)
			found = r;
		p = p[len] ? p + len + 1 : NULL;
	}
	return found;
}

void fd_open_standard(void)
{
	int fd = open("/dev/null", O_RDWR);

	while (fd >= 0 && fd < 3)
		fd = open("/dev/null", O_RDWR);
	if (fd > 2)
		(void)close(fd);
}
