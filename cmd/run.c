#include "cmd/run.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "base/path.h"
#include "cmd/cmd.h"
#include "cmd/screen.h"
#include "cmd/verdict_block.h"
#include "rendezvous/link.h"
#include "supervisor/cgroup.h"
#include "supervisor/control.h"
#include "supervisor/tree.h"

/* What the terminal has not taken beyond this stays with the supervisor. */
enum { BACKLOG_MAX = 256 << 10, READER_MS = 1000, SUPERVISOR_MS = 5000 };

/* What each signal to accel does to the job: the workers get @first, and
 * SIGKILL after the grace; a second such signal is SIGKILL at once. */
static const struct stop_rule {
	int signo, first;
} stop_rules[] = {
	{ SIGINT, SIGINT },
	{ SIGTERM, SIGTERM },
	{ SIGHUP, SIGTERM },
	{ SIGQUIT, SIGQUIT },
};
/* These are passed on and mean what they mean to the program. */
static const int passed_on[] = { SIGUSR1, SIGUSR2 };
enum {
	N_STOP_RULES = sizeof(stop_rules) / sizeof(stop_rules[0]),
	N_PASSED_ON = sizeof(passed_on) / sizeof(passed_on[0]),
};

struct run {
	const struct run_options *o;
	struct loop *loop;
	struct link *link;
	struct screen *screen;
	struct timer *reader_limit, *supervisor_limit;
	struct sigwatch *signals[N_STOP_RULES + N_PASSED_ON];
	pid_t keeper, daemon;
	int keeper_status;
	bool has_others; /* children that are not of the job */
	bool sigpipe_was_ignored;
	sigset_t old_mask;

	int n_stops;     /* how often the user asked */
	int stop_reason; /* the first signal, or 0 */
	bool ended;      /* the supervisor has said its last word */
	bool refused;
	bool told_error;
	int exit_code;
};

/* ---- stopping ---- */

/* No more waiting for whoever should read the output. */
static void give_up_reader(void *data)
{
	struct run *r = data;

	screen_give_up(r->screen);
	if (r->link)
		link_hold(r->link, false);
}

/* Told to kill at once, it has not even done that. Its workers die with it. */
static void give_up_supervisor(void *data)
{
	struct run *r = data;

	screen_say(r->screen, "accel: the supervisor does not answer; killing it");
	(void)kill(-r->keeper, SIGKILL);
}

static void ask_stop(struct run *r, int first, int reason)
{
	struct msg_stop msg = {
		.signo = r->n_stops ? SIGKILL : first,
		.grace_ms = r->n_stops ? 0 : r->o->grace_ms,
		.reason = (uint32_t)reason,
	};

	if (!r->stop_reason)
		r->stop_reason = reason;
	r->n_stops++;
	(void)link_send(r->link, MSG_STOP, &msg);
	/* Twice means now; once means when the grace is over at the latest. */
	if (r->n_stops > 1) {
		give_up_reader(r);
		timer_start(r->supervisor_limit, SUPERVISOR_MS);
	} else {
		timer_start(r->reader_limit, r->o->grace_ms + READER_MS);
	}
}

static void on_stop_signal(void *data, int signo)
{
	struct run *r = data;
	const struct stop_rule *rule = stop_rules;

	while (rule->signo != signo)
		rule++;
	ask_stop(r, rule->first, signo);
	if (signo == SIGINT && r->n_stops == 1)
		screen_say(r->screen,
			   "%saccel: stopping (SIGKILL in %g s; Ctrl-C again: at once)",
			   /* The terminal has just shown "^C". */
			   isatty(STDERR_FILENO) ? "\n" : "", r->o->grace_ms / 1e3);
}

static void on_pass_signal(void *data, int signo)
{
	struct run *r = data;
	struct msg_signal msg = { .signo = signo };

	(void)link_send(r->link, MSG_SIGNAL, &msg);
}

/* A signal that was ignored when we came, as under nohup, stays ignored. */
static int watch_signal(struct run *r, int i, int signo, on_signal_fn *fn,
			struct err *err)
{
	struct sigaction old;

	(void)sigaction(signo, NULL, &old);
	if (old.sa_handler == SIG_IGN)
		return 0;
	return sigwatch_new(&r->signals[i], r->loop, signo, fn, r, err);
}

