/* Settings: their table, values, layers and origins, and the file's YAML. */

#include "tests/unit/unit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "base/path.h"
#include "config/config.h"

static struct config *c;
static struct err err;

static int make_config(void **state)
{
	(void)state;
	err = (struct err){ 0 };
	return config_new(&c, &err);
}

static int free_config(void **state)
{
	(void)state;
	c = config_free(c);
	return 0;
}

static int make_folder(void **state)
{
	char *folder = strdup("/tmp/test_config.XXXXXX");

	*state = mkdtemp(folder);
	return *state && chdir(folder) == 0 ? make_config(state) : -1;
}

static int remove_folder(void **state)
{
	OWN_MEM char *command = NULL;
	int r = chdir("/");

	if (r == 0 && asprintf(&command, "rm -rf '%s'", (char *)*state) > 0)
		r = system(command);
	free(*state);
	return r ? r : free_config(state);
}

static int yaml(const char *text)
{
	return config_load_yaml(c, "f.yaml", text, strlen(text), &err);
}

/* A configuration of its own for one text. */
static int yaml_alone(const char *text)
{
	void *none = NULL;

	free_config(&none);
	assert_int_equal(make_config(&none), 0);
	return yaml(text);
}

static void assert_good(const char *text)
{
	int r = yaml_alone(text);

	if (r)
		print_error("%s: %s\n", text, err.text);
	assert_int_equal(r, 0);
}

static void assert_bad(const char *text, const char *message)
{
	assert_int_equal(yaml_alone(text), -EINVAL);
	assert_string_equal(err.text, message);
}

static int variables(const char *const *env)
{
	return config_load_variables(c, (char *const *)env, &err);
}

#define VARIABLES(...) variables((const char *const[]){ __VA_ARGS__, NULL })

static int flag(enum setting id, const char *value)
{
	return config_set_flag(c, id, NULL, value, &err);
}

static void assert_printed(int (*print)(struct buf *, const struct config *,
					enum setting),
			   enum setting id, const char *expected)
{
	struct buf out = { 0 };

	assert_int_equal(print(&out, c, id), 0);
	assert_int_equal(buf_add(&out, "", 1), 0);
	assert_string_equal((char *)buf_data(&out), expected);
	buf_fini(&out);
}

#define ASSERT_VALUE(id, text) assert_printed(config_print_value, id, text)
#define ASSERT_ORIGIN(id, text) assert_printed(config_print_origin, id, text)

/* --- the table --- */

static void every_row_is_whole(void **state)
{
	(void)state;
	for (size_t i = 0; i < N_SETTINGS; i++) {
		const struct setting_row *row = &schema[i];

		assert_int_equal(row->id, i);
		assert_non_null(row->key);
		assert_non_null(row->flag);
		assert_non_null(row->group);
		assert_non_null(row->help);
		assert_true(row->type == TYPE_BOOL || row->arg);
		assert_true(row->type != TYPE_ENUM || row->choices);
		assert_true(row->type != TYPE_INT || row->min < row->max);
		assert_true(row->type == TYPE_MAP || row->variable);
		assert_ptr_equal(schema_by_key(row->key), row);
		for (size_t k = 0; k < i; k++) {
			assert_string_not_equal(row->key, schema[k].key);
			assert_string_not_equal(row->flag, schema[k].flag);
			assert_true(!row->short_flag ||
				    row->short_flag != schema[k].short_flag);
		}
	}
	assert_null(schema_by_key("num_processe"));
	assert_null(schema_by_key("num_processess"));
	assert_ptr_equal(schema_by_key("num-processes"), &schema[SET_NUM_PROCESSES]);
}

static void every_row_is_an_option(void **state)
{
	struct opt options[N_SETTINGS];

	(void)state;
	assert_int_equal(schema_options(options, N_SETTINGS), N_SETTINGS);
	for (size_t i = 0; i < N_SETTINGS; i++) {
		assert_int_equal(options[i].id, i);
		assert_string_equal(options[i].name, schema[i].flag);
		assert_true(!options[i].arg == (schema[i].type == TYPE_BOOL));
	}
	assert_int_equal(schema_options(options, 2), 2);
}

static void the_reference_page_has_every_setting(void **state)
{
	struct buf out = { 0 };

	(void)state;
	assert_int_equal(schema_print_markdown(&out), 0);
	assert_int_equal(buf_add(&out, "", 1), 0);
	for (size_t i = 0; i < N_SETTINGS; i++) {
		const char *text = (const char *)buf_data(&out);
		char head[64];

		(void)snprintf(head, sizeof(head), "### `%s`", schema[i].key);
		assert_non_null(strstr(text, head));
		assert_non_null(strstr(text, schema[i].help));
		assert_true(!schema[i].variable || strstr(text, schema[i].variable));
	}
	buf_fini(&out);
}

/* --- layers --- */

static void defaults_hold_when_nobody_says_anything(void **state)
{
	(void)state;
	assert_int_equal(config_int(c, SET_NUM_PROCESSES), 1);
	assert_false(config_bool(c, SET_CPU));
	assert_string_equal(config_str(c, SET_MIXED_PRECISION), "no");
	assert_int_equal(config_duration_ms(c, SET_GRACE), 15000);
	assert_int_equal(config_int(c, SET_MASTER_PORT), 0);
	assert_null(config_str(c, SET_LOG_DIR));
	assert_null(config_str(c, SET_PYTHON));
	assert_int_equal(config_list(c, SET_ENV)->n, 0);
	for (size_t i = 0; i < N_SETTINGS; i++) {
		assert_false(config_is_set(c, schema[i].id));
		ASSERT_ORIGIN(schema[i].id, "default");
	}
}

