/*
 * Values: from text, checked against their row. One place for what each type
 * allows, whichever layer the text is from; the layer adds where it was.
 */

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/contract.h"
#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "config/layers.h"

enum {
	SHOWN = 64,         /* bytes of a value in a message */
	ENTRY_MAX = 131071, /* what the kernel lets one variable of a program be */
};

/* Variables of the contract that a setting decides. */
static const struct {
	const char *name, *key;
} decided_by[] = {
	{ "WORLD_SIZE", "num_processes" },
	{ "MASTER_PORT", "master_port" },
	{ "ACCELERATE_MIXED_PRECISION", "mixed_precision" },
	{ "ACCELERATE_USE_CPU", "cpu" },
};

int value_refuse(const struct setting_row *row, const char *text, const char *what,
		 struct err *err)
{
	struct buf allowed = { 0 };
	char shown[SHOWN];

	(void)schema_print_allowed(&allowed, row);
	if (row->note)
		(void)buf_addf(&allowed, " (%s)", row->note);
	(void)err_set(err, -EINVAL, "'%s' %s; allowed: %.*s",
		      printable(shown, sizeof(shown), text), what, (int)buf_len(&allowed),
		      (const char *)buf_data(&allowed));
	buf_fini(&allowed);
	return -EINVAL;
}

static int parse_number(struct value *ret, const struct setting_row *row,
			const char *text, struct err *err)
{
	int r = parse_int(&ret->number, text, row->min, row->max);

	if (r == -ERANGE)
		return value_refuse(row, text, "is out of range", err);
	if (r < 0)
		return value_refuse(row, text, "is not a whole number", err);
	return 0;
}

static int parse_time(struct value *ret, const struct setting_row *row, const char *text,
		      struct err *err)
{
	unsigned long long ms;
	int r = parse_duration_ms(&ms, text);

	if (r == -ERANGE)
		return value_refuse(row, text, "is too long", err);
	if (r < 0)
		return value_refuse(row, text, "is not a time", err);
	ret->number = (long long)ms;
	return 0;
}

/* In any case, and kept as the table writes it: programs compare it. */
static int parse_choice(struct value *ret, struct arena *arena,
			const struct setting_row *row, const char *text, struct err *err)
{
	size_t wanted = strlen(text);

	for (const char *p = row->choices; *p;) {
		size_t len = strcspn(p, "|");

		if (len == wanted && !strncasecmp(p, text, len)) {
			ret->text = arena_copy(arena, p, len);
			return ret->text ? 0 : err_set(err, -ENOMEM, "settings");
		}
		p += len + (p[len] != 0);
	}
	return value_refuse(row, text, "is unknown", err);
}

/* An empty path is a mistake (a variable in a script that was not set, mostly), and
 * would otherwise come to mean the working folder. */
static int parse_text(struct value *ret, struct arena *arena,
		      const struct setting_row *row, const char *text, struct err *err)
{
	size_t len = strlen(text);

	if (row->type != TYPE_STRING && !len)
		return value_refuse(row, text, "is empty", err);
	if (row->type != TYPE_STRING && len >= PATH_MAX)
		return value_refuse(row, text, "is longer than a path can be", err);
	ret->text = arena_copy(arena, text, len);
	return ret->text ? 0 : err_set(err, -ENOMEM, "settings");
}

int value_parse(struct value *ret, struct arena *arena, const struct setting_row *row,
		const char *text, struct err *err)
{
	bool on;

	*ret = (struct value){ 0 };
	switch (row->type) {
	case TYPE_INT:
		return parse_number(ret, row, text, err);
	case TYPE_DURATION:
		return parse_time(ret, row, text, err);
	case TYPE_ENUM:
		return parse_choice(ret, arena, row, text, err);
	case TYPE_STRING:
	case TYPE_PATH:
	case TYPE_PROGRAM:
		return parse_text(ret, arena, row, text, err);
	case TYPE_BOOL:
		if (parse_bool(&on, text) < 0)
			return value_refuse(row, text, "is neither yes nor no", err);
		ret->number = on;
		return 0;
	case TYPE_MAP:
		break;
	}
	/* Entries are put one by one, see config_put(). */
	return err_set(err, -EINVAL, "%s: takes entries", row->key);
}

static bool is_name(const char *name)
{
	static const char letters[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_"
		".0123456789";
	size_t first = strcspn(letters, ".");

	/* The letters that may begin a name come first. */
	return *name && memchr(letters, *name, first) && !name[strspn(name, letters)];
}

/* Settings, too, would reach the worker as if they had been made for it. */
static bool is_workers_own(const char *name)
{
	return !strncmp(name, "ACCEL_", strlen("ACCEL_")) || contract_has(name);
}

static const char *deciding_key(const char *name)
{
	for (size_t i = 0; i < sizeof(decided_by) / sizeof(decided_by[0]); i++)
		if (!strcmp(decided_by[i].name, name))
			return decided_by[i].key;
	return NULL;
}

int value_check_entry(const char *name, const char *value, struct err *err)
{
	const char *key = deciding_key(name);
	char shown[SHOWN];

	(void)printable(shown, sizeof(shown), name);
	if (!is_name(name))
		return err_set(err, -EINVAL,
			       "'%s' is not the name of a variable; allowed: letters, "
			       "digits, '_' and '.', the first a letter or '_'",
			       shown);
	if (is_workers_own(name))
		return err_set(err, -EINVAL,
			       "%s cannot be set: accel sets it for each worker%s%s%s",
			       shown, key ? " (from the setting " : "", key ? key : "",
			       key ? ")" : "");
	if (strlen(name) + 1 + strlen(value) > ENTRY_MAX)
		return err_set(err, -EINVAL,
			       "%s is too long; allowed: %d bytes with its name", shown,
			       ENTRY_MAX);
	return 0;
}
