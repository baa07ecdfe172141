/*
 * accel config: shows which settings hold here, and why. It resolves them just as
 * accel launch does and starts nothing.
 */

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/near.h"
#include "base/opt.h"
#include "base/own.h"
#include "cmd/cmd.h"
#include "cmd/settings.h"
#include "config/config.h"

enum {
	GAP = 2,
	INDENT = 4,
	VALUE_MAX = 40, /* longer values do not push the origins to the right */
};

enum {
	OPT_ORIGIN = OPT_OF_COMMAND,
	OPT_JSON,
};

static const struct opt own_options[] = {
	{ .name = "origin",
	  .group = "Show",
	  .help = "Say where each value is from",
	  .id = OPT_ORIGIN },
	{ .name = "json",
	  .group = "Show",
	  .help = "Print an object {KEY: {value, origin}}",
	  .id = OPT_JSON },
};

enum {
	N_OWN = sizeof(own_options) / sizeof(own_options[0]),
	N_OPTIONS = OPT_OF_COMMAND + N_OWN,
};

static const char usage[] =
	"Usage: accel config show [--origin] [--json] [--config FILE] [OPTION...]\n"
	"\n"
	"Print the settings that accel launch would use here with the same options:\n"
	"flag > ACCEL_* variable > file > detected > default.\n"
	"\n";

static const char try_help[] = "'accel config --help' lists what there is.";

struct request {
	struct settings settings;
	bool origin, json;
};

/* A line of what is shown: a setting, or one entry of a MAP. */
struct row {
	char *key, *value, *origin;
};

DEFINE_OWN(json, json_t, json_decref)

/* --- text --- */

/* What @b holds as a string of its own; empties @b. */
static char *take_text(struct buf *b)
{
	char *text = buf_add(b, "", 1) < 0 ? NULL : strdup((const char *)buf_data(b));

	buf_fini(b);
	return text;
}

static void row_fini(struct row *row)
{
	free(row->key);
	free(row->value);
	free(row->origin);
}

static char *clean(const char *text)
{
	size_t size = strlen(text) + 1;
	char *out = malloc(size);

	if (out)
		(void)printable(out, size, text);
	return out;
}

static int setting_row(struct row *ret, const struct config *c, enum setting id)
{
	struct buf value = { 0 }, origin = { 0 };
	int r = config_print_value(&value, c, id);

	if (r == 0)
		r = config_print_origin(&origin, c, id);
	ret->key = strdup(schema[id].key);
	ret->value = take_text(&value);
	ret->origin = take_text(&origin);
	return r == 0 && ret->key && ret->value && ret->origin ? 0 : -ENOMEM;
}

/* "env.NAME", its value, its own origin. */
static int entry_row(struct row *ret, const struct config *c, enum setting id, size_t i)
{
	struct origin from = config_entry_origin(c, id, i);
	const char *entry = config_list(c, id)->v[i];
	size_t len = strcspn(entry, "=");
	struct buf key = { 0 }, origin = { 0 };
	int r = buf_addf(&key, "%s.%.*s", schema[id].key, (int)len, entry);

	if (r == 0)
		r = origin_print(&origin, &from);
	ret->key = take_text(&key);
	ret->value = clean(entry + len + 1);
	ret->origin = take_text(&origin);
	return r == 0 && ret->key && ret->value && ret->origin ? 0 : -ENOMEM;
}

/* Characters, which is what a column holds; bytes that continue one are none. */
static int columns(const char *text)
{
	int n = 0;

	for (; *text; text++)
		n += (*text & 0xc0) != 0x80;
	return n;
}

static int max_int(int a, int b)
{
	return a > b ? a : b;
}

static void pad(struct buf *out, int n)
{
	(void)buf_addf(out, "%*s", n > 0 ? n : 0, "");
}

/* Columns as wide as their contents. Where a line would not fit, each origin
 * gets a line of its own. */