static void load_layer(int layer)
{
	if (layer == 0)
		assert_int_equal(config_set_detected(c, SET_NUM_PROCESSES, "2",
						     "2 cuda devices in /dev", &err),
				 0);
	if (layer == 1)
		assert_int_equal(yaml("# first\nnum_processes: 3\n"), 0);
	if (layer == 2)
		assert_int_equal(VARIABLES("ACCEL_NUM_PROCESSES=4"), 0);
	if (layer == 3)
		assert_int_equal(flag(SET_NUM_PROCESSES, "5"), 0);
}

static void the_highest_layer_holds_in_whatever_order_they_come(void **state)
{
	static const char *const origins[] = {
		"default",
		"detected (2 cuda devices in /dev)",
		"f.yaml:2",
		"variable ACCEL_NUM_PROCESSES",
		"flag --num-processes",
	};

	for (int set = 0; set < 16; set++)
		for (int backwards = 0; backwards < 2; backwards++) {
			int highest = 0;

			free_config(state);
			assert_int_equal(make_config(state), 0);
			for (int i = 0; i < 4; i++) {
				int layer = backwards ? 3 - i : i;

				if (!(set & 1 << layer))
					continue;
				load_layer(layer);
				if (layer + 1 > highest)
					highest = layer + 1;
			}
			assert_int_equal(config_int(c, SET_NUM_PROCESSES), highest + 1);
			ASSERT_ORIGIN(SET_NUM_PROCESSES, origins[highest]);
			assert_int_equal(config_is_set(c, SET_NUM_PROCESSES),
					 highest > 0);
		}
}

static void every_setting_is_taken_from_every_layer(void **state)
{
	(void)state;
	assert_int_equal(yaml("num_processes: 4\ncpu: true\nmixed_precision: bf16\n"
			      "env: {A: 1}\nlog_dir: /l\nmaster_port: 5\ngrace: 1.5\n"
			      "python: py\n"),
			 0);
	ASSERT_VALUE(SET_NUM_PROCESSES, "4");
	ASSERT_VALUE(SET_CPU, "true");
	ASSERT_VALUE(SET_MIXED_PRECISION, "bf16");
	ASSERT_VALUE(SET_ENV, "A=1");
	ASSERT_VALUE(SET_LOG_DIR, "/l");
	ASSERT_VALUE(SET_MASTER_PORT, "5");
	ASSERT_VALUE(SET_GRACE, "1500 ms");
	ASSERT_VALUE(SET_PYTHON, "py");
	assert_int_equal(VARIABLES("ACCEL_NUM_PROCESSES=5", "ACCEL_CPU=no",
				   "ACCEL_MIXED_PRECISION=FP16", "ACCEL_LOG_DIR=m",
				   "ACCEL_MASTER_PORT=6", "ACCEL_GRACE=2m",
				   "ACCEL_PYTHON=./p"),
			 0);
	ASSERT_VALUE(SET_NUM_PROCESSES, "5");
	ASSERT_VALUE(SET_CPU, "false");
	ASSERT_VALUE(SET_MIXED_PRECISION, "fp16");
	ASSERT_VALUE(SET_LOG_DIR, "m");
	ASSERT_VALUE(SET_MASTER_PORT, "6");
	ASSERT_VALUE(SET_GRACE, "120 s");
	ASSERT_VALUE(SET_PYTHON, "./p");
	assert_int_equal(flag(SET_CPU, "true"), 0);
	assert_int_equal(flag(SET_MIXED_PRECISION, "no"), 0);
	assert_int_equal(flag(SET_GRACE, "250ms"), 0);
	assert_int_equal(flag(SET_ENV, "B=x=y"), 0);
	assert_true(config_bool(c, SET_CPU));
	ASSERT_VALUE(SET_MIXED_PRECISION, "no");
	assert_int_equal(config_duration_ms(c, SET_GRACE), 250);
	ASSERT_VALUE(SET_ENV, "A=1 B=x=y");
	ASSERT_ORIGIN(SET_ENV, "flag --env");
}

static void the_last_of_a_repeated_flag_holds(void **state)
{
	(void)state;
	assert_int_equal(flag(SET_NUM_PROCESSES, "2"), 0);
	assert_int_equal(
		config_set_flag(c, SET_NUM_PROCESSES, "nproc-per-node", "3", &err), 0);
	assert_int_equal(config_int(c, SET_NUM_PROCESSES), 3);
	ASSERT_ORIGIN(SET_NUM_PROCESSES, "flag --nproc-per-node");
	assert_int_equal(config_set_flag(c, SET_NUM_PROCESSES, "-n", "4", &err), 0);
	ASSERT_ORIGIN(SET_NUM_PROCESSES, "flag -n");
}

