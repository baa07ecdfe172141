/* A whole job in memory: the test is both the client and the agent. */

#include "tests/unit/unit.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/loop.h"
#include "rendezvous/coordinator.h"
#include "rendezvous/link.h"

enum { SEEN_MAX = 256 };

struct side {
	struct link *ours, *theirs;
	unsigned seen[SEEN_MAX];
	int n_seen;
	union message_any last[N_MSG_TYPES];
	size_t bytes;     /* of output */
	uint64_t skipped; /* lines */
};

struct job {
	struct loop *loop;
	struct timer *keep;
	struct side client, agent;
	struct coordinator *c;
	char dir[64];
	struct buf argv, env;
	bool over;
	uint32_t exit_code;
};

static void on_message(void *data, unsigned type, const union message_any *msg)
{
	struct side *s = data;

	if (s->n_seen < SEEN_MAX)
		s->seen[s->n_seen++] = type;
	s->last[type] = *msg;
	if (type == MSG_OUTPUT) {
		s->bytes += msg->output.data.len;
		s->skipped += msg->output.skipped_lines;
	}
}

static const struct link_ops ops = { .on_message = on_message };

static void on_over(void *data, uint32_t exit_code)
{
	struct job *j = data;

	j->over = true;
	j->exit_code = exit_code;
}

static void on_nothing(void *data)
{
	(void)data;
}

/* Let everything that was sent arrive, and what that leads to. */
static void settle(struct job *j)
{
	for (int i = 0; i < 4; i++) {
		timer_start(j->keep, 1);
		loop_once(j->loop);
	}
}

static bool saw(const struct side *s, unsigned type)
{
	for (int i = 0; i < s->n_seen; i++)
		if (s->seen[i] == type)
			return true;
	return false;
}

static void open_job(struct job *j)
{
	*j = (struct job){ 0 };
	strcpy(j->dir, "/tmp/test_coordinator.XXXXXX");
	assert_non_null(mkdtemp(j->dir));
	assert_int_equal(loop_new(&j->loop, NULL), 0);
	assert_int_equal(timer_new(&j->keep, j->loop, on_nothing, NULL, NULL), 0);
	assert_int_equal(link_new_pair(&j->client.ours, &j->client.theirs, j->loop, NULL),
			 0);
	assert_int_equal(link_new_pair(&j->agent.ours, &j->agent.theirs, j->loop, NULL),
			 0);
	assert_int_equal(coordinator_new(&j->c, j->loop, j->client.theirs,
					 j->agent.theirs, on_over, j, NULL),
			 0);
	link_set_handler(j->client.ours, &ops, &j->client);
	link_set_handler(j->agent.ours, &ops, &j->agent);
}

static void close_job(struct job *j)
{
	char command[128];

	coordinator_free(j->c);
	link_free(j->client.ours);
	link_free(j->client.theirs);
	link_free(j->agent.ours);
	link_free(j->agent.theirs);
	timer_free(j->keep);
	loop_free(j->loop);
	buf_fini(&j->argv);
	buf_fini(&j->env);
	(void)snprintf(command, sizeof(command), "rm -r %s", j->dir);
	assert_int_equal(system(command), 0);
}

static void send_plan(struct job *j, uint32_t n, uint32_t flags)
{
	struct msg_plan plan = {
		.job = slice_str("job"),
		.job_dir = slice_str(j->dir),
		.socket = slice_str("/nowhere.sock"),
		.program = slice_str("prog"),
		.path = slice_str("/bin/prog"),
		.n_processes = n,
		.flags = flags,
		.mixed_precision = slice_str("no"),
		.master_addr = slice_str("localhost"),
		.grace_ms = 15000,
		.lost_grace_ms = 1000,
	};

	(void)slice_list_add(&j->argv, &plan.argv.n, "prog", 4);
	plan.argv.body = buf_slice(&j->argv);
	assert_int_equal(link_send(j->client.ours, MSG_PLAN, &plan), 0);
	settle(j);
}

static void say_started(struct job *j, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		struct msg_started m = { .rank = i, .pid = 100 + i };

		assert_int_equal(link_send(j->agent.ours, MSG_STARTED, &m), 0);
	}
	settle(j);
}

