/* Option tables, help, and the syntaxes of values. */

#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/opt.h"

static const struct opt table[] = {
	{ .name = "num-processes",
	  .short_name = 'n',
	  .arg = "N",
	  .aliases = "nproc-per-node|np",
	  .group = "Job",
	  .help = "Worker processes",
	  .def = "1",
	  .id = 1 },
	{ .name = "cpu", .group = "Job", .help = "No accelerator", .id = 2 },
	{ .name = "log-dir",
	  .arg = "DIR",
	  .group = "Logs",
	  .help = "Where the job keeps its files, which is a long thing to say in few "
		  "words",
	  .id = 3 },
	{ .name = "verbose",
	  .short_name = 'v',
	  .group = "Job",
	  .help = "Say more",
	  .id = 4 },
};

enum { N = sizeof(table) / sizeof(table[0]) };

static char met[512];

static int on_opt(void *data, const struct opt *o, const char *value, struct err *err)
{
	char one[128];

	assert_ptr_equal(data, met);
	if (!strcmp(value, "refuse"))
		return err_set(err, -ERANGE, "refused");
	(void)snprintf(one, sizeof(one), "%d=%s ", o->id, value);
	strcat(met, one);
	return 0;
}

static int parse(struct err *err, const char *const *words)
{
	char *argv[16] = { (char *)"launch" };
	int argc = 1;

	for (; words[argc - 1]; argc++)
		argv[argc] = (char *)words[argc - 1];
	met[0] = 0;
	return opt_parse(table, N, argc, argv, on_opt, met, err);
}

#define PARSE(err, ...) parse(err, (const char *const[]){ __VA_ARGS__, NULL })

static void every_way_to_write_an_option_is_understood(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--num-processes", "2", "--num-processes=3", "-n",
			       "4", "-n5", "--cpu", "-v", "prog"),
			 8 + 1);
	assert_string_equal(met, "1=2 1=3 1=4 1=5 2=true 4=true ");
	assert_int_equal(PARSE(&err, "--num_processes=2", "--nproc-per-node", "3",
			       "--nproc_per_node=4", "--np=5", "--log_dir", ""),
			 8);
	assert_string_equal(met, "1=2 1=3 1=4 1=5 3= ");
	assert_int_equal(PARSE(&err, "-vvn7"), 2);
	assert_string_equal(met, "4=true 4=true 1=7 ");
	assert_int_equal(err.code, 0);
}

static void parsing_stops_at_the_program(void **state)
{
	(void)state;
	assert_int_equal(PARSE(NULL, "--cpu", "train.py", "--cpu", "-n"), 2);
	assert_string_equal(met, "2=true ");
	assert_int_equal(PARSE(NULL, "--cpu", "--", "--cpu"), 3);
	assert_string_equal(met, "2=true ");
	assert_int_equal(PARSE(NULL, "-"), 1);
	assert_int_equal(PARSE(NULL, ""), 1);
}

static void a_value_may_begin_with_a_dash(void **state)
{
	(void)state;
	assert_int_equal(PARSE(NULL, "-n", "-1", "--log-dir", "--cpu"), 5);
	assert_string_equal(met, "1=-1 3=--cpu ");
}

static void a_flag_takes_a_boolean_after_an_equals_sign(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--cpu=False", "--cpu=on", "--cpu=0"), 4);
	assert_string_equal(met, "2=false 2=true 2=false ");
	assert_int_equal(PARSE(&err, "--cpu=maybe"), -EINVAL);
	assert_string_equal(err.text,
			    "--cpu: 'maybe' is not allowed; allowed: true, false");
	assert_int_equal(PARSE(&err, "--cpu="), -EINVAL);
	assert_int_equal(PARSE(&err, "--cpu", "false"), 2);
}

static void an_unknown_option_is_named_with_its_nearest(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--num-proceses=2"), -EINVAL);
	assert_string_equal(
		err.text,
		"unknown option --num-proceses (did you mean --num-processes?)");
	assert_int_equal(PARSE(&err, "--nproc-per-nod", "2"), -EINVAL);
	assert_string_equal(
		err.text,
		"unknown option --nproc-per-nod (did you mean --nproc-per-node?)");
	assert_int_equal(PARSE(&err, "--zzz"), -EINVAL);
	assert_string_equal(err.text, "unknown option --zzz");
	assert_int_equal(PARSE(&err, "-x"), -EINVAL);
	assert_string_equal(err.text, "unknown option -x");
	assert_int_equal(PARSE(&err, "-vx"), -EINVAL);
	assert_string_equal(err.text, "unknown option -x in -vx");
}