static void variables_of_workers_are_merged_name_by_name(void **state)
{
	for (int flags_first = 0; flags_first < 2; flags_first++) {
		const struct strv *list;

		free_config(state);
		assert_int_equal(make_config(state), 0);
		if (!flags_first)
			assert_int_equal(yaml("env:\n  A: file\n  B: file\n"), 0);
		assert_int_equal(flag(SET_ENV, "B=flag"), 0);
		assert_int_equal(flag(SET_ENV, "C=one"), 0);
		assert_int_equal(flag(SET_ENV, "C=two"), 0);
		assert_int_equal(flag(SET_ENV, "AB="), 0);
		if (flags_first)
			assert_int_equal(yaml("env:\n  A: file\n  B: file\n"), 0);
		list = config_list(c, SET_ENV);
		assert_int_equal(list->n, 4);
		assert_string_equal(list->v[0], "A=file");
		assert_string_equal(list->v[1], "B=flag");
		assert_string_equal(list->v[2], "C=two");
		assert_string_equal(list->v[3], "AB=");
		assert_int_equal(config_entry_origin(c, SET_ENV, 0).kind, ORIGIN_FILE);
		assert_int_equal(config_entry_origin(c, SET_ENV, 0).line, 2);
		assert_int_equal(config_entry_origin(c, SET_ENV, 1).kind, ORIGIN_FLAG);
	}
}

static void an_empty_variable_is_as_good_as_none(void **state)
{
	(void)state;
	assert_int_equal(VARIABLES("ACCEL_NUM_PROCESSES=", "ACCEL_CPU=", "ACCEL_LOG_DIR=",
				   "ACCEL_GRACE=", "ACCEL_UNKNOWN=1"),
			 0);
	for (size_t i = 0; i < N_SETTINGS; i++)
		assert_false(config_is_set(c, schema[i].id));
}

static void a_bad_variable_is_named(void **state)
{
	(void)state;
	assert_int_equal(VARIABLES("ACCEL_NUM_PROCESSES=0"), -EINVAL);
	assert_string_equal(
		err.text,
		"ACCEL_NUM_PROCESSES: '0' is out of range; allowed: 1 to 65536");
	assert_int_equal(VARIABLES("ACCEL_CPU=2"), -EINVAL);
	assert_string_equal(err.text,
			    "ACCEL_CPU: '2' is neither yes nor no; allowed: true, false");
	assert_int_equal(VARIABLES("ACCEL_MIXED_PRECISION=fp8"), -EINVAL);
	assert_string_equal(err.text,
			    "ACCEL_MIXED_PRECISION: 'fp8' is unknown; allowed: no, "
			    "fp16, bf16");
	assert_int_equal(VARIABLES("ACCEL_GRACE=soon"), -EINVAL);
	assert_string_equal(err.text,
			    "ACCEL_GRACE: 'soon' is not a time; allowed: seconds, "
			    "or a number with ms, s, m or h; at most a year");
}

static void a_job_within_a_worker_takes_nothing_of_its_contract(void **state)
{
	(void)state;
	assert_int_equal(VARIABLES("ACCEL_JOB=j", "ACCEL_MIXED_PRECISION=bf16",
				   "ACCEL_MASTER_PORT=29500", "ACCEL_NUM_PROCESSES=2",
				   "RANK=3", "WORLD_SIZE=8", "MASTER_PORT=1"),
			 0);
	ASSERT_VALUE(SET_MIXED_PRECISION, "no");
	assert_int_equal(config_int(c, SET_MASTER_PORT), 0);
	assert_int_equal(config_int(c, SET_NUM_PROCESSES), 2);
	/* Not even to complain about it. */
	assert_int_equal(VARIABLES("ACCEL_JOB=j", "ACCEL_MIXED_PRECISION=strange"), 0);
	assert_int_equal(VARIABLES("ACCEL_MIXED_PRECISION=bf16"), 0);
	ASSERT_VALUE(SET_MIXED_PRECISION, "bf16");
}

static void a_bad_number_of_processes_says_what_is_allowed(void **state)
{
	static const struct {
		const char *value, *message;
	} cases[] = {
		{ "0", "'0' is out of range" },
		{ "-1", "'-1' is out of range" },
		{ "65537", "'65537' is out of range" },
		{ "99999999999999999999", "'99999999999999999999' is out of range" },
		{ "1e3", "'1e3' is not a whole number" },
		{ "4x", "'4x' is not a whole number" },
		{ "4.0", "'4.0' is not a whole number" },
		{ "0x10", "'0x10' is not a whole number" },
		{ "", "'' is not a whole number" },
		{ " 4", "' 4' is not a whole number" },
		{ "٤", "'٤' is not a whole number" },
		{ "\xff", "'?' is not a whole number" },
	};
	char message[160];

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		(void)snprintf(message, sizeof(message),
			       "--num-processes: %s; allowed: 1 to 65536",
			       cases[i].message);
		assert_int_equal(flag(SET_NUM_PROCESSES, cases[i].value), -EINVAL);
		assert_string_equal(err.text, message);
	}
	assert_false(config_is_set(c, SET_NUM_PROCESSES));
}

static void other_bad_flags_say_what_is_allowed(void **state)
{
	(void)state;
	assert_int_equal(flag(SET_MASTER_PORT, "65536"), -EINVAL);
	assert_string_equal(err.text,
			    "--master-port: '65536' is out of range; allowed: 0 to "
			    "65535 (0 means a free one)");
	assert_int_equal(flag(SET_LOG_DIR, ""), -EINVAL);
	assert_string_equal(err.text, "--log-dir: '' is empty; allowed: a path");
	assert_int_equal(flag(SET_GRACE, "9000h"), -EINVAL);
	assert_non_null(strstr(err.text, "'9000h' is too long"));
	assert_int_equal(flag(SET_ENV, "A"), -EINVAL);
	assert_string_equal(err.text, "--env: 'A' has no '='; allowed: NAME=VALUE");
	assert_int_equal(flag(SET_ENV, "=1"), -EINVAL);
	assert_int_equal(flag(SET_ENV, "1A=1"), -EINVAL);
	assert_int_equal(flag(SET_ENV, ".A=1"), -EINVAL);
	assert_int_equal(flag(SET_ENV, "A B=1"), -EINVAL);
	assert_int_equal(flag(SET_ENV, "Ä=1"), -EINVAL);
	assert_int_equal(config_list(c, SET_ENV)->n, 0);
	assert_int_equal(flag(SET_ENV, "_a.B9=\xff\n"), 0);
	assert_string_equal(config_list(c, SET_ENV)->v[0], "_a.B9=\xff\n");
}

