/*
 * The table of messages: the fields of messages.h, in wire order.
 */

#include "rendezvous/messages.h"

#define FIELD(type, member, kind)                                                        \
	{                                                                                \
#member, kind, offsetof(struct type, member)                             \
	}
#define MESSAGE(type, fields)                                                            \
	{                                                                                \
#type, fields, sizeof(fields) / sizeof((fields)[0]), sizeof(struct type) \
	}

static const struct field unknown_fields[] = {
	FIELD(msg_unknown, type, F_U32),
};

static const struct field plan_fields[] = {
	FIELD(msg_plan, job, F_BYTES),         FIELD(msg_plan, job_dir, F_BYTES),
	FIELD(msg_plan, socket, F_BYTES),      FIELD(msg_plan, program, F_BYTES),
	FIELD(msg_plan, path, F_BYTES),        FIELD(msg_plan, argv, F_LIST),
	FIELD(msg_plan, env, F_SECRET),        FIELD(msg_plan, n_processes, F_U32),
	FIELD(msg_plan, flags, F_U32),         FIELD(msg_plan, mixed_precision, F_BYTES),
	FIELD(msg_plan, master_addr, F_BYTES), FIELD(msg_plan, master_port, F_U32),
	FIELD(msg_plan, grace_ms, F_U32),      FIELD(msg_plan, lost_grace_ms, F_U32),
};

static const struct field refused_fields[] = {
	FIELD(msg_refused, exit_code, F_U32),
	FIELD(msg_refused, text, F_BYTES),
	FIELD(msg_refused, hint, F_BYTES),
};

static const struct field accepted_fields[] = {
	FIELD(msg_accepted, master_port, F_U32),
	FIELD(msg_accepted, pid, F_U32),
};

static const struct field start_fields[] = {
	FIELD(msg_start, attempt, F_U32),     FIELD(msg_start, node, F_U32),
	FIELD(msg_start, n_nodes, F_U32),     FIELD(msg_start, first_rank, F_U32),
	FIELD(msg_start, n_local, F_U32),     FIELD(msg_start, n_world, F_U32),
	FIELD(msg_start, master_port, F_U32),
};

static const struct field started_fields[] = {
	FIELD(msg_started, rank, F_U32),
	FIELD(msg_started, pid, F_U32),
	FIELD(msg_started, time_us, F_U64),
};

static const struct field exited_fields[] = {
	FIELD(msg_exited, rank, F_U32),      FIELD(msg_exited, pid, F_U32),
	FIELD(msg_exited, status, F_I32),    FIELD(msg_exited, exec_errno, F_I32),
	FIELD(msg_exited, flags, F_U32),     FIELD(msg_exited, time_us, F_U64),
	FIELD(msg_exited, failed_us, F_U64), FIELD(msg_exited, message, F_BYTES),
	FIELD(msg_exited, tail, F_BYTES),    FIELD(msg_exited, tail_path, F_BYTES),
};

static const struct field output_fields[] = {
	FIELD(msg_output, rank, F_U32),          FIELD(msg_output, stream, F_U32),
	FIELD(msg_output, data, F_BYTES),        FIELD(msg_output, skipped_lines, F_U64),
	FIELD(msg_output, skipped_bytes, F_U64), FIELD(msg_output, path, F_BYTES),
};

static const struct field stop_fields[] = {
	FIELD(msg_stop, signo, F_I32),
	FIELD(msg_stop, grace_ms, F_U32),
	FIELD(msg_stop, reason, F_U32),
};

static const struct field signal_fields[] = {
	FIELD(msg_signal, signo, F_I32),
};

static const struct field hold_fields[] = {
	FIELD(msg_hold, on, F_U32),
};

static const struct field note_fields[] = {
	FIELD(msg_note, level, F_U32),
	FIELD(msg_note, time_us, F_U64),
	FIELD(msg_note, text, F_BYTES),
};

static const struct field idle_fields[] = {
	FIELD(msg_idle, n_killed, F_U32),
};

