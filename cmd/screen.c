#include "cmd/screen.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"

enum {
	LINE_MAX_TTY = 4096,   /* longer lines come in pieces on a terminal, */
	LINE_MAX_FILE = 65536, /* and in a file or a pipe */
	IDLE_MS = 500,         /* an unfinished line is shown on a terminal after this */
	REDRAW_MS = 500,       /* how often a progress bar is shown */
	QUOTE_MAX = 400,
};

struct line {
	struct buf text;
	uint64_t changed_ms, redrawn_ms;
	bool continued; /* a piece of it was shown already */
};

struct screen {
	struct loop *loop;
	struct sink sinks[N_STREAMS];
	bool is_tty[N_STREAMS];
	uint32_t n_processes;
	char *job_dir;
	struct line *lines; /* n_processes times N_STREAMS */
	struct timer *idle;
	bool idle_running;
	void (*on_change)(void *data);
	void *data;
};

static void on_sink_change(void *data)
{
	struct screen *s = data;

	s->on_change(s->data);
}

/* ---- one line ---- */

static size_t utf8_len(const uint8_t *p, size_t left)
{
	size_t n = *p < 0x80             ? 1
		   : (*p & 0xe0) == 0xc0 ? 2
		   : (*p & 0xf0) == 0xe0 ? 3
		   : (*p & 0xf8) == 0xf0 ? 4
					 : 0;

	if (!n || n > left || (n == 2 && *p < 0xc2))
		return 0;
	for (size_t i = 1; i < n; i++)
		if ((p[i] & 0xc0) != 0x80)
			return 0;
	return n;
}

/* A colour sequence, ESC [ digits ; ... m, is harmless on a shared screen. */
static size_t colour_len(const uint8_t *p, size_t left)
{
	size_t i = 2;

	if (left < 3 || p[0] != 0x1b || p[1] != '[')
		return 0;
	while (i < left && ((p[i] >= '0' && p[i] <= '9') || p[i] == ';'))
		i++;
	return i < left && p[i] == 'm' ? i + 1 : 0;
}

/* On a terminal, bytes that are no text or would move the cursor are escaped. */
static void add_escaped(struct buf *out, struct slice text)
{
	const uint8_t *p = text.data;
	size_t left = text.len;

	while (left) {
		size_t n = colour_len(p, left);

		if (!n && (*p >= 0x20 || *p == '\t') && *p != 0x7f)
			n = utf8_len(p, left);
		if (n)
			(void)buf_add(out, p, n);
		else
			(void)buf_addf(out, "\\x%02x", *p);
		n = n ? n : 1;
		p += n;
		left -= n;
	}
}

static void add_text(const struct screen *s, int stream, struct buf *out,
		     struct slice text)
{
	if (s->is_tty[stream])
		add_escaped(out, text);
	else
		(void)buf_add(out, text.data, text.len);
}

static void show(struct screen *s, uint32_t rank, int stream, struct line *l,
		 struct slice text, bool goes_on)
{
	struct buf out = { 0 };

	(void)buf_addf(&out, "[%u] %s", rank, l->continued ? "..." : "");
	add_text(s, stream, &out, text);
	(void)buf_add_str(&out, goes_on ? "...\n" : "\n");
	l->continued = goes_on;
	sink_write(&s->sinks[stream], buf_data(&out), buf_len(&out));
	buf_fini(&out);
}

static void show_held(struct screen *s, uint32_t rank, int stream, struct line *l,
		      bool goes_on)
{
	if (buf_len(&l->text) || (l->continued && !goes_on))
		show(s, rank, stream, l, buf_slice(&l->text), goes_on);
	buf_fini(&l->text);
}

/* The text up to a carriage return: a progress bar, replaced by what follows. */
static void redraw(struct screen *s, uint32_t rank, int stream, struct line *l)
{
	uint64_t now = now_ms();

	if (now - l->redrawn_ms >= REDRAW_MS && buf_len(&l->text)) {
		show(s, rank, stream, l, buf_slice(&l->text), false);
		l->redrawn_ms = now;
	}
	buf_fini(&l->text);
}