static int watch_signals(struct run *r, struct err *err)
{
	int e = 0;

	for (int i = 0; i < N_STOP_RULES && !e; i++)
		e = watch_signal(r, i, stop_rules[i].signo, on_stop_signal, err);
	for (int i = 0; i < N_PASSED_ON && !e; i++)
		e = watch_signal(r, N_STOP_RULES + i, passed_on[i], on_pass_signal, err);
	return e;
}

/* ---- what the supervisor says ---- */

static void on_change(void *data)
{
	struct run *r = data;
	int error = screen_error(r->screen);

	if (r->link)
		link_hold(r->link, screen_backlog(r->screen) > BACKLOG_MAX);
	if (!error || r->told_error)
		return;
	r->told_error = true;
	/* A reader that left ends a pipeline; the job is a part of it. */
	if (error == EPIPE && !r->ended && !r->n_stops)
		ask_stop(r, SIGTERM, SIGPIPE);
	else if (error != EPIPE && !r->ended)
		screen_say(r->screen, "accel: write to stdout: %s; all output is in %s",
			   strerror(error), r->o->job_dir);
}

static void on_refused(struct run *r, const struct msg_refused *msg)
{
	screen_say(r->screen, "accel: %.*s", (int)msg->text.len,
		   (const char *)msg->text.data);
	if (msg->hint.len)
		screen_say(r->screen, "%.*s", (int)msg->hint.len,
			   (const char *)msg->hint.data);
	r->ended = r->refused = true;
	r->exit_code = (int)msg->exit_code;
}

static void on_verdict(struct run *r, const struct msg_verdict *v)
{
	screen_finish_lines(r->screen);
	verdict_block(r->screen, v, r->o);
	r->ended = true;
	r->exit_code = (int)v->exit_code;
}

static void on_message(void *data, unsigned type, const union message_any *msg)
{
	struct run *r = data;

	switch (type) {
	case MSG_OUTPUT:
		screen_output(r->screen, &msg->output);
		if (screen_backlog(r->screen) > BACKLOG_MAX)
			link_hold(r->link, true);
		break;
	case MSG_NOTE:
		if (msg->note.level == NOTE_WARNING || r->o->verbose)
			screen_say(r->screen, "accel: %.*s", (int)msg->note.text.len,
				   (const char *)msg->note.text.data);
		break;
	case MSG_ACCEPTED:
		r->daemon = (pid_t)msg->accepted.pid;
		if (r->o->verbose)
			screen_say(r->screen, "accel: the store is on port %u",
				   msg->accepted.master_port);
		break;
	case MSG_REFUSED:
		on_refused(r, &msg->refused);
		break;
	case MSG_VERDICT:
		on_verdict(r, &msg->verdict);
		break;
	default:
		break;
	}
}

static void on_end(void *data, const char *reason)
{
	struct run *r = data;

	if (reason)
		screen_say(r->screen, "accel: talk to the supervisor: %s", reason);
	loop_stop(r->loop);
}

static const struct link_ops link_ops = {
	.on_message = on_message,
	.on_end = on_end,
};

/* ---- the supervisor's processes ---- */

int run_find_acceld(char **ret, struct err *err)
{
	static const char *const places[] = { "acceld", "../libexec/accel/acceld" };
	OWN_MEM char *self = realpath("/proc/self/exe", NULL);
	char *slash = self ? strrchr(self, '/') : NULL;

	if (!slash)
		return err_sys(err, "find acceld");
	slash[1] = 0;
	for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
		OWN_MEM char *path = NULL;

		if (asprintf(&path, "%s%s", self, places[i]) < 0)
			return err_set(err, -ENOMEM, "find acceld");
		if (access(path, X_OK) < 0)
			continue;
		*ret = take(path);
		return 0;
	}
	return err_set(err, -ENOENT, "find acceld: it is not beside accel in %s", self);
}

/* The user may have descriptors open for the program (a shell's <(command)):
 * the link's end takes a high number, where the limit allows one. */
