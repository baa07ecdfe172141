#pragma once

/*
 * What client, coordinator and agents say to each other. One struct per
 * message; the tables in messages.c follow them field by field. Numbers and
 * fields are only ever appended.
 */

#include <stdint.h>

#include "rendezvous/wire.h"

enum msg_type {
	MSG_UNKNOWN = 1, /* answer to a type we do not know */
	MSG_PLAN,        /* client -> coordinator -> agents: the job */
	MSG_REFUSED,     /* agent -> coordinator -> client: the plan cannot run */
	MSG_ACCEPTED,    /* coordinator -> client */
	MSG_START,       /* coordinator -> agent: start your workers */
	MSG_STARTED,     /* agent -> coordinator: one worker runs */
	MSG_EXITED,      /* agent -> coordinator: one worker's main process ended */
	MSG_OUTPUT,      /* agent -> coordinator -> client */
	MSG_STOP,        /* client -> coordinator -> agents: end the job */
	MSG_SIGNAL,      /* client -> coordinator -> agents: pass a signal on */
	MSG_HOLD,        /* coordinator -> agent: stop or resume reading output */
	MSG_NOTE,        /* anyone -> client: something to tell the user */
	MSG_IDLE,        /* agent -> coordinator: no process of the job is left here */
	MSG_VERDICT,     /* coordinator -> client: how it went; the last message */
	MSG_STATUS_ASK,  /* control socket: what are you doing? */
	MSG_STATUS,
	MSG_PAGE_ASK, /* control socket: the descriptors of a rank */
	MSG_PAGE,     /* comes with the descriptors: the control page, then the ring */
	MSG_FAILING,  /* agent -> coordinator: a worker failed; MSG_EXITED follows */
	N_MSG_TYPES,
};

struct msg_unknown {
	uint32_t type;
};

enum {
	PLAN_CPU = 1,         /* accelerators are to be left alone */
	PLAN_STDIN = 2,       /* the only worker reads the supervisor's stdin */
	PLAN_SKIP_SCREEN = 4, /* a slow screen skips lines; otherwise it slows the job */
	PLAN_VERBOSE = 8,     /* the client wants NOTE_INFO */
};

struct msg_plan {
	struct slice job;     /* its name, unique on this machine */
	struct slice job_dir; /* absolute; exists, ours, 0700 */
	struct slice socket;  /* where the control socket goes; absolute */
	struct slice program; /* as the user called it, for people */
	struct slice path;    /* the file to execute */
	struct slice_list argv;
	struct slice_list env; /* the user's; what accel adds is added by the agent */
	uint32_t n_processes;
	uint32_t flags;
	struct slice mixed_precision;
	struct slice master_addr;
	uint32_t master_port; /* 0: a free one */
	uint32_t grace_ms;
	uint32_t lost_grace_ms; /* at most this much when the client is lost */
};

struct msg_refused {
	uint32_t exit_code;
	struct slice text; /* what was being done: reason */
	struct slice hint; /* what to do about it */
};

struct msg_accepted {
	uint32_t master_port;
	uint32_t pid; /* of the daemon */
};

struct msg_start {
	uint32_t attempt;
	uint32_t node, n_nodes;
	uint32_t first_rank, n_local, n_world;
	uint32_t master_port;
};

struct msg_started {
	uint32_t rank;
	uint32_t pid;
	uint64_t time_us; /* wall clock */
};

enum {
	EXIT_SIGNALLED = 1, /* it ended after the supervisor had signalled it */
};

struct msg_exited {
	uint32_t rank;
	uint32_t pid;
	int32_t status;     /* as waitpid(2) gives it */
	int32_t exec_errno; /* when the program could not be executed */
	uint32_t flags;
	uint64_t time_us;
	uint64_t failed_us;   /* when its own error file was written, or 0 */
	struct slice message; /* why, in its own words, from its error file */
	struct slice tail;    /* the last lines it wrote */
	struct slice tail_path;
};

/* Sent the moment it is known, before anything is read or closed: the others are
 * to hear of it first. */
struct msg_failing {
	uint32_t rank;
};

enum { STREAM_OUT, STREAM_ERR, N_STREAMS };

struct msg_output {
	uint32_t rank;
	uint32_t stream;
	struct slice data;
	uint64_t skipped_lines; /* before @data, not shown */
	uint64_t skipped_bytes;
	struct slice path; /* where all of it is; with skipped ones */
};

struct msg_stop {
	int32_t signo;     /* to each worker first; SIGKILL goes to whole trees */
	uint32_t grace_ms; /* then SIGKILL */
	uint32_t reason;   /* the signal the client got: 128 + it is the exit code */
};

struct msg_signal {
	int32_t signo;
};

struct msg_hold {
	uint32_t on;
};

enum { NOTE_WARNING, NOTE_INFO };

struct msg_note {
	uint32_t level;
	uint64_t time_us;
	struct slice text;
};

struct msg_idle {
	uint32_t n_killed; /* processes that had to be killed after the workers ended */
};

enum verdict {
	VERDICT_DONE,
	VERDICT_FAILED,  /* a worker ended with a code or by a signal */
	VERDICT_NO_EXEC, /* a worker's program could not be executed */
	VERDICT_STOPPED, /* on request */
	VERDICT_LOST,    /* client or keeper went away */
	N_VERDICTS,
};

struct msg_verdict {
	uint32_t verdict;
	uint32_t exit_code;
	uint32_t rank; /* which failed first */
	uint32_t pid;
	int32_t status;
	int32_t exec_errno;
	uint32_t n_failed; /* workers that failed by themselves */
	uint32_t n_workers;
	uint64_t started_us, ended_us, failed_us;
	struct slice message, tail, tail_path;
	uint32_t flags; /* EXIT_..., of the one that failed first */
};

struct msg_status_ask {
	uint32_t reserved;
};

struct msg_status {
	struct slice job, program, job_dir;
	uint32_t pid; /* of the daemon */
	uint32_t n_workers, n_running;
	uint32_t attempt;
	uint32_t stopping;
	uint32_t master_port;
	uint64_t started_us;
	uint32_t n_nodes;
	uint64_t step_lowest, step_highest; /* of those that run; 0: none counts */
};

struct msg_page_ask {
	uint32_t rank;
};

struct msg_page {
	int32_t error; /* errno, and no descriptors then; no ring, only the first */
	uint32_t rank;
};

/* Room for any message, decoded. */
union message_any {
	struct msg_unknown unknown;
	struct msg_plan plan;
	struct msg_refused refused;
	struct msg_accepted accepted;
	struct msg_start start;
	struct msg_started started;
	struct msg_exited exited;
	struct msg_output output;
	struct msg_stop stop;
	struct msg_signal signal;
	struct msg_hold hold;
	struct msg_note note;
	struct msg_idle idle;
	struct msg_verdict verdict;
	struct msg_status_ask status_ask;
	struct msg_status status;
	struct msg_page_ask page_ask;
	struct msg_page page;
	struct msg_failing failing;
};

/* The table's entry, or NULL for a type nobody defined. */
const struct message *message_of(unsigned type);

/* A string field as C string; the caller frees. Cut at a NUL, NULL without memory. */
char *slice_dup(struct slice s);
