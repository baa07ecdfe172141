/*
 * A job has one life (enum job_state): it waits for its plan, runs,
 * is stopped, and is over. What decides the verdict is in verdict.c.
 */

#include "rendezvous/coordinator.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "rendezvous/journal.h"
#include "rendezvous/link.h"
#include "rendezvous/plan.h"
#include "rendezvous/store_server.h"
#include "rendezvous/verdict.h"

/* Output waiting for the client beyond this is skipped or holds the job up. */
enum { BACKLOG_MAX = 1 << 20 };

enum job_state { JOB_WAITING, JOB_RUNNING, JOB_STOPPING, JOB_OVER };

struct skipped {
	uint64_t lines, bytes;
	bool active; /* until the next line begins */
};

struct coordinator {
	struct loop *loop;
	struct link *client, *agent;
	bool client_gone, lost;
	on_over_fn *on_over;
	void *data;

	enum job_state state;
	struct plan plan;
	struct store_server *store;
	struct journal *journal;
	struct prelude *prelude;
	struct journal_worker *workers;
	struct skipped *skipped; /* n_processes times N_STREAMS */
	uint32_t n_running, n_failed;
	bool holding, plan_written;
	struct failure first; /* the best guess at what went wrong first */
	uint32_t stop_reason;
	uint64_t started_us, stopped_us;
	uint32_t exit_code;
};

