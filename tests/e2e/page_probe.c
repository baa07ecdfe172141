/*
 * A program that uses libaccel, for the end-to-end tests: it makes the calls that
 * its arguments name, one after the other, and says how each went. Its status is
 * the last error, made positive; 0 when all went well.
 *
 *     page_probe join barrier if 0 exit 3 barrier
 *
 * "if R" makes the next call only on rank R. What a call says is one write, so that
 * lines of several ranks stay whole: "barrier: ok", or "barrier: ACCEL_E_LOST: ..."
 * and the library's sentence.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/accel.h"

struct call {
	const char *name;
	int n_args;
	void (*run)(char **args);
};

static const char *const errors[] = {
	[-ACCEL_E_INVALID] = "ACCEL_E_INVALID",
	[-ACCEL_E_MISMATCH] = "ACCEL_E_MISMATCH",
	[-ACCEL_E_LOST] = "ACCEL_E_LOST",
	[-ACCEL_E_TIMEOUT] = "ACCEL_E_TIMEOUT",
	[-ACCEL_E_FORKED] = "ACCEL_E_FORKED",
	[-ACCEL_E_OWNED] = "ACCEL_E_OWNED",
	[-ACCEL_E_VERSION] = "ACCEL_E_VERSION",
	[-ACCEL_E_UNREACHABLE] = "ACCEL_E_UNREACHABLE",
	[-ACCEL_E_MEMORY] = "ACCEL_E_MEMORY",
	[-ACCEL_E_BUSY] = "ACCEL_E_BUSY",
	[-ACCEL_E_INTERRUPTED] = "ACCEL_E_INTERRUPTED",
};
enum { N_ERRORS = sizeof(errors) / sizeof(errors[0]), LINE = 8192 };

static accel_world *world;
static int last_error;

static void run_calls(char **at);

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
	char line[LINE];
	va_list ap;
	size_t len;

	va_start(ap, fmt);
	(void)vsnprintf(line, sizeof(line) - 1, fmt, ap);
	va_end(ap);
	len = strlen(line);
	line[len++] = '\n';
	if (write(STDOUT_FILENO, line, len) != (ssize_t)len)
		_exit(99);
}

/* True when it went well. */
static int went_well(const char *what, int r)
{
	if (!r)
		return 1;
	last_error = r;
	say("%s: %s: %s", what, r > -N_ERRORS && r < 0 ? errors[-r] : "?", accel_error());
	return 0;
}

static void need_world(void)
{
	if (!world) {
		say("page_probe: no world");
		exit(98);
	}
}

static void tell(const char *fifo)
{
	const char *rank = getenv("RANK");
	char line[256];
	int fd = open(fifo, O_WRONLY | O_NONBLOCK | O_CLOEXEC), n;

	n = snprintf(line, sizeof(line), "ready %s %d\n", rank ? rank : "-",
		     (int)getpid());
	if (fd < 0 || write(fd, line, (size_t)n) != n)
		_exit(99);
	(void)close(fd);
}

static void do_join(char **args)
{
	(void)args;
	if (went_well("join", accel_init(&world)))
		say("join: rank %d of %d, local rank %d of %d", accel_rank(world),
		    accel_size(world), accel_local_rank(world), accel_local_size(world));
}

static void do_barrier(char **args)
{
	(void)args;
	need_world();
	if (went_well("barrier", accel_barrier(world)))
		say("barrier: ok");
}

/* The sum over all ranks of one more than their number. */
static void do_sum(char **args)
{
	int64_t value;
	struct accel_array array = { .data = &value, .dtype = ACCEL_INT64 };

	(void)args;
	need_world();
	value = accel_rank(world) + 1;
	if (went_well("sum", accel_reduce(world, &array, ACCEL_SUM)))
		say("sum: %lld", (long long)value);
}

static void do_should_stop(char **args)
{
	int r;

	(void)args;
	need_world();
	r = accel_should_stop(world);
	if (went_well("should-stop", r < 0 ? r : 0))
		say("should-stop: %d", r);
}