static void print_rows(struct buf *out, const struct row *rows, size_t n, bool origins,
		       int width)
{
	int keys = 0, values = 0, widest = 0;
	bool stacked;

	for (size_t i = 0; i < n; i++) {
		int value = columns(rows[i].value);

		keys = max_int(keys, columns(rows[i].key));
		values = max_int(values, value <= VALUE_MAX ? value : 0);
		widest = max_int(widest, columns(rows[i].origin));
	}
	stacked = keys + values + widest + 2 * GAP > width;
	for (size_t i = 0; i < n; i++) {
		(void)buf_add_str(out, rows[i].key);
		pad(out, keys - columns(rows[i].key) + GAP);
		(void)buf_add_str(out, rows[i].value);
		if (origins && stacked)
			(void)buf_addf(out, "\n%*s", INDENT, "");
		else if (origins)
			pad(out, max_int(values - columns(rows[i].value), 0) + GAP);
		if (origins)
			(void)buf_add_str(out, rows[i].origin);
		(void)buf_add_str(out, "\n");
	}
}

static size_t count_rows(const struct config *c)
{
	size_t n = 0;

	for (size_t i = 0; i < N_SETTINGS; i++)
		n += max_int((int)config_list(c, schema[i].id)->n, 1);
	return n;
}

static int show_text(struct buf *out, const struct request *req)
{
	const struct config *c = req->settings.config;
	size_t n = count_rows(c), used = 0;
	OWN_MEM struct row *rows = calloc(n, sizeof(*rows));
	int r = rows ? 0 : -ENOMEM;

	for (size_t i = 0; i < N_SETTINGS && r == 0; i++) {
		size_t entries = config_list(c, schema[i].id)->n;

		for (size_t k = 0; k < entries && r == 0; k++)
			r = entry_row(&rows[used++], c, schema[i].id, k);
		if (!entries)
			r = setting_row(&rows[used++], c, schema[i].id);
	}
	/* Into a file or a pipe go whole lines, whatever their length. */
	if (r == 0)
		print_rows(out, rows, n, req->origin,
			   isatty(STDOUT_FILENO) ? terminal_width() : INT_MAX);
	while (used)
		row_fini(&rows[--used]);
	return r;
}

/* --- JSON --- */

/* Text from outside need not be UTF-8, and JSON can hold nothing else. */
static json_t *json_text(const char *text)
{
	OWN_MEM char *cleaned = NULL;
	json_t *j;

	if (!text)
		return json_null();
	j = json_string(text);
	if (j)
		return j;
	cleaned = clean(text);
	return cleaned ? json_string(cleaned) : NULL;
}

static json_t *json_origin(struct origin o)
{
	return json_pack("{s:s, s:o, s:o}", "kind", origin_kind_name(o.kind), "name",
			 json_text(o.name), "line",
			 o.line ? json_integer(o.line) : json_null());
}

/* {NAME: VALUE}; or {NAME: origin}, when @origins. */
static json_t *json_entries(const struct config *c, enum setting id, bool origins)
{
	const struct strv *list = config_list(c, id);
	json_t *all = json_object();

	for (size_t i = 0; i < list->n; i++) {
		size_t len = strcspn(list->v[i], "=");
		OWN_MEM char *name = strndup(list->v[i], len);

		if (name)
			(void)json_object_set_new(
				all, name,
				origins ? json_origin(config_entry_origin(c, id, i))
					: json_text(list->v[i] + len + 1));
	}
	return all;
}

/* Times are in seconds. */
static json_t *json_value(const struct config *c, enum setting id)
{
	uint64_t ms;

	switch (schema[id].type) {
	case TYPE_INT:
		return schema[id].def || config_is_set(c, id)
			       ? json_integer(config_int(c, id))
			       : json_null();
	case TYPE_BOOL:
		return json_boolean(config_bool(c, id));
	case TYPE_DURATION:
		ms = config_duration_ms(c, id);
		return ms % 1000 ? json_real((double)ms / 1000)
				 : json_integer((json_int_t)(ms / 1000));
	case TYPE_MAP:
		return json_entries(c, id, false);
	default:
		return json_text(config_str(c, id));
	}
}

