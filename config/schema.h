#pragma once

/*
 * Every setting accel knows: one row each, in schema.c. Parsing, help, checks,
 * documentation and completion read this table. A row exists only once it acts.
 */

#include <stddef.h>

struct buf;
struct opt;

enum setting {
	SET_NUM_PROCESSES,
	SET_CPU,
	SET_MIXED_PRECISION,
	SET_ENV,
	SET_LOG_DIR,
	SET_MASTER_PORT,
	SET_GRACE,
	SET_PYTHON,
	N_SETTINGS,
};

enum setting_type {
	TYPE_INT,
	TYPE_BOOL,
	TYPE_ENUM,
	TYPE_STRING,
	TYPE_PATH,    /* in a file, relative to the file's folder; "~/" is the home */
	TYPE_PROGRAM, /* a path when it has a slash, else a name for PATH */
	TYPE_DURATION,
	TYPE_MAP, /* NAME=VALUE, repeatable; a mapping in YAML */
};

struct setting_row {
	enum setting id;
	const char *key;      /* in YAML */
	const char *flag;     /* long option */
	char short_flag;      /* or 0 */
	const char *aliases;  /* further long options, "a|b", or NULL */
	const char *variable; /* ACCEL_... */
	enum setting_type type;
	const char *arg;      /* what the value is called in the help */
	const char *def;      /* default as text, or NULL: not set */
	const char *def_text; /* what holds by itself, for people, if not @def */
	const char *choices;  /* of an ENUM, "no|fp16|bf16" */
	long long min, max;   /* of an INT */
	const char *note;     /* on a value, for people: "0 means a free one"; or NULL */
	const char *group;    /* heading in the help */
	const char *help;     /* one line */
	int in_contract;      /* the variable is of one job: workers do not pass it on */
};

extern const struct setting_row schema[N_SETTINGS];

/* The row of a YAML key, or NULL. */
const struct setting_row *schema_by_key(const char *key);

/* The key that was probably meant by one that is unknown, or NULL. Names of
 * options count, too. */
const char *schema_near_key(const char *key);

/* Fill @out with an option for each setting, its id the setting's, so that a
 * command can append its own with ids from N_SETTINGS. Returns how many. */
size_t schema_options(struct opt *out, size_t max);

/* Append what a value of the row must be, for messages: "1 to 65536". */
int schema_print_allowed(struct buf *out, const struct setting_row *row);

/* Append the reference page of all settings, docs/settings.md. */
int schema_print_markdown(struct buf *out);
