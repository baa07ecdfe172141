#include "cmd/jobdir.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

#include "base/err.h"
#include "base/own.h"
#include "base/path.h"
#include "base/strv.h"

static const char letters[] =
	"abcdefghijkmnpqrstuvwxyz23456789"; /* 32, without l, o, 0, 1 */

/* A variable that holds an absolute path, as the XDG rules want it. */
static const char *folder_variable(const char *name)
{
	const char *value = getenv(name);

	return value && value[0] == '/' ? value : NULL;
}

static const char *temporary_folder(void)
{
	const char *dir = folder_variable("TMPDIR");

	return dir ? dir : "/tmp";
}

static int make_id(char *out, size_t size, struct err *err)
{
	time_t now = time(NULL);
	uint8_t r[4];
	struct tm tm;
	size_t n;

	if (getrandom(r, sizeof(r), 0) != sizeof(r))
		return err_sys(err, "random bytes");
	(void)localtime_r(&now, &tm);
	n = strftime(out, size, "%Y%m%d-%H%M%S-", &tm);
	for (size_t i = 0; i < sizeof(r); i++)
		out[n++] = letters[r[i] % 32];
	out[n] = 0;
	return 0;
}

/* Folders for jobs, best first; the last is in the temporary folder. */
static int job_folders(struct strv *out)
{
	const char *state = folder_variable("XDG_STATE_HOME");
	const char *home = folder_variable("HOME");
	int r = 0;

	if (state)
		r = strv_addf(out, "%s/accel/jobs", state);
	else if (home)
		r = strv_addf(out, "%s/.local/state/accel/jobs", home);
	if (!r)
		r = strv_addf(out, "%s/accel-%d/jobs", temporary_folder(), geteuid());
	return r;
}

int jobdir_socket_dirs(struct strv *out)
{
	const char *runtime = folder_variable("XDG_RUNTIME_DIR");
	int r = runtime ? strv_addf(out, "%s/accel", runtime) : 0;

	if (!r)
		r = strv_addf(out, "%s/accel-%d", temporary_folder(), geteuid());
	if (!r && strcmp(temporary_folder(), "/tmp"))
		r = strv_addf(out, "/tmp/accel-%d", geteuid());
	/* Others may have taken our name in the temporary folder, but not here. */
	if (!r && folder_variable("XDG_STATE_HOME"))
		r = strv_addf(out, "%s/accel/run", folder_variable("XDG_STATE_HOME"));
	else if (!r && folder_variable("HOME"))
		r = strv_addf(out, "%s/.local/state/accel/run", folder_variable("HOME"));
	return r;
}

/* @parent/ID, which must be new. */
static int make_job_folder(struct jobdir *j, const char *parent, struct err *err)
{
	OWN_MEM char *dir = NULL;
	int r = path_make_dirs(parent, err);

	if (r < 0)
		return r;
	if (asprintf(&dir, "%s/%s", parent, j->id) < 0)
		return err_set(err, -ENOMEM, "job folder");
	if (mkdir(dir, 0700) < 0)
		return err_sys(err, "make folder %s", dir);
	j->dir = realpath(dir, NULL);
	return j->dir ? 0 : err_sys(err, "open folder %s", dir);
}

/* Drop the last part of @path. False when there is no more than one. */
static bool strip_part(char *path)
{
	char *slash = strrchr(path, '/');

	while (slash && slash > path && !slash[1]) {
		*slash = 0;
		slash = strrchr(path, '/');
	}
	if (!slash || slash == path)
		return false;
	*slash = 0;
	return true;
}

/* The topmost folder of @path that is not there yet, or NULL. */
static char *first_missing(const char *path)
{
	OWN_MEM char *at = strdup(path);
	char *missing = NULL;

	while (at && access(at, F_OK) < 0) {
		free(missing);
		missing = strdup(at);
		if (!strip_part(at))
			break;
	}
	return missing;
}