static void what_accel_sets_for_workers_is_refused(void **state)
{
	static const char *const refused[] = {
		"RANK=1",
		"WORLD_SIZE=1",
		"LOCAL_RANK=1",
		"LOCAL_WORLD_SIZE=1",
		"GROUP_RANK=1",
		"GROUP_WORLD_SIZE=1",
		"ROLE_RANK=1",
		"ROLE_WORLD_SIZE=1",
		"ROLE_NAME=1",
		"MASTER_ADDR=1",
		"MASTER_PORT=1",
		"TORCHELASTIC_RESTART_COUNT=1",
		"TORCHELASTIC_MAX_RESTARTS=1",
		"TORCHELASTIC_RUN_ID=1",
		"TORCHELASTIC_USE_AGENT_STORE=1",
		"TORCHELASTIC_ERROR_FILE=1",
		"ACCELERATE_MIXED_PRECISION=1",
		"ACCELERATE_USE_CPU=1",
		"ACCEL_CPU=1",
		"ACCEL_=1",
	};
	static const char *const taken[] = {
		"OMP_NUM_THREADS=4",
		"GLOO_ENABLE_STORE_V2_API=0",
		"TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
		"RANKS=1",
		"ACCELERATE_DYNAMO_BACKEND=NO",
		"rank=1",
	};

	(void)state;
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		assert_int_equal(flag(SET_ENV, refused[i]), -EINVAL);
		assert_non_null(strstr(err.text, "accel sets it for each worker"));
	}
	for (size_t i = 0; i < sizeof(taken) / sizeof(taken[0]); i++)
		assert_int_equal(flag(SET_ENV, taken[i]), 0);
	assert_int_equal(config_list(c, SET_ENV)->n, sizeof(taken) / sizeof(taken[0]));
	assert_int_equal(flag(SET_ENV, "MASTER_PORT=1"), -EINVAL);
	assert_string_equal(err.text,
			    "--env: MASTER_PORT cannot be set: accel sets it for "
			    "each worker (from the setting master_port)");
}

static void a_variable_is_no_longer_than_a_program_can_get(void **state)
{
	OWN_MEM char *entry = malloc(131073);

	(void)state;
	memset(entry, 'x', 131072);
	memcpy(entry, "A=", 2);
	entry[131072] = 0;
	assert_int_equal(flag(SET_ENV, entry), -EINVAL);
	assert_string_equal(err.text,
			    "--env: A is too long; allowed: 131071 bytes with its "
			    "name");
	entry[131071] = 0;
	assert_int_equal(flag(SET_ENV, entry), 0);
}

/* --- YAML --- */

static void every_spelling_of_no_is_the_word(void **state)
{
	static const char *const no[] = { "no",  "No",     "NO",    "off",
					  "Off", "false",  "False", "n",
					  "N",   "~",      "null",  "Null",
					  "",    "\"no\"", "'NO'",  "!!str no" };
	char text[64];

	(void)state;
	for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++) {
		(void)snprintf(text, sizeof(text), "mixed_precision: %s\n", no[i]);
		assert_good(text);
		ASSERT_VALUE(SET_MIXED_PRECISION, "no");
		ASSERT_ORIGIN(SET_MIXED_PRECISION, "f.yaml:1");
	}
	assert_bad("mixed_precision: yes\n", "f.yaml:1:18: mixed_precision: 'yes' is "
					     "unknown; allowed: no, fp16, bf16");
	assert_bad("mixed_precision: \"off\"\n", "f.yaml:1:18: mixed_precision: 'off' is "
						 "unknown; allowed: no, fp16, bf16");
}

static void booleans_are_those_of_yaml(void **state)
{
	static const char *const yes[] = {
		"yes", "Yes", "YES", "true", "True", "TRUE",
		"on",  "On",  "y",   "Y",    "1",    "\"true\""
	};
	static const char *const no[] = { "no",  "No",  "NO", "false",
					  "off", "OFF", "n",  "0" };
	static const char *const neither[] = {
		"2", "maybe", "1.0", "\"\"", "\"y\"", "t"
	};
	char text[64];

	(void)state;
	for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++) {
		(void)snprintf(text, sizeof(text), "cpu: %s\n", yes[i]);
		assert_good(text);
		assert_true(config_bool(c, SET_CPU));
	}
	for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++) {
		(void)snprintf(text, sizeof(text), "cpu: %s\n", no[i]);
		assert_good(text);
		assert_false(config_bool(c, SET_CPU));
		assert_true(config_is_set(c, SET_CPU));
	}
	for (size_t i = 0; i < sizeof(neither) / sizeof(neither[0]); i++) {
		(void)snprintf(text, sizeof(text), "cpu: %s\n", neither[i]);
		assert_int_equal(yaml_alone(text), -EINVAL);
	}
}

