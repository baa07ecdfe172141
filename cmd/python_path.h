#pragma once

/*
 * "import accel" in a Python program: the package that belongs to this accel is
 * put last in the program's PYTHONPATH, where it hides nothing of the user's.
 */

struct strv;

/* The folder to import from: .../python of a source tree that this accel was built
 * in, else PREFIX/lib/accel/python. NULL where there is no package. */
char *python_path_folder(void);

/* Append @folder to PYTHONPATH in @env, unless it is NULL or already there. Returns 1
 * when it was added, 0, or -ENOMEM. */
int python_path_add(struct strv *env, const char *folder);