static int make_in_log_dir(struct jobdir *j, const char *log_dir, struct err *err)
{
	int r;

	j->created = first_missing(log_dir);
	if (j->created)
		j->log_dir = strdup(log_dir);
	r = make_job_folder(j, log_dir, err);
	return r < 0 ? err_wrap(err, r, "keep the job's files in %s", log_dir) : 0;
}

static int make_in_default(struct jobdir *j, bool *ret_fallback, struct err *err)
{
	struct strv folders = { 0 };
	int r = job_folders(&folders);

	if (r < 0)
		return err_set(err, r, "job folder");
	for (size_t i = 0; i < folders.n; i++) {
		bool last = i + 1 == folders.n;
		OWN_MEM char *above = NULL;

		*ret_fallback = last;
		if (last &&
		    asprintf(&above, "%s/accel-%d", temporary_folder(), geteuid()) < 0)
			above = NULL;
		/* Anyone may write into the temporary folder: ours must be ours. */
		r = above ? path_private_dir(above, err) : 0;
		if (!r)
			r = make_job_folder(j, folders.v[i], err);
		if (!r)
			break;
	}
	strv_fini(&folders);
	return r < 0 ? err_wrap(err, r, "keep the job's files") : 0;
}

static int make_socket_folder(struct jobdir *j, struct err *err)
{
	struct strv folders = { 0 };
	int r = jobdir_socket_dirs(&folders);

	if (r < 0)
		return err_set(err, r, "socket folder");
	r = -ENAMETOOLONG;
	for (size_t i = 0; i < folders.n && !j->socket; i++) {
		if (strlen(folders.v[i]) + strlen(j->id) + sizeof("/.sock") >
		    sizeof(((struct sockaddr_un *)0)->sun_path)) {
			(void)err_set(err, r, "%s is too long for a socket's path",
				      folders.v[i]);
			continue;
		}
		r = path_private_dir(folders.v[i], err);
		if (!r && asprintf(&j->socket, "%s/%s.sock", folders.v[i], j->id) < 0)
			j->socket = NULL;
	}
	strv_fini(&folders);
	return j->socket ? 0 : err_wrap(err, r, "make a folder for the job's socket");
}

int jobdir_init(struct jobdir *j, const char *log_dir, bool *ret_fallback,
		const char **ret_hint, struct err *err)
{
	int r;

	*j = (struct jobdir){ 0 };
	*ret_fallback = false;
	*ret_hint = log_dir ? "Name a folder you may write with --log-dir."
			    : "Set XDG_STATE_HOME, or name a folder with --log-dir.";
	r = make_id(j->id, sizeof(j->id), err);
	if (!r)
		r = log_dir ? make_in_log_dir(j, log_dir, err)
			    : make_in_default(j, ret_fallback, err);
	if (!r) {
		*ret_hint =
			"Set XDG_RUNTIME_DIR to a folder of your own, of a short path.";
		r = make_socket_folder(j, err);
	}
	if (r < 0)
		jobdir_undo(j);
	return r;
}

void jobdir_undo(struct jobdir *j)
{
	static const char *const files[] = { "plan.json", "events.jsonl", "report.json" };
	char path[PATH_MAX];

	for (size_t i = 0; j->dir && i < sizeof(files) / sizeof(files[0]); i++) {
		(void)snprintf(path, sizeof(path), "%s/%s", j->dir, files[i]);
		(void)unlink(path);
	}
	if (j->dir) {
		(void)snprintf(path, sizeof(path), "%s/attempt-0", j->dir);
		(void)rmdir(path);
		(void)rmdir(j->dir);
	}
	while (j->log_dir && rmdir(j->log_dir) == 0 &&
	       strlen(j->log_dir) > strlen(j->created) && strip_part(j->log_dir))
		;
	jobdir_fini(j);
}

void jobdir_fini(struct jobdir *j)
{
	free(j->dir);
	free(j->socket);
	free(j->log_dir);
	free(j->created);
	*j = (struct jobdir){ 0 };
}
