#pragma once

/*
 * Settings: one table of rows (schema.h), values in layers, and for each value
 * where it came from. Precedence: flag > variable > file > detected > default.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strv.h"
#include "config/schema.h"

struct buf;
struct err;
struct config;

enum origin_kind {
	ORIGIN_DEFAULT,
	ORIGIN_DETECTED,
	ORIGIN_FILE,
	ORIGIN_VARIABLE,
	ORIGIN_FLAG,
};

struct origin {
	enum origin_kind kind;
	const char *name; /* the flag, variable or file; what was detected; or NULL */
	int line;         /* in a file, from 1 */
};

/* All settings at their defaults. */
int config_new(struct config **ret, struct err *err);
struct config *config_free(struct config *c);

/*
 * One layer each; they may be loaded in any order. All of them refuse a value
 * that its row does not allow with -EINVAL and a sentence that names the place,
 * the setting and what is allowed.
 */
int config_load_file(struct config *c, const char *path, struct err *err);
int config_load_yaml(struct config *c, const char *name, const char *text, size_t len,
		     struct err *err);
/* ACCEL_* variables. Inside a worker of another job (ACCEL_JOB is set) those
 * that are part of what that job gave its worker are passed over. */
int config_load_variables(struct config *c, char *const *env, struct err *err);
/* @flag is the option's name as it was written, with or without its dashes; NULL:
 * the row's. For a MAP, @value is one NAME=VALUE. */
int config_set_flag(struct config *c, enum setting id, const char *flag,
		    const char *value, struct err *err);
/* @what says how it was found, "2 cuda devices in /dev". */
int config_set_detected(struct config *c, enum setting id, const char *value,
			const char *what, struct err *err);

/* Which file a launch here would read: ACCEL_CONFIG, else accel.yaml in @cwd or
 * its parents up to the repository's root, else $XDG_CONFIG_HOME/accel/config.yaml
 * (~/.config). Returns 1 with *@ret allocated, 0 when there is none, or -ENOENT
 * when ACCEL_CONFIG names a file that is not there. */
int config_find_file(char **ret, const char *cwd, char *const *env, struct err *err);

/* Warnings met while loading (unknown keys with the nearest name), one string each. */
const struct strv *config_warnings(const struct config *c);

/* The value that holds, by its row's type. A string that is not set is NULL, a
 * number 0. A MAP is the layers' entries together, a higher layer's over a lower
 * one's of the same name. */
long long config_int(const struct config *c, enum setting id);
bool config_bool(const struct config *c, enum setting id);
const char *config_str(const struct config *c, enum setting id); /* and PATH, ENUM, ... */
uint64_t config_duration_ms(const struct config *c, enum setting id);
const struct strv *config_list(const struct config *c, enum setting id); /* "K=V" */
struct origin config_origin(const struct config *c, enum setting id);
/* Of entry @i of a MAP's list. */
struct origin config_entry_origin(const struct config *c, enum setting id, size_t i);
/* By more than its default? */
bool config_is_set(const struct config *c, enum setting id);

/* The value as text ("4", "bf16", "15 s"), and the origin as text ("flag
 * --num-processes", "variable ACCEL_CPU", "FILE:3", "detected (...)", "default"). */
int config_print_value(struct buf *out, const struct config *c, enum setting id);
int config_print_origin(struct buf *out, const struct config *c, enum setting id);
int origin_print(struct buf *out, const struct origin *o);
/* The word for a kind: "flag", "variable", "file", "detected", "default". */
const char *origin_kind_name(enum origin_kind kind);
