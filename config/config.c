/*
 * Settings in layers: what each layer says, which of them holds, and where it is
 * from. Reading YAML is in yaml.c, checking values in value.c.
 */

#include "config/config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "base/path.h"
#include "base/strv.h"
#include "config/layers.h"
#include "config/spell.h"

enum { FILE_MAX = 16 << 20 };

static const char *const kind_names[N_ORIGINS] = {
	[ORIGIN_DEFAULT] = "default", [ORIGIN_DETECTED] = "detected",
	[ORIGIN_FILE] = "file",       [ORIGIN_VARIABLE] = "variable",
	[ORIGIN_FLAG] = "flag",
};

DEFINE_OWN(config, struct config, config_free)

/* --- maps --- */

void map_fini(struct map *m)
{
	strv_fini(&m->list);
	free(m->origins);
	*m = (struct map){ 0 };
}

int map_add(struct map *m, const char *entry, struct origin origin)
{
	if (m->list.n == m->cap) {
		size_t cap = m->cap ? 2 * m->cap : 16;
		struct origin *more = reallocarray(m->origins, cap, sizeof(*more));

		if (!more)
			return -ENOMEM;
		m->origins = more;
		m->cap = cap;
	}
	m->origins[m->list.n] = origin;
	return strv_add(&m->list, entry);
}

/* The entry of the same name as @entry, or m->list.n. */
static size_t map_find(const struct map *m, const char *entry)
{
	size_t len = strcspn(entry, "=") + 1, i;

	for (i = 0; i < m->list.n; i++)
		if (!strncmp(m->list.v[i], entry, len))
			break;
	return i;
}

/* Add @entry, or put it in the place of a lower or the same layer's; a higher one's
 * stays, so that the layers may come in any order. */
static int map_set(struct map *m, const char *entry, struct origin origin)
{
	size_t i = map_find(m, entry);
	char *copy;

	if (i == m->list.n)
		return map_add(m, entry, origin);
	if (m->origins[i].kind > origin.kind)
		return 0;
	copy = strdup(entry);
	if (!copy)
		return -ENOMEM;
	free(m->list.v[i]);
	m->list.v[i] = copy;
	m->origins[i] = origin;
	return 0;
}

int config_put_entries(struct config *c, enum setting id, struct map *entries)
{
	struct map *old = &c->maps[id];
	int r = 0;

	/* What was there is little (flags), what comes may be much (a file): so the
	 * one is put into the other, which is not quadratic. */
	for (size_t i = 0; i < old->list.n && r == 0; i++)
		if (old->origins[i].kind > ORIGIN_FILE ||
		    map_find(entries, old->list.v[i]) == entries->list.n)
			r = map_set(entries, old->list.v[i], old->origins[i]);
	if (r < 0)
		return r;
	map_fini(old);
	*old = *entries;
	*entries = (struct map){ 0 };
	return 0;
}

static int put_entry(struct config *c, enum setting id, const char *text,
		     struct origin origin, struct err *err)
{
	const char *eq = strchr(text, '=');
	OWN_MEM char *name = strndup(text, eq ? (size_t)(eq - text) : strlen(text));
	char shown[64];
	int r;

	if (!name)
		return err_set(err, -ENOMEM, "settings");
	if (!eq)
		return err_set(err, -EINVAL, "'%s' has no '='; allowed: NAME=VALUE",
			       printable(shown, sizeof(shown), text));
	r = value_check_entry(name, eq + 1, err);
	if (r < 0)
		return r;
	r = map_set(&c->maps[id], text, origin);
	return r < 0 ? err_set(err, r, "settings") : 0;
}

/* --- layers --- */

int config_put(struct config *c, enum setting id, const char *text, struct origin origin,
	       struct err *err)
{
	struct slot *slot = &c->slots[id][origin.kind];
	OWN_MEM char *path = NULL;
	struct value value;
	int r;

