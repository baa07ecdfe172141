#include "supervisor/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/own.h"

/* Where cgroup2 is mounted: at the top, or beside v1 hierarchies. */
static const char *const mounts[] = { "/sys/fs/cgroup", "/sys/fs/cgroup/unified" };

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

int cgroup_new(char *out, size_t size, const char *name)
{
	char own[2048], path[4096], procs[4200];

	out[0] = 0;
	if (own_path(own, sizeof(own)) < 0)
		return -ENOENT;
	for (size_t i = 0; i < sizeof(mounts) / sizeof(mounts[0]); i++) {
		int n = snprintf(path, sizeof(path), "%s%s/accel-%s", mounts[i],
				 strcmp(own, "/") ? own : "", name);

		(void)snprintf(procs, sizeof(procs), "%s/cgroup.kill", path);
		if ((size_t)n >= size || mkdir(path, 0700) < 0)
			continue;
		if (access(procs, W_OK) == 0) {
			(void)strcpy(out, path);
			return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		}
		(void)rmdir(path); /* a tmpfs, or a kernel without cgroup.kill */
	}
	return -ENOENT;
}

void cgroup_kill(const char *path)
{
	char file[4200];
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
