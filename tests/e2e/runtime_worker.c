/*
 * A rank for the tests of what goes wrong between ranks: it makes the calls that its
 * arguments name, with real data, and says how each went.
 *
 *     runtime_worker join watch FIFO if 2 pause large gather
 *
 * "if R" and "unless R" are about the next word, which only rank R, or all but it,
 * follow. What a call gave is one line, written at once: "large: ok", or
 * "large: ACCEL_E_LOST at MS: SENTENCE" with the monotonic clock and the sentence's
 * lines joined by " | ". The status is the last error, made positive. A call whose
 * result is wrong ends the program with 97, wrong words with 98.
 *
 * After "watch FIFO" each call that has to wait for others says so in the FIFO, once:
 * when it first looks around, or for the Nth time after "looks N".
 */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/accel.h"

struct word {
	const char *name;
	int n_args;
	void (*run)(char **args);
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
	LINE = 8192,
	LARGE = 700001, /* floats: several slots */
	SMALL = 5,
	ROWS = 60001, /* of rank 0, and 1000 more on each other */
	ALLOCATED = 1 << 20,
	MAX_RANKS = 128,
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

static accel_world *world;
static accel_model *model;
static float parameters[SMALL], gradients[SMALL];
static float *gathering; /* between the halves of a gather */
static uint64_t rows[MAX_RANKS];
static float *arena;
static int last_error;
static int rank_now = -1;
static int watch_fd = -1;
static int n_looks; /* of the call that waits */
static int looks_to_tell = 1;
static int gives_up;
static int is_quiet;

static void run_words(char **at);

/* ---- talking -------------------------------------------------------------------------
 */

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

__attribute__((noreturn)) static void wrong(const char *what)
{
	say("%s: wrong result", what);
	_exit(97);
}

static int open_to_tell(const char *fifo)
{
	int fd = open(fifo, O_WRONLY | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		_exit(99);
	return fd;
}

static void tell(int fd, const char *word)
{
	const char *rank = getenv("RANK");
	char line[256];
	int n = snprintf(line, sizeof(line), "%s %s %d\n", word, rank ? rank : "-",
			 (int)getpid());

	if (write(fd, line, (size_t)n) != n)
		_exit(99);
}

static int on_wait(void *data)
{
	(void)data;
	if (watch_fd >= 0 && ++n_looks == looks_to_tell)
		tell(watch_fd, "waiting");
	return gives_up;
}

static unsigned long long monotonic_ms(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (unsigned long long)t.tv_sec * 1000 +
	       (unsigned long long)t.tv_nsec / 1000000;
}

static void say_error(const char *what, int r)
{
	char text[LINE / 2];
	size_t n = 0;

	for (const char *s = accel_error(); *s && n < sizeof(text) - 4; s++) {
		if (*s == '\n')
			n += (size_t)snprintf(text + n, sizeof(text) - n, " | ");
		else
			text[n++] = *s;
	}
	text[n] = 0;
	say("%s: %s at %llu: %s", what, -r < (int)COUNT(errors) ? errors[-r] : "?",
	    monotonic_ms(), text);
}

/* What a call gave; true when it went well. */
static int went_well(const char *what, int r)
{
	n_looks = 0;
	if (r < 0) {
		last_error = r;
		say_error(what, r);
		return 0;
	}
	return 1;
}

static void say_ok(const char *what)
{
	if (!is_quiet)
		say("%s: ok", what);
}

/* ---- calls ---------------------------------------------------------------------------
 */

static void need_world(void)
{
	if (!world) {
		say("runtime_worker: no world");
		exit(98);
	}
}

static void do_join(char **args)
{
	(void)args;
	accel_on_wait(on_wait, NULL);
	if (!went_well("join", accel_init(&world)))
		return;
	rank_now = accel_rank(world);
	say("join: rank %d of %d", rank_now, accel_size(world));
}

static void do_barrier(char **args)
{
	(void)args;
	need_world();
	if (went_well("barrier", accel_barrier(world)))
		say_ok("barrier");
}

static void do_stop(char **args)
{
	int r;

	(void)args;
	need_world();
	r = accel_should_stop(world);
	if (!went_well("stop", r))
		return;
	if (r)
		wrong("stop");
	say_ok("stop");
}

static void do_leave(char **args)
{
	(void)args;
	need_world();
	if (went_well("leave", accel_join(world)))
		say_ok("leave");
}

static float sum_of(size_t i)
{
	int n = accel_size(world);

	return (float)(n * (n + 1) / 2) * (float)(i % 100);
}

static void reduce(const char *what, size_t count)
{
	float *data = malloc(count * sizeof(*data));
	struct accel_array a = { data, ACCEL_FLOAT32, 1, { count } };

	need_world();
	for (size_t i = 0; i < count; i++)
		data[i] = (float)(rank_now + 1) * (float)(i % 100);
	if (went_well(what, accel_reduce(world, &a, ACCEL_SUM))) {
		for (size_t i = 0; i < count; i++)
			if (data[i] != sum_of(i))
				wrong(what);
		say_ok(what);
	}
	free(data);
}

static void do_small(char **args)
{
	(void)args;
	reduce("small", SMALL);
}

static void do_large(char **args)
{
	(void)args;
	reduce("large", LARGE);
}

static void do_broadcast(char **args)
{
	uint8_t *data = malloc(LARGE);
	struct accel_array a = { data, ACCEL_UINT8, 1, { LARGE } };

	(void)args;
	need_world();
	for (size_t i = 0; i < LARGE; i++)
		data[i] = (uint8_t)(i * 7 + (size_t)rank_now);
	if (went_well("broadcast", accel_broadcast(world, &a, 0))) {
		for (size_t i = 0; i < LARGE; i++)
			if (data[i] != (uint8_t)(i * 7))
				wrong("broadcast");
		say_ok("broadcast");
	}
	free(data);
}

static uint64_t rows_of(int rank)
{
	return ROWS + 1000 * (uint64_t)rank;
}

static int gather_half(const char *what)
{
	uint64_t n;
	struct accel_array a = { NULL, ACCEL_FLOAT32, 2, { 0, 2 } };

	need_world();
	n = rows_of(rank_now);
	a.dims[0] = n;
	a.data = gathering = malloc(n * 2 * sizeof(float));
	for (uint64_t i = 0; i < n * 2; i++)
		gathering[i] = (float)(rank_now * 1000 + (int)(i % 1000));
	if (went_well(what, accel_gather(world, &a, rows)))
		return 1;
	free(gathering);
	return 0;
}

static void gather_rest(const char *what)
{
	uint64_t n = 0, at = 0;
	float *out;

	for (int k = 0; k < accel_size(world); k++)
		n += rows_of(k) * 2;
	out = malloc(n * sizeof(*out));
	if (went_well(what, accel_gather_into(world, out))) {
		for (int k = 0; k < accel_size(world); k++)
			for (uint64_t i = 0; i < rows_of(k) * 2; i++)
				if (out[at++] != (float)(k * 1000 + (int)(i % 1000)))
					wrong(what);
		say_ok(what);
	}
	free(out);
	free(gathering);
}

static void do_gather(char **args)
{
	(void)args;
	if (gather_half("gather"))
		gather_rest("gather");
}

static void do_gather_half(char **args)
{
	(void)args;
	(void)gather_half("gather-half");
}

static void do_prepare(char **args)
{
	struct accel_array a = { parameters, ACCEL_FLOAT32, 1, { SMALL } };

	(void)args;
	need_world();
	for (int i = 0; i < SMALL; i++)
		parameters[i] = (float)rank_now;
	if (!went_well("prepare", accel_prepare(world, &a, 1, 0, &model)))
		return;
	for (int i = 0; i < SMALL; i++)
		if (parameters[i] != 0)
			wrong("prepare");
	say_ok("prepare");
}

static void do_backward(char **args)
{
	void *list[] = { gradients };

	(void)args;
	need_world();
	for (int i = 0; i < SMALL; i++)
		gradients[i] = (float)(rank_now + 1);
	if (!went_well("backward", accel_backward(model, list)))
		return;
	for (int i = 0; i < SMALL; i++)
		if (gradients[i] != (float)(accel_size(world) + 1) / 2)
			wrong("backward");
	say_ok("backward");
}

/* Without a gradient, where others have one. */
static void do_backward_half(char **args)
{
	void *list[] = { NULL };
	int r;

	(void)args;
	need_world();
	r = accel_backward(model, list);
	if (went_well("backward-half", r) && r != 1)
		wrong("backward-half");
}

static void do_alloc(char **args)
{
	(void)args;
	need_world();
	if (!went_well("alloc", accel_alloc(world, ALLOCATED, (void **)&arena)))
		return;
	for (size_t i = 0; i < ALLOCATED / sizeof(*arena); i++)
		if (arena[i] != 0)
			wrong("alloc");
	say_ok("alloc");
}

static void do_alloc_mib(char **args)
{
	void *memory;

	need_world();
	if (went_well("alloc-mib",
		      accel_alloc(world, strtoull(args[0], NULL, 10) << 20, &memory)))
		say_ok("alloc-mib");
}

/* In memory of the arenas. */
static void do_in_place(char **args)
{
	const size_t count = ALLOCATED / sizeof(*arena);
	struct accel_array a = { arena, ACCEL_FLOAT32, 1, { count } };

	(void)args;
	need_world();
	for (size_t i = 0; i < count; i++)
		arena[i] = (float)(rank_now + 1) * (float)(i % 100);
	if (!went_well("in-place", accel_reduce(world, &a, ACCEL_SUM)))
		return;
	for (size_t i = 0; i < count; i++)
		if (arena[i] != sum_of(i))
			wrong("in-place");
	say_ok("in-place");
}

/* The sum over all ranks of a number. */
static void do_sum(char **args)
{
	int64_t value = strtoll(args[0], NULL, 10);
	struct accel_array a = { .data = &value, .dtype = ACCEL_INT64 };

	need_world();
	if (went_well("sum", accel_reduce(world, &a, ACCEL_SUM)))
		say("sum: %lld", (long long)value);
}

static void do_finish(char **args)
{
	(void)args;
	accel_finish(world);
	world = NULL;
	model = NULL;
}

static void do_fail(char **args)
{
	accel_fail(world, args[0]);
}

/* ---- around calls --------------------------------------------------------------------
 */

static void do_watch(char **args)
{
	watch_fd = open_to_tell(args[0]);
}

static void do_looks(char **args)
{
	looks_to_tell = atoi(args[0]);
}

static void do_give_up(char **args)
{
	(void)args;
	gives_up = 1;
}

static void do_ready(char **args)
{
	int fd = open_to_tell(args[0]);

	tell(fd, "ready");
	(void)close(fd);
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

static void do_exit(char **args)
{
	exit(atoi(args[0]));
}

/* Stay for some milliseconds. */
static void do_linger(char **args)
{
	long ms = atol(args[0]);
	struct timespec left = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&left, &left) < 0 && errno == EINTR)
		;
}

static void do_raise(char **args)
{
	(void)raise(atoi(args[0]));
}

static void do_ignore(char **args)
{
	(void)signal(atoi(args[0]), SIG_IGN);
}

static void on_signal(int signo)
{
	(void)signo;
}

/* Do nothing about a signal, but be interrupted by it. */
static void do_handle(char **args)
{
	struct sigaction act = { .sa_handler = on_signal };

	(void)sigaction(atoi(args[0]), &act, NULL);
}

/* A word N times, without a line for each. */
static void do_times(char **args)
{
	char *words[] = { args[1], NULL };

	is_quiet = 1;
	for (long n = atol(args[0]); n > 0 && !last_error; n--)
		run_words(words);
	is_quiet = 0;
	if (!last_error)
		say("%s: ok", args[1]);
}

/* One of each. */
static void do_mixed(char **args)
{
	do_small(args);
	do_large(args);
	do_barrier(args);
	do_broadcast(args);
	do_gather(args);
	do_stop(args);
}

/* The rest in another thread; the main one ends. */
static void *rest_of_words(void *rest)
{
	run_words(rest);
	exit(-last_error);
}

__attribute__((noreturn)) static void do_move(char **args)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, rest_of_words, args))
		_exit(99);
	pthread_exit(NULL);
}

