#include "cmd/program.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "base/own.h"
#include "base/path.h"
#include "base/strv.h"

static const char *const prefix_variables[] = { "VIRTUAL_ENV", "CONDA_PREFIX" };

void program_fini(struct program *p)
{
	free(p->path);
	free(p->name);
	strv_fini(&p->argv);
	*p = (struct program){ 0 };
}

static const char *search_path(char *const *env)
{
	const char *path = env_get(env, "PATH");

	return path ? path : "/usr/local/bin:/usr/bin:/bin";
}

/* ---- the interpreter ---- */

static bool is_on_path(const char *folder, const char *path)
{
	size_t len = strlen(folder);

	while (*path) {
		size_t part = strcspn(path, ":");

		if (part == len && !strncmp(path, folder, len))
			return true;
		path += part + (path[part] == ':');
	}
	return false;
}

/* The folder of the accel being run, as it was called: a link in a virtual
 * environment counts as being there. */
static char *own_folder(const char *accel, char *const *env)
{
	char *path = NULL, *slash;

	if (strchr(accel, '/'))
		path = strdup(accel);
	else if (path_find(&path, accel, search_path(env)) < 0)
		path = realpath("/proc/self/exe", NULL);
	slash = path ? strrchr(path, '/') : NULL;
	if (!slash) {
		free(path);
		return NULL;
	}
	*slash = 0;
	return path;
}

static int python_of_own_venv(char **ret, const char *accel, char *const *env)
{
	OWN_MEM char *folder = own_folder(accel, env);
	OWN_MEM char *mark = NULL, *python = NULL;

	if (!folder || asprintf(&mark, "%s/../pyvenv.cfg", folder) < 0 ||
	    asprintf(&python, "%s/python", folder) < 0)
		return -ENOENT;
	if (access(mark, F_OK) < 0 || access(python, X_OK) < 0)
		return -ENOENT;
	*ret = take(python);
	return 0;
}

static int python_of_prefix(char **ret, char *const *env)
{
	for (size_t i = 0; i < sizeof(prefix_variables) / sizeof(char *); i++) {
		const char *prefix = env_get(env, prefix_variables[i]);
		OWN_MEM char *folder = NULL, *python = NULL;

		if (!prefix || !*prefix || asprintf(&folder, "%s/bin", prefix) < 0 ||
		    asprintf(&python, "%s/python", folder) < 0)
			continue;
		if (!is_on_path(folder, search_path(env)) || access(python, X_OK) < 0)
			continue;
		*ret = take(python);
		return 0;
	}
	return -ENOENT;
}

static int python_given(char **ret, const char *python, char *const *env, struct err *err)
{
	struct stat st;
	int r;

	if (!strchr(python, '/')) {
		r = path_find(ret, python, search_path(env));
		return r < 0 ? err_set(err, r,
				       "find the interpreter %s: it is not on PATH",
				       python)
			     : 0;
	}
	if (stat(python, &st) < 0)
		return err_sys(err, "find the interpreter %s", python);
	if (!S_ISREG(st.st_mode) || access(python, X_OK) < 0)
		return err_set(err, -EACCES,
			       "find the interpreter %s: it is not an executable file",
			       python);
	*ret = strdup(python);
	return *ret ? 0 : err_set(err, -ENOMEM, "find the interpreter");
}

int program_python(char **ret, const struct program_options *o, char *const *env,
		   struct err *err)
{
	if (o->python)
		return python_given(ret, o->python, env, err);
	if (python_of_own_venv(ret, o->accel, env) == 0 ||
	    python_of_prefix(ret, env) == 0)
		return 0;
	if (path_find(ret, "python3", search_path(env)) == 0)
		return 0;
	return err_set(err, -ENOENT, "find a Python interpreter: no python3 on PATH");
}

/* ---- the program ---- */

static bool ends_with(const char *text, const char *end)
{
	size_t len = strlen(text), want = strlen(end);

	return len >= want && !strcmp(text + len - want, end);
}

static int check_file(const char *path, int mode, struct err *err)
{
	struct stat st;

	if (stat(path, &st) < 0)
		return err_sys(err, "open %s", path);
	if (S_ISDIR(st.st_mode))
		return err_set(err, -EISDIR, "open %s: it is a folder", path);
	if (access(path, mode) < 0)
		return err_sys(err, "open %s", path);
	return 0;
}

static int add_python(struct program *p, const struct program_options *o,
		      char *const *env, struct err *err)
{
	int r = program_python(&p->path, o, env, err);

	if (r < 0)
		return r;
	p->is_python = true;
	if (strv_add(&p->argv, p->path) < 0 || strv_add(&p->argv, "-u") < 0)
		return err_set(err, -ENOMEM, "program");
	return 0;
}