/* A training loop that looks after each step; says so once it runs. */
static void do_until_stop(char **args)
{
	struct accel_counters counters;
	int r;

	need_world();
	accel_step(world);
	r = accel_should_stop(world);
	tell(args[0]);
	while (!r) {
		accel_step(world);
		r = accel_should_stop(world);
	}
	accel_counters(world, &counters);
	if (went_well("until-stop", r < 0 ? r : 0))
		say("until-stop: step %llu", (unsigned long long)counters.steps);
}

static void do_steps(char **args)
{
	need_world();
	for (long n = atol(args[0]); n > 0; n--)
		accel_step(world);
}

static void do_fail(char **args)
{
	need_world();
	accel_fail(world, args[0]);
}

static void do_finish(char **args)
{
	(void)args;
	accel_finish(world);
	world = NULL;
}

static void wait_for(pid_t pid)
{
	int status;

	if (pid < 0 || waitpid(pid, &status, 0) < 0 || !WIFEXITED(status))
		exit(99);
}

/* One call in a fork of this process, which waits for it. */
static void do_fork(char **args)
{
	char *call[] = { args[0], NULL };
	pid_t pid = fork();

	if (!pid) {
		run_calls(call);
		_exit(0);
	}
	wait_for(pid);
}

/* One call in another process, started with this one's environment. */
static void do_spawn(char **args)
{
	static char self[] = "page_probe";
	char *argv[] = { self, args[0], NULL };
	pid_t pid = fork();

	if (!pid) {
		(void)execv("/proc/self/exe", argv);
		_exit(99);
	}
	wait_for(pid);
}

static void do_ready(char **args)
{
	tell(args[0]);
}

/* Until somebody writes a byte into the FIFO. */
static void do_wait(char **args)
{
	char c;
	int fd = open(args[0], O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		exit(99);
	while (read(fd, &c, 1) < 0 && errno == EINTR)
		;
	(void)close(fd);
}

static void do_pause(char **args)
{
	(void)args;
	for (;;)
		(void)pause();
}

static void do_ignore(char **args)
{
	(void)signal(atoi(args[0]), SIG_IGN);
}

static void do_exit(char **args)
{
	_exit(atoi(args[0]));
}

static const struct call calls[] = {
	{ "barrier", 0, do_barrier }, { "exit", 1, do_exit },
	{ "fail", 1, do_fail },       { "finish", 0, do_finish },
	{ "fork", 1, do_fork },       { "ignore", 1, do_ignore },
	{ "join", 0, do_join },       { "pause", 0, do_pause },
	{ "ready", 1, do_ready },     { "should-stop", 0, do_should_stop },
	{ "spawn", 1, do_spawn },     { "steps", 1, do_steps },
	{ "sum", 0, do_sum },         { "until-stop", 1, do_until_stop },
	{ "wait", 1, do_wait },
};

static const struct call *find_call(const char *name)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (!strcmp(calls[i].name, name))
			return &calls[i];
	say("page_probe: no call '%s'", name);
	exit(98);
}

static int count(char **args)
{
	int n = 0;

	while (args[n])
		n++;
	return n;
}

static void run_calls(char **at)
{
	const char *rank = getenv("RANK");

	while (*at) {
		int mine = 1;
		const struct call *c;

		if (!strcmp(at[0], "if") && at[1]) {
			mine = rank && !strcmp(at[1], rank);
			at += 2;
		}
		c = find_call(*at ? *at : "");
		at++;
		if (c->n_args > count(at)) {
			say("page_probe: '%s' wants more", c->name);
			exit(98);
		}
		if (mine)
			c->run(at);
		at += c->n_args;
	}
}

int main(int argc, char **argv)
{
	(void)signal(SIGPIPE, SIG_IGN);
	run_calls(argv + (argc ? 1 : 0));
	return -last_error;
}