static void tell(struct coordinator *c, uint32_t level, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
static void tell(struct coordinator *c, uint32_t level, const char *fmt, ...)
{
	char text[512];
	struct msg_note note = { .level = level, .time_us = wall_us() };
	va_list ap;

	if (level == NOTE_INFO && !(c->plan.flags & PLAN_VERBOSE))
		return;
	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	note.text = slice_str(text);
	if (!c->client_gone)
		(void)link_send(c->client, MSG_NOTE, &note);
}

/* ---- the end ---- */

static void over(struct coordinator *c)
{
	if (c->state == JOB_OVER)
		return;
	c->state = JOB_OVER;
	c->store = store_server_free(c->store);
	if (c->client_gone || !link_backlog(c->client))
		c->on_over(c->data, c->exit_code);
	/* Otherwise on_client_drained() or on_client_end() goes on. */
}

static void refuse(struct coordinator *c, uint32_t exit_code, const char *text,
		   const char *hint)
{
	struct msg_refused msg = {
		.exit_code = exit_code,
		.text = slice_str(text),
		.hint = slice_str(hint),
	};

	if (!c->client_gone)
		(void)link_send(c->client, MSG_REFUSED, &msg);
	c->exit_code = exit_code;
	over(c);
}

/* ---- output ---- */

static void hold(struct coordinator *c, bool on)
{
	struct msg_hold msg = { .on = on };

	if (c->holding == on)
		return;
	c->holding = on;
	(void)link_send(c->agent, MSG_HOLD, &msg);
}

static uint64_t count_lines(struct slice s)
{
	uint64_t n = 0;

	while (s.len) {
		const uint8_t *nl = memchr(s.data, '\n', s.len);

		if (!nl)
			break;
		n++;
		s.len -= (size_t)(nl + 1 - s.data);
		s.data = nl + 1;
	}
	return n;
}

static void skip(struct skipped *s, struct slice data)
{
	s->active = true;
	s->bytes += data.len;
	s->lines += count_lines(data);
}

/* After a gap the screen goes on with a whole line. Takes the rest of the line
 * that was cut off @data; false when all of it belongs to that line. */
static bool resume(struct skipped *s, struct slice *data)
{
	const uint8_t *nl = data->len ? memchr(data->data, '\n', data->len) : NULL;
	size_t len = nl ? (size_t)(nl + 1 - data->data) : data->len;

	skip(s, slice_of(data->data, len));
	data->data += len;
	data->len -= len;
	return nl != NULL;
}

static void send_output(struct coordinator *c, struct skipped *s, struct msg_output *msg)
{
	char path[64];

	if (s->bytes) {
		msg->skipped_lines = s->lines;
		msg->skipped_bytes = s->bytes;
		(void)snprintf(path, sizeof(path), "attempt-0/0-%u.%s", msg->rank,
			       msg->stream == STREAM_ERR ? "err" : "out");
		msg->path = slice_str(path);
	}
	*s = (struct skipped){ 0 };
	(void)link_send(c->client, MSG_OUTPUT, msg);
}

static void on_output(struct coordinator *c, const struct msg_output *from)
{
	struct msg_output msg = *from;
	struct skipped *s;

	if (msg.rank >= c->plan.n_processes || msg.stream >= N_STREAMS || c->client_gone)
		return;
	s = &c->skipped[msg.rank * N_STREAMS + msg.stream];
	if (link_backlog(c->client) > BACKLOG_MAX) {
		if (c->plan.flags & PLAN_SKIP_SCREEN) {
			skip(s, msg.data);
			return;
		}
		hold(c, true);
	}
	if (s->active && !resume(s, &msg.data))
		return;
	send_output(c, s, &msg);
}

/* What was skipped last would otherwise never be said. */
static void tell_skipped(struct coordinator *c)
{
	for (uint32_t i = 0; i < c->plan.n_processes * N_STREAMS; i++) {
		struct msg_output msg = { .rank = i / N_STREAMS,
					  .stream = i % N_STREAMS };

		if (c->skipped[i].bytes)
			send_output(c, &c->skipped[i], &msg);
	}
}

/* ---- stopping ---- */

static void stop(struct coordinator *c, int signo, uint32_t grace_ms, uint32_t reason)
{
	struct msg_stop msg = { .signo = signo, .grace_ms = grace_ms, .reason = reason };

	if (c->state == JOB_RUNNING) {
		c->state = JOB_STOPPING;
		c->stopped_us = wall_us();
	}
	(void)link_send(c->agent, MSG_STOP, &msg);
	journal_event(c->journal, "stop", MSG_STOP, &msg);
}

static void on_stop(struct coordinator *c, const struct msg_stop *msg)
{
	/* A job that has failed already keeps its own exit code. */
	if (c->state == JOB_RUNNING)
		c->stop_reason = msg->reason;
	if (c->state == JOB_RUNNING || c->state == JOB_STOPPING)
		stop(c, msg->signo, msg->grace_ms, msg->reason);
	else if (c->state == JOB_WAITING)
		over(c);
}

void coordinator_stop(struct coordinator *c, int signo)
{
	struct msg_stop msg = {
		.signo = c->state == JOB_STOPPING ? SIGKILL : signo,
		.grace_ms = c->state == JOB_STOPPING ? 0 : c->plan.grace_ms,
		.reason = (uint32_t)signo,
	};

	on_stop(c, &msg);
}

/* ---- workers ---- */

static void on_started(struct coordinator *c, const struct msg_started *msg)
{
	if (msg->rank >= c->plan.n_processes)
		return;
	c->workers[msg->rank].pid = msg->pid;
	c->n_running++;
	journal_event(c->journal, "started", MSG_STARTED, msg);
	tell(c, NOTE_INFO, "rank %u started, pid %u", msg->rank, msg->pid);
}

static void on_exited(struct coordinator *c, const struct msg_exited *msg)
{
	char how[128];

	if (msg->rank >= c->plan.n_processes)
		return;
	c->workers[msg->rank] = (struct journal_worker){
		.pid = msg->pid,
		.status = msg->status,
		.exec_errno = msg->exec_errno,
		.flags = msg->flags,
		.ended_us = msg->time_us,
	};
	if (msg->pid && c->n_running)
		c->n_running--;
	journal_event(c->journal, "exited", MSG_EXITED, msg);
	verdict_describe(how, sizeof(how), msg->status, msg->exec_errno);
	tell(c, NOTE_INFO, "rank %u %s", msg->rank, how);
	if (!verdict_is_failure(msg, c->stopped_us))
		return;
	c->n_failed++;
	failure_consider(&c->first, msg);
	if (c->state == JOB_RUNNING)
		stop(c, SIGTERM, c->plan.grace_ms, 0);
}

static void on_idle(struct coordinator *c)
{
	struct msg_verdict v = {
		.n_failed = c->n_failed,
		.n_workers = c->plan.n_processes,
		.started_us = c->started_us,
		.ended_us = wall_us(),
	};
	struct err e = { 0 };

	verdict_reach(&v, &c->first, c->stop_reason, c->client_gone || c->lost);
	c->exit_code = v.exit_code;
	journal_event(c->journal, "verdict", MSG_VERDICT, &v);
	journal_flush(c->journal);
	if (journal_report(c->journal, &c->plan, &v, c->workers, c->plan.n_processes,
			   &e) < 0)
		tell(c, NOTE_WARNING, "%s", e.text);
	else if (journal_error(c->journal))
		tell(c, NOTE_WARNING, "%s", journal_error(c->journal));
	if (!c->client_gone) {
		tell_skipped(c);
		(void)link_send(c->client, MSG_VERDICT, &v);
	}
	over(c);
}

/* ---- the plan ---- */

static int open_job(struct coordinator *c, struct err *err)
{
	uint32_t n = c->plan.n_processes;
	int r;

	c->workers = calloc(n, sizeof(*c->workers));
	c->skipped = calloc((size_t)n * N_STREAMS, sizeof(*c->skipped));
	if (!c->workers || !c->skipped)
		return err_set(err, -ENOMEM, "job of %u processes", n);
	r = journal_new(&c->journal, &c->plan, err);
	return r < 0 ? err_wrap(err, r, "prepare the job's folder") : 0;
}

static void start(struct coordinator *c, const struct msg_plan *plan)
{
	struct msg_accepted accepted = {
		.master_port = store_server_port(c->store),
		.pid = (uint32_t)getpid(),
	};
	struct msg_start msg = {
		.n_nodes = 1,
		.n_local = c->plan.n_processes,
		.n_world = c->plan.n_processes,
		.master_port = accepted.master_port,
	};

	c->state = JOB_RUNNING;
	c->started_us = wall_us();
	journal_event(c->journal, "accepted", MSG_ACCEPTED, &accepted);
	(void)link_send(c->client, MSG_ACCEPTED, &accepted);
	(void)link_send(c->agent, MSG_PLAN, plan);
	(void)link_send(c->agent, MSG_START, &msg);
}

static void on_plan(struct coordinator *c, const struct msg_plan *msg)
{
	char text[ERR_MAX];
	struct err e = { 0 };
	int r;

	if (c->state != JOB_WAITING)
		return;
	if (plan_init(&c->plan, msg, &e) < 0 || open_job(c, &e) < 0) {
		refuse(c, 2, e.text, "");
		return;
	}
	r = store_server_new(&c->store, c->loop, (uint16_t)c->plan.master_port, &e);
	if (r == -EADDRINUSE && c->plan.master_port) {
		(void)snprintf(text, sizeof(text),
			       "open the store: port %u is taken by another program",
			       c->plan.master_port);
		refuse(c, 2, text,
		       "Leave out --master-port to get a free one, or name another.");
	} else if (r < 0) {
		(void)err_wrap(&e, r, "open the store");
		refuse(c, 2, e.text, "");
	} else {
		start(c, msg);
	}
}

/* ---- links ---- */

static void on_client_message(void *data, unsigned type, const union message_any *msg)
{
	struct coordinator *c = data;

	switch (type) {
	case MSG_PLAN:
		on_plan(c, &msg->plan);
		break;
	case MSG_STOP:
		on_stop(c, &msg->stop);
		break;
	case MSG_SIGNAL:
		if (c->state == JOB_RUNNING || c->state == JOB_STOPPING)
			(void)link_send(c->agent, MSG_SIGNAL, &msg->signal);
		break;
	default:
		break;
	}
}

/* Nobody is there to watch a long goodbye. */
static uint32_t lost_grace(const struct coordinator *c)
{
	return c->plan.grace_ms < c->plan.lost_grace_ms ? c->plan.grace_ms
							: c->plan.lost_grace_ms;
}

static void on_client_end(void *data, const char *reason)
{
	struct coordinator *c = data;
	(void)reason;
	c->client_gone = true;
	hold(c, false);
	if (c->state == JOB_RUNNING || c->state == JOB_STOPPING)
		stop(c, SIGTERM, lost_grace(c), 0);
	else if (c->state == JOB_WAITING)
		over(c);
	else
		c->on_over(c->data, c->exit_code);
}

void coordinator_lost(struct coordinator *c, const char *what)
{
	if (c->state == JOB_WAITING) {
		over(c);
	} else if (c->state != JOB_OVER) {
		c->lost = true;
		tell(c, NOTE_WARNING, "%s; ending the job", what);
		stop(c, SIGTERM, lost_grace(c), 0);
	}
}

static void on_client_drained(void *data)
{
	struct coordinator *c = data;

	hold(c, false);
	if (c->state == JOB_OVER)
		c->on_over(c->data, c->exit_code);
}

static const struct link_ops client_ops = {
	.on_message = on_client_message,
	.on_end = on_client_end,
	.on_drained = on_client_drained,
};

static void on_agent_message(void *data, unsigned type, const union message_any *msg)
{
	struct coordinator *c = data;

	if (c->state == JOB_WAITING || c->state == JOB_OVER)
		return;
	switch (type) {
	case MSG_STARTED:
		on_started(c, &msg->started);
		break;
	case MSG_FAILING:
		if (c->state == JOB_RUNNING)
			stop(c, SIGTERM, c->plan.grace_ms, 0);
		break;
	case MSG_EXITED:
		on_exited(c, &msg->exited);
		break;
	case MSG_OUTPUT:
		on_output(c, &msg->output);
		break;
	case MSG_NOTE:
		journal_event(c->journal, "note", MSG_NOTE, &msg->note);
		tell(c, msg->note.level, "%.*s", (int)msg->note.text.len,
		     (const char *)msg->note.text.data);
		break;
	case MSG_REFUSED:
		if (!c->client_gone)
			(void)link_send(c->client, MSG_REFUSED, &msg->refused);
		c->exit_code = msg->refused.exit_code;
		over(c);
		break;
	case MSG_IDLE:
		on_idle(c);
		break;
	default:
		break;
	}
}

static const struct link_ops agent_ops = {
	.on_message = on_agent_message,
};

static void on_prelude(void *data)
{
	struct coordinator *c = data;
	struct err e = { 0 };

	if (!c->journal)
		return;
	journal_flush(c->journal);
	/* After the workers were started: they need not wait for it. */
	if (c->state == JOB_WAITING || c->state == JOB_OVER || c->plan_written)
		return;
	c->plan_written = true;
	if (journal_plan(c->journal, &c->plan, &e) < 0)
		tell(c, NOTE_WARNING, "%s", e.text);
}

DEFINE_OWN(coordinator, struct coordinator, coordinator_free)

int coordinator_new(struct coordinator **ret, struct loop *loop, struct link *client,
		    struct link *agent, on_over_fn *fn, void *data, struct err *err)
{
	OWN(own_coordinator) struct coordinator *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return err_set(err, -ENOMEM, "coordinator");
	c->loop = loop;
	c->client = client;
	c->agent = agent;
	c->on_over = fn;
	c->data = data;
	r = prelude_new(&c->prelude, loop, on_prelude, c, err);
	if (r < 0)
		return r;
	link_set_handler(client, &client_ops, c);
	link_set_handler(agent, &agent_ops, c);
	*ret = take(c);
	return 0;
}

struct coordinator *coordinator_free(struct coordinator *c)
{
	if (!c)
		return NULL;
	c->prelude = prelude_free(c->prelude);
	c->store = store_server_free(c->store);
	c->journal = journal_free(c->journal);
	failure_fini(&c->first);
	plan_fini(&c->plan);
	free(c->workers);
	free(c->skipped);
	free(c);
	return NULL;
}

int coordinator_status(const struct coordinator *c, struct msg_status *ret)
{
	if (!c->workers)
		return -EAGAIN;
	*ret = (struct msg_status){
		.job = slice_str(c->plan.job),
		.program = slice_str(c->plan.program),
		.job_dir = slice_str(c->plan.job_dir),
		.pid = (uint32_t)getpid(),
		.n_workers = c->plan.n_processes,
		.n_running = c->n_running,
		.stopping = c->state == JOB_STOPPING,
		.master_port = c->store ? store_server_port(c->store) : 0,
		.started_us = c->started_us,
		.n_nodes = 1,
	};
	return 0;
}
