#include "rendezvous/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/own.h"
#include "base/path.h"

enum { JSON_FLAGS = JSON_COMPACT | JSON_REAL_PRECISION(16), QUEUE_MAX = 64 << 10 };

struct journal {
	char *dir;
	int fd;
	struct buf queue;
	struct err error;
};

/* JSON is UTF-8 and the bytes of programs are not: what does not fit becomes
 * U+FFFD. The exact bytes are in the workers' files. */
static json_t *json_bytes(struct slice s)
{
	struct buf text = { 0 };
	json_t *j = json_stringn((const char *)(s.data ? s.data : (void *)""), s.len);

	if (j)
		return j;
	for (size_t i = 0; i < s.len;) {
		size_t len = 1;

		while (len < 4 && i + len < s.len && (s.data[i + len] & 0xc0) == 0x80)
			len++;
		j = json_stringn((const char *)s.data + i, len);
		(void)buf_add(&text, j ? (const char *)s.data + i : "\xef\xbf\xbd",
			      j ? len : 3);
		json_decref(j);
		i += len;
	}
	j = json_stringn((const char *)buf_data(&text), buf_len(&text));
	buf_fini(&text);
	return j;
}

static json_t *json_text(const char *text)
{
	return json_bytes(slice_str(text));
}

static json_t *json_strv(const struct strv *s)
{
	json_t *list = json_array();

	for (size_t i = 0; i < s->n; i++)
		(void)json_array_append_new(list, json_text(s->v[i]));
	return list;
}

/* Seconds since 1970, to the microsecond. */
static json_t *json_time(uint64_t us)
{
	return json_real((double)us / 1e6);
}

static int write_json(const struct journal *j, const char *name, json_t *doc,
		      struct err *err)
{
	OWN_MEM char *path = NULL,
		     *text = json_dumps(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(16));
	struct buf out = { 0 };
	int r;

	json_decref(doc);
	if (!text || asprintf(&path, "%s/%s", j->dir, name) < 0)
		return err_set(err, -ENOMEM, "write %s", name);
	if (buf_addf(&out, "%s\n", text) < 0)
		return err_set(err, -ENOMEM, "write %s", name);
	r = path_write_file(path, buf_slice(&out), 0600, err);
	buf_fini(&out);
	return r;
}

static json_t *plan_json(const struct plan *p)
{
	return json_pack("{s:o, s:o, s:o, s:o, s:i, s:b, s:o, s:o, s:i, s:f}", "job",
			 json_text(p->job), "program", json_text(p->program), "path",
			 json_text(p->path), "argv", json_strv(&p->argv), "num_processes",
			 (int)p->n_processes, "cpu", (p->flags & PLAN_CPU) != 0,
			 "mixed_precision", json_text(p->mixed_precision), "master_addr",
			 json_text(p->master_addr), "master_port", (int)p->master_port,
			 "grace", p->grace_ms / 1e3);
}

DEFINE_OWN(journal, struct journal, journal_free)

int journal_new(struct journal **ret, const struct plan *plan, struct err *err)
{
	OWN(own_journal) struct journal *j = calloc(1, sizeof(*j));
	OWN_MEM char *path = NULL;

	if (!j)
		return err_set(err, -ENOMEM, "journal");
	j->fd = -1;
	j->dir = strdup(plan->job_dir);
	if (!j->dir || asprintf(&path, "%s/events.jsonl", j->dir) < 0)
		return err_set(err, -ENOMEM, "journal");
	j->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (j->fd < 0)
		return err_sys(err, "open %s", path);
	*ret = take(j);
	return 0;
}

int journal_plan(struct journal *j, const struct plan *plan, struct err *err)
{
	return write_json(j, "plan.json", plan_json(plan), err);
}

struct journal *journal_free(struct journal *j)
{
	if (!j)
		return NULL;
	if (j->fd >= 0)
		journal_flush(j);
	own_close(&j->fd);
	buf_fini(&j->queue);
	free(j->dir);
	free(j);
	return NULL;
}

void journal_flush(struct journal *j)
{
	int r = buf_len(&j->queue)
			? fd_write_all(j->fd, buf_data(&j->queue), buf_len(&j->queue))
			: 0;

	if (r < 0 && !j->error.code)
		(void)err_set(&j->error, r, "write %s/events.jsonl: %s", j->dir,
			      strerror(-r));
	buf_consume(&j->queue, buf_len(&j->queue));
}

const char *journal_error(const struct journal *j)
{
	return j->error.code ? j->error.text : NULL;
}

