/* What the supervisor learns from a rank: progress, failure, and the end. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/own.h"
#include "runtime/world.h"

enum { FAIL_TEXT = 64 * 1024, FIRST_LINE = 400 };

void accel_step(accel_world *w)
{
	if (!w || is_forked(w))
		return;
	w->counters.steps++;
	if (w->page)
		__atomic_store_n(&w->page->step, w->counters.steps, __ATOMIC_RELAXED);
}

void accel_counters(const accel_world *w, struct accel_counters *ret)
{
	*ret = w->counters;
}

/* ---- the error file ------------------------------------------------------------------
 */

/* A sequence of UTF-8 that begins at @s: its length, or 0 where it is none. */
static size_t utf8_len(const unsigned char *s)
{
	size_t n = s[0] < 0x80                   ? 1
		   : s[0] >= 0xc2 && s[0] < 0xe0 ? 2
		   : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
		   : s[0] >= 0xf0 && s[0] < 0xf5 ? 4
						 : 0;

	for (size_t i = 1; i < n; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	/* Overlong forms, surrogates, beyond the last code point. */
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
	    (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return n;
}

static void write_json_text(FILE *f, const char *text)
{
	const unsigned char *s = (const unsigned char *)text, *end = s + FAIL_TEXT;

	(void)fputc('"', f);
	while (*s && s < end) {
		size_t n = utf8_len(s);

		if (!n) {
			(void)fputs("\\ufffd", f);
			n = 1;
		} else if (*s == '"' || *s == '\\') {
			(void)fprintf(f, "\\%c", *s);
		} else if (*s < 0x20) {
			(void)fprintf(f, "\\u%04x", *s);
		} else {
			(void)fwrite(s, 1, n, f);
		}
		s += n;
	}
	(void)fputc('"', f);
}

/*
 * As torch.distributed.elastic writes it, so that other launchers show it too. The
 * first report of a rank stays. Nothing to do about a file that cannot be written:
 * the program is failing already.
 */
static void write_error_file(const char *text)
{
	const char *path = secure_getenv("TORCHELASTIC_ERROR_FILE");
	OWN_MEM char *draft = NULL;
	bool is_written;
	FILE *f;
	int fd;

	if (!path || !*path || access(path, F_OK) == 0 ||
	    asprintf(&draft, "%s.%d", path, getpid()) < 0)
		return;
	fd = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	f = fd < 0 ? NULL : fdopen(fd, "w");
	if (!f) {
		own_close(&fd);
		return;
	}
	(void)fputs("{\"message\": {\"message\": ", f);
	write_json_text(f, text);
	(void)fputs(", \"extraInfo\": {\"py_callstack\": ", f);
	write_json_text(f, text);
	(void)fprintf(f, ", \"timestamp\": \"%llu\"}}}\n",
		      (unsigned long long)(wall_us() / 1000000));
	is_written = !ferror(f);
	if (fclose(f) != 0 || !is_written || link(draft, path) < 0)
		(void)0;
	(void)unlink(draft);
}

/* ---- failing
 * --------------------------------------------------------------------------- */

/* The last line that is not empty, where Python says what was raised. */
static void last_line(const char *text, char *line, size_t size)
{
	const char *end = text + strlen(text), *from;

	while (end > text && (end[-1] == '\n' || end[-1] == ' '))
		end--;
	from = end;
	while (from > text && from[-1] != '\n')
		from--;
	(void)snprintf(line, size, "%.*s", (int)(end - from), from);
}

void accel_fail(accel_world *w, const char *text)
{
	char line[FIRST_LINE], sentence[ABORT_TEXT];

	if (!text || (w && is_forked(w)))
		return;
	write_error_file(text);
	if (!w)
		return;
	if (w->page)
		__atomic_store_n(&w->page->state, PAGE_FAILED, __ATOMIC_SEQ_CST);
	if (!w->ring)
		return;
	last_line(text, line, sizeof(line));
	(void)snprintf(sentence, sizeof(sentence), "rank %d failed (process %d): %s",
		       w->rank, w->pid, line);
	__atomic_store_n(&cell_of(w, w->local_rank)->state, PAGE_FAILED,
			 __ATOMIC_SEQ_CST);
	tell_why(w, ACCEL_E_LOST, w->rank, sentence);
}
