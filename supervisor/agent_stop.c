/*
 * How workers end, and how what is left of them is taken down. A worker's death
 * is told to the coordinator at once, so that the others hear of it within a
 * fraction of a millisecond; its last words and its descriptors come after
 * (agent_bury()).
 */

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/loop.h"
#include "base/own.h"
#include "rendezvous/link.h"
#include "supervisor/agent_impl.h"
#include "supervisor/cgroup.h"
#include "supervisor/keeper.h"
#include "supervisor/tree.h"

enum {
	TICK_MS = 20,       /* how often the dead are looked for while killing */
	KILL_TICK_MS = 2,   /* at the very end, when nothing else goes on */
	PATIENCE_MS = 1000, /* after this much waiting the user is told for what */
	BLIND_MS = 1000,    /* how long to wait for what cannot be seen */
	TAIL_LINES = 10,
	TOLD_MAX = 65536,
	MESSAGE_MAX = 64 << 10,
	RANKS_SIZE = 128,
};

/* ---- last words ---- */

/* torch's @record writes {"message": {"message": TEXT, ...}}; some programs
 * {"message": TEXT}. What is neither is taken as it is. */
static int add_message(struct buf *text, struct slice file)
{
	json_t *doc = json_loadb((const char *)file.data, file.len, 0, NULL);
	json_t *m = json_object_get(doc, "message");
	int r;

	if (json_is_object(m))
		m = json_object_get(m, "message");
	r = json_is_string(m) ? buf_add_str(text, json_string_value(m))
			      : buf_add(text, file.data, file.len);
	json_decref(doc);
	return r;
}

/* Why it failed, in its own words, and when it wrote that. The file is the
 * worker's: it may be anything. */
static void read_error_file(const struct worker *w, struct buf *text, uint64_t *ret_us)
{
	OWN_MEM char *path = NULL;
	OWN_MEM char *file = malloc(MESSAGE_MAX);
	OWN_FD int fd = -1;
	struct stat st;
	ssize_t n;

	if (!file || asprintf(&path, "%s/%u-%u.error.json", w->agent->attempt_dir,
			      w->agent->start.node, w->rank) < 0)
		return;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
		return;
	n = read(fd, file, MESSAGE_MAX);
	if (n > 0)
		(void)add_message(text, slice_of(file, (size_t)n));
	*ret_us = (uint64_t)st.st_mtim.tv_sec * 1000000 +
		  (uint64_t)st.st_mtim.tv_nsec / 1000;
}

static void report_exit(struct worker *w)
{
	struct buf tail = { 0 }, message = { 0 };
	const struct output *o = &w->outputs[STREAM_ERR];
	struct msg_exited msg = {
		.rank = w->rank,
		.pid = (uint32_t)w->pid,
		.status = w->status,
		.exec_errno = w->agent->exec_errnos[w->rank - w->agent->start.first_rank],
		.flags = w->was_signalled ? EXIT_SIGNALLED : 0,
		.time_us = w->ended_us,
	};

	if (msg.status || msg.exec_errno) {
		read_error_file(w, &message, &msg.failed_us);
		if (!o->written)
			o = &w->outputs[STREAM_OUT];
		(void)output_tail(o, TAIL_LINES, &tail);
		msg.message = buf_slice(&message);
		msg.tail = buf_slice(&tail);
		if (o->written)
			msg.tail_path = slice_str(o->path);
	}
	(void)link_send(w->agent->coordinator, MSG_EXITED, &msg);
	buf_fini(&tail);
	buf_fini(&message);
}

static void note_ended(const struct worker *w)
{
	struct agent *a = w->agent;
	int r = a->ring_fd < 0
			? 0
			: ring_note_ended(a->ring_fd, w->rank - a->start.first_rank);

	if (r < 0)
		agent_tell(a, NOTE_WARNING, "rank %u: write to the ring: %s", w->rank,
			   strerror(-r));
}

void worker_report_unborn(struct worker *w, int error)
{
	struct msg_exited msg = {
		.rank = w->rank,
		.exec_errno = error,
		.time_us = wall_us(),
	};

	own_close(&w->page_fd);
	note_ended(w);
	w->agent->failed = true;
	(void)link_send(w->agent->coordinator, MSG_EXITED, &msg);
}

/* ---- taking things down ---- */

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