static void add_bytes(struct screen *s, uint32_t rank, int stream, struct line *l,
		      struct slice part)
{
	size_t most = s->is_tty[stream] ? LINE_MAX_TTY : LINE_MAX_FILE;

	while (part.len) {
		size_t room = most - buf_len(&l->text);
		size_t n = part.len < room ? part.len : room;

		(void)buf_add(&l->text, part.data, n);
		part.data += n;
		part.len -= n;
		if (buf_len(&l->text) == most && part.len)
			show_held(s, rank, stream, l, true);
	}
}

static size_t end_of_part(struct slice data)
{
	size_t i = 0;

	while (i < data.len && data.data[i] != '\n' && data.data[i] != '\r')
		i++;
	return i;
}

static void add_output(struct screen *s, uint32_t rank, int stream, struct slice data)
{
	struct line *l = &s->lines[rank * N_STREAMS + (uint32_t)stream];

	while (data.len) {
		size_t n = end_of_part(data);
		bool held_cr = buf_len(&l->text) &&
			       buf_data(&l->text)[buf_len(&l->text) - 1] == '\r';

		/* A '\r' is held until it is known whether '\n' follows. */
		if (held_cr) {
			l->text.end--;
			if (data.data[0] != '\n')
				redraw(s, rank, stream, l);
		}
		add_bytes(s, rank, stream, l, slice_of(data.data, n));
		if (n < data.len && data.data[n] == '\n') {
			if (buf_len(&l->text) || l->continued)
				show_held(s, rank, stream, l, false);
			else
				show(s, rank, stream, l, slice_of("", 0), false);
			n++;
		} else if (n < data.len) {
			(void)buf_add(&l->text, "\r", 1);
			n++;
		}
		data.data += n;
		data.len -= n;
	}
	l->changed_ms = now_ms();
}

/* ---- time ---- */

static void start_idle(struct screen *s)
{
	if (!s->idle_running)
		timer_start(s->idle, IDLE_MS);
	s->idle_running = true;
}

static void on_idle(void *data)
{
	struct screen *s = data;
	uint64_t now = now_ms();

	s->idle_running = false;
	for (uint32_t i = 0; i < s->n_processes * N_STREAMS; i++) {
		struct line *l = &s->lines[i];

		/* In a file or a pipe a line is a line, however long it takes. */
		if (!buf_len(&l->text) || !s->is_tty[i % N_STREAMS])
			continue;
		if (now - l->changed_ms < IDLE_MS) {
			start_idle(s);
			continue;
		}
		/* A progress bar that stands still is shown as it stands. */
		if (buf_data(&l->text)[buf_len(&l->text) - 1] == '\r') {
			l->text.end--;
			show_held(s, i / N_STREAMS, (int)(i % N_STREAMS), l, false);
		} else {
			show_held(s, i / N_STREAMS, (int)(i % N_STREAMS), l, true);
		}
	}
}

/* ---- public ---- */

static void say_skipped(struct screen *s, const struct msg_output *msg)
{
	struct line *l = &s->lines[msg->rank * N_STREAMS + msg->stream];

	show_held(s, msg->rank, (int)msg->stream, l, false);
	screen_say(s, "[%u] %llu lines (%llu bytes) not shown here; they are in %s/%.*s",
		   msg->rank, (unsigned long long)msg->skipped_lines,
		   (unsigned long long)msg->skipped_bytes, s->job_dir, (int)msg->path.len,
		   (const char *)msg->path.data);
}

