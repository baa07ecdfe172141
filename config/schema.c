/*
 * The table of settings and what is derived from it alone: options, the words
 * for what a value may be, the nearest key. Values are elsewhere (config.c).
 */

#include "config/schema.h"

#include <stdbool.h>
#include <string.h>

#include "base/buf.h"
#include "base/near.h"
#include "base/opt.h"

enum {
	NAMES_MAX = 4 * N_SETTINGS, /* keys and all further names of options */
	NAME_SIZE = 64,
};

/* Each row in the place of its id. */
const struct setting_row schema[N_SETTINGS] = {
	[SET_NUM_PROCESSES] = {
		.id = SET_NUM_PROCESSES,
		.key = "num_processes",
		.flag = "num-processes",
		.short_flag = 'n',
		.aliases = "nproc-per-node",
		.variable = "ACCEL_NUM_PROCESSES",
		.type = TYPE_INT,
		.arg = "N",
		.def = "1",
		.def_text = "one for each device, else 1",
		.min = 1,
		.max = 65536,
		.group = "Job size",
		.help = "Worker processes of the whole job",
	},
	[SET_CPU] = {
		.id = SET_CPU,
		.key = "cpu",
		.flag = "cpu",
		.variable = "ACCEL_CPU",
		.type = TYPE_BOOL,
		.def = "false",
		.group = "Job size",
		.help = "Run on processors only, whatever devices there are",
	},
	[SET_MIXED_PRECISION] = {
		.id = SET_MIXED_PRECISION,
		.key = "mixed_precision",
		.flag = "mixed-precision",
		.variable = "ACCEL_MIXED_PRECISION",
		.type = TYPE_ENUM,
		.arg = "no|fp16|bf16",
		.def = "no",
		.choices = "no|fp16|bf16",
		.group = "Program",
		.help = "Precision that the program is told to compute in",
		.in_contract = 1,
	},
	[SET_ENV] = {
		.id = SET_ENV,
		.key = "env",
		.flag = "env",
		.type = TYPE_MAP,
		.arg = "NAME=VALUE",
		.group = "Program",
		.help = "Set a variable for the workers; may be given again",
	},
	[SET_LOG_DIR] = {
		.id = SET_LOG_DIR,
		.key = "log_dir",
		.flag = "log-dir",
		.variable = "ACCEL_LOG_DIR",
		.type = TYPE_PATH,
		.arg = "DIR",
		.def_text = "$XDG_STATE_HOME/accel/jobs",
		.group = "Logs",
		.help = "Keep the job's files in DIR/JOB-ID",
	},
	[SET_MASTER_PORT] = {
		.id = SET_MASTER_PORT,
		.key = "master_port",
		.flag = "master-port",
		.aliases = "main-process-port",
		.variable = "ACCEL_MASTER_PORT",
		.type = TYPE_INT,
		.arg = "PORT",
		.def_text = "a free one",
		.min = 0,
		.max = 65535,
		.note = "0 means a free one",
		.group = "Rendezvous",
		.help = "Port of the key-value store that the workers meet at",
		/* A job within a worker would find it taken by the job around it. */
		.in_contract = 1,
	},
	[SET_GRACE] = {
		.id = SET_GRACE,
		.key = "grace",
		.flag = "grace",
		.variable = "ACCEL_GRACE",
		.type = TYPE_DURATION,
		.arg = "TIME",
		.def = "15 s",
		.group = "Stopping",
		.help = "Time that workers get between the first signal (SIGTERM; SIGINT "
			"after Ctrl-C) and SIGKILL, in seconds or with a unit (500ms, 2m)",
	},
	[SET_PYTHON] = {
		.id = SET_PYTHON,
		.key = "python",
		.flag = "python",
		.variable = "ACCEL_PYTHON",
		.type = TYPE_PROGRAM,
		.arg = "PATH",
		.def_text = "the virtual environment's, else python3",
		.group = "Program",
		.help = "Interpreter for Python programs",
	},
};

static bool same_key(const char *a, const char *b)
{
	for (; *a && *b; a++, b++)
		if (*a != *b && (*a != '_' || *b != '-'))
			return false;
	return *a == *b;
}

const struct setting_row *schema_by_key(const char *key)
{
	for (size_t i = 0; i < N_SETTINGS; i++)
		if (same_key(schema[i].key, key))
			return &schema[i];
	return NULL;
}

/* Names to compare an unknown key with, and the key that each stands for. */
struct names {
	const char *name[NAMES_MAX], *key[NAMES_MAX];
	char held[NAMES_MAX][NAME_SIZE];
	size_t n;
};

/* Add each of "a|b|c", but for the key itself. */
static void add_names(struct names *all, const char *list, const char *key)
{
	while (list && all->n < NAMES_MAX) {
		size_t len = strcspn(list, "|");
		char *held = all->held[all->n];

		if (len < NAME_SIZE) {
			memcpy(held, list, len);
			held[len] = 0;
			all->name[all->n] = held;
			all->key[all->n] = key;
			all->n += !same_key(key, held);
		}
		list = list[len] ? list + len + 1 : NULL;
	}
}

const char *schema_near_key(const char *key)
{
	struct names all = { .n = N_SETTINGS };
	const char *near;

	for (size_t i = 0; i < N_SETTINGS; i++) {
		all.name[i] = all.key[i] = schema[i].key;
		add_names(&all, schema[i].flag, schema[i].key);
		add_names(&all, schema[i].aliases, schema[i].key);
	}
	near = near_match(key, all.name, all.n);
	for (size_t i = 0; near && i < all.n; i++)
		if (all.name[i] == near)
			return all.key[i];
	return NULL;
}

size_t schema_options(struct opt *out, size_t max)
{
	size_t n = 0;

	for (; n < N_SETTINGS && n < max; n++) {
		const struct setting_row *row = &schema[n];

		out[n] = (struct opt){
			.name = row->flag,
			.short_name = row->short_flag,
			.aliases = row->aliases,
			.group = row->group,
			.help = row->help,
			.id = (int)row->id,
		};
		if (row->type == TYPE_BOOL)
			continue;
		out[n].arg = row->arg;
		out[n].def = row->def_text ? row->def_text : row->def;
	}
	return n;
}

/* "no|fp16|bf16" as "no, fp16, bf16". */
static int print_choices(struct buf *out, const char *choices)
{
	int r = 0;

	while (*choices && r == 0) {
		size_t len = strcspn(choices, "|");

		r = buf_add(out, choices, len);
		choices += len + (choices[len] != 0);
		if (r == 0 && *choices)
			r = buf_add_str(out, ", ");
	}
	return r;
}

int schema_print_allowed(struct buf *out, const struct setting_row *row)
{
	switch (row->type) {
	case TYPE_INT:
		return buf_addf(out, "%lld to %lld", row->min, row->max);
	case TYPE_BOOL:
		return buf_add_str(out, "true, false");
	case TYPE_ENUM:
		return print_choices(out, row->choices);
	case TYPE_PATH:
	case TYPE_PROGRAM:
		return buf_add_str(out, "a path");
	case TYPE_STRING:
		return buf_add_str(out, "text");
	case TYPE_DURATION:
		return buf_add_str(out, "seconds, or a number with ms, s, m or h; "
					"at most a year");
	case TYPE_MAP:
		return buf_add_str(out, "NAME=VALUE");
	}
	return 0;
}