/* From here on N more descriptors can be opened. */
static void do_descriptors(char **args)
{
	struct rlimit limit;
	int fd = dup(STDOUT_FILENO);

	if (fd < 0 || getrlimit(RLIMIT_NOFILE, &limit) < 0)
		_exit(99);
	(void)close(fd);
	limit.rlim_cur = (rlim_t)fd + strtoul(args[0], NULL, 10);
	if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
		_exit(99);
}

static void wait_for(pid_t pid)
{
	int status;

	if (pid < 0 || waitpid(pid, &status, 0) < 0 || !WIFEXITED(status) ||
	    WEXITSTATUS(status) >= 97)
		_exit(99);
}

/* One word in a fork of this process, which waits for it. */
static void do_fork(char **args)
{
	char *words[] = { args[0], NULL };
	pid_t pid = fork();

	if (!pid) {
		run_words(words);
		_exit(0);
	}
	wait_for(pid);
}

/* A fork that lives as long as this process. */
static void do_heir(char **args)
{
	int ends[2];
	char c;

	(void)args;
	if (pipe(ends) < 0)
		_exit(99);
	if (!fork()) {
		(void)close(ends[1]);
		while (read(ends[0], &c, 1) < 0 && errno == EINTR)
			;
		_exit(0);
	}
	(void)close(ends[0]);
}

