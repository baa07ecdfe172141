#include "supervisor/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/own.h"

/* Where cgroup2 is mounted: at the top, or beside v1 hierarchies. */
static const char *const mounts[] = { "/sys/fs/cgroup", "/sys/fs/cgroup/unified" };
enum { N_MOUNTS = sizeof(mounts) / sizeof(mounts[0]) };

/* Our own path in the v2 hierarchy: the line "0::/path". */
static int own_path(char *out, size_t size)
{
	char line[4096];
	FILE *f = fopen("/proc/self/cgroup", "re");
	int r = -ENOENT;

	if (!f)
		return -errno;
	while (r < 0 && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "0::/", 4) &&
		    snprintf(out, size, "%s", line + 3) < (int)size)
			r = 0;
	}
	(void)fclose(f);
	return r;
}

/* The place of cgroup @name below our own, on the given mount. */
static int path_on(char *out, size_t size, const char *mount, const char *name)
{
	char own[2048];
	int r = own_path(own, sizeof(own));

	if (!r && snprintf(out, size, "%s%s/accel-%s", mount, strcmp(own, "/") ? own : "",
			   name) >= (int)size)
		r = -ENAMETOOLONG;
	return r;
}

static bool can_kill(const char *path)
{
	char file[PATH_MAX + 16];

	(void)snprintf(file, sizeof(file), "%s/cgroup.kill", path);
	return access(file, W_OK) == 0;
}

int cgroup_new(char *out, size_t size, const char *name)
{
	for (size_t i = 0; i < N_MOUNTS; i++) {
		if (path_on(out, size, mounts[i], name) < 0 || mkdir(out, 0700) < 0)
			continue;
		if (can_kill(out))
			return open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		(void)rmdir(out); /* a tmpfs, or a kernel without cgroup.kill */
	}
	out[0] = 0;
	return -ENOENT;
}

void cgroup_sweep(const char *name)
{
	char path[PATH_MAX];

	for (size_t i = 0; i < N_MOUNTS; i++) {
		if (path_on(path, sizeof(path), mounts[i], name) < 0 || !can_kill(path))
			continue;
		cgroup_kill(path);
		cgroup_remove(path);
	}
}

void cgroup_kill(const char *path)
{
	char file[PATH_MAX + 16];
	OWN_FD int fd = -1;

	(void)snprintf(file, sizeof(file), "%s/cgroup.kill", path);
	fd = open(file, O_WRONLY | O_CLOEXEC);
	if (fd >= 0)
		(void)!write(fd, "1", 1);
}

void cgroup_remove(const char *path)
{
	/* Processes just reaped may be on their way out for a moment. */
	for (int i = 0; i < 50 && rmdir(path) < 0 && errno == EBUSY; i++)
		(void)usleep(2000);
}