	if (schema[id].type == TYPE_MAP)
		return put_entry(c, id, text, origin, err);
	/* A shell leaves --log-dir=~/logs as it is; nobody wants a folder "~". */
	if (schema[id].type == TYPE_PATH || schema[id].type == TYPE_PROGRAM) {
		text = path = spell_path("", text, true);
		if (!path)
			return err_set(err, -ENOMEM, "settings");
	}
	r = value_parse(&value, &c->arena, &schema[id], text, err);
	if (r < 0)
		return r;
	*slot = (struct slot){ .set = true, .value = value, .origin = origin };
	return 0;
}

int config_new(struct config **ret, struct err *err)
{
	OWN(own_config) struct config *c = calloc(1, sizeof(*c));

	if (!c)
		return err_set(err, -ENOMEM, "settings");
	for (size_t i = 0; i < N_SETTINGS; i++) {
		int r = !schema[i].def ? 0
				       : config_put(c, schema[i].id, schema[i].def,
						    (struct origin){ 0 }, err);

		if (r < 0)
			return err_wrap(err, r, "default of %s", schema[i].key);
	}
	*ret = take(c);
	return 0;
}

struct config *config_free(struct config *c)
{
	if (!c)
		return NULL;
	for (size_t i = 0; i < N_SETTINGS; i++)
		map_fini(&c->maps[i]);
	strv_fini(&c->warnings);
	arena_fini(&c->arena);
	free(c);
	return NULL;
}

int config_load_file(struct config *c, const char *path, struct err *err)
{
	struct buf text = { 0 };
	int r = path_read_file(&text, path, FILE_MAX, NULL);

	if (r == -EFBIG)
		(void)err_set(err, r, "%s: is larger than %d MB", path, FILE_MAX >> 20);
	else if (r < 0)
		(void)err_set(err, r, "%s: %s", path, strerror(-r));
	else
		r = config_load_yaml(c, path, (const char *)buf_data(&text),
				     buf_len(&text), err);
	buf_fini(&text);
	return r;
}

int config_load_variables(struct config *c, char *const *env, struct err *err)
{
	/* Workers inherit these variables, and a launch in one is a job of its own:
	 * what the outer job said of itself must not become the inner one's. */
	bool in_worker = env_get(env, "ACCEL_JOB");

	for (size_t i = 0; i < N_SETTINGS; i++) {
		const char *name = schema[i].variable;
		const char *value = name ? env_get(env, name) : NULL;
		struct origin origin = { ORIGIN_VARIABLE, name, 0 };
		int r;

		if (!value || !*value || (in_worker && schema[i].in_contract))
			continue;
		r = config_put(c, schema[i].id, value, origin, err);
		if (r < 0)
			return err_wrap(err, r, "%s", name);
	}
	return 0;
}

int config_set_flag(struct config *c, enum setting id, const char *flag,
		    const char *value, struct err *err)
{
	const char *word = flag ? flag : schema[id].flag;
	char name[80];
	struct origin origin = { ORIGIN_FLAG, NULL, 0 };
	int r;

	(void)snprintf(name, sizeof(name), "%s%s", *word == '-' ? "" : "--", word);
	origin.name = arena_copy(&c->arena, name, strlen(name));
	if (!origin.name)
		return err_set(err, -ENOMEM, "settings");
	r = config_put(c, id, value, origin, err);
	return r < 0 ? err_wrap(err, r, "%s", name) : 0;
}

int config_set_detected(struct config *c, enum setting id, const char *value,
			const char *what, struct err *err)
{
	struct origin origin = { ORIGIN_DETECTED, NULL, 0 };
	int r;

	origin.name = arena_copy(&c->arena, what, strlen(what));
	if (!origin.name)
		return err_set(err, -ENOMEM, "settings");
	r = config_put(c, id, value, origin, err);
	return r < 0 ? err_wrap(err, r, "%s (%s)", schema[id].key, what) : 0;
}