static int resolve_module(struct program *p, const struct program_options *o,
			  const char *module, char *const *env, struct err *err)
{
	int r = add_python(p, o, env, err);

	if (!r && (strv_add(&p->argv, "-m") < 0 || strv_add(&p->argv, module) < 0))
		r = err_set(err, -ENOMEM, "program");
	return r;
}

static int resolve_python_file(struct program *p, const struct program_options *o,
			       const char *file, char *const *env, struct err *err)
{
	int r = check_file(file, R_OK, err);
	/* Python would take a name with a leading dash for an option. */
	const char *here = file[0] == '-' ? "./" : "";

	if (!r)
		r = add_python(p, o, env, err);
	if (!r && strv_addf(&p->argv, "%s%s", here, file) < 0)
		r = err_set(err, -ENOMEM, "program");
	return r;
}

/* The words of a "#!" line: interpreter, and at most one argument. */
static int read_shebang(const char *path, struct strv *words)
{
	char line[512];
	OWN_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
	char *at = line + 2, *end;

	if (n < 2 || line[0] != '#' || line[1] != '!')
		return -ENOEXEC;
	line[n] = 0;
	line[strcspn(line, "\r\n")] = 0;
	at += strspn(at, " \t");
	end = at + strcspn(at, " \t");
	if (end == at || strv_addn(words, at, (size_t)(end - at)) < 0)
		return -ENOEXEC;
	at = end + strspn(end, " \t");
	for (end = at + strlen(at); end > at && isspace((unsigned char)end[-1]); end--)
		;
	return end > at ? strv_addn(words, at, (size_t)(end - at)) : 0;
}

static bool names_python(const char *word)
{
	const char *slash = strrchr(word, '/');

	return strstr(slash ? slash + 1 : word, "python");
}

/* The interpreter itself, or a script that names it: "#!/usr/bin/env python3". */
static bool runs_python(const char *path)
{
	struct strv words = { 0 };
	bool yes = names_python(path);

	if (!yes && read_shebang(path, &words) == 0)
		for (size_t i = 0; i < words.n; i++)
			yes = yes || names_python(words.v[i]);
	strv_fini(&words);
	return yes;
}

/* A script that nobody made executable still says what runs it. */
static int resolve_script(struct program *p, const char *path, struct err *err)
{
	int r = check_file(path, R_OK, err);

	if (r < 0)
		return r;
	if (read_shebang(path, &p->argv) < 0)
		return err_set(err, -EACCES, "run %s: it is not executable", path);
	p->is_python = runs_python(path);
	p->path = strdup(p->argv.v[0]);
	if (!p->path || strv_add(&p->argv, path) < 0)
		return err_set(err, -ENOMEM, "program");
	return check_file(p->path, X_OK, err);
}

static int resolve_executable(struct program *p, const char *word, char *const *env,
			      struct err *err)
{
	int r = -ENOENT;

	if (!strchr(word, '/')) {
		r = path_find(&p->path, word, search_path(env));
		if (r < 0 && access(word, F_OK) < 0)
			return err_set(
				err, r,
				"find %s: it is neither on PATH nor in this folder",
				word);
		if (r < 0 && asprintf(&p->path, "./%s", word) < 0)
			return err_set(err, -ENOMEM, "program");
	} else {
		p->path = strdup(word);
	}
	if (!p->path)
		return err_set(err, -ENOMEM, "program");
	r = check_file(p->path, F_OK, err);
	if (r < 0)
		return r;
	if (access(p->path, X_OK) < 0) {
		OWN_MEM char *script = take(p->path);

		return resolve_script(p, script, err);
	}
	p->is_python = runs_python(p->path);
	return strv_add(&p->argv, word) < 0 ? err_set(err, -ENOMEM, "program") : 0;
}

int program_resolve(struct program *p, const struct program_options *o, int argc,
		    char **argv, char *const *env, struct err *err)
{
	int r;

	*p = (struct program){ .name = strdup(argv[0]) };
	if (!p->name)
		return err_set(err, -ENOMEM, "program");
	if (!*p->name)
		r = err_set(err, -ENOENT, "the program's name is empty");
	else if (o->is_module)
		r = resolve_module(p, o, argv[0], env, err);
	else if (!o->no_python && ends_with(argv[0], ".py"))
		r = resolve_python_file(p, o, argv[0], env, err);
	else
		r = resolve_executable(p, argv[0], env, err);
	for (int i = 1; i < argc && !r; i++)
		if (strv_add(&p->argv, argv[i]) < 0)
			r = err_set(err, -ENOMEM, "program");
	if (r < 0)
		program_fini(p);
	return r;
}
