/*
 * How many cores there are to use: the affinity mask and the CPU quota of the
 * cgroup, in either version and in hybrid layouts. Not the machine's cores:
 * those are of no use to a process that may not run on them.
 */

#include "detect/detect.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/own.h"
#include "base/path.h"

enum {
	CPUS_FIRST = 1024, /* what a fixed cpu_set_t holds */
	CPUS_MAX = 1 << 20,
	FILE_MAX = 4 << 20, /* mountinfo of a host with thousands of containers */
};

/* A cgroup hierarchy that can hold a CPU quota. */
struct hierarchy {
	const char *fstype;
	const char *controller; /* of v1; NULL: v2 */
	int (*quota)(const char *folder);
};

/* Where this process stands in one: the mount, and its folder below it. */
struct place {
	char mount[PATH_MAX], below[PATH_MAX];
	bool found, exact;
};

/* --- files --- */

/* The whole file as a string, or NULL. */
static char *read_text(const char *path)
{
	struct buf text = { 0 };

	if (path_read_file(&text, path, FILE_MAX, NULL) < 0 ||
	    buf_add(&text, "", 1) < 0) {
		buf_fini(&text);
		return NULL;
	}
	return (char *)text.mem;
}

/* The number in folder/name: 0 or -1 where there is none ("max"). */
static int read_number(long long *ret, const char *folder, const char *name)
{
	char path[2 * PATH_MAX + 64];
	OWN_MEM char *text = NULL;
	char *end;

	(void)snprintf(path, sizeof(path), "%s/%s", folder, name);
	text = read_text(path);
	if (!text)
		return -1;
	*ret = strtoll(text, &end, 10);
	return end == text ? -1 : 0;
}

/* --- quotas: of one folder, in cores rounded up, 0 for none --- */

static int cores_of(long long quota, long long period)
{
	long long cores;

	if (quota <= 0 || period <= 0)
		return 0;
	cores = quota / period + (quota % period != 0);
	return cores > INT_MAX ? INT_MAX : (int)cores;
}

static int quota_v2(const char *folder)
{
	char path[2 * PATH_MAX + 64];
	OWN_MEM char *text = NULL;
	long long quota, period = 100000;

	(void)snprintf(path, sizeof(path), "%s/cpu.max", folder);
	text = read_text(path);
	if (!text || sscanf(text, "%lld %lld", &quota, &period) < 1)
		return 0;
	return cores_of(quota, period);
}

static int quota_v1(const char *folder)
{
	long long quota, period;

	if (read_number(&quota, folder, "cpu.cfs_quota_us") < 0 ||
	    read_number(&period, folder, "cpu.cfs_period_us") < 0)
		return 0;
	return cores_of(quota, period);
}

static const struct hierarchy hierarchies[] = {
	{ "cgroup2", NULL, quota_v2 },
	{ "cgroup", "cpu", quota_v1 },
};

/* --- where this process stands --- */

/* Is @word one of the comma-separated @list? */
static bool has_word(const char *list, const char *word)
{
	size_t len = strlen(word);

	while (*list) {
		size_t n = strcspn(list, ",");

		if (n == len && !memcmp(list, word, len))
			return true;
		list += n + (list[n] != 0);
	}
	return false;
}

/* The path of this process in the hierarchy, from /proc/self/cgroup: lines
 * "ID:CONTROLLERS:PATH", in v2 "0::PATH". Moves into @text. */
static char *own_path(char *text, const struct hierarchy *h)
{
	char *save = NULL;

	for (char *line = strtok_r(text, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save)) {
		char *list = strchr(line, ':'),
		     *path = list ? strchr(list + 1, ':') : NULL;

		if (!path)
			continue;
		*path++ = 0;
		list++;
		if (h->controller ? has_word(list, h->controller) : !*list)
			return path;
	}
	return NULL;
}

/* mountinfo writes blanks and backslashes as \ooo. */
static void unescape(char *text)
{
	char *to = text;

	for (const char *p = text; *p; p++) {
		unsigned c;

		if (*p == '\\' && sscanf(p + 1, "%3o", &c) == 1) {
			*to++ = (char)c;
			p += 3;
		} else {
			*to++ = *p;
		}
	}
	*to = 0;
}

