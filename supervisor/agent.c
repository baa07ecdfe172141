#include "supervisor/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "base/path.h"
#include "detect/detect.h"
#include "rendezvous/link.h"
#include "rendezvous/plan.h"
#include "supervisor/cgroup.h"
#include "supervisor/env.h"
#include "supervisor/keeper.h"
#include "supervisor/output.h"
#include "supervisor/page.h"
#include "supervisor/tree.h"
#include "supervisor/worker.h"

enum {
	SPAWN_BATCH = 32,   /* started per round of the loop */
	TICK_MS = 20,       /* how often the dead are looked for while killing */
	KILL_TICK_MS = 2,   /* at the very end, when nothing else goes on */
	PATIENCE_MS = 1000, /* after this much waiting the user is told for what */
	TAIL_LINES = 10,
	TOLD_MAX = 65536,
	MESSAGE_MAX = 64 << 10,
};

struct worker {
	struct agent *agent;
	uint32_t rank;
	enum worker_state state;
	pid_t pid;
	int pidfd, page_fd;
	uint64_t page_inode;
	struct watch *exit_watch;
	struct output outputs[N_STREAMS];
	bool started;              /* outputs are in use */
	bool signalled;            /* we told it to end */
	uint64_t group_kill_at_ms; /* while lingering */
};

/* Processes of the job that no worker leads any more. */
struct leftovers {
	pid_t *told; /* have had their SIGTERM */
	size_t n_told, cap;
	uint32_t n_seen; /* in the last look */
};

struct agent {
	struct loop *loop;
	struct link *coordinator;
	const struct inherited *inherited;
	struct keeper_board *board;
	int (*on_status)(void *data, struct msg_status *ret);
	void *status_data;

	struct plan plan;
	struct msg_start start;
	char *attempt_dir;
	struct devices devices;
	int n_cores;
	struct strv base_env; /* the user's, less what describes another job */
	uint8_t nonce[NONCE_SIZE];
	struct control *control;
	int cgroup_fd;
	int stdin_fd;

	struct worker *workers;
	uint32_t n_workers, n_spawned, n_alive, n_lingering;
	int *exec_errnos; /* shared with the children */
	bool want_pidfds;
	struct timer *spawn_timer;
	struct sigwatch *sigchld;
	struct prelude *prelude;
	bool reap_wanted, holding;

	/* Taking things down. */
	struct timer *tick, *patience;
	int stop_signo;      /* 0: the job runs */
	uint64_t kill_at_ms; /* 0: no limit yet */
	bool killing, sweeping, idle;
	uint32_t n_killed;
	struct leftovers leftovers;
};