static void whole_numbers_have_the_spellings_of_yaml(void **state)
{
	static const struct {
		const char *text;
		int value;
	} good[] = {
		{ "4", 4 },        { "+4", 4 },
		{ "0x10", 16 },    { "0X1f", 31 },
		{ "010", 8 },      { "0o10", 8 },
		{ "0b101", 5 },    { "1_000", 1000 },
		{ "0x1_0", 16 },   { "\"4\"", 4 },
		{ "!!int 4", 4 },  { "!!str 4", 4 },
		{ "&x 4", 4 },     { "65536 # c", 65536 },
		{ "00000007", 7 },
	};
	static const char *const bad[] = {
		"1e3",
		"4.0",
		"4.",
		"0x",
		"0b2",
		"0o8",
		"08",
		"_1",
		"1:30",
		"0_",
		"four",
		".inf",
		"0",
		"-1",
		"-0x4",
		"٤",
		"65537",
		"true",
		"\"0x10\"",
		"\"\"",
		"- 4",
		"[4]",
		"{a: 4}",
		"|\n  4 5",
		"99999999999999999999999999",
		"0xffffffffffffffffffffff",
		"4 5",
	};
	char text[96];

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
		(void)snprintf(text, sizeof(text), "num_processes: %s\n", good[i].text);
		assert_good(text);
		assert_int_equal(config_int(c, SET_NUM_PROCESSES), good[i].value);
	}
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		(void)snprintf(text, sizeof(text), "num_processes: %s\n", bad[i]);
		assert_int_equal(yaml_alone(text), -EINVAL);
		assert_int_equal(strncmp(err.text, "f.yaml:1:", 9), 0);
		assert_false(config_is_set(c, SET_NUM_PROCESSES));
	}
}

static void errors_have_line_column_key_and_what_is_allowed(void **state)
{
	(void)state;
	assert_bad(
		"# c\n\nnum_processes:   1e3\n",
		"f.yaml:3:18: num_processes: '1e3' is not a whole number; allowed: 1 to "
		"65536");
	assert_bad("num_processes: [1]\n",
		   "f.yaml:1:16: num_processes: a list; allowed: 1 to 65536");
	assert_bad("log_dir:\n  a: b\n",
		   "f.yaml:2:3: log_dir: a mapping; allowed: a path");
	assert_bad("env: [A]\n",
		   "f.yaml:1:6: env: a list; allowed: a mapping of NAME: VALUE");
	assert_bad("env: A=1\n",
		   "f.yaml:1:6: env: a value; allowed: a mapping of NAME: VALUE");
	assert_bad("env:\n  A: [1]\n", "f.yaml:2:6: env: A: a list; allowed: text");
	assert_bad("env:\n  A: ~\n",
		   "f.yaml:2:6: env: A: ~ is no text; allowed: \"\" for an "
		   "empty value, or \"~\" for the word");
	assert_bad("env:\n  B: 1\n  RANK: 1\n",
		   "f.yaml:3:3: env: RANK cannot be set: accel sets it for each worker");
	assert_bad("- a\n",
		   "f.yaml:1:1: a list; allowed: settings, one 'key: value' to a "
		   "line");
	assert_bad("hello\n",
		   "f.yaml:1:1: a value; allowed: settings, one 'key: value' to a "
		   "line");
	assert_bad("? [a]\n: b\n", "f.yaml:1:3: a list; allowed: a word as the key");
	assert_bad("cpu: !!python/object 1\n",
		   "f.yaml:1:6: cpu: the tag tag:yaml.org,2002:python/object is not "
		   "supported; write the value alone");
	assert_bad("python: \"a\\0b\"\n",
		   "f.yaml:1:9: python: a NUL character, which no value can hold");
}

static void keys_that_are_there_twice_are_refused(void **state)
{
	(void)state;
	assert_bad("cpu: true\n\ncpu: true\n",
		   "f.yaml:3:1: cpu: is there twice, first in line 1");
	assert_bad("num_processes: 1\nnum-processes: 1\n",
		   "f.yaml:2:1: num_processes: is there twice, first in line 1");
	assert_bad("env:\n  B: 1\n  A: 1\n  AB: 2\n  A: 3\n",
		   "f.yaml:5:3: env: A is there twice, first in line 3");
	assert_good("env:\n  A: 1\n  A.: 1\n  AA: 1\n");
}

static void broken_yaml_is_placed(void **state)
{
	(void)state;
	assert_bad("env:\n\tA: 1\n", "f.yaml:2:1: a tab; allowed: spaces to indent with");
	assert_bad("env:\n  A: 1\n \tB: 1\n",
		   "f.yaml:3:2: a tab; allowed: spaces to indent with");
	assert_bad("a: \"x\n",
		   "f.yaml:2:1: found unexpected end of stream while scanning a "
		   "quoted scalar");
	assert_bad("cpu: true\n}\n",
		   "f.yaml:2:1: did not find expected key while parsing a "
		   "block mapping");
	assert_bad("cpu: tr\xe9\n",
		   "f.yaml:1:8: incomplete UTF-8 octet sequence; allowed: "
		   "text in UTF-8");
	assert_bad("a: ü\ncpu: \xff\n",
		   "f.yaml:2:6: invalid leading UTF-8 octet; allowed: text in UTF-8");
	assert_bad("a: 1\n---\nb: 1\n",
		   "f.yaml:2:1: a second document; allowed: one in a "
		   "file");
	assert_int_equal(config_load_yaml(c, "f", "cpu: t\0rue\n", 11, &err), -EINVAL);
	assert_string_equal(err.text,
			    "f:1:7: control characters are not allowed; allowed: "
			    "text in UTF-8");
}