/*
 * A mount shows the hierarchy from @root downwards. When our path lies below
 * that, the rest of it is our folder; when it does not (a namespace hides it),
 * all that can be known is the mount itself, and a better mount may follow.
 */
static void consider_mount(struct place *at, const char *root, const char *mount,
			   const char *path)
{
	size_t len = strcmp(root, "/") ? strlen(root) : 0;
	bool exact = !strncmp(path, root, len) && (path[len] == '/' || !path[len]) &&
		     !strstr(path, "/..");

	if (at->exact || (at->found && !exact))
		return;
	at->found = true;
	at->exact = exact;
	(void)snprintf(at->mount, sizeof(at->mount), "%s", mount);
	(void)snprintf(at->below, sizeof(at->below), "%s", exact ? path + len : "");
}

/* One line: "ID PARENT DEV ROOT MOUNT OPTIONS [TAGS...] - FSTYPE SOURCE SUPER" */
static void consider_line(struct place *at, char *line, const struct hierarchy *h,
			  const char *path)
{
	char *tail = strstr(line, " - "), *field[5] = { 0 }, *save = NULL;
	char *fstype, *options;

	if (!tail)
		return;
	*tail = 0;
	fstype = strtok_r(tail + 3, " ", &save);
	(void)strtok_r(NULL, " ", &save);
	options = strtok_r(NULL, " ", &save);
	if (!fstype || strcmp(fstype, h->fstype) ||
	    (h->controller && (!options || !has_word(options, h->controller))))
		return;
	for (int i = 0; i < 5; i++) {
		field[i] = strtok_r(i ? NULL : line, " ", &save);
		if (!field[i])
			return;
	}
	unescape(field[3]);
	unescape(field[4]);
	consider_mount(at, field[3], field[4], path);
}

static void find_place(struct place *at, const char *root, const struct hierarchy *h)
{
	char name[PATH_MAX], *save = NULL;
	OWN_MEM char *cgroup = NULL;
	OWN_MEM char *mounts = NULL;
	const char *path;

	(void)snprintf(name, sizeof(name), "%s/proc/self/cgroup", root);
	cgroup = read_text(name);
	(void)snprintf(name, sizeof(name), "%s/proc/self/mountinfo", root);
	mounts = read_text(name);
	path = cgroup ? own_path(cgroup, h) : NULL;
	if (!path || !mounts)
		return;
	for (char *line = strtok_r(mounts, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save))
		consider_line(at, line, h, path);
}

/* The tightest quota from our folder up to the mount. */
static int tightest(const char *root, const struct hierarchy *h)
{
	OWN_MEM struct place *at = calloc(1, sizeof(*at));
	char folder[3 * PATH_MAX];
	int least = 0;

	if (!at)
		return 0;
	find_place(at, root, h);
	while (at->found) {
		char *slash = strrchr(at->below, '/');
		int cores;

		(void)snprintf(folder, sizeof(folder), "%s%s%s", root, at->mount,
			       at->below);
		cores = h->quota(folder);
		if (cores && (!least || cores < least))
			least = cores;
		if (!slash)
			break;
		*slash = 0;
	}
	return least;
}

int detect_quota(const char *root)
{
	int least = 0;

	for (size_t i = 0; i < sizeof(hierarchies) / sizeof(hierarchies[0]); i++) {
		int cores = tightest(root, &hierarchies[i]);

		if (cores && (!least || cores < least))
			least = cores;
	}
	return least;
}

/* Cores of the affinity mask. The kernel refuses a mask smaller than its own,
 * which is how machines beyond 1024 processors are found. */
static int affinity_cores(void)
{
	for (size_t cpus = CPUS_FIRST; cpus <= CPUS_MAX; cpus *= 4) {
		cpu_set_t *set = CPU_ALLOC(cpus);
		size_t size = CPU_ALLOC_SIZE(cpus);
		int n = 0;

		if (!set)
			return 1;
		if (sched_getaffinity(0, size, set) == 0)
			n = CPU_COUNT_S(size, set);
		else if (errno != EINVAL)
			n = 1;
		CPU_FREE(set);
		if (n)
			return n;
	}
	return 1;
}

int detect_cores(const char *root)
{
	int cores = affinity_cores(), quota = detect_quota(root);

	return quota && quota < cores ? quota : cores;
}
