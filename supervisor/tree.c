#include "supervisor/tree.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/own.h"

static int read_whole(struct buf *out, const char *path)
{
	OWN_FD int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	for (;;) {
		uint8_t *to = buf_reserve(out, 4096);
		ssize_t n = to ? read(fd, to, 4095) : -1;

		if (n < 0)
			return to ? -errno : -ENOMEM;
		buf_grow(out, (size_t)n);
		if (!n) {
			to[0] = 0;
			return 0;
		}
	}
}

/* The kernel's own list, where it was built with one. */
static int children_listed(on_child_fn *fn, void *data)
{
	struct buf text = { 0 };
	char path[64], *at;
	int n = 0, r;

	(void)snprintf(path, sizeof(path), "/proc/self/task/%d/children", getpid());
	r = read_whole(&text, path);
	at = (char *)buf_data(&text);
	while (!r) {
		char *end;
		long pid = strtol(at, &end, 10);

		if (end == at)
			break;
		fn(data, (pid_t)pid);
		n++;
		at = end;
	}
	buf_fini(&text);
	return r < 0 ? r : n;
}

static pid_t parent_of(const char *pid)
{
	struct buf text = { 0 };
	char path[64];
	int parent = -1;

	(void)snprintf(path, sizeof(path), "/proc/%.20s/stat", pid);
	if (!read_whole(&text, path)) {
		/* The name may hold anything, brackets included. */
		char *end = strrchr((char *)buf_data(&text), ')');

		if (!end || sscanf(end, ") %*c %d", &parent) != 1)
			parent = -1;
	}
	buf_fini(&text);
	return parent;
}

static int children_searched(on_child_fn *fn, void *data)
{
	DIR *dir = opendir("/proc");
	pid_t self = getpid();
	struct dirent *e;
	int n = 0;

	if (!dir)
		return -errno;
	while ((e = readdir(dir))) {
		if (!isdigit((unsigned char)e->d_name[0]) || parent_of(e->d_name) != self)
			continue;
		fn(data, (pid_t)strtol(e->d_name, NULL, 10));
		n++;
	}
	(void)closedir(dir);
	return n;
}

int tree_children(on_child_fn *fn, void *data)
{
	int n = children_listed(fn, data);

	return n < 0 ? children_searched(fn, data) : n;
}

static void kill_child(void *data, pid_t pid)
{
	pid_t group = getpgid(pid);

	(void)data;
	/* The group at one stroke, so that a child cannot fork out of reach. */
	if (group > 1 && group != getpgrp())
		(void)kill(-group, SIGKILL);
	(void)kill(pid, SIGKILL);
}

int tree_kill_children(void)
{
	return tree_children(kill_child, NULL);
}

bool tree_is_empty(void)
{
	siginfo_t info;

	return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 &&
	       errno == ECHILD;
}

void tree_kill_all(void)
{
	for (;;) {
		pid_t pid;

		(void)tree_kill_children();
		while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
			;
		if (pid < 0 && errno == ECHILD)
			return;
		(void)usleep(1000); /* the kernel is taking them down */
	}
}