static void tell(struct agent *a, uint32_t level, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
static void tell(struct agent *a, uint32_t level, const char *fmt, ...)
{
	char text[512];
	struct msg_note note = { .level = level, .time_us = wall_us() };
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	note.text = SLICE_STR(text);
	(void)link_send(a->coordinator, MSG_NOTE, &note);
}

static void worker_event(struct worker *w, enum worker_event event)
{
	enum worker_state before = w->state;

	w->state = worker_next(before, event);
	w->agent->n_lingering +=
		(w->state == WORKER_LINGERING) - (before == WORKER_LINGERING);
}

static bool is_alive(const struct worker *w)
{
	return w->state == WORKER_RUNNING || w->state == WORKER_STOPPING;
}

/* ---- output ---- */

static void on_data(void *data, struct output *o, struct slice bytes)
{
	struct worker *w = data;
	struct msg_output msg = {
		.rank = w->rank,
		.stream = (uint32_t)(o - w->outputs),
		.data = bytes,
	};

	(void)link_send(w->agent->coordinator, MSG_OUTPUT, &msg);
}

static void on_file_error(void *data, struct output *o, const char *text)
{
	struct worker *w = data;

	(void)o;
	tell(w->agent, NOTE_WARNING,
	     "rank %u: %s; its output is shown here but no longer kept", w->rank, text);
}

static const struct output_ops output_ops = {
	.on_data = on_data,
	.on_file_error = on_file_error,
};

static void hold(struct agent *a, bool on)
{
	a->holding = on;
	for (uint32_t i = 0; i < a->n_workers; i++)
		for (int s = 0; s < N_STREAMS && a->workers[i].started; s++)
			output_hold(&a->workers[i].outputs[s], on);
}

/* ---- how a worker ended ---- */

/* torch's @record and accel_fail() write {"message": {"message": TEXT, ...}} or
 * {"message": TEXT}; only the text is wanted, and the moment it was written. */
static void read_error_file(const struct worker *w, struct buf *text, uint64_t *ret_us)
{
	OWN_MEM char *path = NULL;
	struct stat st;

	if (asprintf(&path, "%s/0-%u.error.json", w->agent->attempt_dir, w->rank) < 0 ||
	    stat(path, &st) < 0 || path_read_file(text, path, MESSAGE_MAX, NULL) < 0)
		return;
	*ret_us = (uint64_t)st.st_mtim.tv_sec * 1000000 +
		  (uint64_t)st.st_mtim.tv_nsec / 1000;
}

static void report_exit(struct worker *w, int status, int exec_errno)
{
	struct buf tail = { 0 }, message = { 0 };
	struct msg_exited msg = {
		.rank = w->rank,
		.pid = (uint32_t)w->pid,
		.status = status,
		.exec_errno = exec_errno,
		.flags = w->signalled ? EXIT_SIGNALLED : 0,
		.time_us = wall_us(),
	};

	if ((status || exec_errno) && w->started) {
		const struct output *o = &w->outputs[STREAM_ERR];

		read_error_file(w, &message, &msg.failed_us);
		if (!o->written)
			o = &w->outputs[STREAM_OUT];
		(void)output_tail(o, TAIL_LINES, &tail);
		msg.message = buf_slice(&message);
		msg.tail = buf_slice(&tail);
		if (o->written)
			msg.tail_path = SLICE_STR(o->path);
	}
	(void)link_send(w->agent->coordinator, MSG_EXITED, &msg);
	buf_fini(&tail);
	buf_fini(&message);
}

/* ---- taking things down ---- */

static void look_after(struct agent *a);

static bool group_is_gone(pid_t group)
{
	return kill(-group, 0) < 0 && errno == ESRCH;
}

/* Look again soon where something may go away unseen, else at the deadline. */
static void schedule_tick(struct agent *a)
{
	uint64_t now = now_ms(), delay_ms = TICK_MS;

	if (a->sweeping && a->killing)
		delay_ms = KILL_TICK_MS;
	else if (!a->sweeping && !a->killing && !a->n_lingering)
		delay_ms = a->kill_at_ms > now ? a->kill_at_ms - now : 0;
	timer_start(a->tick, delay_ms);
}

static void set_deadline(struct agent *a, uint32_t grace_ms)
{
	uint64_t at = now_ms() + grace_ms;

	if (!a->kill_at_ms || at < a->kill_at_ms)
		a->kill_at_ms = at;
}

/*
 * SIGINT goes to the whole group, as a terminal would send it, and so does
 * SIGKILL; anything else to the main process alone, which may need its helpers
 * to save its work. A worker that has not yet made its group is alone.
 */
static void signal_worker(struct worker *w, int signo)
{
	bool to_group = signo == SIGINT || signo == SIGKILL;

	w->signalled = true;
	if (!to_group || kill(-w->pid, signo) < 0)
		(void)kill(w->pid, signo);
}

static void kill_everything(struct agent *a)
{
	if (!a->killing && (a->n_alive || a->sweeping) && a->stop_signo)
		tell(a, NOTE_INFO, "SIGKILL to what is left");
	a->killing = true;
	if (a->board->cgroup[0])
		cgroup_kill(a->board->cgroup);
	for (uint32_t i = 0; i < a->n_workers; i++) {
		const struct worker *w = &a->workers[i];

		if (is_alive(w))
			signal_worker(&a->workers[i], SIGKILL);
		else if (w->state == WORKER_LINGERING)
			(void)kill(-w->pid,
				   SIGKILL); /* its pid alone may be another's now */
	}
	/* What was in other groups falls to us when its parents are dead. */
	if (a->sweeping)
		tree_kill_children();
}

static bool was_told(struct leftovers *l, pid_t pid)
{
	for (size_t i = 0; i < l->n_told; i++)
		if (l->told[i] == pid)
			return true;
	if (l->n_told == TOLD_MAX)
		return true;
	if (l->n_told == l->cap) {
		size_t cap = l->cap ? l->cap * 2 : 16;
		pid_t *told = reallocarray(l->told, cap, sizeof(*told));

		if (!told)
			return true;
		l->told = told;
		l->cap = cap;
	}
	l->told[l->n_told++] = pid;
	return false;
}

static void on_leftover(void *data, pid_t pid)
{
	struct agent *a = data;

	a->leftovers.n_seen++;
	if (!was_told(&a->leftovers, pid)) {
		a->n_killed++;
		(void)kill(pid, SIGTERM);
	}
}

/* All workers have ended; what is left of their trees must end as well. */
static void sweep(struct agent *a)
{
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
	if (tree_is_empty()) {
		a->idle = true;
		return;
	}
	if (!a->sweeping) {
		a->sweeping = true;
		if (!a->stop_signo)
			timer_start(a->patience, PATIENCE_MS);
		set_deadline(a, a->plan.grace_ms);
	}
	a->leftovers.n_seen = 0;
	if (a->killing)
		tree_kill_children();
	else
		(void)tree_children(on_leftover, a);
	schedule_tick(a);
}

static void finish(struct agent *a)
{
	struct msg_idle idle = { .n_killed = a->n_killed };

	timer_stop(a->tick);
	timer_stop(a->patience);
	for (uint32_t i = 0; i < a->n_workers; i++) {
		struct worker *w = &a->workers[i];

		for (int s = 0; s < N_STREAMS && w->started; s++) {
			output_drain(&w->outputs[s]);
			output_fini(&w->outputs[s]);
		}
		w->started = false;
	}
	if (a->n_killed)
		tell(a, NOTE_INFO, "ended %u processes that the workers had left behind",
		     a->n_killed);
	a->control = control_free(a->control);
	a->board->socket[0] = 0;
	own_close(&a->cgroup_fd);
	if (a->board->cgroup[0])
		cgroup_remove(a->board->cgroup);
	a->board->cgroup[0] = 0;
	(void)link_send(a->coordinator, MSG_IDLE, &idle);
}

/* Groups whose leader ended: told once to end, killed at the deadline. */
static void look_after_groups(struct agent *a)
{
	for (uint32_t i = 0; i < a->n_workers && a->n_lingering; i++) {
		struct worker *w = &a->workers[i];

		if (w->state != WORKER_LINGERING)
			continue;
		if (now_ms() >= w->group_kill_at_ms)
			(void)kill(-w->pid, SIGKILL);
		if (group_is_gone(w->pid))
			worker_event(w, WORKER_GROUP_GONE);
	}
}

/* One look at what is still there, and at the clock. */
static void look_after(struct agent *a)
{
	if (a->idle || !a->n_workers)
		return;
	if (a->kill_at_ms && now_ms() >= a->kill_at_ms)
		kill_everything(a);
	look_after_groups(a);
	if (a->n_spawned == a->n_workers && !a->n_alive) {
		sweep(a);
		if (a->idle)
			finish(a);
	} else if (a->kill_at_ms || a->n_lingering) {
		schedule_tick(a);
	}
}

static void on_tick(void *data)
{
	look_after(data);
}

static int append_rank(char *out, size_t size, size_t *len, uint32_t rank)
{
	int n = snprintf(out + *len, size - *len, "%s%u", *len ? ", " : "", rank);

	if (n < 0 || (size_t)n >= size - *len)
		return -ENOSPC;
	*len += (size_t)n;
	return 0;
}

static void on_patience(void *data)
{
	struct agent *a = data;
	char ranks[128] = "";
	size_t len = 0;
	uint64_t now = now_ms();
	unsigned left =
		a->kill_at_ms > now ? (unsigned)((a->kill_at_ms - now + 500) / 1000) : 0;

	if (a->sweeping) {
		tell(a, NOTE_WARNING,
		     "waiting for %u processes that the workers left behind; SIGKILL in "
		     "%u s",
		     a->leftovers.n_seen, left);
		return;
	}
	for (uint32_t i = 0; i < a->n_workers; i++)
		if (is_alive(&a->workers[i]) &&
		    append_rank(ranks, sizeof(ranks) - 8, &len, a->workers[i].rank) < 0) {
			(void)strcat(ranks, ", ...");
			break;
		}
	if (len)
		tell(a, NOTE_WARNING, "waiting for rank %s to end; SIGKILL in %u s",
		     ranks, left);
}

static void on_stop(struct agent *a, const struct msg_stop *msg)
{
	bool first = !a->stop_signo;

	a->stop_signo = msg->signo;
	for (uint32_t i = 0; i < a->n_workers; i++) {
		struct worker *w = &a->workers[i];

		if (is_alive(w) && msg->signo != SIGKILL)
			signal_worker(w, msg->signo);
		worker_event(w, WORKER_STOP);
	}
	a->n_spawned = a->n_workers; /* those not started yet never will be */
	timer_stop(a->spawn_timer);
	set_deadline(a, msg->signo == SIGKILL ? 0 : msg->grace_ms);
	if (first)
		timer_start(a->patience, PATIENCE_MS);
	look_after(a);
}

/* ---- exits ---- */

static void worker_ended(struct worker *w, int status)
{
	struct agent *a = w->agent;
	int exec_errno = a->exec_errnos[w->rank - a->start.first_rank];
	bool gone = group_is_gone(w->pid);

	w->exit_watch = watch_free(w->exit_watch);
	own_close(&w->pidfd);
	own_close(&w->page_fd);
	a->n_alive--;
	for (int s = 0; s < N_STREAMS; s++)
		output_drain(&w->outputs[s]);
	report_exit(w, status, exec_errno);
	worker_event(w, gone ? WORKER_EXIT : WORKER_EXIT_LEFT);
	if (!gone) {
		(void)kill(-w->pid, a->killing ? SIGKILL : SIGTERM);
		w->group_kill_at_ms = now_ms() + a->plan.grace_ms;
	}
	look_after(a);
}

static void reap_worker(struct worker *w)
{
	int status;
	pid_t pid = waitpid(w->pid, &status, WNOHANG);

	if (pid == w->pid)
		worker_ended(w, status);
}

static void on_exit_ready(void *data, int events)
{
	(void)events;
	reap_worker(data);
}

static struct worker *worker_of(struct agent *a, pid_t pid)
{
	for (uint32_t i = 0; i < a->n_workers; i++)
		if (a->workers[i].pid == pid && is_alive(&a->workers[i]))
			return &a->workers[i];
	return NULL;
}

/*
 * Orphans that fell to us, and, where there are no pidfds, workers. A worker
 * with a pidfd is left to it, since pidfds become ready in the order of the
 * exits and this does not.
 */
static void reap(struct agent *a)
{
	while (a->reap_wanted) {
		siginfo_t info = { 0 };
		struct worker *w;

		if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 ||
		    !info.si_pid) {
			a->reap_wanted = false;
			break;
		}
		w = worker_of(a, info.si_pid);
		if (w && w->pidfd >= 0)
			return; /* go on when it is gone */
		if (w)
			reap_worker(w);
		else
			(void)waitpid(info.si_pid, NULL, WNOHANG);
	}
	if (a->sweeping || a->n_lingering)
		look_after(a);
}