static const struct field verdict_fields[] = {
	FIELD(msg_verdict, verdict, F_U32),    FIELD(msg_verdict, exit_code, F_U32),
	FIELD(msg_verdict, rank, F_U32),       FIELD(msg_verdict, pid, F_U32),
	FIELD(msg_verdict, status, F_I32),     FIELD(msg_verdict, exec_errno, F_I32),
	FIELD(msg_verdict, n_failed, F_U32),   FIELD(msg_verdict, n_workers, F_U32),
	FIELD(msg_verdict, started_us, F_U64), FIELD(msg_verdict, ended_us, F_U64),
	FIELD(msg_verdict, failed_us, F_U64),  FIELD(msg_verdict, message, F_BYTES),
	FIELD(msg_verdict, tail, F_BYTES),     FIELD(msg_verdict, tail_path, F_BYTES),
	FIELD(msg_verdict, flags, F_U32),
};

static const struct field status_ask_fields[] = {
	FIELD(msg_status_ask, reserved, F_U32),
};

static const struct field status_fields[] = {
	FIELD(msg_status, job, F_BYTES),        FIELD(msg_status, program, F_BYTES),
	FIELD(msg_status, job_dir, F_BYTES),    FIELD(msg_status, pid, F_U32),
	FIELD(msg_status, n_workers, F_U32),    FIELD(msg_status, n_running, F_U32),
	FIELD(msg_status, attempt, F_U32),      FIELD(msg_status, stopping, F_U32),
	FIELD(msg_status, master_port, F_U32),  FIELD(msg_status, started_us, F_U64),
	FIELD(msg_status, n_nodes, F_U32),      FIELD(msg_status, step_lowest, F_U64),
	FIELD(msg_status, step_highest, F_U64),
};

static const struct field page_ask_fields[] = {
	FIELD(msg_page_ask, rank, F_U32),
};

static const struct field page_fields[] = {
	FIELD(msg_page, error, F_I32),
	FIELD(msg_page, rank, F_U32),
};

static const struct field failing_fields[] = {
	FIELD(msg_failing, rank, F_U32),
};

/* clang-format off */
static const struct message messages[N_MSG_TYPES] = {
	[MSG_UNKNOWN]    = MESSAGE(msg_unknown, unknown_fields),
	[MSG_PLAN]       = MESSAGE(msg_plan, plan_fields),
	[MSG_REFUSED]    = MESSAGE(msg_refused, refused_fields),
	[MSG_ACCEPTED]   = MESSAGE(msg_accepted, accepted_fields),
	[MSG_START]      = MESSAGE(msg_start, start_fields),
	[MSG_STARTED]    = MESSAGE(msg_started, started_fields),
	[MSG_EXITED]     = MESSAGE(msg_exited, exited_fields),
	[MSG_OUTPUT]     = MESSAGE(msg_output, output_fields),
	[MSG_STOP]       = MESSAGE(msg_stop, stop_fields),
	[MSG_SIGNAL]     = MESSAGE(msg_signal, signal_fields),
	[MSG_HOLD]       = MESSAGE(msg_hold, hold_fields),
	[MSG_NOTE]       = MESSAGE(msg_note, note_fields),
	[MSG_IDLE]       = MESSAGE(msg_idle, idle_fields),
	[MSG_VERDICT]    = MESSAGE(msg_verdict, verdict_fields),
	[MSG_STATUS_ASK] = MESSAGE(msg_status_ask, status_ask_fields),
	[MSG_STATUS]     = MESSAGE(msg_status, status_fields),
	[MSG_PAGE_ASK]   = MESSAGE(msg_page_ask, page_ask_fields),
	[MSG_PAGE]       = MESSAGE(msg_page, page_fields),
	[MSG_FAILING]    = MESSAGE(msg_failing, failing_fields),
};
/* clang-format on */

const struct message *message_of(unsigned type)
{
	return type < N_MSG_TYPES && messages[type].name ? &messages[type] : NULL;
}

char *slice_dup(struct slice s)
{
	return strndup(s.data ? (const char *)s.data : "", s.len);
}