static void a_beginning_of_a_name_is_not_taken_for_it(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--num", "2"), -EINVAL);
	assert_int_equal(PARSE(&err, "--cp"), -EINVAL);
	assert_int_equal(PARSE(&err, "--cpus"), -EINVAL);
	assert_int_equal(PARSE(&err, "--n=2"), -EINVAL);
	assert_string_equal(met, "");
}

static void an_unknown_option_cannot_write_to_the_terminal(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--\033[31m\xff"), -EINVAL);
	assert_string_equal(err.text, "unknown option --?[31m?");
}

static void a_missing_value_is_said(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--log-dir"), -EINVAL);
	assert_string_equal(err.text, "--log-dir needs a value: --log-dir DIR");
	assert_int_equal(PARSE(&err, "-vn"), -EINVAL);
	assert_string_equal(err.text, "-n needs a value: -n N");
}

static void what_the_callback_refuses_ends_the_parsing(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(PARSE(&err, "--log-dir=refuse", "--cpu"), -ERANGE);
	assert_string_equal(err.text, "refused");
	assert_int_equal(PARSE(&err, "-nrefuse", "--cpu"), -ERANGE);
	assert_string_equal(met, "");
}

static void check_help(int width, const char *expected)
{
	struct buf out = { 0 };

	assert_int_equal(opt_help(&out, table, N, width), 0);
	assert_int_equal(buf_add(&out, "", 1), 0);
	assert_string_equal((char *)buf_data(&out), expected);
	buf_fini(&out);
}

static void help_is_grouped_and_aligned(void **state)
{
	(void)state;
	check_help(80, "Job:\n"
		       "  -n, --num-processes N  Worker processes (default: 1)\n"
		       "      --cpu              No accelerator\n"
		       "  -v, --verbose          Say more\n"
		       "\n"
		       "Logs:\n"
		       "      --log-dir DIR      Where the job keeps its files, which is "
		       "a long thing to\n"
		       "                         say in few words\n");
}

static void help_fits_a_narrow_terminal(void **state)
{
	(void)state;
	check_help(40, "Job:\n"
		       "  -n, --num-processes N\n"
		       "        Worker processes (default: 1)\n"
		       "      --cpu\n"
		       "        No accelerator\n"
		       "  -v, --verbose\n"
		       "        Say more\n"
		       "\n"
		       "Logs:\n"
		       "      --log-dir DIR\n"
		       "        Where the job keeps its files,\n"
		       "        which is a long thing to say in\n"
		       "        few words\n");
}

static void only_known_words_are_booleans(void **state)
{
	static const char *const yes[] = { "true", "True", "YES", "on", "1" };
	static const char *const no[] = { "false", "FALSE", "No", "off", "0" };
	static const char *const neither[] = {
		"", "2", "y", "true ", "tru", "null", "-1"
	};
	bool b;

	(void)state;
	for (size_t i = 0; i < 5; i++) {
		b = false;
		assert_int_equal(parse_bool(&b, yes[i]), 0);
		assert_true(b);
		assert_int_equal(parse_bool(&b, no[i]), 0);
		assert_false(b);
	}
	for (size_t i = 0; i < sizeof(neither) / sizeof(neither[0]); i++)
		assert_int_equal(parse_bool(&b, neither[i]), -EINVAL);
}

static void whole_numbers_are_strict(void **state)
{
	static const char *const bad[] = { "",    "-",   "+1", " 1", "1 ",
					   "1e3", "0x1", "1.", "4x", "1_0",
					   "--1", "\n1", "٣",  "Ⅳ",  "1\n1" };
	long long n = 77;

	(void)state;
	assert_int_equal(parse_int(&n, "65536", 1, 65536), 0);
	assert_int_equal(n, 65536);
	assert_int_equal(parse_int(&n, "-5", -10, 10), 0);
	assert_int_equal(n, -5);
	assert_int_equal(parse_int(&n, "007", 1, 10), 0);
	assert_int_equal(n, 7);
	assert_int_equal(parse_int(&n, "0", 1, 10), -ERANGE);
	assert_int_equal(parse_int(&n, "11", 1, 10), -ERANGE);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_int_equal(parse_int(&n, bad[i], LLONG_MIN, LLONG_MAX), -EINVAL);
	assert_int_equal(n, 7);
}

static void the_largest_and_smallest_numbers_are_read(void **state)
{
	long long n;

	(void)state;
	assert_int_equal(parse_int(&n, "9223372036854775807", LLONG_MIN, LLONG_MAX), 0);
	assert_true(n == LLONG_MAX);
	assert_int_equal(parse_int(&n, "-9223372036854775808", LLONG_MIN, LLONG_MAX), 0);
	assert_true(n == LLONG_MIN);
	assert_int_equal(parse_int(&n, "9223372036854775808", LLONG_MIN, LLONG_MAX),
			 -ERANGE);
	assert_int_equal(parse_int(&n, "-9223372036854775809", LLONG_MIN, LLONG_MAX),
			 -ERANGE);
	assert_int_equal(parse_int(&n, "99999999999999999999999", LLONG_MIN, LLONG_MAX),
			 -ERANGE);
	assert_int_equal(parse_int(&n, "99999999999999999999999x", LLONG_MIN, LLONG_MAX),
			 -EINVAL);
}

static void times_have_units(void **state)
{
	static const struct {
		const char *text;
		unsigned long long ms;
	} good[] = {
		{ "15", 15000 },
		{ "0", 0 },
		{ "0.5", 500 },
		{ "1.5s", 1500 },
		{ "250ms", 250 },
		{ "2m", 120000 },
		{ "1h", 3600000 },
		{ "15 s", 15000 },
		{ "0.0001", 1 },
		{ "1.0000001", 1001 },
		{ "0.5m", 30000 },
		{ "365 h", 1314000000ULL },
		{ "8760h", 31536000000ULL },
		{ "007", 7000 },
	};
	static const char *const bad[] = { "",     "s",   "-1",   "+1",  "1e3",
					   ".5",   "5.",  "1  s", "1 ",  "1S",
					   "1d",   "inf", "nan",  "0x1", "1.5.",
					   "1:30", " 1",  "1\n",  "٣" };
	static const char *const far[] = { "8761h", "31536001", "99999999999999999999999",
					   "99999999999999999999999h", "31536000.1" };
	unsigned long long ms;

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
		assert_int_equal(parse_duration_ms(&ms, good[i].text), 0);
		assert_int_equal(ms, good[i].ms);
	}
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_int_equal(parse_duration_ms(&ms, bad[i]), -EINVAL);
	for (size_t i = 0; i < sizeof(far) / sizeof(far[0]); i++)
		assert_int_equal(parse_duration_ms(&ms, far[i]), -ERANGE);
}

