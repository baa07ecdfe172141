/*
 * Bringing workers up: the folder, socket, pages and pipes of an attempt, each
 * worker's environment, and its process.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "rendezvous/link.h"
#include "supervisor/agent_impl.h"
#include "supervisor/cgroup.h"
#include "supervisor/env.h"
#include "supervisor/keeper.h"

enum { SPAWN_BATCH = 32 }; /* started per round of the loop */

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
	agent_tell(w->agent, NOTE_WARNING,
		   "rank %u: %s; its output is shown here but no longer kept", w->rank,
		   text);
}

static const struct output_ops output_ops = {
	.on_data = on_data,
	.on_file_error = on_file_error,
};

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

	if (asprintf(&error_file, "%s/%u-%u.error.json", a->attempt_dir,
		     w->agent->start.node, w->rank) < 0)
		return err_set(err, -ENOMEM, "environment");
	e.error_file = error_file;
	return env_additions(added, &e, &a->base_env) < 0
		       ? err_set(err, -ENOMEM, "environment")
		       : 0;
}

static int make_page(struct worker *w, struct err *err)
{
	const struct agent *a = w->agent;
	struct page_spec spec = {
		.nonce = a->nonce,
		.rank = w->rank,
		.attempt = a->start.attempt,
		.n_cores = (uint32_t)a->n_cores,
		.ring_fd = a->ring_fd,
		.ring_inode = a->ring_inode,
	};

	return page_new(&w->page_fd, &w->page_inode, &spec, err);
}

static int spawn(struct worker *w, struct err *err)
{
	struct agent *a = w->agent;
	struct strv added = { 0 };
	OWN_MEM char **env = NULL;
	OWN_FD int out = -1, errs = -1;
	int r = make_page(w, err);

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
			.keep_fds = { w->page_fd, a->ring_fd },
			.cgroup_fd = a->cgroup_fd,
			.inherited = a->inherited,
			.exec_errno = &a->exec_errnos[w->rank - a->start.first_rank],
		};

		r = spawn_process(&s, a->want_pidfds, &w->pid, &w->pidfd, err);
	}
	strv_fini(&added);
	return r;
}

static void on_exit_ready(void *data, int events)
{
	(void)events;
	worker_reap(data);
}

static void start_worker(struct worker *w)
{
	struct agent *a = w->agent;
	struct msg_started msg = { .rank = w->rank };
	struct err e = { 0 };
	int r = spawn(w, &e);

	if (r < 0) {
		worker_event(w, WORKER_NOT_SPAWNED);
		agent_tell(a, NOTE_WARNING, "rank %u: %s", w->rank, e.text);
		worker_report_unborn(w, -r);
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

void worker_write(struct worker *w, size_t offset, uint32_t value)
{
	if (w->page_fd >= 0 &&
	    pwrite(w->page_fd, &value, sizeof(value), (off_t)offset) < 0)
		agent_tell(w->agent, NOTE_WARNING, "rank %u: write to its page: %s",
			   w->rank, strerror(errno));
}

/* What on_plan() had no time for. */
static void write_cores(struct agent *a)
{
	if (a->n_cores)
		return;
	a->n_cores = detect_cores("");
	for (uint32_t i = 0; i < a->n_workers; i++)
		worker_write(&a->workers[i], offsetof(struct control_page, n_cores),
			     (uint32_t)a->n_cores);
}

void agent_spawn_some(struct agent *a)
{
	for (int i = 0; i < SPAWN_BATCH && a->n_spawned < a->n_workers; i++)
		start_worker(&a->workers[a->n_spawned++]);
	if (a->n_spawned < a->n_workers) {
		timer_start(a->spawn_timer, 0);
		return;
	}
	write_cores(a);
	agent_look_after(a);
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

/* How far the workers that still run have come, by their own count. */
static void read_steps(const struct agent *a, struct msg_status *ret)
{
	uint64_t lowest = UINT64_MAX, highest = 0;

	for (uint32_t i = 0; i < a->n_workers; i++) {
		uint64_t step = 0;

		if (a->workers[i].page_fd < 0 ||
		    pread(a->workers[i].page_fd, &step, sizeof(step),
			  offsetof(struct control_page, step)) != sizeof(step))
			continue;
		lowest = step < lowest ? step : lowest;
		highest = step > highest ? step : highest;
	}
	ret->step_lowest = lowest < highest ? lowest : highest;
	ret->step_highest = highest;
}

static int on_control_status(void *data, struct msg_status *ret)
{
	struct agent *a = data;
	int r = a->on_status(a->status_data, ret);

	if (!r)
		read_steps(a, ret);
	return r;
}

static int on_control_page(void *data, uint32_t rank, int fds[PAGE_FDS])
{
	struct agent *a = data;
	uint32_t i = rank - a->start.first_rank;

	if (i >= a->n_workers || a->workers[i].page_fd < 0)
		return -ENOENT;
	fds[0] = a->workers[i].page_fd;
	fds[1] = a->ring_fd;
	return 0;
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

/* Most programs need none. */
static void make_ring(struct agent *a)
{
	struct err e = { 0 };

	if (ring_new(&a->ring_fd, &a->ring_inode, a->nonce, a->start.n_local, &e) < 0)
		agent_tell(a, NOTE_WARNING,
			   "%s; the workers have no shared memory for collectives",
			   e.text);
}

int agent_prepare(struct agent *a, struct err *err)
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
	if (r < 0)
		return r;
	make_ring(a);
	a->cgroup_fd =
		cgroup_new(a->board->cgroup, sizeof(a->board->cgroup), a->plan.job);
	return 0;
}