static int high_number(int fd)
{
	static const int lowest[] = { 100, 10, 3 };
	int high = -1;

	for (size_t i = 0; i < sizeof(lowest) / sizeof(lowest[0]) && high < 0; i++)
		high = fcntl(fd, F_DUPFD, lowest[i]);
	return high;
}

/* The workers start as we were started: neither the SIGPIPE that we ignore nor
 * the signals that we unblocked are theirs. */
static void set_signals(const struct run *r, posix_spawnattr_t *attr)
{
	sigset_t pipe_only;

	(void)sigemptyset(&pipe_only);
	(void)sigaddset(&pipe_only, SIGPIPE);
	(void)posix_spawnattr_setsigdefault(attr, &pipe_only);
	(void)posix_spawnattr_setsigmask(attr, &r->old_mask);
	(void)posix_spawnattr_setflags(
		attr, (short)(POSIX_SPAWN_SETSIGMASK |
			      (r->sigpipe_was_ignored ? 0 : POSIX_SPAWN_SETSIGDEF)));
}

static int spawn_acceld(struct run *r, int link_fd, struct err *err)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	char number[16];
	char *argv[] = { (char *)"acceld", (char *)"--link", number, NULL };
	int e;

	(void)snprintf(number, sizeof(number), "%d", link_fd);
	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null",
					       O_WRONLY, 0);
	(void)posix_spawnattr_init(&attr);
	set_signals(r, &attr);
	e = posix_spawn(&r->keeper, r->o->acceld, &actions, &attr, argv, environ);
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)posix_spawnattr_destroy(&attr);
	return e ? err_set(err, -e, "start the supervisor %s: %s", r->o->acceld,
			   strerror(e))
		 : 0;
}

static int start_acceld(struct run *r, int *ret_link, struct err *err)
{
	OWN_FD int ours = -1, theirs = -1, high = -1;
	int ends[2], e;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
		return err_sys(err, "start the supervisor");
	ours = ends[0];
	theirs = ends[1];
	high = high_number(theirs);
	if (high < 0)
		return err_sys(err, "start the supervisor");
	e = spawn_acceld(r, high, err);
	if (!e)
		*ret_link = take_fd(&ours);
	return e;
}

static void note_child(void *data, pid_t pid)
{
	struct run *r = data;

	(void)pid;
	r->has_others = true;
}

static void set_up_process(struct run *r)
{
	struct sigaction old, ignore = { .sa_handler = SIG_IGN };
	sigset_t none;

	(void)sigaction(SIGPIPE, &ignore, &old);
	r->sigpipe_was_ignored = old.sa_handler == SIG_IGN;
	/* Who ignores or blocks these does not hear of children, or of Ctrl-C. */
	(void)signal(SIGCHLD, SIG_DFL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, &r->old_mask);
	/* Should keeper and daemon be killed at once, their orphans are ours. */
	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);
	(void)tree_children(note_child, r);
	r->has_others = r->has_others || getpid() == 1;
}

/* Is this child of ours a process of the job? To ask is only needed where there
 * are others: from before this program was executed, or of a whole container. */
static bool belongs_to_job(const struct run *r, pid_t pid)
{
	char path[64], want[64];
	struct buf env = { 0 };
	size_t at = 0, len;
	bool found = false;

	(void)snprintf(path, sizeof(path), "/proc/%d/environ", (int)pid);
	len = (size_t)snprintf(want, sizeof(want), "ACCEL_JOB=%s", r->o->job) + 1;
	if (path_read_file(&env, path, 4 << 20, NULL) < 0)
		return false;
	while (!found && at + len <= buf_len(&env)) {
		const uint8_t *entry = buf_data(&env) + at;
		size_t left = buf_len(&env) - at;

		found = !memcmp(entry, want, len);
		at += strnlen((const char *)entry, left) + 1;
	}
	buf_fini(&env);
	return found;
}

struct sweep {
	struct run *run;
	int n;
};

/* Once it is reaped, its own children have fallen to us. */
static void kill_if_of_job(void *data, pid_t pid)
{
	struct sweep *s = data;

	if (s->run->has_others && !belongs_to_job(s->run, pid))
		return;
	s->n++;
	(void)kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
}

/* Keeper and daemon were killed: what was below them has fallen to us, and what
 * they would have removed is ours to remove. */