static void on_sigchld(void *data, int signo)
{
	struct agent *a = data;

	(void)signo;
	a->reap_wanted = true;
}

static void on_prelude(void *data)
{
	struct agent *a = data;

	if (a->reap_wanted)
		reap(a);
}

/* ---- starting ---- */

/* The array is the caller's to free, its strings belong to @base and @added. */
static char **join_env(const struct strv *base, const struct strv *added)
{
	char **env = calloc(base->n + added->n + 1, sizeof(*env));

	if (!env)
		return NULL;
	if (base->n)
		memcpy(env, base->v, base->n * sizeof(*env));
	memcpy(env + base->n, added->v, added->n * sizeof(*env));
	return env;
}

static int open_output(struct worker *w, int stream, int *ret_child_fd, struct err *err)
{
	static const char *const suffix[N_STREAMS] = { "out", "err" };
	struct agent *a = w->agent;
	OWN_MEM char *path = NULL;
	int ends[2], r;

	if (asprintf(&path, "%s/%u-%u.%s", a->attempt_dir, a->start.node, w->rank,
		     suffix[stream]) < 0)
		return err_set(err, -ENOMEM, "output");
	if (pipe2(ends, O_CLOEXEC) < 0)
		return err_sys(err, "pipe");
	(void)fcntl(ends[0], F_SETFL, O_NONBLOCK);
	r = output_init(&w->outputs[stream], a->loop, ends[0], path, &output_ops, w, err);
	if (r < 0) {
		(void)close(ends[1]);
		return r;
	}
	if (a->holding)
		output_hold(&w->outputs[stream], true);
	*ret_child_fd = ends[1];
	return 0;
}