static void say_exited(struct job *j, uint32_t rank, int32_t status, uint32_t flags)
{
	struct msg_exited m = { .rank = rank,
				.pid = 100 + rank,
				.status = status,
				.flags = flags,
				.time_us = 1000000 + rank };

	assert_int_equal(link_send(j->agent.ours, MSG_EXITED, &m), 0);
	settle(j);
}

static void say_idle(struct job *j)
{
	struct msg_idle m = { 0 };

	assert_int_equal(link_send(j->agent.ours, MSG_IDLE, &m), 0);
	settle(j);
}

static void a_plan_is_accepted_and_handed_to_the_agent(void **state)
{
	struct msg_status status;
	struct job j;

	(void)state;
	open_job(&j);
	assert_true(coordinator_status(j.c, &status) < 0);
	send_plan(&j, 2, 0);
	assert_true(saw(&j.client, MSG_ACCEPTED));
	assert_true(j.client.last[MSG_ACCEPTED].accepted.master_port > 0);
	assert_int_equal(j.agent.seen[0], MSG_PLAN);
	assert_int_equal(j.agent.seen[1], MSG_START);
	assert_int_equal(j.agent.last[MSG_START].start.n_local, 2);
	assert_int_equal(j.agent.last[MSG_START].start.master_port,
			 j.client.last[MSG_ACCEPTED].accepted.master_port);
	say_started(&j, 2);
	assert_int_equal(coordinator_status(j.c, &status), 0);
	assert_int_equal(status.n_running, 2);
	close_job(&j);
}

static void a_plan_without_processes_is_refused(void **state)
{
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 0, 0);
	assert_true(saw(&j.client, MSG_REFUSED));
	assert_false(saw(&j.agent, MSG_START));
	assert_true(j.over);
	assert_int_equal(j.exit_code, 2);
	close_job(&j);
}

static void a_job_whose_workers_succeed_is_done(void **state)
{
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 2, 0);
	say_started(&j, 2);
	say_exited(&j, 0, 0, 0);
	say_exited(&j, 1, 0, 0);
	assert_false(saw(&j.agent, MSG_STOP));
	assert_false(j.over);
	say_idle(&j);
	assert_true(j.over);
	assert_int_equal(j.client.last[MSG_VERDICT].verdict.verdict, VERDICT_DONE);
	assert_int_equal(j.exit_code, 0);
	close_job(&j);
}

static void
the_first_failure_stops_the_others_before_its_last_words_are_known(void **state)
{
	struct msg_failing failing = { .rank = 1 };
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 2, 0);
	say_started(&j, 2);
	assert_int_equal(link_send(j.agent.ours, MSG_FAILING, &failing), 0);
	settle(&j);
	assert_true(saw(&j.agent, MSG_STOP));
	assert_int_equal(j.agent.last[MSG_STOP].stop.signo, SIGTERM);
	assert_int_equal(j.agent.last[MSG_STOP].stop.grace_ms, 15000);
	say_exited(&j, 1, 7 << 8, 0);
	say_exited(&j, 0, SIGTERM, EXIT_SIGNALLED);
	say_idle(&j);
	assert_int_equal(j.client.last[MSG_VERDICT].verdict.rank, 1);
	assert_int_equal(j.client.last[MSG_VERDICT].verdict.n_failed, 1);
	assert_int_equal(j.exit_code, 7);
	close_job(&j);
}

static void a_stop_on_request_is_passed_on_and_named(void **state)
{
	struct msg_stop stop = { .signo = SIGINT, .grace_ms = 500, .reason = SIGINT };
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 1, 0);
	say_started(&j, 1);
	assert_int_equal(link_send(j.client.ours, MSG_STOP, &stop), 0);
	settle(&j);
	assert_int_equal(j.agent.last[MSG_STOP].stop.signo, SIGINT);
	assert_int_equal(j.agent.last[MSG_STOP].stop.grace_ms, 500);
	say_exited(&j, 0, SIGINT, EXIT_SIGNALLED);
	say_idle(&j);
	assert_int_equal(j.client.last[MSG_VERDICT].verdict.verdict, VERDICT_STOPPED);
	assert_int_equal(j.exit_code, 130);
	close_job(&j);
}