static void odd_but_right_files_are_read(void **state)
{
	static const char utf16[] = "\xff\xfe"
				    "c\0p\0u\0:\0 \0y\0e\0s\0\n";

	(void)state;
	assert_good("");
	assert_good("\n\n  \n");
	assert_good("# only\n# comments\n");
	assert_good("---\n");
	assert_good("---\n...\n");
	assert_good("{}\n");
	assert_good("~\n");
	assert_false(config_is_set(c, SET_CPU));
	assert_good("\xef\xbb\xbf"
		    "cpu: true\r\nnum_processes: 2\r\n");
	assert_true(config_bool(c, SET_CPU));
	assert_int_equal(config_int(c, SET_NUM_PROCESSES), 2);
	assert_good("%YAML 1.1\n---\ncpu:\ttrue\n...\n");
	assert_true(config_bool(c, SET_CPU));
	assert_good("{cpu: true, \"num_processes\": 3}");
	assert_int_equal(config_int(c, SET_NUM_PROCESSES), 3);
	assert_int_equal(config_load_yaml(c, "f", utf16, sizeof(utf16), &err), 0);
}

static void a_blank_value_is_as_good_as_none(void **state)
{
	(void)state;
	assert_good("num_processes:\nlog_dir: ~\nenv:\ngrace: null\ncpu: NULL\n");
	for (size_t i = 0; i < N_SETTINGS; i++)
		assert_false(config_is_set(c, schema[i].id));
}

static void values_of_workers_variables_are_the_text_as_written(void **state)
{
	const struct strv *list;

	(void)state;
	assert_good("env:\n  A: no\n  B: 010\n  C: 1e3\n  D: \"~\"\n  E:\n  F: ''\n"
		    "  no: x\n  G: |\n    two\n    lines\n  'H': \"\\xfc\"\n");
	list = config_list(c, SET_ENV);
	assert_int_equal(list->n, 9);
	assert_string_equal(list->v[0], "A=no");
	assert_string_equal(list->v[1], "B=010");
	assert_string_equal(list->v[2], "C=1e3");
	assert_string_equal(list->v[3], "D=~");
	assert_string_equal(list->v[4], "E=");
	assert_string_equal(list->v[5], "F=");
	assert_string_equal(list->v[6], "no=x");
	assert_string_equal(list->v[7], "G=two\nlines\n");
	assert_string_equal(list->v[8], "H=ü");
}

static void an_unknown_key_is_a_warning_with_the_nearest(void **state)
{
	const struct strv *w;

	(void)state;
	assert_good("num_procs: 4\nmain_process_port: 1\nfsdp_config: {a: [1, {b: *c}]}\n"
		    "cpu: true\n");
	w = config_warnings(c);
	assert_int_equal(w->n, 3);
	assert_string_equal(w->v[0], "f.yaml:1:1: unknown key 'num_procs' (did you mean "
				     "num_processes?) is ignored");
	assert_string_equal(w->v[1],
			    "f.yaml:2:1: unknown key 'main_process_port' (did you "
			    "mean master_port?) is ignored");
	assert_string_equal(w->v[2], "f.yaml:3:1: unknown key 'fsdp_config' is ignored");
	assert_true(config_bool(c, SET_CPU));
}

static void a_file_full_of_unknown_keys_warns_briefly(void **state)
{
	struct buf text = { 0 };
	const struct strv *w;

	(void)state;
	for (int i = 0; i < 500; i++)
		assert_int_equal(buf_addf(&text, "key_%d: 1\n", i), 0);
	assert_int_equal(buf_add(&text, "", 1), 0);
	assert_good((char *)buf_data(&text));
	w = config_warnings(c);
	assert_int_equal(w->n, 21);
	assert_string_equal(w->v[20], "f.yaml: 480 more unknown keys are ignored");
	buf_fini(&text);
}

static void aliases_are_refused_where_they_would_count(void **state)
{
	(void)state;
	assert_bad(
		"a: &x 4\nnum_processes: *x\n",
		"f.yaml:2:16: num_processes: an alias (*name), which is not supported; "
		"allowed: 1 to 65536");
	assert_int_equal(yaml_alone("a: &x {A: 1}\nenv: *x\n"), -EINVAL);
	assert_int_equal(yaml_alone("a: &x A\nenv: {*x : 1}\n"), -EINVAL);
	assert_good("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n");
}

/* "x: " and then @n times @piece. */
static int repeated(const char *piece, int n)
{
	struct buf text = { 0 };
	int r;

	assert_int_equal(buf_add_str(&text, "x: "), 0);
	for (int i = 0; i < n; i++)
		assert_int_equal(buf_add_str(&text, piece), 0);
	r = config_load_yaml(c, "f", (char *)buf_data(&text), buf_len(&text), &err);
	buf_fini(&text);
	return r;
}

static void deep_nesting_is_refused_at_once(void **state)
{
	static const char *const pieces[] = { "[", "{a: ", "- ", "? " };
	uint64_t start = now_ms();

	(void)state;
	for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++)
		assert_int_equal(repeated(pieces[i], 10000), -EINVAL);
	assert_int_equal(repeated("[", 101), -EINVAL);
	assert_string_equal(err.text, "f:1:104: nested more than 100 levels deep");
	assert_true(now_ms() - start < 1000);
}