static void clean_up(struct run *r)
{
	struct sweep s = { .run = r };

	cgroup_sweep(r->o->job);
	do {
		s.n = 0;
		(void)tree_children(kill_if_of_job, &s);
	} while (s.n);
	control_remove(r->o->socket);
}

/* Its end of the link closes before its children change hands; wait it out. It
 * is our child only if its keeper is gone. */
static void wait_for_daemon(struct run *r)
{
	while (r->daemon && waitpid(r->daemon, NULL, 0) < 0 && errno == EINTR)
		;
}

static void wait_for_keeper(struct run *r)
{
	while (waitpid(r->keeper, &r->keeper_status, 0) < 0 && errno == EINTR)
		;
}

static void say_lost(struct run *r)
{
	int status = r->keeper_status;
	int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	bool killed = code == 128 + SIGKILL || code == 128 + SIGTERM;

	if (r->stop_reason) {
		r->exit_code = 128 + r->stop_reason;
		return;
	}
	r->exit_code = killed ? EXIT_LOST : EXIT_BUG;
	if (code > 128)
		screen_say(r->screen,
			   "accel: the job's supervisor was killed by SIG%s; all its "
			   "processes have been ended\n  files of the job: %s",
			   sigabbrev_np(code - 128), r->o->job_dir);
	else
		screen_say(r->screen,
			   "accel: the job's supervisor ended without a word (code %d); "
			   "this is a bug in accel\n  files of the job: %s",
			   code, r->o->job_dir);
}

/* ---- the whole ---- */

static int run_init(struct run *r, struct err *err)
{
	struct screen_options so = {
		.n_processes = r->o->n_processes,
		.job_dir = r->o->job_dir,
		.on_change = on_change,
		.data = r,
	};
	int link_fd = -1, e;

	e = loop_new(&r->loop, err);
	if (!e)
		e = screen_new(&r->screen, r->loop, &so, err);
	if (!e)
		e = timer_new(&r->reader_limit, r->loop, give_up_reader, r, err);
	if (!e)
		e = timer_new(&r->supervisor_limit, r->loop, give_up_supervisor, r, err);
	if (!e)
		e = watch_signals(r, err);
	if (!e)
		e = start_acceld(r, &link_fd, err);
	if (!e)
		e = link_new(&r->link, r->loop, link_fd, err);
	if (!e)
		link_set_handler(r->link, &link_ops, r);
	return e;
}

static void run_fini(struct run *r)
{
	r->link = link_free(r->link);
	for (int i = 0; i < N_STOP_RULES + N_PASSED_ON; i++)
		r->signals[i] = sigwatch_free(r->signals[i]);
	r->reader_limit = timer_free(r->reader_limit);
	r->supervisor_limit = timer_free(r->supervisor_limit);
	r->screen = screen_free(r->screen);
	r->loop = loop_free(r->loop);
}

/* The supervisor has closed its end: see that all of it is gone. */
static void wind_up(struct run *r)
{
	wait_for_keeper(r);
	wait_for_daemon(r);
	if (WIFSIGNALED(r->keeper_status))
		clean_up(r);
	if (!r->ended)
		say_lost(r);
	screen_flush(r->screen);
	if (!r->exit_code && screen_error(r->screen) == EPIPE)
		r->exit_code = 128 + SIGPIPE;
}

int run_job(const struct run_options *o, const struct msg_plan *plan,
	    int *ret_refused_code)
{
	struct run r = { .o = o };
	struct err e = { 0 };
	int exit_code;

	set_up_process(&r);
	if (run_init(&r, &e) < 0) {
		say_error(e.text, "");
		r.refused = true;
		r.exit_code = EXIT_BUG;
	} else if (link_send(r.link, MSG_PLAN, plan) < 0) {
		say_error("send the plan: it is too large",
			  "Arguments and environment together may have 16 MiB.");
		r.refused = r.ended = true;
		r.exit_code = EXIT_USAGE;
		r.link = link_free(r.link);
		wait_for_keeper(&r);
	} else {
		loop_run(r.loop);
		wind_up(&r);
	}
	run_fini(&r);
	exit_code = r.exit_code;
	if (!r.refused)
		return exit_code;
	*ret_refused_code = exit_code;
	return RUN_REFUSED;
}
