/*
 * A worker for the end-to-end tests: it does what its arguments say, one action
 * after the other, and exits with 0 when they are used up. It stands in for a
 * training program wherever only processes, signals and bytes matter, since it
 * starts in well under a millisecond. It knows nothing of accel but RANK.
 *
 *     e2e_worker ready FIFO if 1 exit 3 pause
 *
 * "if R" runs the next action only on rank R. A FIFO is how a test learns that a
 * line was reached: it gets one short line, written at once.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

struct action {
	const char *name;
	int n_args; /* -1: all that are left */
	void (*run)(char **args);
};

static const char *rank = "-";
static const char *term_fifo;
static int term_code = -1;

static void die(const char *what)
{
	fprintf(stderr, "e2e_worker: %s: %s\n", what, strerror(errno));
	exit(99);
}

static void write_all(int fd, const void *data, size_t len)
{
	const char *p = data;

	while (len) {
		ssize_t n = write(fd, p, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			die("write");
		p += n;
		len -= (size_t)n;
	}
}

static int open_for_rank(const char *path)
{
	char name[4096];
	int fd;

	(void)snprintf(name, sizeof(name), "%s.%s", path, rank);
	fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		die(name);
	return fd;
}

/* One line, at most PIPE_BUF long, so that lines of several writers stay whole.
 * Used from a signal handler too. */
static void tell(const char *fifo, const char *word)
{
	char line[256];
	int fd = open(fifo, O_WRONLY | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		return;
	write_all(fd, line,
		  (size_t)snprintf(line, sizeof(line), "%s %s %d\n", word, rank,
				   (int)getpid()));
	(void)close(fd);
}

static void on_term(int signo)
{
	int saved = errno;

	(void)signo;
	if (term_fifo)
		tell(term_fifo, "term");
	if (term_code >= 0)
		_exit(term_code);
	errno = saved;
}

/* An orderly stop may begin with either signal. */
static void catch_term(void)
{
	struct sigaction act = { .sa_handler = on_term, .sa_flags = SA_RESTART };

	(void)sigaction(SIGTERM, &act, NULL);
	(void)sigaction(SIGINT, &act, NULL);
}

static void do_pause(char **args)
{
	(void)args;
	for (;;)
		(void)pause();
}

static void do_exit(char **args)
{
	_exit(atoi(args[0]));
}

static void do_raise(char **args)
{
	(void)raise(atoi(args[0]));
}

static void do_sleep(char **args)
{
	long ms = atol(args[0]);
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&t, &t) < 0 && errno == EINTR)
		;
}

static void do_out(char **args)
{
	dprintf(STDOUT_FILENO, "%s\n", args[0]);
}

static void do_err(char **args)
{
	dprintf(STDERR_FILENO, "%s\n", args[0]);
}

/* Bytes as they are, without a newline. */
static void do_part(char **args)
{
	write_all(STDOUT_FILENO, args[0], strlen(args[0]));
}

static void do_ready(char **args)
{
	tell(args[0], "ready");
}

