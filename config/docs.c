/*
 * The reference page of the settings, from their table.
 */

#include <stdbool.h>
#include <string.h>

#include "base/buf.h"
#include "config/schema.h"

static const char intro[] =
	"# Settings\n"
	"\n"
	"This page is made from the table in `config/schema.c`.\n"
	"\n"
	"A setting is looked up in this order, and the first place that has it counts:\n"
	"the option on the command line, the environment variable, the configuration\n"
	"file, what was detected on the machine, the default.\n"
	"`accel config show --origin` prints what holds here, and why.\n"
	"\n"
	"The file is what `--config FILE` or `ACCEL_CONFIG` names; else `accel.yaml` in\n"
	"the working folder or above it, up to the root of the repository; else\n"
	"`accel/config.yaml` in `$XDG_CONFIG_HOME` (`~/.config`). It is YAML, one\n"
	"`key: value` to a line. Paths in it are relative to its folder. A variable "
	"that\n"
	"is empty counts as not set. In an option's name `-` and `_` are the same.\n";

/* "|" would end a cell. */
static int add_cell(struct buf *out, const char *text)
{
	int r = 0;

	for (; *text && r == 0; text++)
		r = *text == '|' ? buf_add_str(out, "\\|") : buf_add(out, text, 1);
	return r;
}

static int add_field(struct buf *out, const char *what, const char *text)
{
	int r = buf_addf(out, "| %s | ", what);

	if (r == 0)
		r = add_cell(out, text);
	return r < 0 ? r : buf_add_str(out, " |\n");
}

/* "`-n N`, `--num-processes N`, `--nproc-per-node N`" */
static int add_flags(struct buf *out, const struct setting_row *row)
{
	const char *arg = row->type == TYPE_BOOL ? NULL : row->arg;
	const char *a = row->aliases;
	int r = 0;

	if (row->short_flag)
		r = buf_addf(out, "`-%c%s%s`, ", row->short_flag, arg ? " " : "",
			     arg ? arg : "");
	if (r == 0)
		r = buf_addf(out, "`--%s%s%s`", row->flag, arg ? " " : "",
			     arg ? arg : "");
	while (a && *a && r == 0) {
		size_t len = strcspn(a, "|");

		r = buf_addf(out, ", `--%.*s%s%s`", (int)len, a, arg ? " " : "",
			     arg ? arg : "");
		a += len + (a[len] != 0);
	}
	return r;
}

static int add_option_field(struct buf *out, const struct setting_row *row)
{
	struct buf flags = { 0 };
	int r = add_flags(&flags, row);

	if (r == 0)
		r = buf_add(&flags, "", 1);
	if (r == 0)
		r = add_field(out, "Option", (const char *)buf_data(&flags));
	buf_fini(&flags);
	return r;
}

static int add_allowed_field(struct buf *out, const struct setting_row *row)
{
	struct buf allowed = { 0 };
	int r = schema_print_allowed(&allowed, row);

	if (r == 0 && row->note)
		r = buf_addf(&allowed, " (%s)", row->note);
	if (r == 0)
		r = buf_add(&allowed, "", 1);
	if (r == 0)
		r = add_field(out, "Allowed", (const char *)buf_data(&allowed));
	buf_fini(&allowed);
	return r;
}

static int add_setting(struct buf *out, const struct setting_row *row)
{
	const char *def = row->def_text ? row->def_text : row->def;
	int r = buf_addf(out, "\n### `%s`\n\n%s.\n\n| | |\n|---|---|\n", row->key,
			 row->help);

	if (r == 0)
		r = add_option_field(out, row);
	if (r == 0 && row->variable)
		r = add_field(out, "Variable", row->variable);
	if (r == 0)
		r = add_allowed_field(out, row);
	if (r == 0)
		r = add_field(out, "Default",
			      def                     ? def
			      : row->type == TYPE_MAP ? "none"
						      : "not set");
	return r;
}

static bool group_began_before(size_t i)
{
	for (size_t k = 0; k < i; k++)
		if (!strcmp(schema[k].group, schema[i].group))
			return true;
	return false;
}

int schema_print_markdown(struct buf *out)
{
	int r = buf_add_str(out, intro);

	for (size_t i = 0; i < N_SETTINGS && r == 0; i++) {
		if (group_began_before(i))
			continue;
		r = buf_addf(out, "\n## %s\n", schema[i].group);
		for (size_t k = i; k < N_SETTINGS && r == 0; k++)
			if (!strcmp(schema[k].group, schema[i].group))
				r = add_setting(out, &schema[k]);
	}
	return r;
}
