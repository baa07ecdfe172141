/*
 * The file layer: YAML into settings, straight from libyaml's events, so that no
 * document makes us recurse and every error has its line and column. Values are
 * checked by value.c and what YAML means by a spelling is in spell.c; here are
 * structure and places: nesting, repeated keys, tags, aliases.
 */

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "config/layers.h"
#include "config/spell.h"

enum {
	DEPTH_MAX = 100,
	WARNINGS_MAX = 20,
	SHOWN = 64, /* bytes of a word in a message */
};

/* Tags that say what a plain scalar is anyway. */
static const char *const plain_tags[] = {
	"tag:yaml.org,2002:int",
	"tag:yaml.org,2002:bool",
	"tag:yaml.org,2002:float",
	"tag:yaml.org,2002:null",
};

struct loader {
	struct config *c;
	const char *name; /* lives as long as the configuration */
	const uint8_t *text;
	size_t len;
	struct err *err;
	yaml_parser_t parser;
	yaml_event_t event;
	int line_of[N_SETTINGS]; /* where a key was given, 0: not yet */
	size_t n_unknown;
};

/* A scalar: its text, and whether YAML may read more into it than text. */
struct scalar {
	const char *text;
	bool plain;
	yaml_mark_t at;
};

/* --- places --- */

static int int_of(size_t n)
{
	return n < INT_MAX ? (int)n + 1 : INT_MAX;
}

/* "FILE:LINE:COLUMN" in front of what @l->err says. */
static int at_mark(struct loader *l, yaml_mark_t at, int code)
{
	return err_wrap(l->err, code, "%s:%d:%d", l->name, int_of(at.line),
			int_of(at.column));
}

/* Is there a tab before the @index'th character in its line, or there? Such a
 * file looks right, so the message had better say it. */
static bool is_tab_before(const struct loader *l, size_t index)
{
	size_t i = l->len >= 3 && !memcmp(l->text, "\xef\xbb\xbf", 3) ? 3 : 0;
	bool tab = false, blank = true;

	for (; i < l->len; i++) {
		uint8_t c = l->text[i];

		if ((c & 0xc0) == 0x80)
			continue;
		if (c == '\n') {
			tab = false;
			blank = true;
		}
		tab |= c == '\t' && blank;
		blank &= c == ' ' || c == '\t' || c == '\n';
		if (!index--)
			break;
	}
	return tab;
}

/* The place of a byte that could not be read, which libyaml gives as an offset. */
static yaml_mark_t mark_of_offset(const struct loader *l, size_t offset)
{
	yaml_mark_t at = { 0 };

	for (size_t i = 0; i < l->len && i < offset; i++) {
		bool newline = l->text[i] == '\n';

		at.line += newline;
		at.column = newline ? 0 : at.column + ((l->text[i] & 0xc0) != 0x80);
	}
	return at;
}

static int parser_error(struct loader *l)
{
	const yaml_parser_t *p = &l->parser;
	const char *problem = p->problem ? p->problem : "cannot be read";

	if (p->error == YAML_MEMORY_ERROR)
		return err_set(l->err, -ENOMEM, "%s", l->name);
	if (p->error == YAML_READER_ERROR) {
		(void)err_set(l->err, -EINVAL, "%s; allowed: text in UTF-8", problem);
		return at_mark(l, mark_of_offset(l, p->problem_offset), -EINVAL);
	}
	if (is_tab_before(l, p->problem_mark.index))
		(void)err_set(l->err, -EINVAL, "a tab; allowed: spaces to indent with");
	else if (p->context)
		(void)err_set(l->err, -EINVAL, "%s %s", problem, p->context);
	else
		(void)err_set(l->err, -EINVAL, "%s", problem);
	return at_mark(l, p->problem_mark, -EINVAL);
}

/* --- events --- */

/* Go to the next event; the one before, and texts in it, are gone. */
static int next(struct loader *l)
{
	yaml_event_delete(&l->event);
	return yaml_parser_parse(&l->parser, &l->event) ? 0 : parser_error(l);
}

static const char *kind_of_event(yaml_event_type_t type)
{
	switch (type) {
	case YAML_SEQUENCE_START_EVENT:
		return "a list";
	case YAML_MAPPING_START_EVENT:
		return "a mapping";
	case YAML_ALIAS_EVENT:
		return "an alias (*name), which is not supported";
	default:
		return "a value";
	}
}

static bool is_tag_one_of(const char *tag, const char *const *tags, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!strcmp(tag, tags[i]))
			return true;
	return false;
}

/* The event at hand as a scalar; its text goes with the event. The error is
 * without its place. */