/* Until somebody writes a byte into the FIFO. */
static void do_wait(char **args)
{
	char c;
	int fd = open(args[0], O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		die(args[0]);
	while (read(fd, &c, 1) < 0 && errno == EINTR)
		;
	(void)close(fd);
}

static void do_ignore(char **args)
{
	(void)signal(atoi(args[0]), SIG_IGN);
}

/* Say that SIGTERM or SIGINT came and go on. */
static void do_term_says(char **args)
{
	term_fifo = args[0];
	catch_term();
}

static void do_term_exits(char **args)
{
	term_code = atoi(args[0]);
	catch_term();
}

static void be_child(const char *fifo)
{
	tell(fifo, "child");
	do_pause(NULL);
}

static void do_child(char **args)
{
	if (!fork())
		be_child(args[0]);
}

static void do_setsid_child(char **args)
{
	if (!fork()) {
		(void)setsid();
		be_child(args[0]);
	}
}

/* Forked twice in a session of its own, deaf to SIGTERM and SIGHUP, as daemons
 * are made. */
static void do_daemon(char **args)
{
	if (fork())
		return;
	(void)setsid();
	if (fork())
		_exit(0);
	(void)signal(SIGTERM, SIG_IGN);
	(void)signal(SIGHUP, SIG_IGN);
	be_child(args[0]);
}

/* A child that holds the output open after its parent has gone. */
static void do_heir(char **args)
{
	if (!fork()) {
		do_sleep(args);
		dprintf(STDOUT_FILENO, "the heir speaks\n");
		_exit(0);
	}
}

static void do_args(char **args)
{
	int fd = open_for_rank(args[0]);

	for (char **a = args + 1; *a; a++)
		write_all(fd, *a, strlen(*a) + 1);
	(void)close(fd);
}

static void do_env(char **args)
{
	int fd = open_for_rank(args[0]);

	for (char **e = environ; *e; e++)
		write_all(fd, *e, strlen(*e) + 1);
	(void)close(fd);
}

static void do_cwd(char **args)
{
	char path[4096];
	int fd = open_for_rank(args[0]);

	if (!getcwd(path, sizeof(path)))
		die("getcwd");
	write_all(fd, path, strlen(path));
	(void)close(fd);
}

static void do_stdin(char **args)
{
	char chunk[65536];
	int fd = open_for_rank(args[0]);
	ssize_t n;

	while ((n = read(STDIN_FILENO, chunk, sizeof(chunk))) > 0)
		write_all(fd, chunk, (size_t)n);
	if (n < 0)
		die("stdin");
	(void)close(fd);
}

/* Descriptors the worker was born with and what they are, one a line. */
static void do_fds(char **args)
{
	int out = open_for_rank(args[0]);

	for (int fd = 0; fd < 256; fd++) {
		char name[64], to[512];
		ssize_t n;

		(void)snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
		n = readlink(name, to, sizeof(to) - 1);
		if (n >= 0 && fd != out)
			dprintf(out, "%d %.*s\n", fd, (int)n, to);
	}
	(void)close(out);
}

/* Blocked, ignored and caught signals as the kernel tells them. */
static void do_signals(char **args)
{
	char text[8192];
	int in = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
	int out = open_for_rank(args[0]);
	ssize_t n = read(in, text, sizeof(text));

	if (n < 0)
		die("status");
	write_all(out, text, (size_t)n);
	(void)close(in);
	(void)close(out);
}

/* Megabytes of "x" with no newline anywhere. */
static void do_flood(char **args)
{
	size_t left = (size_t)atol(args[0]) << 20;
	static char chunk[65536];

	memset(chunk, 'x', sizeof(chunk));
	for (; left; left -= sizeof(chunk))
		write_all(STDOUT_FILENO, chunk, sizeof(chunk));
}

/* Every byte value, in an order that never repeats within 64 KiB. */
static void do_binary(char **args)
{
	size_t n = (size_t)atol(args[0]);
	static unsigned char chunk[65536];

	for (size_t at = 0; at < n; at += sizeof(chunk)) {
		size_t len = n - at < sizeof(chunk) ? n - at : sizeof(chunk);

		for (size_t i = 0; i < len; i++)
			chunk[i] = (unsigned char)(i * 167 + (i >> 8) * 13 + at);
		write_all(STDOUT_FILENO, chunk, len);
	}
}

/* COUNT numbered lines, RATE of them a second. */
static void do_lines(char **args)
{
	long count = atol(args[0]), rate = atol(args[1]);
	struct timespec next;

	(void)clock_gettime(CLOCK_MONOTONIC, &next);
	for (long i = 0; i < count; i++) {
		dprintf(STDOUT_FILENO, "line %ld of rank %s\n", i, rank);
		if ((i + 1) % (rate / 100))
			continue;
		next.tv_nsec += 10000000;
		if (next.tv_nsec >= 1000000000) {
			next.tv_nsec -= 1000000000;
			next.tv_sec++;
		}
		(void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
	}
}

static void do_close_output(char **args)
{
	(void)args;
	(void)close(STDOUT_FILENO);
	(void)close(STDERR_FILENO);
}

static void do_exec(char **args)
{
	(void)execvp(args[0], args);
	die(args[0]);
}

static const struct action actions[] = {
	{ "args", -1, do_args },
	{ "binary", 1, do_binary },
	{ "child", 1, do_child },
	{ "close-output", 0, do_close_output },
	{ "cwd", 1, do_cwd },
	{ "daemon", 1, do_daemon },
	{ "env", 1, do_env },
	{ "err", 1, do_err },
	{ "exec", -1, do_exec },
	{ "exit", 1, do_exit },
	{ "fds", 1, do_fds },
	{ "flood", 1, do_flood },
	{ "heir", 1, do_heir },
	{ "ignore", 1, do_ignore },
	{ "lines", 2, do_lines },
	{ "out", 1, do_out },
	{ "part", 1, do_part },
	{ "pause", 0, do_pause },
	{ "raise", 1, do_raise },
	{ "ready", 1, do_ready },
	{ "setsid-child", 1, do_setsid_child },
	{ "signals", 1, do_signals },
	{ "sleep", 1, do_sleep },
	{ "stdin", 1, do_stdin },
	{ "term-exits", 1, do_term_exits },
	{ "term-says", 1, do_term_says },
	{ "wait", 1, do_wait },
};

static const struct action *find_action(const char *name)
{
	for (size_t i = 0; i < sizeof(actions) / sizeof(actions[0]); i++)
		if (!strcmp(actions[i].name, name))
			return &actions[i];
	fprintf(stderr, "e2e_worker: no action '%s'\n", name);
	exit(98);
}

static int count_args(char **args)
{
	int n = 0;

	while (args[n])
		n++;
	return n;
}

int main(int argc, char **argv)
{
	char **at = argv + (argc ? 1 : 0);

	if (getenv("RANK"))
		rank = getenv("RANK");
	while (*at) {
		int mine = 1, n;
		const struct action *a;

		if (!strcmp(at[0], "if") && at[1]) {
			mine = !strcmp(at[1], rank);
			at += 2;
		}
		a = find_action(*at ? *at : "");
		at++;
		n = count_args(at);
		if (a->n_args > n) {
			fprintf(stderr, "e2e_worker: '%s' wants more\n", a->name);
			exit(98);
		}
		if (mine)
			a->run(at);
		at += a->n_args < 0 ? n : a->n_args;
	}
	return 0;
}