static int make_env(struct worker *w, struct strv *added, struct err *err)
{
	struct agent *a = w->agent;
	OWN_MEM char *error_file = NULL;
	struct worker_env e = {
		.rank = w->rank,
		.world = a->start.n_world,
		.local_rank = w->rank - a->start.first_rank,
		.local_world = a->start.n_local,
		.node = a->start.node,
		.n_nodes = a->start.n_nodes,
		.attempt = a->start.attempt,
		.master_addr = a->plan.master_addr,
		.master_port = a->start.master_port,
		.job = a->plan.job,
		.mixed_precision = a->plan.mixed_precision,
		.device_kind = a->devices.kind,
		.n_devices = a->devices.count,
		.n_cores = a->n_cores,
		.control_fd = w->page_fd,
		.control_inode = w->page_inode,
		.socket = a->plan.socket,
	};

	if (asprintf(&error_file, "%s/0-%u.error.json", a->attempt_dir, w->rank) < 0)
		return err_set(err, -ENOMEM, "environment");
	e.error_file = error_file;
	return env_additions(added, &e, &a->base_env) < 0
		       ? err_set(err, -ENOMEM, "environment")
		       : 0;
}

static int spawn(struct worker *w, struct err *err)
{
	struct agent *a = w->agent;
	struct strv added = { 0 };
	OWN_MEM char **env = NULL;
	OWN_FD int out = -1, errs = -1;
	int r = page_new(&w->page_fd, &w->page_inode, a->nonce, w->rank, a->start.attempt,
			 err);

	if (!r)
		r = open_output(w, STREAM_OUT, &out, err);
	if (!r) {
		r = open_output(w, STREAM_ERR, &errs, err);
		w->started = !r;
		if (r < 0)
			output_fini(&w->outputs[STREAM_OUT]);
	}
	if (!r)
		r = make_env(w, &added, err);
	if (!r) {
		env = join_env(&a->base_env, &added);
		r = env ? 0 : err_set(err, -ENOMEM, "environment");
	}
	if (!r) {
		struct spawn s = {
			.path = a->plan.path,
			.argv = a->plan.argv.v,
			.env = env,
			.stdin_fd = a->stdin_fd,
			.stdout_fd = out,
			.stderr_fd = errs,
			.keep_fd = w->page_fd,
			.cgroup_fd = a->cgroup_fd,
			.inherited = a->inherited,
			.exec_errno = &a->exec_errnos[w->rank - a->start.first_rank],
		};

		r = spawn_process(&s, a->want_pidfds, &w->pid, &w->pidfd, err);
	}
	strv_fini(&added);
	return r;
}

