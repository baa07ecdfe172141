/*
 * Which configuration file a launch reads. It looks for a file and does not open
 * it.
 */

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "base/own.h"
#include "base/strv.h"
#include "config/config.h"

static const char project_file[] = "accel.yaml";
static const char user_file[] = "accel/config.yaml";

/* A variable that is empty counts as not set. */
static const char *env_get_set(char *const *env, const char *name)
{
	const char *value = env_get(env, name);

	return value && *value ? value : NULL;
}

static bool is_file(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
}

/* Returns 1 when folder/name is a file, 0 when not, or -ENOMEM. */
static int try_file(char **ret, const char *folder, const char *name)
{
	OWN_MEM char *path = NULL;
	size_t len = strlen(folder);

	if (asprintf(&path, "%s%s%s", folder, len && folder[len - 1] == '/' ? "" : "/",
		     name) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	if (!is_file(path))
		return 0;
	*ret = take(path);
	return 1;
}

/* A folder that holds .git (a file in worktrees and submodules). */
static bool is_repository(const char *folder)
{
	char path[PATH_MAX];
	struct stat st;

	return snprintf(path, sizeof(path), "%s/.git", folder) < PATH_MAX &&
	       stat(path, &st) == 0;
}

/* Move up. Returns false at the top. */
static bool to_parent(char *folder)
{
	char *slash = strrchr(folder, '/');

	if (!slash || !slash[1])
		return false;
	slash[slash == folder] = 0;
	return true;
}

static bool in_repository(const char *cwd)
{
	OWN_MEM char *folder = strdup(cwd);

	if (!folder)
		return false;
	do
		if (is_repository(folder))
			return true;
	while (to_parent(folder));
	return false;
}

/* Outside of a repository only @cwd counts: whose the folders above it are (/tmp,
 * say) nobody knows. */
static int find_project_file(char **ret, const char *cwd)
{
	OWN_MEM char *folder = strdup(cwd);
	bool go_up = in_repository(cwd), last;
	int r;

	if (!folder)
		return -ENOMEM;
	do {
		r = try_file(ret, folder, project_file);
		last = !go_up || is_repository(folder);
	} while (r == 0 && !last && to_parent(folder));
	return r;
}

static int find_user_file(char **ret, char *const *env)
{
	const char *config = env_get_set(env, "XDG_CONFIG_HOME"),
		   *home = env_get_set(env, "HOME");
	OWN_MEM char *folder = NULL;

	/* The XDG specification has relative paths ignored. */
	if (config && *config == '/')
		return try_file(ret, config, user_file);
	if (!home)
		return 0;
	if (asprintf(&folder, "%s/.config", home) < 0) {
		folder = NULL;
		return -ENOMEM;
	}
	return try_file(ret, folder, user_file);
}

int config_find_file(char **ret, const char *cwd, char *const *env, struct err *err)
{
	const char *named = env_get_set(env, "ACCEL_CONFIG");
	int r;

	if (named) {
		if (!is_file(named))
			return err_set(err, -ENOENT, "ACCEL_CONFIG: %s is not a file",
				       named);
		*ret = strdup(named);
		return *ret ? 1 : err_set(err, -ENOMEM, "find configuration file");
	}
	r = find_project_file(ret, cwd);
	if (r == 0)
		r = find_user_file(ret, env);
	return r < 0 ? err_set(err, r, "find configuration file") : r;
}
