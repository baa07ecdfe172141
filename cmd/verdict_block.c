#include "cmd/verdict_block.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cmd/run.h"
#include "cmd/screen.h"
#include "rendezvous/verdict.h"

static void say_lines(struct screen *s, struct slice text)
{
	while (text.len) {
		const uint8_t *nl = memchr(text.data, '\n', text.len);
		size_t n = nl ? (size_t)(nl - text.data) : text.len;

		screen_quote(s, "  | ", slice_of(text.data, n));
		n += nl != NULL;
		text.data += n;
		text.len -= n;
	}
}

/* Where and when: what follows "exited with code 3". */
static void describe_place(char *out, size_t size, const struct msg_verdict *v,
			   const char *path)
{
	uint64_t us = v->failed_us > v->started_us ? v->failed_us - v->started_us : 0;

	/* The kernel says the same of a script whose interpreter is missing. */
	if (v->exec_errno == ENOENT && access(path, F_OK) == 0)
		(void)snprintf(out, size, " (%s, or the interpreter in its first line)",
			       path);
	else if (v->exec_errno)
		(void)snprintf(out, size, " (%s)", path);
	else if (us < 1000000)
		(void)snprintf(out, size, ", %.3g ms after the start (pid %u)",
			       (double)us / 1e3, v->pid);
	else
		(void)snprintf(out, size, ", %.1f s after the start (pid %u)",
			       (double)us / 1e6, v->pid);
}

/* A traceback is printed by the program as well as reported. */
static bool tail_says_the_same(const struct msg_verdict *v)
{
	struct slice line = v->message;
	const uint8_t *nl;

	while (line.len && line.data[line.len - 1] == '\n')
		line.len--;
	nl = line.len ? memrchr(line.data, '\n', line.len) : NULL;
	if (nl) {
		line.len -= (size_t)(nl + 1 - line.data);
		line.data = nl + 1;
	}
	return line.len && memmem(v->tail.data, v->tail.len, line.data, line.len);
}

static void say_failure(struct screen *s, const struct msg_verdict *v,
			const struct run_options *o)
{
	char how[256], place[4200];

	/* It had written why it failed, and was then still there to be ended. */
	if (v->flags & EXIT_SIGNALLED)
		(void)snprintf(how, sizeof(how), "failed, by its own account");
	else
		verdict_describe(how, sizeof(how), v->status, v->exec_errno);
	describe_place(place, sizeof(place), v, o->path);
	screen_say(s, "accel: rank %u %s%s%s", v->rank,
		   v->n_workers > 1 ? "failed first: it " : "", how, place);
	if (v->message.len) {
		screen_say(s, "  what it says went wrong:");
		say_lines(s, v->message);
	}
	if (v->tail.len && v->n_workers > 1 && !tail_says_the_same(v)) {
		screen_say(s, "  its last lines (%.*s):", (int)v->tail_path.len,
			   (const char *)v->tail_path.data);
		say_lines(s, v->tail);
	}
	if (v->n_failed > 1)
		screen_say(s, "  %u more failed as well", v->n_failed - 1);
}

void verdict_block(struct screen *s, const struct msg_verdict *v,
		   const struct run_options *o)
{
	switch (v->verdict) {
	case VERDICT_FAILED:
	case VERDICT_NO_EXEC:
		say_failure(s, v, o);
		break;
	case VERDICT_STOPPED:
		screen_say(s, "accel: the job was stopped (%s)",
			   strsignal((int)v->exit_code - 128));
		break;
	case VERDICT_LOST:
		screen_say(s, "accel: the job was ended before it was done");
		break;
	default:
		if (o->verbose)
			screen_say(s, "accel: done in %.2f s",
				   (double)(v->ended_us - v->started_us) / 1e6);
		break;
	}
	if (v->verdict != VERDICT_DONE)
		screen_say(s, "  files of the job: %s", o->job_dir);
}