static void shown_text_is_harmless_and_fits(void **state)
{
	char out[12];

	(void)state;
	assert_string_equal(printable(out, sizeof(out), "plain ü"), "plain ü");
	assert_string_equal(printable(out, sizeof(out), "a\n\x1b\x7f"), "a???");
	assert_string_equal(printable(out, sizeof(out), "\xc3\xc2\x85x"), "???x");
	assert_string_equal(printable(out, sizeof(out), "12345678901"), "12345678901");
	assert_string_equal(printable(out, sizeof(out), "123456789012"), "12345678...");
	assert_string_equal(printable(out, sizeof(out), "1234567ü9012"), "1234567...");
	assert_string_equal(printable(out, sizeof(out), "\xf0\x9f\x98"), "???");
	assert_string_equal(printable(out, sizeof(out), "\xed\xa0\x80"), "???");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_way_to_write_an_option_is_understood),
		cmocka_unit_test(parsing_stops_at_the_program),
		cmocka_unit_test(a_value_may_begin_with_a_dash),
		cmocka_unit_test(a_flag_takes_a_boolean_after_an_equals_sign),
		cmocka_unit_test(an_unknown_option_is_named_with_its_nearest),
		cmocka_unit_test(a_beginning_of_a_name_is_not_taken_for_it),
		cmocka_unit_test(an_unknown_option_cannot_write_to_the_terminal),
		cmocka_unit_test(a_missing_value_is_said),
		cmocka_unit_test(what_the_callback_refuses_ends_the_parsing),
		cmocka_unit_test(help_is_grouped_and_aligned),
		cmocka_unit_test(help_fits_a_narrow_terminal),
		cmocka_unit_test(only_known_words_are_booleans),
		cmocka_unit_test(whole_numbers_are_strict),
		cmocka_unit_test(the_largest_and_smallest_numbers_are_read),
		cmocka_unit_test(times_have_units),
		cmocka_unit_test(shown_text_is_harmless_and_fits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