static void start_worker(struct worker *w)
{
	struct agent *a = w->agent;
	struct msg_started msg = { .rank = w->rank };
	struct err e = { 0 };
	int r = spawn(w, &e);

	if (r < 0) {
		worker_event(w, WORKER_NOT_SPAWNED);
		tell(a, NOTE_WARNING, "rank %u: %s", w->rank, e.text);
		report_exit(w, 0, -r);
		return;
	}
	worker_event(w, WORKER_SPAWNED);
	a->n_alive++;
	if (w->pidfd < 0 || watch_new(&w->exit_watch, a->loop, w->pidfd, WATCH_READ,
				      on_exit_ready, w, NULL) < 0)
		own_close(&w->pidfd); /* SIGCHLD will tell */
	msg.pid = (uint32_t)w->pid;
	msg.time_us = wall_us();
	(void)link_send(a->coordinator, MSG_STARTED, &msg);
}

static void on_spawn_timer(void *data)
{
	struct agent *a = data;

	for (int i = 0; i < SPAWN_BATCH && a->n_spawned < a->n_workers; i++)
		start_worker(&a->workers[a->n_spawned++]);
	if (a->n_spawned < a->n_workers)
		timer_start(a->spawn_timer, 0);
	else
		look_after(a);
}

/* An empty root has no /dev/null; a pipe whose writer is gone reads the same. */
static int open_null(struct err *err)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC), ends[2];

	if (fd >= 0)
		return fd;
	if (pipe2(ends, O_CLOEXEC) < 0)
		return err_sys(err, "pipe");
	(void)close(ends[1]);
	return ends[0];
}

