#include "cmd/python_path.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/own.h"
#include "base/strv.h"

/* Seen from the folder of the executable. */
static const char *const places[] = { "../python", "../lib/accel/python" };

/* A colon would make two folders of one. */
static bool has_package(const char *folder)
{
	OWN_MEM char *init = NULL;

	return !strchr(folder, ':') &&
	       asprintf(&init, "%s/accel/__init__.py", folder) >= 0 &&
	       access(init, R_OK) == 0;
}

char *python_path_folder(void)
{
	OWN_MEM char *exe = realpath("/proc/self/exe", NULL);
	char *slash = exe ? strrchr(exe, '/') : NULL;

	if (!slash)
		return NULL;
	*slash = 0;
	for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
		OWN_MEM char *path = NULL, *folder = NULL;

		if (asprintf(&path, "%s/%s", exe, places[i]) < 0)
			return NULL;
		folder = realpath(path, NULL);
		if (folder && has_package(folder))
			return take(folder);
	}
	return NULL;
}

static bool has_part(const char *list, const char *part)
{
	size_t want = strlen(part);

	while (*list) {
		size_t len = strcspn(list, ":");

		if (len == want && !strncmp(list, part, len))
			return true;
		list += len + (list[len] == ':');
	}
	return false;
}

int python_path_add(struct strv *env, const char *folder)
{
	const char *user = strv_env_get(env, "PYTHONPATH");
	OWN_MEM char *value = NULL;

	if (!folder || (user && has_part(user, folder)))
		return 0;
	/* An empty one counts as none to Python. */
	if (!user || !*user)
		return strv_env_set(env, "PYTHONPATH", folder) < 0 ? -ENOMEM : 1;
	if (asprintf(&value, "%s:%s", user, folder) < 0 ||
	    strv_env_set(env, "PYTHONPATH", value) < 0)
		return -ENOMEM;
	return 1;
}
