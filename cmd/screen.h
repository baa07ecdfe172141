#pragma once

/*
 * What the user sees of the workers' output. With one process its bytes pass
 * unchanged. With more, whole lines with a "[rank] " in front: a line that is
 * too long or does not go on is shown in pieces marked "...", and a progress
 * bar that redraws itself with carriage returns is shown a few times a second.
 */

#include <stdbool.h>
#include <stdint.h>

#include "cmd/sink.h"
#include "rendezvous/messages.h"

struct err;
struct loop;
struct screen;

struct screen_options {
	uint32_t n_processes;
	const char *job_dir;
	void (*on_change)(void *data); /* backlog shrank, or an error came up */
	void *data;
};

int screen_new(struct screen **ret, struct loop *loop, const struct screen_options *o,
	       struct err *err);
struct screen *screen_free(struct screen *s);

void screen_output(struct screen *s, const struct msg_output *msg);

/* A line of accel's own on stderr, after what came before it. */
void screen_say(struct screen *s, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/* A line that somebody else wrote, behind @head; cut at 400 bytes. */
void screen_quote(struct screen *s, const char *head, struct slice line);

/* The workers have ended: show lines that never got their newline. */
void screen_finish_lines(struct screen *s);

/* Run the loop until all that waits is written. */
void screen_flush(struct screen *s);

/* Drop what a stream that takes nothing has not taken, now and from now on. */
void screen_give_up(struct screen *s);

/* Bytes that the slower of both streams has not taken. */
size_t screen_backlog(const struct screen *s);

/* Why stdout is not written any more: 0, EPIPE when its reader is gone, ... */
int screen_error(const struct screen *s);