static int open_stdin(struct agent *a, struct err *err)
{
	a->stdin_fd = a->plan.flags & PLAN_STDIN ? fcntl(0, F_DUPFD_CLOEXEC, 3)
						 : open_null(err);
	if (a->stdin_fd < 0)
		return err_sys(err, "standard input");
	return 0;
}

static int make_workers(struct agent *a, struct err *err)
{
	size_t n = a->start.n_local;

	a->workers = calloc(n, sizeof(*a->workers));
	a->exec_errnos = mmap(NULL, n * sizeof(int), PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!a->workers || a->exec_errnos == MAP_FAILED)
		return err_set(err, -ENOMEM, "%zu workers", n);
	for (uint32_t i = 0; i < n; i++)
		a->workers[i] = (struct worker){
			.agent = a,
			.rank = a->start.first_rank + i,
			.pidfd = -1,
			.page_fd = -1,
		};
	a->n_workers = (uint32_t)n;
	return 0;
}

static int make_attempt_dir(struct agent *a, struct err *err)
{
	if (asprintf(&a->attempt_dir, "%s/attempt-%u", a->plan.job_dir,
		     a->start.attempt) < 0)
		return err_set(err, -ENOMEM, "attempt folder");
	if (mkdir(a->attempt_dir, 0700) < 0 && errno != EEXIST)
		return err_sys(err, "make folder %s", a->attempt_dir);
	return 0;
}

static int on_control_status(void *data, struct msg_status *ret)
{
	struct agent *a = data;

	return a->on_status(a->status_data, ret);
}

static int on_control_page(void *data, uint32_t rank)
{
	struct agent *a = data;
	uint32_t i = rank - a->start.first_rank;

	if (i >= a->n_workers || a->workers[i].page_fd < 0)
		return -ENOENT;
	return a->workers[i].page_fd;
}

static const struct control_ops control_ops = {
	.on_status = on_control_status,
	.on_page = on_control_page,
};

static int open_control(struct agent *a, struct err *err)
{
	(void)snprintf(a->board->socket, sizeof(a->board->socket), "%s", a->plan.socket);
	return control_new(&a->control, a->loop, a->plan.socket, &control_ops, a, err);
}

static int prepare(struct agent *a, struct err *err)
{
	int r = make_attempt_dir(a, err);

	if (!r)
		r = open_control(a, err);
	if (!r)
		r = open_stdin(a, err);
	if (!r)
		r = make_workers(a, err);
	if (!r && getrandom(a->nonce, sizeof(a->nonce), 0) != sizeof(a->nonce))
		r = err_sys(err, "random bytes");
	if (!r)
		a->cgroup_fd = cgroup_new(a->board->cgroup, sizeof(a->board->cgroup),
					  a->plan.job);
	return r;
}

static void on_start(struct agent *a, const struct msg_start *msg)
{
	struct msg_refused refused = { .exit_code = 2 };
	struct err e = { 0 };

	if (a->n_workers)
		return;
	a->start = *msg;
	if (prepare(a, &e) < 0) {
		refused.text = SLICE_STR(e.text);
		(void)link_send(a->coordinator, MSG_REFUSED, &refused);
		return;
	}
	on_spawn_timer(a);
}