static int append_rank(char *out, size_t size, size_t *len, uint32_t rank)
{
	int n = snprintf(out + *len, size - *len, "%s%u", *len ? ", " : "", rank);

	if (n < 0 || (size_t)n >= size - *len)
		return -ENOSPC;
	*len += (size_t)n;
	return 0;
}

/* "0, 2, 5" of the workers that are alive. False when none is. */
static bool list_alive(const struct agent *a, char *out)
{
	size_t len = 0;

	out[0] = 0;
	for (uint32_t i = 0; i < a->n_workers; i++)
		if (is_alive(&a->workers[i]) &&
		    append_rank(out, RANKS_SIZE - 8, &len, a->workers[i].rank) < 0) {
			(void)strcpy(out + len, ", ...");
			break;
		}
	return len;
}

static void kill_everything(struct agent *a)
{
	char ranks[RANKS_SIZE];

	/* Whoever asked for it knows. */
	if (!a->killing && a->stop_signo && a->stop_signo != SIGKILL &&
	    list_alive(a, ranks))
		agent_tell(a, NOTE_WARNING, "the grace is over: SIGKILL to rank %s",
			   ranks);
	a->killing = true;
	if (a->board->cgroup[0])
		cgroup_kill(a->board->cgroup);
	for (uint32_t i = 0; i < a->n_workers; i++) {
		struct worker *w = &a->workers[i];

		if (is_alive(w))
			signal_worker(w, SIGKILL);
		else if (w->state == WORKER_LINGERING)
			/* Its pid alone may be another's by now. */
			(void)kill(-w->pid, SIGKILL);
	}
	/* What was in other groups falls to us when its parents are dead. */
	if (a->sweeping)
		(void)tree_kill_children();
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
		(void)kill(pid, SIGCONT);
	}
}

/* Without /proc nothing can be found, and what cannot be found not be killed. */
static bool is_hopeless(const struct agent *a, int listed)
{
	return listed < 0 && now_ms() >= a->kill_at_ms + BLIND_MS;
}

/* All workers have ended; what is left of their trees must end as well. */
static void sweep(struct agent *a)
{
	int listed;

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
	listed = a->killing ? tree_kill_children() : tree_children(on_leftover, a);
	if (is_hopeless(a, listed)) {
		agent_tell(a, NOTE_WARNING,
			   "processes that the workers left behind are still there, and "
			   "without /proc they cannot be found");
		a->idle = true;
		return;
	}
	schedule_tick(a);
}

static void close_outputs(struct worker *w)
{
	for (int s = 0; s < N_STREAMS && w->started; s++) {
		while (output_drain(&w->outputs[s]))
			;
		output_fini(&w->outputs[s]);
	}
	w->started = false;
}

static void finish(struct agent *a)
{
	struct msg_idle idle = { .n_killed = a->n_killed };

	timer_stop(a->tick);
	timer_stop(a->patience);
	for (uint32_t i = 0; i < a->n_workers; i++)
		close_outputs(&a->workers[i]);
	if (a->n_killed)
		agent_tell(a, NOTE_INFO,
			   "ended %u processes that the workers had left behind",
			   a->n_killed);
	a->control = control_free(a->control);
	a->board->socket[0] = 0;
	own_close(&a->ring_fd);
	own_close(&a->cgroup_fd);
	if (a->board->cgroup[0])
		cgroup_remove(a->board->cgroup);
	a->board->cgroup[0] = 0;
	(void)link_send(a->coordinator, MSG_IDLE, &idle);
}

/* Groups whose leader ended: told once to end, killed at their deadline. */
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

void agent_look_after(struct agent *a)
{
	if (a->idle || !a->n_workers)
		return;
	if (a->kill_at_ms && now_ms() >= a->kill_at_ms)
		kill_everything(a);
	look_after_groups(a);
	if (a->n_spawned == a->n_workers && !a->n_alive && !a->reaped) {
		sweep(a);
		if (a->idle)
			finish(a);
	} else if (a->kill_at_ms || a->n_lingering) {
		schedule_tick(a);
	}
}

