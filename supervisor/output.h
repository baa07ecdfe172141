#pragma once

/*
 * One output stream of a worker: read from its pipe, written byte for byte to
 * its file (created at the first byte), and shown to whoever asked. The file is
 * complete whatever the screen does.
 */

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

struct err;
struct loop;
struct output;

struct output_ops {
	void (*on_data)(void *data, struct output *o, struct slice bytes);
	/* The file cannot be written; told once. The stream goes on being shown. */
	void (*on_file_error)(void *data, struct output *o, const char *text);
};

struct output {
	int fd, file;
	struct watch *watch;
	const struct output_ops *ops;
	void *data;
	char *path;
	uint64_t written;
	bool file_failed;
};

/* Read @fd (nonblocking, owned from now on) and write to @path. */
int output_init(struct output *o, struct loop *loop, int fd, const char *path,
		const struct output_ops *ops, void *data, struct err *err);
void output_fini(struct output *o);

/* Pause or resume reading. */
void output_hold(struct output *o, bool on);

/* Read what is there now, held or not, without waiting for an end that may
 * never come. Returns whether there may be more: it stops at what a pipe holds,
 * since some other process may write on and on. */
bool output_drain(struct output *o);

/* Append the last lines of the file, at most @max_lines and 4 KiB, to @out. */
int output_tail(const struct output *o, int max_lines, struct buf *out);