static int get_scalar(struct loader *l, struct scalar *ret)
{
	const char *text = (const char *)l->event.data.scalar.value;
	const char *tag = (const char *)l->event.data.scalar.tag;
	char shown[SHOWN];

	*ret = (struct scalar){
		.text = text,
		.plain = l->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE && !tag,
		.at = l->event.start_mark,
	};
	if (strlen(text) != l->event.data.scalar.length)
		return err_set(l->err, -EINVAL,
			       "a NUL character, which no value can hold");
	if (!tag || !strcmp(tag, "!") || !strcmp(tag, YAML_STR_TAG))
		return 0;
	ret->plain = true;
	if (is_tag_one_of(tag, plain_tags, sizeof(plain_tags) / sizeof(plain_tags[0])))
		return 0;
	return err_set(l->err, -EINVAL,
		       "the tag %s is not supported; write the value alone",
		       printable(shown, sizeof(shown), tag));
}

/* Pass over a node, the first event of which is at hand. */
static int skip_node(struct loader *l)
{
	int depth = 0, r;

	for (;;) {
		switch (l->event.type) {
		case YAML_SEQUENCE_START_EVENT:
		case YAML_MAPPING_START_EVENT:
			depth++;
			break;
		case YAML_SEQUENCE_END_EVENT:
		case YAML_MAPPING_END_EVENT:
			depth--;
			break;
		default:
			break;
		}
		if (depth <= 0)
			return 0;
		if (depth > DEPTH_MAX) {
			(void)err_set(l->err, -EINVAL, "nested more than %d levels deep",
				      DEPTH_MAX);
			return at_mark(l, l->event.start_mark, -EINVAL);
		}
		r = next(l);
		if (r < 0)
			return r;
	}
}

static bool is_null(const struct scalar *s)
{
	return s->plain && spell_is_null(s->text);
}

/* --- settings --- */

/* Put "KEY: " and the place in front of the error at hand. */
static int at_key(struct loader *l, const char *key, yaml_mark_t at, int code)
{
	(void)err_wrap(l->err, code, "%s", key);
	return at_mark(l, at, code);
}

/* Something that is no scalar stands where one is wanted. */
static int wrong_kind(struct loader *l, const struct setting_row *row)
{
	struct buf allowed = { 0 };
	int r = row->type == TYPE_MAP ? buf_add_str(&allowed, "a mapping of NAME: VALUE")
				      : schema_print_allowed(&allowed, row);

	if (r == 0)
		r = err_set(l->err, -EINVAL, "%s; allowed: %.*s",
			    kind_of_event(l->event.type), (int)buf_len(&allowed),
			    (const char *)buf_data(&allowed));
	buf_fini(&allowed);
	return at_key(l, row->key, l->event.start_mark, r);
}

static int put_scalar(struct loader *l, const struct setting_row *row)
{
	struct origin origin = { ORIGIN_FILE, l->name, int_of(l->event.start_mark.line) };
	OWN_MEM char *path = NULL;
	const char *text;
	char number[32];
	struct scalar s;
	int r = get_scalar(l, &s);

	if (r < 0)
		return at_key(l, row->key, s.at, r);
	text = s.text;
	if (row->type == TYPE_ENUM && s.plain)
		text = spell_choice(row->choices, s.text);
	if (text == s.text && is_null(&s))
		return 0; /* a key left blank is as good as none */
	if (row->type == TYPE_BOOL && s.plain) {
		text = spell_bool(s.text);
	} else if (row->type == TYPE_INT && s.plain) {
		text = spell_int(number, sizeof(number), s.text);
		if (!text) {
			r = value_refuse(row, s.text, "is not a whole number", l->err);
			return at_key(l, row->key, s.at, r);
		}
	} else if (row->type == TYPE_PATH || row->type == TYPE_PROGRAM) {
		text = path = spell_path(l->name, s.text, row->type == TYPE_PROGRAM);
		if (!path)
			return err_set(l->err, -ENOMEM, "%s", l->name);
	}
	r = config_put(l->c, row->id, text, origin, l->err);
	return r < 0 ? at_key(l, row->key, s.at, r) : 0;
}