/* One word, by this program begun anew: the process stays the same. */
__attribute__((noreturn)) static void do_exec(char **args)
{
	static char self[] = "runtime_worker";
	char *argv[] = { self, args[0], NULL };

	(void)execv("/proc/self/exe", argv);
	_exit(99);
}

/* One word in another process, started with this one's environment. */
static void do_spawn(char **args)
{
	pid_t pid = fork();

	if (!pid)
		do_exec(args);
	wait_for(pid);
}

/* MiB of memory that the ring takes. */
static void do_held(char **args)
{
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;
	long long blocks = 0;

	(void)args;
	while (folder && (entry = readdir(folder))) {
		char link[64];
		ssize_t n =
			readlinkat(dirfd(folder), entry->d_name, link, sizeof(link) - 1);
		struct stat st;

		link[n > 0 ? n : 0] = 0;
		if (strstr(link, "memfd:accel-ring") &&
		    fstat(atoi(entry->d_name), &st) == 0)
			blocks = st.st_blocks;
	}
	if (folder)
		(void)closedir(folder);
	say("held: %lld", blocks * 512 >> 20);
}

static const struct word words_known[] = {
	{ "alloc", 0, do_alloc },
	{ "alloc-mib", 1, do_alloc_mib },
	{ "backward", 0, do_backward },
	{ "backward-half", 0, do_backward_half },
	{ "barrier", 0, do_barrier },
	{ "broadcast", 0, do_broadcast },
	{ "descriptors", 1, do_descriptors },
	{ "exec", 1, do_exec },
	{ "exit", 1, do_exit },
	{ "fail", 1, do_fail },
	{ "finish", 0, do_finish },
	{ "fork", 1, do_fork },
	{ "gather", 0, do_gather },
	{ "gather-half", 0, do_gather_half },
	{ "give-up", 0, do_give_up },
	{ "handle", 1, do_handle },
	{ "heir", 0, do_heir },
	{ "held", 0, do_held },
	{ "ignore", 1, do_ignore },
	{ "in-place", 0, do_in_place },
	{ "join", 0, do_join },
	{ "large", 0, do_large },
	{ "leave", 0, do_leave },
	{ "linger", 1, do_linger },
	{ "looks", 1, do_looks },
	{ "mixed", 0, do_mixed },
	{ "move", 0, do_move },
	{ "pause", 0, do_pause },
	{ "prepare", 0, do_prepare },
	{ "raise", 1, do_raise },
	{ "ready", 1, do_ready },
	{ "small", 0, do_small },
	{ "spawn", 1, do_spawn },
	{ "stop", 0, do_stop },
	{ "sum", 1, do_sum },
	{ "times", 2, do_times },
	{ "wait", 1, do_wait },
	{ "watch", 1, do_watch },
};

static const struct word *find_word(const char *name)
{
	for (size_t i = 0; i < COUNT(words_known); i++)
		if (!strcmp(words_known[i].name, name))
			return &words_known[i];
	say("runtime_worker: no word '%s'", name);
	exit(98);
}

static int count(char **args)
{
	int n = 0;

	while (args[n])
		n++;
	return n;
}

static void run_words(char **at)
{
	const char *rank = getenv("RANK");

	while (*at) {
		int mine = 1;
		const struct word *w;

		if ((!strcmp(at[0], "if") || !strcmp(at[0], "unless")) && at[1]) {
			int is_it = rank && !strcmp(at[1], rank);

			mine = at[0][0] == 'i' ? is_it : !is_it;
			at += 2;
		}
		w = find_word(*at ? *at : "");
		at++;
		if (w->n_args > count(at)) {
			say("runtime_worker: '%s' wants more", w->name);
			exit(98);
		}
		if (mine)
			w->run(at);
		at += w->n_args;
	}
}

int main(int argc, char **argv)
{
	(void)signal(SIGPIPE, SIG_IGN);
	run_words(argv + (argc ? 1 : 0));
	return -last_error;
}
