/* accel status: asks every job of this user, through its control socket. */

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "base/strv.h"
#include "cmd/cmd.h"
#include "cmd/jobdir.h"
#include "rendezvous/messages.h"
#include "supervisor/cgroup.h"
#include "supervisor/control.h"

enum { ANSWER_MS = 1000, PACKET_MAX = 16384 };

enum { OPT_JSON = 1, OPT_STATUS_HELP };

static const struct opt options[] = {
	{ .name = "json", .group = "Options", .help = "Print JSON", .id = OPT_JSON },
	{ .name = "help",
	  .short_name = 'h',
	  .group = "Options",
	  .help = "Show this text",
	  .id = OPT_STATUS_HELP },
};
enum { N_OPTIONS = sizeof(options) / sizeof(options[0]) };

struct listing {
	bool json, help;
	json_t *jobs;
	struct buf text;
	int n;
};

static int ask(int fd, uint8_t *packet, struct msg_status *ret)
{
	struct msg_status_ask question = { 0 };
	struct timeval limit = { .tv_sec = ANSWER_MS / 1000 };
	struct buf out = { 0 };
	struct frame f;
	ssize_t n;
	int r = frame_encode(&out, MSG_STATUS_ASK, 0, message_of(MSG_STATUS_ASK),
			     &question);

	(void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	if (!r && send(fd, buf_data(&out), buf_len(&out), MSG_NOSIGNAL) < 0)
		r = -errno;
	buf_fini(&out);
	if (r < 0)
		return r;
	n = recv(fd, packet, PACKET_MAX, 0);
	if (n <= 0 || frame_decode(slice_of(packet, (size_t)n), &f, NULL) != 1 ||
	    f.type != MSG_STATUS)
		return -EPROTO;
	return wire_decode(message_of(MSG_STATUS), f.body, ret, NULL);
}

static void print_age(struct buf *out, uint64_t started_us)
{
	uint64_t now = wall_us(), s = now > started_us ? (now - started_us) / 1000000 : 0;

	if (s < 60)
		(void)buf_addf(out, "%llu s", (unsigned long long)s);
	else if (s < 3600)
		(void)buf_addf(out, "%llu min", (unsigned long long)(s / 60));
	else
		(void)buf_addf(out, "%llu h %llu min", (unsigned long long)(s / 3600),
			       (unsigned long long)(s / 60 % 60));
}

/* "step 120", or "steps 118 to 120" where ranks are apart. */
static void print_steps(struct buf *out, const struct msg_status *s)
{
	if (s->step_lowest < s->step_highest)
		(void)buf_addf(out, ", steps %llu to %llu",
			       (unsigned long long)s->step_lowest,
			       (unsigned long long)s->step_highest);
	else if (s->step_highest)
		(void)buf_addf(out, ", step %llu", (unsigned long long)s->step_highest);
}

static json_t *text_json(struct slice s)
{
	json_t *j = json_stringn((const char *)s.data, s.len);

	return j ? j : json_string("(not UTF-8)");
}

static void add_json(struct listing *l, const struct msg_status *s)
{
	json_t *o =
		json_pack("{s:o, s:o, s:o, s:i, s:i, s:i, s:i, s:b, s:i, s:f}", "job",
			  text_json(s->job), "program", text_json(s->program), "job_dir",
			  text_json(s->job_dir), "pid", (int)s->pid, "num_processes",
			  (int)s->n_workers, "running", (int)s->n_running, "attempt",
			  (int)s->attempt, "stopping", s->stopping != 0, "master_port",
			  (int)s->master_port, "started", (double)s->started_us / 1e6);

	(void)json_object_set_new(o, "step_lowest",
				  json_integer((json_int_t)s->step_lowest));
	(void)json_object_set_new(o, "step_highest",
				  json_integer((json_int_t)s->step_highest));
	(void)json_array_append_new(l->jobs, o);
}

static void add_job(struct listing *l, const struct msg_status *s)
{
	OWN_MEM char *program = slice_dup(s->program), *dir = slice_dup(s->job_dir);
	char shown[2][512];

	l->n++;
	if (l->json) {
		add_json(l, s);
		return;
	}
	(void)buf_addf(&l->text, "%.*s  %u of %u running%s, ", (int)s->job.len,
		       (const char *)s->job.data, s->n_running, s->n_workers,
		       s->stopping ? " (stopping)" : "");
	print_age(&l->text, s->started_us);
	print_steps(&l->text, s);
	(void)buf_addf(&l->text,
		       "  %s\n    pid %u (kill it to stop the job), files: %s\n",
		       printable(shown[0], sizeof(shown[0]), program ? program : ""),
		       s->pid, printable(shown[1], sizeof(shown[1]), dir ? dir : ""));
}

/* accel, keeper and daemon of that job were killed at once, and there was nobody
 * left to do this. */
static void remove_remains(const char *path, const char *name)
{
	OWN_MEM char *job = strndup(name, strlen(name) - strlen(".sock"));

	if (job)
		cgroup_sweep(job);
	control_remove(path);
}

static void try_socket(struct listing *l, const char *dir, const char *name)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	uint8_t packet[PACKET_MAX];
	struct msg_status status;
	OWN_FD int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0 || snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/%s", dir,
			       name) >= (int)sizeof(addr.sun_path))
		return;
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		if (errno == ECONNREFUSED)
			remove_remains(addr.sun_path, name);
		return;
	}
	if (ask(fd, packet, &status) == 0)
		add_job(l, &status);
}