/* The value of variable @name is at hand. */
static int put_variable(struct loader *l, const struct setting_row *row, struct map *into,
			const char *name)
{
	struct origin origin = { ORIGIN_FILE, l->name, int_of(l->event.start_mark.line) };
	OWN_MEM char *entry = NULL;
	struct scalar s;
	int r;

	if (l->event.type != YAML_SCALAR_EVENT) {
		(void)err_set(l->err, -EINVAL, "%s: %s; allowed: text", name,
			      kind_of_event(l->event.type));
		return at_key(l, row->key, l->event.start_mark, -EINVAL);
	}
	r = get_scalar(l, &s);
	if (r < 0)
		return at_key(l, row->key, s.at, r);
	if (*s.text && is_null(&s)) {
		(void)err_set(l->err, -EINVAL,
			      "%s: %s is no text; allowed: \"\" for an empty value, or "
			      "\"%s\" for the word",
			      name, s.text, s.text);
		return at_key(l, row->key, s.at, -EINVAL);
	}
	r = value_check_entry(name, s.text, l->err);
	if (r < 0)
		return at_key(l, row->key, s.at, r);
	if (asprintf(&entry, "%s=%s", name, s.text) < 0)
		entry = NULL;
	if (!entry || map_add(into, entry, origin) < 0)
		return err_set(l->err, -ENOMEM, "%s", l->name);
	return 0;
}

/* The key at hand, copied; it must be a word. */
static int take_key(struct loader *l, char **ret, yaml_mark_t *at)
{
	struct scalar s;
	int r;

	*at = l->event.start_mark;
	if (l->event.type != YAML_SCALAR_EVENT) {
		(void)err_set(l->err, -EINVAL, "%s; allowed: a word as the key",
			      kind_of_event(l->event.type));
		return at_mark(l, *at, -EINVAL);
	}
	r = get_scalar(l, &s);
	if (r < 0)
		return at_mark(l, *at, r);
	*ret = strdup(s.text);
	return *ret ? 0 : err_set(l->err, -ENOMEM, "%s", l->name);
}

/* Entries as they are read, each with its place, for finding those that are
 * there twice. */
struct entries {
	struct map map;
	struct place {
		size_t i;
		yaml_mark_t at;
	} * places;
	size_t cap;
};

static int add_place(struct entries *e, size_t i, yaml_mark_t at)
{
	if (i == e->cap) {
		size_t cap = e->cap ? 2 * e->cap : 16;
		struct place *more = reallocarray(e->places, cap, sizeof(*more));

		if (!more)
			return -ENOMEM;
		e->places = more;
		e->cap = cap;
	}
	e->places[i] = (struct place){ i, at };
	return 0;
}

/* By name, then in the order of the file. */
static int compare_places(const void *a, const void *b, void *map)
{
	const struct place *x = a, *y = b;
	const struct map *m = map;
	const char *p = m->list.v[x->i], *q = m->list.v[y->i];
	size_t n = strcspn(p, "="), k = strcspn(q, "=");
	int order = memcmp(p, q, n < k ? n : k);

	if (!order)
		order = (n > k) - (n < k);
	return order ? order : (x->i > y->i) - (x->i < y->i);
}

static int refuse_repeated(struct loader *l, const struct setting_row *row,
			   struct entries *e)
{
	if (!e->places)
		return 0;
	qsort_r(e->places, e->map.list.n, sizeof(*e->places), compare_places, &e->map);
	for (size_t i = 1; i < e->map.list.n; i++) {
		const struct place *one = &e->places[i - 1], *other = &e->places[i];
		const char *name = e->map.list.v[other->i];
		size_t len = strcspn(name, "=");

		if (strncmp(name, e->map.list.v[one->i], len + 1))
			continue;
		(void)err_set(l->err, -EINVAL, "%.*s is there twice, first in line %d",
			      (int)len, name, int_of(one->at.line));
		return at_key(l, row->key, other->at, -EINVAL);
	}
	return 0;
}

static int load_entry(struct loader *l, const struct setting_row *row,
		      struct entries *into)
{
	OWN_MEM char *name = NULL;
	yaml_mark_t at;
	int r = take_key(l, &name, &at);

	if (r < 0)
		return r;
	r = value_check_entry(name, "", l->err);
	if (r < 0)
		return at_key(l, row->key, at, r);
	if (add_place(into, into->map.list.n, at) < 0)
		return err_set(l->err, -ENOMEM, "%s", l->name);
	r = next(l);
	return r < 0 ? r : put_variable(l, row, &into->map, name);
}

static int load_entries(struct loader *l, const struct setting_row *row,
			struct entries *into)
{
	for (;;) {
		int r = next(l);

		if (r < 0)
			return r;
		if (l->event.type == YAML_MAPPING_END_EVENT)
			return refuse_repeated(l, row, into);
		r = load_entry(l, row, into);
		if (r < 0)
			return r;
	}
}