static void a_stop_after_a_failure_keeps_the_failures_code(void **state)
{
	struct msg_stop stop = { .signo = SIGKILL, .reason = SIGINT };
	struct msg_failing failing = { .rank = 0 };
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 2, 0);
	say_started(&j, 2);
	assert_int_equal(link_send(j.agent.ours, MSG_FAILING, &failing), 0);
	settle(&j);
	assert_int_equal(link_send(j.client.ours, MSG_STOP, &stop), 0);
	settle(&j);
	assert_int_equal(j.agent.last[MSG_STOP].stop.signo, SIGKILL);
	say_exited(&j, 0, 9 << 8, 0);
	say_exited(&j, 1, SIGKILL, EXIT_SIGNALLED);
	say_idle(&j);
	assert_int_equal(j.exit_code, 9);
	close_job(&j);
}

static void what_is_lost_ends_the_job_soon(void **state)
{
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 1, 0);
	say_started(&j, 1);
	coordinator_lost(j.c, "something");
	settle(&j);
	assert_int_equal(j.agent.last[MSG_STOP].stop.grace_ms, 1000);
	say_exited(&j, 0, SIGTERM, EXIT_SIGNALLED);
	say_idle(&j);
	assert_int_equal(j.exit_code, 4);
	close_job(&j);
}

static void messages_about_ranks_that_do_not_exist_are_ignored(void **state)
{
	struct msg_started started = { .rank = 7 };
	struct msg_output output = { .rank = 1, .stream = 9, .data = slice_str("x") };
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 1, 0);
	assert_int_equal(link_send(j.agent.ours, MSG_STARTED, &started), 0);
	assert_int_equal(link_send(j.agent.ours, MSG_OUTPUT, &output), 0);
	say_exited(&j, 9, 1 << 8, 0);
	assert_false(saw(&j.client, MSG_OUTPUT));
	assert_false(saw(&j.agent, MSG_STOP));
	say_idle(&j);
	assert_int_equal(j.exit_code, 0);
	close_job(&j);
}

/* 4 MiB in lines of 64 bytes at once: more than may wait for a screen. */
static void flood(struct job *j)
{
	char lines[64 << 10];
	struct msg_output m = { .data = slice_of(lines, sizeof(lines)) };

	memset(lines, 'x', sizeof(lines));
	for (size_t i = 63; i < sizeof(lines); i += 64)
		lines[i] = '\n';
	for (int i = 0; i < 64; i++)
		assert_int_equal(link_send(j->agent.ours, MSG_OUTPUT, &m), 0);
	settle(j);
}

static void a_screen_that_lags_is_told_what_it_missed(void **state)
{
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 1, PLAN_SKIP_SCREEN);
	flood(&j);
	assert_true(j.client.bytes < 3 << 20);
	assert_false(saw(&j.agent, MSG_HOLD));
	say_idle(&j);
	/* Every line was shown or counted. */
	assert_int_equal(j.client.bytes / 64 + j.client.skipped, 64 * 1024);
	close_job(&j);
}

static void a_pipe_that_lags_holds_the_workers_up_and_loses_nothing(void **state)
{
	struct job j;

	(void)state;
	open_job(&j);
	send_plan(&j, 1, 0);
	flood(&j);
	assert_true(saw(&j.agent, MSG_HOLD));
	assert_int_equal(j.client.bytes, 4 << 20);
	assert_int_equal(j.client.skipped, 0);
	close_job(&j);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_plan_is_accepted_and_handed_to_the_agent),
		cmocka_unit_test(a_plan_without_processes_is_refused),
		cmocka_unit_test(a_job_whose_workers_succeed_is_done),
		cmocka_unit_test(
			the_first_failure_stops_the_others_before_its_last_words_are_known),
		cmocka_unit_test(a_stop_on_request_is_passed_on_and_named),
		cmocka_unit_test(a_stop_after_a_failure_keeps_the_failures_code),
		cmocka_unit_test(what_is_lost_ends_the_job_soon),
		cmocka_unit_test(messages_about_ranks_that_do_not_exist_are_ignored),
		cmocka_unit_test(a_screen_that_lags_is_told_what_it_missed),
		cmocka_unit_test(a_pipe_that_lags_holds_the_workers_up_and_loses_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
