/*
 * accel launch: from options, files and variables to a plan, and the plan to a
 * supervisor. What happens then is run.c's.
 */

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "cmd/cmd.h"
#include "cmd/jobdir.h"
#include "cmd/program.h"
#include "cmd/python_path.h"
#include "cmd/rank_table.h"
#include "cmd/run.h"
#include "cmd/settings.h"
#include "config/config.h"

enum { MAX_OPTIONS = 256, LOST_GRACE_MS = 1000 };

enum { OPT_MODULE = OPT_OF_COMMAND, OPT_NO_PYTHON, OPT_DRY_RUN, OPT_VERBOSE };

static const struct opt launch_options[] = {
	{ .name = "module",
	  .short_name = 'm',
	  .group = "Program",
	  .help = "PROGRAM is a Python module: run it as python -m",
	  .id = OPT_MODULE },
	{ .name = "no-python",
	  .group = "Program",
	  .help = "Run PROGRAM by itself, even if it is a Python file",
	  .id = OPT_NO_PYTHON },
	{ .name = "dry-run",
	  .group = "Other",
	  .help = "Print the rank table and what each worker is given; start nothing",
	  .id = OPT_DRY_RUN },
	{ .name = "verbose",
	  .short_name = 'v',
	  .group = "Other",
	  .help = "Say what is going on",
	  .id = OPT_VERBOSE },
};

enum { N_LAUNCH_OPTIONS = sizeof(launch_options) / sizeof(launch_options[0]) };

static const char intro[] =
	"usage: accel launch [options] PROGRAM [arguments...]\n"
	"\n"
	"Run PROGRAM in several processes that know of each other. PROGRAM is a\n"
	"Python file, a module (-m), or anything executable. Nothing after PROGRAM\n"
	"is read by accel. One process alone reads accel's stdin; several read nothing.\n"
	"\n"
	"  accel launch -n 2 train.py --lr 3e-4\n"
	"  accel launch -n 4 --mixed-precision bf16 -m package.train\n"
	"  accel launch -n 8 ./a.out\n"
	"\n";

static const char outro[] =
	"\n"
	"Every setting may also stand in accel.yaml or a variable, see\n"
	"\"accel config show --origin\". Exit status: that of the first worker that\n"
	"failed (128 + the signal's number if it was killed), 126/127 if it could not "
	"be\n"
	"executed/its interpreter not be found, 128 + the signal that stopped the job\n"
	"(130 Ctrl-C, 143 SIGTERM, 141 nobody reads the output), 2 wrong use, as a\n"
	"PROGRAM that is not there, 3 a bad configuration, 4 the supervisor was lost.\n";

struct launch {
	struct settings settings;
	struct program_options program_options;
	struct program program;
	bool dry_run, verbose;
};

static int on_option(void *data, const struct opt *o, const char *value, struct err *err)
{
	struct launch *l = data;
	bool on;

	if (o->id < OPT_OF_COMMAND)
		return settings_option(&l->settings, o, value, err);
	if (parse_bool(&on, value) < 0)
		return err_set(err, -EINVAL, "--%s is on or off, not '%s'", o->name,
			       value);
	switch (o->id) {
	case OPT_MODULE:
		l->program_options.is_module = on;
		break;
	case OPT_NO_PYTHON:
		l->program_options.no_python = on;
		break;
	case OPT_DRY_RUN:
		l->dry_run = on;
		break;
	case OPT_VERBOSE:
		l->verbose = on;
		break;
	}
	return 0;
}

static size_t all_options(struct opt *table)
{
	size_t n = settings_options(table, MAX_OPTIONS - N_LAUNCH_OPTIONS);

	memcpy(table + n, launch_options, sizeof(launch_options));
	return n + N_LAUNCH_OPTIONS;
}

static int print_help(const struct opt *table, size_t n)
{
	struct buf out = { 0 };

	(void)buf_add_str(&out, intro);
	(void)opt_help(&out, table, n, terminal_width());
	(void)buf_add_str(&out, outro);
	return print_out(&out);
}

/* ---- the plan ---- */

/* In the background, the terminal's keys belong to somebody else. */
static bool stdin_is_ours(void)
{
	return !isatty(STDIN_FILENO) || tcgetpgrp(STDIN_FILENO) == getpgrp();
}

static uint32_t plan_flags(const struct launch *l, uint32_t n)
{
	uint32_t flags = 0;

	if (config_bool(l->settings.config, SET_CPU))
		flags |= PLAN_CPU;
	if (n == 1 && stdin_is_ours())
		flags |= PLAN_STDIN;
	/* A file or a pipe gets every line; people can scroll back no further. */
	if (isatty(STDOUT_FILENO))
		flags |= PLAN_SKIP_SCREEN;
	if (l->verbose)
		flags |= PLAN_VERBOSE;
	return flags;
}

static int make_list(struct buf *body, struct slice_list *list, const struct strv *from)
{
	int r = 0;

	for (size_t i = 0; i < from->n && !r; i++)
		r = slice_list_add(body, &list->n, from->v[i], strlen(from->v[i]));
	list->body = buf_slice(body);
	return r;
}

/* What the user has, and where the Python package is. */
static int make_env(const struct launch *l, struct strv *env)
{
	OWN_MEM char *folder = l->program.is_python ? python_path_folder() : NULL;
	int r = settings_env(&l->settings, env);

	if (!r && python_path_add(env, folder) < 0)
		r = -ENOMEM;
	return r;
}

