#include "cmd/verdict_block.h"

#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "cmd/run.h"
#include "cmd/screen.h"
#include "rendezvous/verdict.h"

static void say_lines(struct screen *s, struct slice text)
{
	while (text.len) {
		const uint8_t *nl = memchr(text.data, '\n', text.len);
		size_t n = nl ? (size_t)(nl - text.data) : text.len;
		int shown = n > 400 ? 400 : (int)n;

		screen_say(s, "  | %.*s%s", shown, (const char *)text.data,
			   n > 400 ? "..." : "");
		n += nl != NULL;
		text.data += n;
		text.len -= n;
	}
}

/* The text of an error file: {"message": {"message": TEXT}} or {"message": TEXT}. */
static void say_message(struct screen *s, struct slice file)
{
	json_t *doc = json_loadb((const char *)file.data, file.len, 0, NULL);
	json_t *m = json_object_get(doc, "message");

	if (json_is_object(m))
		m = json_object_get(m, "message");
	if (json_is_string(m))
		screen_say(s, "  what it says went wrong: %.*s", 400,
			   json_string_value(m));
	json_decref(doc);
}

static void say_failure(struct screen *s, const struct msg_verdict *v,
			const struct run_options *o)
{
	double after = v->failed_us > v->started_us
			       ? (double)(v->failed_us - v->started_us) / 1e6
			       : 0;
	char how[256], where[4200] = "";

	verdict_describe(how, sizeof(how), v->status, v->exec_errno);
	if (v->exec_errno)
		(void)snprintf(where, sizeof(where), " (%s)", o->path);
	else
		(void)snprintf(where, sizeof(where), ", %.1f s after the start (pid %u)",
			       after, v->pid);
	screen_say(s, "accel: rank %u %s%s%s", v->rank,
		   v->n_workers > 1 ? "failed first: it " : "", how, where);
	if (v->message.len)
		say_message(s, v->message);
	if (v->tail.len && v->n_workers > 1) {
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
	if (v->verdict != VERDICT_DONE || o->verbose)
		screen_say(s, "  files of the job: %s", o->job_dir);
}