const struct strv *config_warnings(const struct config *c)
{
	return &c->warnings;
}

/* --- what holds --- */

/* The slot of the highest layer that has one; an empty one when none has. */
static const struct slot *holding(const struct config *c, enum setting id)
{
	int i = ORIGIN_FLAG;

	while (i > ORIGIN_DEFAULT && !c->slots[id][i].set)
		i--;
	return &c->slots[id][i];
}

long long config_int(const struct config *c, enum setting id)
{
	return holding(c, id)->value.number;
}

bool config_bool(const struct config *c, enum setting id)
{
	return holding(c, id)->value.number;
}

const char *config_str(const struct config *c, enum setting id)
{
	return holding(c, id)->value.text;
}

uint64_t config_duration_ms(const struct config *c, enum setting id)
{
	return (uint64_t)holding(c, id)->value.number;
}

const struct strv *config_list(const struct config *c, enum setting id)
{
	return &c->maps[id].list;
}

struct origin config_entry_origin(const struct config *c, enum setting id, size_t i)
{
	return c->maps[id].origins[i];
}

struct origin config_origin(const struct config *c, enum setting id)
{
	const struct map *m = &c->maps[id];
	struct origin highest = holding(c, id)->origin;

	for (size_t i = 0; i < m->list.n; i++)
		if (m->origins[i].kind > highest.kind)
			highest = m->origins[i];
	return highest;
}

bool config_is_set(const struct config *c, enum setting id)
{
	return config_origin(c, id).kind != ORIGIN_DEFAULT;
}

/* --- for people --- */

/* Texts are from outside, and these go to a terminal. */
static int print_text(struct buf *out, const char *text)
{
	size_t size = strlen(text) + 1;
	OWN_MEM char *shown = malloc(size);

	return shown ? buf_add_str(out, printable(shown, size, text)) : -ENOMEM;
}

static int print_map(struct buf *out, const struct map *m)
{
	int r = 0;

	for (size_t i = 0; i < m->list.n && r == 0; i++) {
		r = i ? buf_add_str(out, " ") : 0;
		if (r == 0)
			r = print_text(out, m->list.v[i]);
	}
	return r;
}

int config_print_value(struct buf *out, const struct config *c, enum setting id)
{
	const struct setting_row *row = &schema[id];
	const struct slot *slot = holding(c, id);
	long long n = slot->value.number;

	if (row->type == TYPE_MAP && c->maps[id].list.n)
		return print_map(out, &c->maps[id]);
	if (!slot->set)
		return buf_add_str(out, row->def_text           ? row->def_text
					: row->type == TYPE_MAP ? "none"
								: "not set");
	if (row->type == TYPE_INT)
		return buf_addf(out, "%lld", n);
	if (row->type == TYPE_BOOL)
		return buf_add_str(out, n ? "true" : "false");
	if (row->type == TYPE_DURATION)
		return n % 1000 ? buf_addf(out, "%lld ms", n)
				: buf_addf(out, "%lld s", n / 1000);
	return print_text(out, slot->value.text);
}

const char *origin_kind_name(enum origin_kind kind)
{
	return kind_names[kind];
}

int origin_print(struct buf *out, const struct origin *o)
{
	int r = 0;

	switch (o->kind) {
	case ORIGIN_DEFAULT:
		return buf_add_str(out, kind_names[o->kind]);
	case ORIGIN_FLAG:
	case ORIGIN_VARIABLE:
		return buf_addf(out, "%s %s", kind_names[o->kind], o->name);
	case ORIGIN_DETECTED:
		return buf_addf(out, "%s (%s)", kind_names[o->kind], o->name);
	case ORIGIN_FILE:
		r = print_text(out, o->name);
		return r < 0 ? r : buf_addf(out, ":%d", o->line);
	}
	return r;
}

int config_print_origin(struct buf *out, const struct config *c, enum setting id)
{
	struct origin o = config_origin(c, id);

	return origin_print(out, &o);
}