static int start_job(const struct launch *l, const struct jobdir *job, const char *acceld,
		     int *ret_refused)
{
	const struct config *c = l->settings.config;
	uint32_t n = (uint32_t)config_int(c, SET_NUM_PROCESSES);
	uint64_t grace_ms = config_duration_ms(c, SET_GRACE);
	struct buf argv = { 0 }, env_body = { 0 };
	struct strv env = { 0 };
	struct msg_plan plan = {
		.job = slice_str(job->id),
		.job_dir = slice_str(job->dir),
		.socket = slice_str(job->socket),
		.program = slice_str(l->program.name),
		.path = slice_str(l->program.path),
		.n_processes = n,
		.flags = plan_flags(l, n),
		.mixed_precision = slice_str(config_str(c, SET_MIXED_PRECISION)),
		.master_addr = slice_str(settings_master_addr()),
		.master_port = (uint32_t)config_int(c, SET_MASTER_PORT),
		.grace_ms = grace_ms > UINT32_MAX ? UINT32_MAX : (uint32_t)grace_ms,
		.lost_grace_ms = LOST_GRACE_MS,
	};
	struct run_options o = {
		.acceld = acceld,
		.job = job->id,
		.job_dir = job->dir,
		.socket = job->socket,
		.path = l->program.path,
		.n_processes = n,
		.grace_ms = plan.grace_ms,
		.verbose = l->verbose,
	};
	int r = make_env(l, &env);

	if (!r)
		r = make_list(&argv, &plan.argv, &l->program.argv);
	if (!r)
		r = make_list(&env_body, &plan.env, &env);
	if (r < 0)
		say_error("make the plan: out of memory", "");
	else
		r = run_job(&o, &plan, ret_refused);
	buf_fini(&argv);
	buf_fini(&env_body);
	strv_fini(&env);
	return r;
}

static void say_start(const struct launch *l, const struct jobdir *job)
{
	const struct config *c = l->settings.config;
	long long n = config_int(c, SET_NUM_PROCESSES);

	say_warning("job %s: %lld process%s on %s, mixed precision %s", job->id, n,
		    n == 1 ? "" : "es",
		    config_bool(c, SET_CPU) || !l->settings.devices.count
			    ? "cpu"
			    : l->settings.devices.kind,
		    config_str(c, SET_MIXED_PRECISION));
	say_warning("files of the job: %s", job->dir);
}

static int launch(struct launch *l)
{
	const char *log_dir = config_str(l->settings.config, SET_LOG_DIR);
	OWN_MEM char *acceld = NULL;
	const char *hint;
	struct jobdir job;
	struct err e = { 0 };
	bool fallback;
	int r, refused = 0;

	if (run_find_acceld(&acceld, &e) < 0) {
		say_error(e.text, "Install accel again, or build both programs.");
		return EXIT_BUG;
	}
	if (jobdir_init(&job, log_dir, &fallback, &hint, &e) < 0) {
		say_error(e.text, hint);
		return EXIT_USAGE;
	}
	if (fallback)
		say_warning("no home folder can be written; the job's files are in %s",
			    job.dir);
	if (l->verbose)
		say_start(l, &job);
	r = start_job(l, &job, acceld, &refused);
	if (r < 0)
		jobdir_undo(&job);
	else
		jobdir_fini(&job);
	return r == RUN_REFUSED ? refused : r < 0 ? EXIT_BUG : r;
}

/* ---- from the command line ---- */

static int no_program(void)
{
	say_error("launch: no program to run",
		  "Say what to run: accel launch [options] PROGRAM [arguments...]");
	return EXIT_USAGE;
}

static const char *hint_of(int code)
{
	switch (code) {
	case -EACCES:
		return "Make it executable (chmod +x), or name its interpreter first: "
		       "accel launch bash FILE";
	case -EISDIR:
		return "Name the file to run in it, or a module with -m.";
	default:
		return "A Python file is named with its .py, a module with -m, anything "
		       "else as a shell would.";
	}
}

static int resolve_and_launch(struct launch *l, int argc, char **argv)
{
	struct err e = { 0 };
	int code;

	l->settings.show_devices = l->verbose || l->dry_run;
	code = settings_finish(&l->settings);
	if (code)
		return code;
	l->program_options.python = config_str(l->settings.config, SET_PYTHON);
	if (program_resolve(&l->program, &l->program_options, argc, argv, environ, &e) <
	    0) {
		(void)err_wrap(&e, e.code, "launch");
		say_error(e.text, strstr(e.text, "interpreter")
					  ? "Name one that is there with --python."
					  : hint_of(e.code));
		return EXIT_USAGE;
	}
	return l->dry_run ? rank_table_print(&l->settings, &l->program) : launch(l);
}

int cmd_launch(int argc, char **argv)
{
	struct launch l = { .program_options = { .accel = program_invocation_name } };
	struct opt table[MAX_OPTIONS];
	size_t n = all_options(table);
	struct err e = { 0 };
	int first, code;

	if (settings_init(&l.settings, &e) < 0) {
		say_error(e.text, "");
		return EXIT_BUG;
	}
	first = opt_parse(table, n, argc, argv, on_option, &l, &e);
	if (first >= 0 && l.settings.help) {
		code = print_help(table, n);
	} else if (first < 0) {
		say_error(e.text, "accel launch --help lists the options.");
		code = EXIT_USAGE;
	} else if (first == argc) {
		code = no_program();
	} else {
		code = resolve_and_launch(&l, argc - first, argv + first);
	}
	program_fini(&l.program);
	settings_fini(&l.settings);
	return code;
}