static void a_value_of_a_megabyte_is_told_to_be_too_long(void **state)
{
	struct buf text = { 0 };

	(void)state;
	assert_int_equal(buf_add_str(&text, "log_dir: "), 0);
	for (int i = 0; i < 1 << 14; i++)
		assert_int_equal(buf_add_str(&text, "aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbb"
						    "ccccccccccccccccdddddddddddddddd"),
				 0);
	assert_int_equal(buf_add(&text, "", 1), 0);
	assert_int_equal(yaml_alone((char *)buf_data(&text)), -EINVAL);
	assert_non_null(strstr(err.text, "is longer than a path can be"));
	assert_true(strlen(err.text) < 200);
	memcpy(buf_data(&text), "mystery: ", 9);
	assert_good((char *)buf_data(&text));
	buf_fini(&text);
}

/* A generous multiple of the 10 ms that it takes optimised: sanitizers and a busy
 * machine have their share. What is quadratic takes minutes. */
static void ten_thousand_lines_take_no_time(void **state)
{
	struct buf text = { 0 };
	uint64_t start;

	(void)state;
	assert_int_equal(buf_add_str(&text, "env:\n"), 0);
	for (int i = 0; i < 10000; i++)
		assert_int_equal(buf_addf(&text, "  NAME_%d: value %d\n", i, i), 0);
	for (int i = 0; i < 10000; i++)
		assert_int_equal(buf_addf(&text, "key_%d: value %d\n", i, i), 0);
	start = now_ms();
	assert_int_equal(
		config_load_yaml(c, "f", (char *)buf_data(&text), buf_len(&text), &err),
		0);
	assert_true(now_ms() - start < 1000);
	assert_int_equal(config_list(c, SET_ENV)->n, 10000);
	buf_fini(&text);
}

static void nobody_need_read_the_error(void **state)
{
	(void)state;
	assert_int_equal(config_load_yaml(c, "f", "cpu: [", 6, NULL), -EINVAL);
	assert_int_equal(config_load_yaml(c, "f", "cpu: 7", 6, NULL), -EINVAL);
	assert_int_equal(config_set_flag(c, SET_ENV, NULL, "RANK=1", NULL), -EINVAL);
}

/* --- files --- */

static void put(const char *path, const char *text)
{
	assert_int_equal(path_write_file(path, slice_str(text), 0644, NULL), 0);
}

static void paths_in_a_file_are_relative_to_its_folder(void **state)
{
	(void)state;
	assert_int_equal(path_make_dirs("conf", NULL), 0);
	put("conf/a.yaml", "log_dir: logs\npython: bin/python\n");
	assert_int_equal(config_load_file(c, "conf/a.yaml", &err), 0);
	assert_string_equal(config_str(c, SET_LOG_DIR), "conf/logs");
	assert_string_equal(config_str(c, SET_PYTHON), "conf/bin/python");
	ASSERT_ORIGIN(SET_LOG_DIR, "conf/a.yaml:1");
	put("conf/a.yaml", "log_dir: /logs\npython: python3.11\n");
	assert_int_equal(config_load_file(c, "conf/a.yaml", &err), 0);
	assert_string_equal(config_str(c, SET_LOG_DIR), "/logs");
	assert_string_equal(config_str(c, SET_PYTHON), "python3.11");
	assert_return_code(setenv("HOME", "/home/me", 1), errno);
	put("conf/a.yaml", "log_dir: ~/logs\npython: ~/py\n");
	assert_int_equal(config_load_file(c, "conf/a.yaml", &err), 0);
	assert_string_equal(config_str(c, SET_LOG_DIR), "/home/me/logs");
	assert_string_equal(config_str(c, SET_PYTHON), "/home/me/py");
	/* A flag's path is what the shell gave. */
	assert_int_equal(flag(SET_LOG_DIR, "logs"), 0);
	assert_string_equal(config_str(c, SET_LOG_DIR), "logs");
}

static void a_file_that_cannot_be_read_is_named(void **state)
{
	struct buf big = { 0 };

	(void)state;
	assert_int_equal(config_load_file(c, "none.yaml", &err), -ENOENT);
	assert_string_equal(err.text, "none.yaml: No such file or directory");
	assert_int_equal(config_load_file(c, ".", &err), -EISDIR);
	assert_non_null(buf_reserve(&big, (16 << 20) + 1));
	memset(big.mem, '#', (16 << 20) + 1);
	buf_grow(&big, (16 << 20) + 1);
	assert_int_equal(path_write_file("big.yaml", buf_slice(&big), 0600, NULL), 0);
	buf_fini(&big);
	assert_int_equal(config_load_file(c, "big.yaml", &err), -EFBIG);
	assert_string_equal(err.text, "big.yaml: is larger than 16 MB");
}

static void assert_found(const char *cwd, const char *const *env, const char *folder,
			 const char *expected)
{
	OWN_MEM char *found = NULL;
	char path[256];

	if (!expected) {
		assert_int_equal(config_find_file(&found, cwd, (char *const *)env, &err),
				 0);
		return;
	}
	assert_int_equal(config_find_file(&found, cwd, (char *const *)env, &err), 1);
	(void)snprintf(path, sizeof(path), "%s/%s", folder, expected);
	assert_string_equal(found, path);
}