static int load_map(struct loader *l, const struct setting_row *row)
{
	struct entries entries = { 0 };
	struct scalar s;
	int r;

	if (l->event.type == YAML_SCALAR_EVENT) {
		r = get_scalar(l, &s);
		if (r < 0)
			return at_key(l, row->key, s.at, r);
		if (is_null(&s))
			return 0;
	}
	if (l->event.type != YAML_MAPPING_START_EVENT)
		return wrong_kind(l, row);
	r = load_entries(l, row, &entries);
	if (r == 0) {
		r = config_put_entries(l->c, row->id, &entries.map);
		if (r < 0)
			(void)err_set(l->err, r, "%s", l->name);
	}
	map_fini(&entries.map);
	free(entries.places);
	return r;
}

static int warn_unknown(struct loader *l, const char *key, yaml_mark_t at)
{
	const char *near;
	char shown[SHOWN];
	int r;

	/* What many keys of another program's file are called helps nobody. */
	if (l->n_unknown++ >= WARNINGS_MAX)
		return 0;
	near = schema_near_key(key);
	r = strv_addf(&l->c->warnings, "%s:%d:%d: unknown key '%s'%s%s%s is ignored",
		      l->name, int_of(at.line), int_of(at.column),
		      printable(shown, sizeof(shown), key), near ? " (did you mean " : "",
		      near ? near : "", near ? "?)" : "");
	return r < 0 ? err_set(l->err, r, "%s", l->name) : 0;
}

static int load_setting(struct loader *l)
{
	OWN_MEM char *key = NULL;
	const struct setting_row *row;
	yaml_mark_t at;
	int r = take_key(l, &key, &at);

	if (r < 0)
		return r;
	row = schema_by_key(key);
	if (!row) {
		r = warn_unknown(l, key, at);
		if (r == 0)
			r = next(l);
		return r < 0 ? r : skip_node(l);
	}
	if (l->line_of[row->id]) {
		r = err_set(l->err, -EINVAL, "is there twice, first in line %d",
			    l->line_of[row->id]);
		return at_key(l, row->key, at, r);
	}
	l->line_of[row->id] = int_of(at.line);
	r = next(l);
	if (r < 0)
		return r;
	if (row->type == TYPE_MAP)
		return load_map(l, row);
	if (l->event.type != YAML_SCALAR_EVENT)
		return wrong_kind(l, row);
	return put_scalar(l, row);
}

static int load_settings(struct loader *l)
{
	for (;;) {
		int r = next(l);

		if (r < 0)
			return r;
		if (l->event.type == YAML_MAPPING_END_EVENT)
			return 0;
		r = load_setting(l);
		if (r < 0)
			return r;
	}
}

/* The one node of the document is at hand. */
static int load_root(struct loader *l)
{
	struct scalar s;

	if (l->event.type == YAML_MAPPING_START_EVENT)
		return load_settings(l);
	if (l->event.type == YAML_SCALAR_EVENT) {
		int r = get_scalar(l, &s);

		if (r < 0)
			return at_mark(l, s.at, r);
		if (is_null(&s))
			return 0;
	}
	(void)err_set(l->err, -EINVAL,
		      "%s; allowed: settings, one 'key: value' to a line",
		      kind_of_event(l->event.type));
	return at_mark(l, l->event.start_mark, -EINVAL);
}

static int load_stream(struct loader *l)
{
	int r = next(l); /* the stream's start */

	if (r == 0)
		r = next(l);
	if (r < 0 || l->event.type == YAML_STREAM_END_EVENT)
		return r;
	r = next(l); /* past the document's start */
	if (r == 0)
		r = load_root(l);
	if (r == 0)
		r = next(l); /* the document's end */
	if (r == 0)
		r = next(l);
	if (r < 0 || l->event.type == YAML_STREAM_END_EVENT)
		return r;
	(void)err_set(l->err, -EINVAL, "a second document; allowed: one in a file");
	return at_mark(l, l->event.start_mark, -EINVAL);
}

int config_load_yaml(struct config *c, const char *name, const char *text, size_t len,
		     struct err *err)
{
	struct err unread; /* errors are built up even when nobody reads them */
	struct loader l = {
		.c = c,
		.name = arena_copy(&c->arena, name, strlen(name)),
		.text = (const uint8_t *)text,
		.len = len,
		.err = err ? err : &unread,
	};
	int r;

	if (!l.name || !yaml_parser_initialize(&l.parser))
		return err_set(err, -ENOMEM, "%s", name);
	yaml_parser_set_input_string(&l.parser, l.text, len);
	r = load_stream(&l);
	yaml_event_delete(&l.event);
	yaml_parser_delete(&l.parser);
	if (r == 0 && l.n_unknown > WARNINGS_MAX &&
	    strv_addf(&c->warnings, "%s: %zu more unknown keys are ignored", l.name,
		      l.n_unknown - WARNINGS_MAX) < 0)
		r = err_set(err, -ENOMEM, "%s", name);
	return r;
}