static json_t *field_json(const struct field *f, const void *msg)
{
	const void *member = (const char *)msg + f->offset;

	switch (f->kind) {
	case F_U32:
		return json_integer(*(const uint32_t *)member);
	case F_I32:
		return json_integer(*(const int32_t *)member);
	case F_U64:
		return json_integer((json_int_t) * (const uint64_t *)member);
	case F_BYTES:
		return json_bytes(*(const struct slice *)member);
	case F_LIST:
	case F_SECRET:
		break;
	}
	return NULL;
}

void journal_event(struct journal *j, const char *event, unsigned type, const void *msg)
{
	const struct message *m = message_of(type);
	json_t *line = json_object();
	OWN_MEM char *text = NULL;

	(void)json_object_set_new(line, "time", json_time(wall_us()));
	(void)json_object_set_new(line, "event", json_string(event));
	for (size_t i = 0; i < m->n_fields; i++)
		(void)json_object_set_new(line, m->fields[i].name,
					  field_json(&m->fields[i], msg));
	text = json_dumps(line, JSON_FLAGS);
	json_decref(line);
	if (text)
		(void)buf_addf(&j->queue, "%s\n", text);
	if (buf_len(&j->queue) > QUEUE_MAX)
		journal_flush(j);
}

static const char *const verdict_names[N_VERDICTS] = {
	[VERDICT_DONE] = "done",       [VERDICT_FAILED] = "failed",
	[VERDICT_NO_EXEC] = "no exec", [VERDICT_STOPPED] = "stopped",
	[VERDICT_LOST] = "lost",
};

static void add_end(json_t *to, int32_t status, int32_t exec_errno)
{
	if (exec_errno) {
		(void)json_object_set_new(to, "exec_error",
					  json_string(strerror(exec_errno)));
	} else if (WIFSIGNALED(status)) {
		const char *name = sigabbrev_np(WTERMSIG(status));

		(void)json_object_set_new(to, "signal", json_integer(WTERMSIG(status)));
		if (name)
			(void)json_object_set_new(to, "signal_name",
						  json_sprintf("SIG%s", name));
	} else {
		(void)json_object_set_new(to, "exit_code",
					  json_integer(WEXITSTATUS(status)));
	}
}

static json_t *worker_json(uint32_t rank, const struct journal_worker *w)
{
	json_t *o = json_pack("{s:i, s:i}", "rank", (int)rank, "node", 0);

	if (!w->ended_us)
		return o;
	(void)json_object_set_new(o, "pid", json_integer(w->pid));
	add_end(o, w->status, w->exec_errno);
	(void)json_object_set_new(o, "ended", json_time(w->ended_us));
	if (w->flags & EXIT_SIGNALLED)
		(void)json_object_set_new(o, "stopped_by_accel", json_true());
	return o;
}

static json_t *first_failure_json(const struct plan *plan, const struct msg_verdict *v)
{
	json_t *o = json_pack("{s:i, s:i, s:i, s:o}", "rank", (int)v->rank, "node", 0,
			      "pid", (int)v->pid, "time", json_time(v->failed_us));

	add_end(o, v->status, v->exec_errno);
	if (v->exec_errno)
		(void)json_object_set_new(o, "path", json_text(plan->path));
	(void)json_object_set_new(o, "message", json_bytes(v->message));
	(void)json_object_set_new(o, "last_lines", json_bytes(v->tail));
	(void)json_object_set_new(o, "file", json_bytes(v->tail_path));
	return o;
}

int journal_report(struct journal *j, const struct plan *plan,
		   const struct msg_verdict *v, const struct journal_worker *workers,
		   uint32_t n_workers, struct err *err)
{
	bool failed = v->verdict == VERDICT_FAILED || v->verdict == VERDICT_NO_EXEC;
	json_t *list = json_array();
	json_t *doc = json_pack(
		"{s:o, s:o, s:s, s:i, s:s, s:o, s:o, s:f, s:i, s:i}", "job",
		json_text(plan->job), "program", json_text(plan->program), "verdict",
		verdict_names[v->verdict], "exit_code", (int)v->exit_code,
		"exit_code_from", v->verdict == VERDICT_FAILED ? "worker" : "accel",
		"started", json_time(v->started_us), "ended", json_time(v->ended_us),
		"duration", (double)(v->ended_us - v->started_us) / 1e6, "attempts", 1,
		"failed_workers", (int)v->n_failed);

	for (uint32_t i = 0; i < n_workers; i++)
		(void)json_array_append_new(list, worker_json(i, &workers[i]));
	if (failed)
		(void)json_object_set_new(doc, "first_failure",
					  first_failure_json(plan, v));
	(void)json_object_set_new(doc, "workers", list);
	return write_json(j, "report.json", doc, err);
}