void agent_on_patience(struct agent *a)
{
	char ranks[RANKS_SIZE];
	uint64_t now = now_ms();
	unsigned left =
		a->kill_at_ms > now ? (unsigned)((a->kill_at_ms - now + 500) / 1000) : 0;

	if (a->sweeping)
		agent_tell(a, NOTE_WARNING,
			   "waiting for %u processes that the workers left behind; "
			   "SIGKILL in %u s",
			   a->leftovers.n_seen, left);
	else if (list_alive(a, ranks))
		agent_tell(a, NOTE_WARNING, "waiting for rank %s to end; SIGKILL in %u s",
			   ranks, left);
}

/* What accel_should_stop() reads. */
static void write_stop(struct agent *a)
{
	for (uint32_t i = 0; i < a->n_workers; i++)
		worker_write(&a->workers[i], offsetof(struct control_page, stop), 1);
}

/* After a failure there is no order, and the others are to hear of it at once. */
static bool is_orderly(const struct agent *a, const struct msg_stop *msg)
{
	return msg->signo != SIGKILL && (msg->reason || !a->failed);
}

void agent_stop(struct agent *a, const struct msg_stop *msg)
{
	bool first = !a->stop_signo;

	if (is_orderly(a, msg))
		write_stop(a);
	a->stop_signo = msg->signo;
	for (uint32_t i = 0; i < a->n_workers && msg->signo != SIGKILL; i++)
		if (is_alive(&a->workers[i]))
			signal_worker(&a->workers[i], msg->signo);
	(void)sched_yield(); /* let those on this core hear of it first */
	for (uint32_t i = 0; i < a->n_workers; i++) {
		/* One that was suspended must go on to hear it; the others come first. */
		if (is_alive(&a->workers[i]))
			(void)kill(-a->workers[i].pid, SIGCONT);
		worker_event(&a->workers[i], WORKER_STOP);
	}
	a->n_spawned = a->n_workers; /* those not started yet never will be */
	timer_stop(a->spawn_timer);
	set_deadline(a, msg->signo == SIGKILL ? 0 : msg->grace_ms);
	if (first)
		timer_start(a->patience, PATIENCE_MS);
	agent_look_after(a);
}

/* ---- exits ---- */

static void worker_died(struct worker *w, int status)
{
	struct agent *a = w->agent;
	struct msg_failing msg = { .rank = w->rank };

	w->reaped = true;
	w->status = status;
	w->was_signalled = w->signalled;
	w->ended_us = wall_us();
	w->next_reaped = NULL;
	*a->reaped_end = w;
	a->reaped_end = &w->next_reaped;
	a->n_alive--;
	if (status && !w->signalled) {
		a->failed = true;
		(void)link_send(a->coordinator, MSG_FAILING, &msg);
	}
}

static void bury(struct worker *w)
{
	struct agent *a = w->agent;
	bool gone = group_is_gone(w->pid);

	w->exit_watch = watch_free(w->exit_watch);
	own_close(&w->pidfd);
	own_close(&w->page_fd);
	note_ended(w);
	for (int s = 0; s < N_STREAMS; s++)
		(void)output_drain(&w->outputs[s]);
	report_exit(w);
	worker_event(w, gone ? WORKER_EXIT : WORKER_EXIT_LEFT);
	if (!gone) {
		(void)kill(-w->pid, a->killing ? SIGKILL : SIGTERM);
		(void)kill(-w->pid, SIGCONT);
		w->group_kill_at_ms = now_ms() + a->plan.grace_ms;
	}
}

void agent_bury(struct agent *a)
{
	if (!a->reaped)
		return;
	while (a->reaped) {
		struct worker *w = a->reaped;

		a->reaped = w->next_reaped;
		bury(w);
	}
	a->reaped_end = &a->reaped;
	agent_look_after(a);
}

void worker_reap(struct worker *w)
{
	int status;

	if (is_alive(w) && waitpid(w->pid, &status, WNOHANG) == w->pid)
		worker_died(w, status);
}

static struct worker *worker_of(struct agent *a, pid_t pid)
{
	for (uint32_t i = 0; i < a->n_workers; i++)
		if (a->workers[i].pid == pid && is_alive(&a->workers[i]))
			return &a->workers[i];
	return NULL;
}

/*
 * A worker with a pidfd is left to it, since pidfds become ready in the order of
 * the exits and this does not.
 */
void agent_reap(struct agent *a)
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
			worker_reap(w);
		else
			(void)waitpid(info.si_pid, NULL, WNOHANG);
	}
	if (a->sweeping || a->n_lingering)
		agent_look_after(a);
}