static void on_plan(struct agent *a, const struct msg_plan *msg)
{
	struct msg_refused refused = { .exit_code = 2 };
	struct err e = { 0 };

	if (plan_init(&a->plan, msg, &e) < 0) {
		refused.text = SLICE_STR(e.text);
		(void)link_send(a->coordinator, MSG_REFUSED, &refused);
		return;
	}
	for (size_t i = 0; i < a->plan.env.n; i++)
		if (!env_is_ours(a->plan.env.v[i]))
			(void)strv_add(&a->base_env, a->plan.env.v[i]);
	a->n_cores = detect_cores("");
	a->devices = (struct devices){ .kind = "cpu" };
	if (!(a->plan.flags & PLAN_CPU))
		a->devices = detect_devices("", a->base_env.v);
}

static void on_signal(struct agent *a, int signo)
{
	for (uint32_t i = 0; i < a->n_workers; i++)
		if (is_alive(&a->workers[i]))
			(void)kill(a->workers[i].pid, signo);
}

static void on_message(void *data, unsigned type, const union message_any *msg)
{
	struct agent *a = data;

	switch (type) {
	case MSG_PLAN:
		on_plan(a, &msg->plan);
		break;
	case MSG_START:
		on_start(a, &msg->start);
		break;
	case MSG_STOP:
		on_stop(a, &msg->stop);
		break;
	case MSG_SIGNAL:
		on_signal(a, msg->signal.signo);
		break;
	case MSG_HOLD:
		hold(a, msg->hold.on);
		break;
	default:
		break;
	}
}

static const struct link_ops link_ops = {
	.on_message = on_message,
};

DEFINE_OWN(agent, struct agent, agent_free)

int agent_new(struct agent **ret, struct loop *loop, struct link *coordinator,
	      const struct inherited *inherited, struct keeper_board *board,
	      int (*on_status)(void *data, struct msg_status *ret), void *status_data,
	      struct err *err)
{
	OWN(own_agent) struct agent *a = calloc(1, sizeof(*a));
	int r;

	if (!a)
		return err_set(err, -ENOMEM, "agent");
	a->loop = loop;
	a->coordinator = coordinator;
	a->inherited = inherited;
	a->board = board;
	a->on_status = on_status;
	a->status_data = status_data;
	a->stdin_fd = a->cgroup_fd = -1;
	/* Sandboxes without pidfds exist; the variable lets tests be one. */
	a->want_pidfds = !getenv("ACCEL_NO_PIDFD");
	r = timer_new(&a->spawn_timer, loop, on_spawn_timer, a, err);
	if (!r)
		r = timer_new(&a->tick, loop, on_tick, a, err);
	if (!r)
		r = timer_new(&a->patience, loop, on_patience, a, err);
	if (!r)
		r = sigwatch_new(&a->sigchld, loop, SIGCHLD, on_sigchld, a, err);
	if (!r)
		r = prelude_new(&a->prelude, loop, on_prelude, a, err);
	if (r < 0)
		return r;
	link_set_handler(coordinator, &link_ops, a);
	*ret = take(a);
	return 0;
}

static void worker_fini(struct worker *w)
{
	w->exit_watch = watch_free(w->exit_watch);
	own_close(&w->pidfd);
	own_close(&w->page_fd);
	for (int s = 0; s < N_STREAMS && w->started; s++)
		output_fini(&w->outputs[s]);
}

struct agent *agent_free(struct agent *a)
{
	if (!a)
		return NULL;
	for (uint32_t i = 0; i < a->n_workers; i++)
		worker_fini(&a->workers[i]);
	free(a->workers);
	if (a->exec_errnos && a->exec_errnos != MAP_FAILED)
		(void)munmap(a->exec_errnos, a->start.n_local * sizeof(int));
	a->control = control_free(a->control);
	a->spawn_timer = timer_free(a->spawn_timer);
	a->tick = timer_free(a->tick);
	a->patience = timer_free(a->patience);
	a->sigchld = sigwatch_free(a->sigchld);
	a->prelude = prelude_free(a->prelude);
	own_close(&a->cgroup_fd);
	own_close(&a->stdin_fd);
	strv_fini(&a->base_env);
	plan_fini(&a->plan);
	free(a->leftovers.told);
	free(a->attempt_dir);
	free(a);
	return NULL;
}
