/*
 * The agent's messages and its life; see agent_start.c and agent_stop.c for what
 * it does to workers.
 */

#include "supervisor/agent_impl.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/contract.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "rendezvous/link.h"

void agent_tell(struct agent *a, uint32_t level, const char *fmt, ...)
{
	char text[512];
	struct msg_note note = { .level = level, .time_us = wall_us() };
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	note.text = slice_str(text);
	(void)link_send(a->coordinator, MSG_NOTE, &note);
}

void worker_event(struct worker *w, enum worker_event event)
{
	enum worker_state before = w->state;

	w->state = worker_next(before, event);
	w->agent->n_lingering +=
		(w->state == WORKER_LINGERING) - (before == WORKER_LINGERING);
}

static void hold(struct agent *a, bool on)
{
	a->holding = on;
	for (uint32_t i = 0; i < a->n_workers; i++)
		for (int s = 0; s < N_STREAMS && a->workers[i].started; s++)
			output_hold(&a->workers[i].outputs[s], on);
}

/* ---- events of the loop ---- */

static void on_spawn_timer(void *data)
{
	agent_spawn_some(data);
}

static void on_tick(void *data)
{
	agent_look_after(data);
}

static void on_patience(void *data)
{
	agent_on_patience(data);
}

static void on_sigchld(void *data, int signo)
{
	struct agent *a = data;

	(void)signo;
	a->reap_wanted = true;
}

/* After the links: whoever has just died was told of there, and the others have
 * their signals. */
static void on_prelude(void *data)
{
	struct agent *a = data;

	if (a->reap_wanted)
		agent_reap(a);
	agent_bury(a);
}

/* ---- messages ---- */

static void on_start(struct agent *a, const struct msg_start *msg)
{
	struct msg_refused refused = { .exit_code = 2 };
	struct err e = { 0 };

	if (a->n_workers)
		return;
	a->start = *msg;
	if (agent_prepare(a, &e) < 0) {
		refused.text = slice_str(e.text);
		(void)link_send(a->coordinator, MSG_REFUSED, &refused);
		return;
	}
	agent_spawn_some(a);
}

static void on_plan(struct agent *a, const struct msg_plan *msg)
{
	struct msg_refused refused = { .exit_code = 2 };
	struct err e = { 0 };

	if (plan_init(&a->plan, msg, &e) < 0) {
		refused.text = slice_str(e.text);
		(void)link_send(a->coordinator, MSG_REFUSED, &refused);
		return;
	}
	for (size_t i = 0; i < a->plan.env.n; i++)
		if (!contract_has(a->plan.env.v[i]))
			(void)strv_add(&a->base_env, a->plan.env.v[i]);
	/* It takes a tenth of a millisecond. Where the user chose the number of
	 * threads, nothing waits for it. */
	if (!strv_env_get(&a->base_env, "OMP_NUM_THREADS"))
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
		agent_stop(a, &msg->stop);
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
	a->stdin_fd = a->cgroup_fd = a->ring_fd = -1;
	a->reaped_end = &a->reaped;
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
	own_close(&a->ring_fd);
	own_close(&a->stdin_fd);
	strv_fini(&a->base_env);
	plan_fini(&a->plan);
	free(a->leftovers.told);
	free(a->attempt_dir);
	free(a);
	return NULL;
}