static void the_file_is_searched_up_to_the_repository(void **state)
{
	const char *none[] = { NULL }, *top = *state;
	char sub[128], repo[128];

	(void)snprintf(repo, sizeof(repo), "%s/repo", top);
	(void)snprintf(sub, sizeof(sub), "%s/repo/a/b", top);
	assert_int_equal(path_make_dirs(sub, NULL), 0);
	assert_found(sub, none, NULL, NULL);
	put("accel.yaml", "");
	put("repo/accel.yaml", "");
	/* Outside of a repository only the working folder itself counts. */
	assert_found(sub, none, NULL, NULL);
	assert_found(repo, none, top, "repo/accel.yaml");
	assert_int_equal(path_make_dirs("repo/.git", NULL), 0);
	assert_found(sub, none, top, "repo/accel.yaml");
	put("repo/a/accel.yaml", "");
	assert_found(sub, none, top, "repo/a/accel.yaml");
	assert_return_code(unlink("repo/a/accel.yaml"), errno);
	assert_return_code(unlink("repo/accel.yaml"), errno);
	/* The one above the repository is somebody else's. */
	assert_found(sub, none, NULL, NULL);
	assert_int_equal(path_make_dirs("repo/a/accel.yaml", NULL), 0);
	assert_found(sub, none, NULL, NULL);
	assert_found("/", none, NULL, NULL);
}

static void the_users_file_comes_last_and_a_named_one_first(void **state)
{
	const char *top = *state, *env[4] = { 0 };
	char home[128], config[128], named[128];

	(void)snprintf(home, sizeof(home), "HOME=%s", top);
	env[0] = home;
	assert_found(top, env, NULL, NULL);
	assert_int_equal(path_make_dirs(".config/accel", NULL), 0);
	assert_int_equal(path_make_dirs("xdg/accel", NULL), 0);
	put(".config/accel/config.yaml", "");
	put("xdg/accel/config.yaml", "");
	assert_found(top, env, top, ".config/accel/config.yaml");
	(void)snprintf(config, sizeof(config), "XDG_CONFIG_HOME=%s/xdg", top);
	env[1] = config;
	assert_found(top, env, top, "xdg/accel/config.yaml");
	env[1] = "XDG_CONFIG_HOME=xdg"; /* relative ones do not count */
	assert_found(top, env, top, ".config/accel/config.yaml");
	put("accel.yaml", "");
	assert_found(top, env, top, "accel.yaml");
	(void)snprintf(named, sizeof(named), "ACCEL_CONFIG=%s/xdg/accel/config.yaml",
		       top);
	env[2] = named;
	assert_found(top, env, top, "xdg/accel/config.yaml");
	env[2] = "ACCEL_CONFIG=";
	assert_found(top, env, top, "accel.yaml");
}

static void a_named_file_that_is_not_there_is_an_error(void **state)
{
	const char *env[] = { "ACCEL_CONFIG=none.yaml", NULL };
	char *found = NULL;

	(void)state;
	put("accel.yaml", "");
	assert_int_equal(config_find_file(&found, "/", (char *const *)env, &err),
			 -ENOENT);
	assert_string_equal(err.text, "ACCEL_CONFIG: none.yaml is not a file");
	env[0] = "ACCEL_CONFIG=.";
	assert_int_equal(config_find_file(&found, "/", (char *const *)env, &err),
			 -ENOENT);
	assert_null(found);
}

int main(void)
{
#define WITH_CONFIG(f) cmocka_unit_test_setup_teardown(f, make_config, free_config)
#define IN_FOLDER(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_row_is_whole),
		cmocka_unit_test(every_row_is_an_option),
		cmocka_unit_test(the_reference_page_has_every_setting),
		WITH_CONFIG(defaults_hold_when_nobody_says_anything),
		WITH_CONFIG(the_highest_layer_holds_in_whatever_order_they_come),
		WITH_CONFIG(every_setting_is_taken_from_every_layer),
		WITH_CONFIG(the_last_of_a_repeated_flag_holds),
		WITH_CONFIG(variables_of_workers_are_merged_name_by_name),
		WITH_CONFIG(an_empty_variable_is_as_good_as_none),
		WITH_CONFIG(a_bad_variable_is_named),
		WITH_CONFIG(a_job_within_a_worker_takes_nothing_of_its_contract),
		WITH_CONFIG(a_bad_number_of_processes_says_what_is_allowed),
		WITH_CONFIG(other_bad_flags_say_what_is_allowed),
		WITH_CONFIG(what_accel_sets_for_workers_is_refused),
		WITH_CONFIG(a_variable_is_no_longer_than_a_program_can_get),
		WITH_CONFIG(every_spelling_of_no_is_the_word),
		WITH_CONFIG(booleans_are_those_of_yaml),
		WITH_CONFIG(whole_numbers_have_the_spellings_of_yaml),
		WITH_CONFIG(errors_have_line_column_key_and_what_is_allowed),
		WITH_CONFIG(keys_that_are_there_twice_are_refused),
		WITH_CONFIG(broken_yaml_is_placed),
		WITH_CONFIG(odd_but_right_files_are_read),
		WITH_CONFIG(a_blank_value_is_as_good_as_none),
		WITH_CONFIG(values_of_workers_variables_are_the_text_as_written),
		WITH_CONFIG(an_unknown_key_is_a_warning_with_the_nearest),
		WITH_CONFIG(a_file_full_of_unknown_keys_warns_briefly),
		WITH_CONFIG(aliases_are_refused_where_they_would_count),
		WITH_CONFIG(deep_nesting_is_refused_at_once),
		WITH_CONFIG(a_value_of_a_megabyte_is_told_to_be_too_long),
		WITH_CONFIG(ten_thousand_lines_take_no_time),
		WITH_CONFIG(nobody_need_read_the_error),
		IN_FOLDER(paths_in_a_file_are_relative_to_its_folder),
		IN_FOLDER(a_file_that_cannot_be_read_is_named),
		IN_FOLDER(the_file_is_searched_up_to_the_repository),
		IN_FOLDER(the_users_file_comes_last_and_a_named_one_first),
		IN_FOLDER(a_named_file_that_is_not_there_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