static void try_folder(struct listing *l, const char *path)
{
	DIR *dir = opendir(path);
	struct dirent *e;
	struct stat st;

	if (!dir)
		return;
	/* In the temporary folder somebody else may have made it. */
	while (fstat(dirfd(dir), &st) == 0 && st.st_uid == geteuid() &&
	       (e = readdir(dir))) {
		size_t len = strlen(e->d_name);

		if (len > 5 && !strcmp(e->d_name + len - 5, ".sock"))
			try_socket(l, path, e->d_name);
	}
	(void)closedir(dir);
}

static int on_option(void *data, const struct opt *o, const char *value, struct err *err)
{
	struct listing *l = data;
	bool on;

	if (parse_bool(&on, value) < 0)
		return err_set(err, -EINVAL, "--%s is on or off, not '%s'", o->name,
			       value);
	if (o->id == OPT_JSON)
		l->json = on;
	else
		l->help = on;
	return 0;
}

static int print_help(void)
{
	struct buf out = { 0 };

	(void)buf_add_str(&out, "usage: accel status [--json]\n\n"
				"List your jobs that run on this machine.\n");
	(void)opt_help(&out, options, N_OPTIONS, terminal_width());
	return print_out(&out);
}

static int print_listing(struct listing *l)
{
	OWN_MEM char *json = NULL;

	if (l->json) {
		json = json_dumps(l->jobs, JSON_INDENT(2) | JSON_REAL_PRECISION(16));
		(void)buf_addf(&l->text, "%s\n", json ? json : "[]");
	} else if (!l->n) {
		(void)buf_add_str(&l->text, "no jobs\n");
	}
	return print_out(&l->text);
}

int cmd_status(int argc, char **argv)
{
	struct listing l = { 0 };
	struct strv folders = { 0 };
	struct err e = { 0 };
	int first = opt_parse(options, N_OPTIONS, argc, argv, on_option, &l, &e);
	int code;

	if (first < 0 || first < argc) {
		say_error(first < 0 ? e.text : "status: takes no arguments",
			  "accel status --help lists the options.");
		return EXIT_USAGE;
	}
	if (l.help)
		return print_help();
	l.jobs = json_array();
	(void)jobdir_socket_dirs(&folders);
	for (size_t i = 0; i < folders.n; i++)
		try_folder(&l, folders.v[i]);
	code = print_listing(&l);
	strv_fini(&folders);
	json_decref(l.jobs);
	return code;
}