static int show_json(struct buf *out, const struct request *req)
{
	OWN(own_json) json_t *all = json_object();
	OWN_MEM char *text = NULL;

	for (size_t i = 0; i < N_SETTINGS; i++) {
		enum setting id = schema[i].id;
		json_t *one = json_pack(
			"{s:o, s:o}", "value", json_value(req->settings.config, id),
			"origin", json_origin(config_origin(req->settings.config, id)));

		/* Each of the entries may be from somewhere else. */
		if (schema[i].type == TYPE_MAP)
			(void)json_object_set_new(
				one, "origins",
				json_entries(req->settings.config, id, true));
		(void)json_object_set_new(all, schema[i].key, one);
	}
	text = json_dumps(all, JSON_INDENT(2));
	return text ? buf_addf(out, "%s\n", text) : -ENOMEM;
}

/* --- the command --- */

static size_t all_options(struct opt *out)
{
	memcpy(out, own_options, sizeof(own_options));
	return N_OWN + settings_options(out + N_OWN, OPT_OF_COMMAND);
}

static int on_option(void *data, const struct opt *o, const char *value, struct err *err)
{
	struct request *req = data;
	bool on = !strcmp(value, "true");

	if (o->id == OPT_ORIGIN)
		req->origin = on;
	else if (o->id == OPT_JSON)
		req->json = on;
	else
		return settings_option(&req->settings, o, value, err);
	return 0;
}

static int print_usage(void)
{
	struct opt options[N_OPTIONS];
	struct buf out = { 0 };
	size_t n = all_options(options);

	(void)buf_add_str(&out, usage);
	(void)opt_help(&out, options, n, terminal_width());
	return print_out(&out);
}

static int wrong_use(const char *text)
{
	struct err err = { 0 };

	(void)err_set(&err, -EINVAL, "config: %s", text);
	say_error(err.text, try_help);
	return EXIT_USAGE;
}

static int parse(struct request *req, int argc, char **argv)
{
	struct opt options[N_OPTIONS];
	struct err err = { 0 };
	char shown[64];
	int r = opt_parse(options, all_options(options), argc, argv, on_option, req,
			  &err);

	if (r >= 0 && r < argc)
		r = err_set(&err, -EINVAL, "'%s' is not an option",
			    printable(shown, sizeof(shown), argv[r]));
	return r < 0 ? wrong_use(err.text) : 0;
}

static int show_settings(struct request *req)
{
	struct buf out = { 0 };
	int r = settings_finish(&req->settings);

	if (r)
		return r;
	r = req->json ? show_json(&out, req) : show_text(&out, req);
	if (r == 0)
		return print_out(&out);
	buf_fini(&out);
	say_error("config: out of memory", NULL);
	return EXIT_BUG;
}

static int show(int argc, char **argv)
{
	struct request req = { 0 };
	struct err err = { 0 };
	int r;

	if (settings_init(&req.settings, &err) < 0) {
		say_error(err.text, NULL);
		return EXIT_BUG;
	}
	r = parse(&req, argc, argv);
	if (r == 0)
		r = req.settings.help ? print_usage() : show_settings(&req);
	settings_fini(&req.settings);
	return r;
}

int cmd_config(int argc, char **argv)
{
	static const char *const words[] = { "show", "help" };
	const char *word = argc > 1 ? argv[1] : "help", *near;
	char shown[64], text[160];

	if (!strcmp(word, "help") || !strcmp(word, "--help") || !strcmp(word, "-h"))
		return print_usage();
	if (!strcmp(word, "show"))
		return show(argc - 1, argv + 1);
	near = near_match(word, words, sizeof(words) / sizeof(words[0]));
	(void)snprintf(text, sizeof(text), "unknown %s %s%s%s%s",
		       *word == '-' ? "option" : "command",
		       printable(shown, sizeof(shown), word),
		       near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
	return wrong_use(text);
}
