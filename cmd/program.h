#pragma once

/* From what the user typed to a file to execute and its argument vector. */

#include <stdbool.h>

#include "base/strv.h"

struct config;
struct err;

struct program {
	char *path;       /* the file to execute */
	struct strv argv; /* argv[0] as the program will see it */
	char *name;       /* as the user called it */
	bool is_python;   /* an interpreter runs it, as far as can be told */
};

struct program_options {
	bool is_module;     /* -m: the first word is a module */
	bool no_python;     /* never through an interpreter */
	const char *python; /* --python, or NULL */
	const char *accel;  /* argv[0] of the accel being run */
};

/*
 * A Python file runs as "python -u FILE", a module as "python -u -m MODULE",
 * anything else by itself: a path as given, a bare name as found on PATH, else
 * in the working folder. A script with a #! line needs no execute permission.
 * -ENOENT, -EACCES, -EISDIR, -ENOEXEC with a sentence.
 */
int program_resolve(struct program *p, const struct program_options *o, int argc,
		    char **argv, char *const *env, struct err *err);
void program_fini(struct program *p);

/* The interpreter: @o->python; else python beside the accel being run, if that
 * is a virtual environment; else that of $VIRTUAL_ENV or $CONDA_PREFIX, when
 * its folder is on PATH; else python3. */
int program_python(char **ret, const struct program_options *o, char *const *env,
		   struct err *err);
