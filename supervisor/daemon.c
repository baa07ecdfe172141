#include "supervisor/daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "rendezvous/coordinator.h"
#include "rendezvous/link.h"
#include "supervisor/agent.h"

struct daemon {
	struct loop *loop;
	struct link *client, *to_agent, *to_coordinator;
	struct coordinator *coordinator;
	struct agent *agent;
	struct watch *keeper;
	struct sigwatch *sigterm;
	uint32_t exit_code;
};

static void on_over(void *data, uint32_t exit_code)
{
	struct daemon *d = data;

	d->exit_code = exit_code;
	loop_stop(d->loop);
}

static void on_keeper_gone(void *data, int events)
{
	struct daemon *d = data;

	(void)events;
	d->keeper = watch_free(d->keeper);
	coordinator_lost(d->coordinator, "the job's keeper process was killed");
}

static void on_sigterm(void *data, int signo)
{
	struct daemon *d = data;

	coordinator_stop(d->coordinator, signo);
}

static int on_status(void *data, struct msg_status *ret)
{
	struct daemon *d = data;

	return coordinator_status(d->coordinator, ret);
}

static int daemon_init(struct daemon *d, int link_fd, int keeper_fd,
		       struct keeper_board *board, const struct inherited *inherited,
		       struct err *err)
{
	int r = loop_new(&d->loop, err);

	if (!r)
		r = link_new(&d->client, d->loop, link_fd, err);
	if (!r)
		r = link_new_pair(&d->to_agent, &d->to_coordinator, d->loop, err);
	if (!r)
		r = coordinator_new(&d->coordinator, d->loop, d->client, d->to_agent,
				    on_over, d, err);
	if (!r)
		r = agent_new(&d->agent, d->loop, d->to_coordinator, inherited, board,
			      on_status, d, err);
	if (!r)
		r = watch_new(&d->keeper, d->loop, keeper_fd, WATCH_READ, on_keeper_gone,
			      d, err);
	if (!r)
		r = sigwatch_new(&d->sigterm, d->loop, SIGTERM, on_sigterm, d, err);
	return r;
}

static void daemon_fini(struct daemon *d)
{
	d->keeper = watch_free(d->keeper);
	d->sigterm = sigwatch_free(d->sigterm);
	d->agent = agent_free(d->agent);
	d->coordinator = coordinator_free(d->coordinator);
	d->to_agent = link_free(d->to_agent);
	d->to_coordinator = link_free(d->to_coordinator);
	d->client = link_free(d->client);
	d->loop = loop_free(d->loop);
}

int daemon_run(int link_fd, int keeper_fd, struct keeper_board *board,
	       const struct inherited *inherited)
{
	struct daemon d = { 0 };
	struct err e = { 0 };

	if (daemon_init(&d, link_fd, keeper_fd, board, inherited, &e) < 0) {
		fprintf(stderr, "acceld: start: %s\n", e.text);
		d.exit_code = 70;
	} else {
		loop_run(d.loop);
	}
	daemon_fini(&d);
	own_close(&keeper_fd);
	return (int)d.exit_code;
}
