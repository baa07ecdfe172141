#include "supervisor/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "base/path.h"

enum { READ_SIZE = 64 << 10, PIPE_MAX = 1 << 20, TAIL_SIZE = 4096 };

static void write_file(struct output *o, struct slice bytes)
{
	struct err e = { 0 };
	int r;

	if (o->file_failed)
		return;
	if (o->file < 0)
		o->file =
			open(o->path,
			     O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
	r = o->file < 0 ? -errno : fd_write_all(o->file, bytes.data, bytes.len);
	if (!r) {
		o->written += bytes.len;
		return;
	}
	o->file_failed = true;
	(void)err_set(&e, r, "write %s: %s", o->path, strerror(-r));
	o->ops->on_file_error(o->data, o, e.text);
}

/* Returns how many bytes came, 0 at the end, -EAGAIN when there is nothing. */
static ssize_t read_some(struct output *o)
{
	static uint8_t bytes[READ_SIZE]; /* one thread, one reader at a time */
	ssize_t n = read(o->fd, bytes, sizeof(bytes));

	if (n < 0)
		return errno == EINTR || errno == EAGAIN ? -EAGAIN : 0;
	if (n > 0) {
		struct slice got = slice_of(bytes, (size_t)n);

		write_file(o, got);
		o->ops->on_data(o->data, o, got);
	}
	return n;
}

static void close_pipe(struct output *o)
{
	o->watch = watch_free(o->watch);
	own_close(&o->fd);
}

static void on_ready(void *data, int events)
{
	struct output *o = data;

	(void)events;
	if (!read_some(o))
		close_pipe(o);
}

int output_init(struct output *o, struct loop *loop, int fd, const char *path,
		const struct output_ops *ops, void *data, struct err *err)
{
	int r;

	*o = (struct output){ .fd = fd, .file = -1, .ops = ops, .data = data };
	o->path = strdup(path);
	r = o->path ? watch_new(&o->watch, loop, fd, WATCH_READ, on_ready, o, err)
		    : err_set(err, -ENOMEM, "output");
	if (r < 0)
		output_fini(o);
	return r;
}

void output_fini(struct output *o)
{
	close_pipe(o);
	own_close(&o->file);
	free(o->path);
	o->path = NULL;
}

void output_hold(struct output *o, bool on)
{
	if (o->watch)
		watch_set(o->watch, on ? 0 : WATCH_READ);
}

bool output_drain(struct output *o)
{
	for (int i = 0; i < PIPE_MAX / READ_SIZE; i++) {
		ssize_t n = o->fd < 0 ? -EAGAIN : read_some(o);

		if (n < 0)
			return false;
		if (!n) {
			close_pipe(o);
			return false;
		}
	}
	return true;
}

/* Where the last @max_lines lines begin. */
static size_t tail_start(const uint8_t *text, size_t len, int max_lines)
{
	size_t at = len && text[len - 1] == '\n' ? len - 1 : len;

	while (at) {
		if (text[at - 1] == '\n' && !--max_lines)
			return at;
		at--;
	}
	return 0;
}

int output_tail(const struct output *o, int max_lines, struct buf *out)
{
	uint8_t text[TAIL_SIZE];
	size_t want = o->written < TAIL_SIZE ? (size_t)o->written : TAIL_SIZE;
	ssize_t n =
		o->file < 0 ? 0 : pread(o->file, text, want, (off_t)(o->written - want));
	size_t from;

	if (n <= 0)
		return 0;
	from = tail_start(text, (size_t)n, max_lines);
	return buf_add(out, text + from, (size_t)n - from);
}
