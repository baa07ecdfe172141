#include "rendezvous/verdict.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

enum {
	TOGETHER_US = 100 * 1000,
	FILE_TIME_US = 10 * 1000, /* how much too early a file's time may be */
};

void failure_fini(struct failure *f)
{
	free(f->message);
	free(f->tail);
	free(f->tail_path);
	*f = (struct failure){ 0 };
}

static bool ended_badly(const struct msg_exited *e)
{
	return e->exec_errno || e->status;
}

bool verdict_is_failure(const struct msg_exited *e, uint64_t stopped_us)
{
	if (!ended_badly(e))
		return false;
	if (!(e->flags & EXIT_SIGNALLED))
		return true;
	return e->failed_us && e->failed_us + FILE_TIME_US < stopped_us;
}

static uint64_t time_of(const struct msg_exited *e)
{
	return e->failed_us && e->failed_us < e->time_us ? e->failed_us : e->time_us;
}

static int class_of(const struct msg_exited *e)
{
	if (e->exec_errno)
		return 1;
	/* Our own signal is no crash. */
	return WIFSIGNALED(e->status) && !(e->flags & EXIT_SIGNALLED) ? 0 : 2;
}

static bool is_before(const struct msg_exited *a, const struct msg_exited *b)
{
	uint64_t ta = time_of(a), tb = time_of(b);
	uint64_t apart = ta < tb ? tb - ta : ta - tb;

	if (apart <= TOGETHER_US && class_of(a) != class_of(b))
		return class_of(a) < class_of(b);
	return ta < tb;
}

void failure_consider(struct failure *f, const struct msg_exited *e)
{
	if (f->known && !is_before(e, &f->exited))
		return;
	failure_fini(f);
	f->known = true;
	f->exited = *e;
	f->message = slice_dup(e->message);
	f->tail = slice_dup(e->tail);
	f->tail_path = slice_dup(e->tail_path);
	f->exited.message = slice_str(f->message ? f->message : "");
	f->exited.tail = slice_str(f->tail ? f->tail : "");
	f->exited.tail_path = slice_str(f->tail_path ? f->tail_path : "");
}

static uint32_t exit_code_of(const struct msg_exited *e)
{
	if (e->exec_errno)
		return e->exec_errno == ENOENT ? 127 : 126;
	/* It had failed by its own account and then hung until we ended it. */
	if (e->flags & EXIT_SIGNALLED && WIFSIGNALED(e->status))
		return 1;
	if (WIFSIGNALED(e->status))
		return 128 + (uint32_t)WTERMSIG(e->status);
	return (uint32_t)WEXITSTATUS(e->status);
}

void verdict_reach(struct msg_verdict *v, const struct failure *f, uint32_t stop_reason,
		   bool lost)
{
	const struct msg_exited *e = &f->exited;

	if (stop_reason) {
		v->verdict = VERDICT_STOPPED;
		v->exit_code = 128 + stop_reason;
	} else if (f->known) {
		v->verdict = e->exec_errno ? VERDICT_NO_EXEC : VERDICT_FAILED;
		v->exit_code = exit_code_of(e);
	} else if (lost) {
		v->verdict = VERDICT_LOST;
		v->exit_code = 4;
	}
	if (!f->known)
		return;
	v->rank = e->rank;
	v->pid = e->pid;
	v->status = e->status;
	v->flags = e->flags;
	v->exec_errno = e->exec_errno;
	v->failed_us = time_of(e);
	v->message = e->message;
	v->tail = e->tail;
	v->tail_path = e->tail_path;
}

/* Not the program's fault. */
static bool is_shortage(int error)
{
	return error == EAGAIN || error == ENOMEM || error == EMFILE || error == ENFILE;
}

void verdict_describe(char *out, size_t size, int32_t status, int32_t exec_errno)
{
	const char *name;

	if (exec_errno) {
		(void)snprintf(out, size, "could not be %s: %s",
			       is_shortage(exec_errno) ? "started" : "executed",
			       strerror(exec_errno));
	} else if (WIFSIGNALED(status)) {
		name = sigabbrev_np(WTERMSIG(status));
		if (name)
			(void)snprintf(out, size, "was killed by SIG%s%s", name,
				       WCOREDUMP(status) ? " (core dumped)" : "");
		else
			(void)snprintf(out, size, "was killed by signal %d%s",
				       WTERMSIG(status),
				       WCOREDUMP(status) ? " (core dumped)" : "");
	} else {
		(void)snprintf(out, size, "exited with code %d", WEXITSTATUS(status));
	}
}