void screen_output(struct screen *s, const struct msg_output *msg)
{
	int stream = (int)msg->stream;

	if (msg->rank >= s->n_processes || msg->stream >= N_STREAMS)
		return;
	if (msg->skipped_bytes)
		say_skipped(s, msg);
	if (s->n_processes == 1) {
		sink_write(&s->sinks[stream], msg->data.data, msg->data.len);
		return;
	}
	add_output(s, msg->rank, stream, msg->data);
	if (buf_len(&s->lines[msg->rank * N_STREAMS + msg->stream].text))
		start_idle(s);
}

void screen_say(struct screen *s, const char *fmt, ...)
{
	OWN_MEM char *text = NULL;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (n < 0) {
		text = NULL;
		return;
	}
	sink_write(&s->sinks[STREAM_ERR], text, (size_t)n);
	sink_write(&s->sinks[STREAM_ERR], "\n", 1);
}

void screen_quote(struct screen *s, const char *head, struct slice line)
{
	struct buf out = { 0 };
	bool cut = line.len > QUOTE_MAX;

	line.len = cut ? QUOTE_MAX : line.len;
	(void)buf_add_str(&out, head);
	add_text(s, STREAM_ERR, &out, line);
	(void)buf_add_str(&out, cut ? "...\n" : "\n");
	sink_write(&s->sinks[STREAM_ERR], buf_data(&out), buf_len(&out));
	buf_fini(&out);
}

void screen_finish_lines(struct screen *s)
{
	for (uint32_t i = 0; i < s->n_processes * N_STREAMS; i++) {
		struct line *l = &s->lines[i];
		size_t len = buf_len(&l->text);

		if (len && buf_data(&l->text)[len - 1] == '\r')
			l->text.end--;
		if (len)
			show_held(s, i / N_STREAMS, (int)(i % N_STREAMS), l, false);
	}
}

void screen_flush(struct screen *s)
{
	while (screen_backlog(s))
		loop_once(s->loop);
}

void screen_give_up(struct screen *s)
{
	for (int i = 0; i < N_STREAMS; i++)
		sink_give_up(&s->sinks[i]);
}

size_t screen_backlog(const struct screen *s)
{
	size_t out = buf_len(&s->sinks[STREAM_OUT].backlog);
	size_t err = buf_len(&s->sinks[STREAM_ERR].backlog);

	return out > err ? out : err;
}

int screen_error(const struct screen *s)
{
	return s->sinks[STREAM_OUT].error;
}

DEFINE_OWN(screen, struct screen, screen_free)

int screen_new(struct screen **ret, struct loop *loop, const struct screen_options *o,
	       struct err *err)
{
	static const int fds[N_STREAMS] = { STDOUT_FILENO, STDERR_FILENO };
	OWN(own_screen) struct screen *s = calloc(1, sizeof(*s));
	int r = 0;

	if (!s)
		return err_set(err, -ENOMEM, "screen");
	s->loop = loop;
	s->n_processes = o->n_processes;
	s->on_change = o->on_change;
	s->data = o->data;
	s->job_dir = strdup(o->job_dir);
	s->lines = calloc((size_t)o->n_processes * N_STREAMS, sizeof(*s->lines));
	if (!s->job_dir || !s->lines)
		return err_set(err, -ENOMEM, "screen");
	for (int i = 0; i < N_STREAMS && !r; i++) {
		s->is_tty[i] = isatty(fds[i]);
		r = sink_init(&s->sinks[i], loop, fds[i], on_sink_change, s, err);
	}
	if (!r)
		r = timer_new(&s->idle, loop, on_idle, s, err);
	if (r < 0)
		return r;
	*ret = take(s);
	return 0;
}

struct screen *screen_free(struct screen *s)
{
	if (!s)
		return NULL;
	for (int i = 0; i < N_STREAMS; i++)
		sink_fini(&s->sinks[i]);
	for (uint32_t i = 0; s->lines && i < s->n_processes * N_STREAMS; i++)
		buf_fini(&s->lines[i].text);
	s->idle = timer_free(s->idle);
	free(s->lines);
	free(s->job_dir);
	free(s);
	return NULL;
}
