/*
 * The store's engine: every operation in every dialect by recorded bytes, each
 * script fed whole and byte by byte; waits, limits, and a random walk held
 * against a model of few lines.
 */

#include "tests/unit/unit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "rendezvous/store.h"

static const uint8_t seed[16] = "a fixed seed....";

struct peer {
	struct store_client *c;
	int told;
};

/* Client and server bytes as text: "06 01. '/k'" where "NN." is a u64 and
 * 'text' is a string with its length in front; blanks are ignored. */
static struct buf bytes(const char *text)
{
	struct buf b = { 0 };

	while (*text) {
		if (*text == ' ') {
			text++;
		} else if (*text == '\'') {
			const char *end = strchr(text + 1, '\'');
			uint64_t len = (uint64_t)(end - text - 1);

			assert_int_equal(buf_add(&b, &len, sizeof(len)), 0);
			assert_int_equal(buf_add(&b, text + 1, len), 0);
			text = end + 1;
		} else {
			char *end;
			uint64_t v = strtoull(text, &end, 16);

			assert_ptr_not_equal(end, text);
			assert_int_equal(buf_add(&b, &v, *end == '.' ? sizeof(v) : 1), 0);
			text = *end == '.' ? end + 1 : end;
		}
	}
	return b;
}

static struct slice slice(const struct buf *b)
{
	return slice_of(b->mem, buf_len(b)); /* nothing was consumed */
}

static void on_output(void *data)
{
	((struct peer *)data)->told++;
}

static struct store *new_store(const struct store_limits *limits)
{
	struct store *s = NULL;

	assert_int_equal(store_new(&s, limits, seed, NULL), 0);
	return s;
}

static void join(struct peer *p, struct store *s)
{
	*p = (struct peer){ 0 };
	assert_int_equal(store_client_new(&p->c, s, on_output, p, NULL), 0);
}

static void leave(struct peer *p)
{
	p->c = store_client_free(p->c);
}

static int feed(struct peer *p, const char *text, bool one_by_one)
{
	struct buf b = bytes(text);
	size_t step = one_by_one ? 1 : buf_len(&b);
	int r = 0;

	for (size_t i = 0; i < buf_len(&b) && r == 0; i += step)
		r = store_client_feed(p->c, buf_data(&b) + i, step);
	buf_fini(&b);
	return r;
}

static void expect(struct peer *p, const char *text)
{
	struct buf want = bytes(text);
	struct slice got = store_client_output(p->c);

	if (!slice_eq(got, slice(&want))) {
		for (size_t i = 0; i < got.len; i++)
			fprintf(stderr, "%02x ", got.data[i]);
		fprintf(stderr, "| wanted: %s\n", text);
	}
	assert_int_equal(got.len, buf_len(&want));
	assert_true(slice_eq(got, slice(&want)));
	store_client_sent(p->c, got.len);
	buf_fini(&want);
}

static void say(struct peer *p, const char *text)
{
	assert_int_equal(feed(p, text, false), 0);
}

static void ask(struct peer *p, const char *text, const char *reply)
{
	say(p, text);
	expect(p, reply);
}

static const char validate[] = "0 CE F7 85 3C";

static void join_current(struct peer *p, struct store *s)
{
	join(p, s);
	ask(p, validate, "");
}

struct line {
	const char *request, *reply;
};

static const struct line current_script[] = {
	{ "0 CE F7 85 3C", "" },
	{ "D 39 5 0 0", "39 5 0 0" },
	{ "4 'init/' 1.", "1." },
	{ "5 1. '/k'", "1" },
	{ "1 '/k' 'v'", "" },
	{ "6 1. '/k'", "0" },
	{ "3 '/k'", "'v'" },
	{ "5 1. '/k'", "0" },
	{ "5 2. '/k' '/no'", "1" },
	{ "5 0.", "0" },
	{ "6 0.", "0" },
	{ "C", "1" },
	{ "2 '/k' 'v' 'w'", "'w'" },
	{ "2 '/k' 'v' 'x'", "'w'" },
	{ "2 '/new' '' 'n'", "'n'" },
	{ "2 '/none' 'e' 'n'", "'e'" },
	{ "5 1. '/none'", "1" },
	{ "3 '/none'", "''" },
	{ "1 '/empty' ''", "" },
	{ "5 1. '/empty'", "0" },
	{ "3 '/empty'", "''" },
	{ "1 '/n' '5'", "" },
	{ "4 '/n' FFFFFFFFFFFFFFF9.", "FFFFFFFFFFFFFFFE." },
	{ "3 '/n'", "'-2'" },
	{ "9 '/a' 'xx'", "" },
	{ "9 '/a' 'yyy'", "" },
	{ "3 '/a'", "'xxyyy'" },
	{ "B 2. '/m1' '1' '/m2' '22'", "" },
	{ "A 3. '/m1' '/none' '/m2'", "'1' '' '22'" },
	{ "A 0.", "" },
	{ "B 0.", "" },
	{ "7", "8." },
	{ "8 '/k'", "1." },
	{ "8 '/k'", "0." },
	{ "F '/q'", "0." },
	{ "E '/q' 'i1'", "" },
	{ "E '/q' 'i2'", "" },
	{ "10 '/q'", "2." },
	{ "5 1. '/q'", "0" },
	{ "3 '/q'", "''" },
	{ "8 '/q'", "0." },
	{ "7", "7." },
	{ "F '/q'", "2. 'i1'" },
	{ "F '/q'", "1. 'i2'" },
	{ "F '/q'", "0." },
	{ "5 1. '/q'", "1" },
	{ "12 '/b' 1.", "0" },
	{ "12 '/b' 1.", "0" },
	{ "3 '/b'", "'2'" },
	{ "B 1. '/only' 'z' 8 'init/' 8 '/n' 8 '/a' 8 '/b' 8 '/m1' 8 '/m2' 8 '/new' 8 "
	  "'/empty'",
	  "1. 1. 1. 1. 1. 1. 1. 1." },
	{ "11", "1. '/only'" },
	{ "0 CE F7 85 3C", "" },
};

/* 1.13 sends the opcode alone and DELETE_KEY is its last operation. */
static const struct line script_20[] = {
	{ "3 'init/' 1.", "1." },
	{ "0 '/k' 'v'", "" },
	{ "1 '/k' 'v' 'w'", "'w'" },
	{ "2 '/k'", "'w'" },
	{ "4 1. '/k'", "0" },
	{ "4 1. '/z'", "1" },
	{ "5 1. '/k'", "0" },
	{ "6", "2." },
	{ "3 '/n' FFFFFFFFFFFFFFFF.", "FFFFFFFFFFFFFFFF." },
};

static const struct line script_21[] = {
	{ "3 'init/' 1.", "1." },
	{ "0 '/k' 'v'", "" },
	{ "7 'init/'", "1." },
	{ "8 '/k' 'w'", "" },
	{ "2 '/k'", "'vw'" },
	{ "A 2. '/a' '1' '/b' '2'", "" },
	{ "9 2. '/a' '/b'", "'1' '2'" },
	{ "6", "3." },
	{ "5 1. '/z'", "" },
	{ "B", "1" },
	{ "7 '/z'", "0." },
};

static void run_script(const struct line *script, size_t n, bool one_by_one)
{
	struct store *s = new_store(NULL);
	struct peer p;

	join(&p, s);
	for (size_t i = 0; i < n; i++) {
		assert_int_equal(feed(&p, script[i].request, one_by_one), 0);
		expect(&p, script[i].reply);
	}
	assert_int_equal(p.told, 0); /* one's own output is no news */
	leave(&p);
	store_free(s);
}

#define RUN(script, one_by_one)                                                          \
	run_script(script, sizeof(script) / sizeof((script)[0]), one_by_one)

static void every_current_request_gets_its_reply(void **state)
{
	(void)state;
	RUN(current_script, false);
	RUN(current_script, true);
}

static void clients_of_2_0_and_before_get_their_replies(void **state)
{
	(void)state;
	RUN(script_20, false);
	RUN(script_20, true);
}

static void clients_of_2_1_get_their_replies(void **state)
{
	(void)state;
	RUN(script_21, false);
	RUN(script_21, true);
}

static void a_whole_conversation_may_arrive_at_once(void **state)
{
	struct store *s = new_store(NULL);
	struct buf in = { 0 }, out = { 0 };
	struct peer p;

	(void)state;
	for (size_t i = 0; i < sizeof(current_script) / sizeof(current_script[0]); i++) {
		struct buf q = bytes(current_script[i].request);
		struct buf a = bytes(current_script[i].reply);

		assert_int_equal(buf_add(&in, q.mem, buf_len(&q)), 0);
		assert_int_equal(buf_add(&out, a.mem, buf_len(&a)), 0);
		buf_fini(&q);
		buf_fini(&a);
	}
	join(&p, s);
	assert_int_equal(store_client_feed(p.c, buf_data(&in), buf_len(&in)), 0);
	assert_true(slice_eq(store_client_output(p.c), slice(&out)));
	leave(&p);
	store_free(s);
	buf_fini(&in);
	buf_fini(&out);
}

static void an_old_set_is_told_from_validate_by_its_length(void **state)
{
	struct store *s = new_store(NULL);
	struct peer p;

	(void)state;
	join(&p, s);
	say(&p, "0");
	say(&p, "CE 0 0 0"); /* a key of 206 bytes begins like the magic */
	say(&p, "0 0 0 0");
	for (int i = 0; i < 206; i++)
		say(&p, "6B");
	ask(&p, "1. 76 6", "1.");
	leave(&p);
	store_free(s);
}

static void delete_of_2_0_is_settled_when_nothing_follows(void **state)
{
	struct store *s = new_store(NULL);
	struct peer p;

	(void)state;
	join(&p, s);
	say(&p, "0 '/k' 'v'");
	assert_false(store_client_is_ambiguous(p.c));
	ask(&p, "8 '/k'", "");
	assert_true(store_client_is_ambiguous(p.c));
	assert_int_equal(store_client_settle(p.c), 0);
	expect(&p, "1.");
	assert_false(store_client_is_ambiguous(p.c));
	/* From now on there is no doubt, and what only 2.1 has is an error. */
	ask(&p, "8 '/k'", "0.");
	assert_int_equal(feed(&p, "9 0.", false), -EPROTO);
	leave(&p);
	store_free(s);
}

static void append_of_2_1_may_come_in_two_pieces(void **state)
{
	struct store *s = new_store(NULL);
	struct peer p;

	(void)state;
	join(&p, s);
	say(&p, "8 '/k'");
	assert_true(store_client_is_ambiguous(p.c));
	say(&p, "2. 78");
	assert_false(store_client_is_ambiguous(p.c));
	assert_int_equal(store_client_settle(p.c), 0); /* the timer was late */
	ask(&p, "79 2 '/k'", "'xy'");
	/* Now known to be 2.1: no doubt about the next one. */
	say(&p, "8 '/k'");
	assert_false(store_client_is_ambiguous(p.c));
	ask(&p, "'z' 2 '/k'", "'xyz'");
	leave(&p);
	store_free(s);
}

static void watch_key_reports_each_change_with_old_and_new(void **state)
{
	struct store *s = new_store(NULL);
	struct peer w, p;

	(void)state;
	join(&w, s);
	join(&p, s);
	ask(&w, "7 '/k'", "3");
	ask(&p, "6", "0."); /* a watched key is no key yet */
	say(&p, "0 '/k' 'v1'");
	assert_int_equal(w.told, 1);
	expect(&w, "1 '/k' '' 'v1'");
	say(&p, "0 '/k' 'v2'");
	expect(&w, "0 '/k' 'v1' 'v2'");
	ask(&p, "1 '/k' 'zz' 'v3'", "'v2'");
	expect(&w, "");
	ask(&p, "1 '/k' 'v2' 'v3'", "'v3'");
	expect(&w, "0 '/k' 'v2' 'v3'");
	ask(&p, "7 '/k'", "1."); /* 2.1's DELETE_KEY: this client has asked before */
	expect(&w, "2 '/k' 'v3' ''");
	ask(&p, "3 '/k' 5.", "5.");
	expect(&w, "1 '/k' '' '5'");
	say(&p, "8 '/k' '0'");
	expect(&w, "0 '/k' '5' '50'");
	ask(&w, "7 '/other'", "3");
	leave(&w);
	say(&p, "0 '/k' 'nobody watches'");
	leave(&p);
	store_free(s);
}

static void a_wait_ends_when_the_last_key_comes(void **state)
{
	struct store *s = new_store(NULL);
	struct peer w, p;

	(void)state;
	join_current(&w, s);
	join_current(&p, s);
	ask(&w, "6 4. '/a' '/b' '/a' '/c'", ""); /* '/a' twice */
	say(&p, "1 '/a' ''");
	expect(&w, "");
	ask(&p, "4 '/b' 0.", "0.");
	expect(&w, "");
	assert_int_equal(w.told, 0);
	say(&p, "B 1. '/c' ''");
	assert_int_equal(w.told, 1);
	expect(&w, "0");
	say(&p, "1 '/a' 'again'");
	expect(&w, "");
	leave(&w);
	leave(&p);
	store_free(s);
}

static const struct line bringers[] = {
	{ "1 '/k' 'v'", "" },  { "4 '/k' 1.", "1." },      { "9 '/k' 'v'", "" },
	{ "E '/k' 'v'", "" },  { "2 '/k' '' 'v'", "'v'" }, { "B 1. '/k' 'v'", "" },
	{ "12 '/k' 1.", "0" },
};

static void every_operation_that_brings_a_key_ends_waits(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(bringers) / sizeof(bringers[0]); i++) {
		struct store *s = new_store(NULL);
		struct peer w, p;

		join_current(&w, s);
		join_current(&p, s);
		ask(&w, "6 1. '/k'", "");
		ask(&p, bringers[i].request, bringers[i].reply);
		expect(&w, "0");
		leave(&w);
		leave(&p);
		store_free(s);
	}
}

static void a_failed_compare_set_wakes_nobody(void **state)
{
	struct store *s = new_store(NULL);
	struct peer w, p;

	(void)state;
	join_current(&w, s);
	join_current(&p, s);
	say(&w, "6 1. '/k'");
	ask(&p, "2 '/k' 'expected' 'v'", "'expected'");
	expect(&w, "");
	leave(&w);
	leave(&p);
	store_free(s);
}

static void a_cancelled_wait_is_silent_and_the_client_goes_on(void **state)
{
	struct store *s = new_store(NULL);
	struct peer w, p;

	(void)state;
	join_current(&w, s);
	join_current(&p, s);
	ask(&w, "6 2. '/a' '/b'", "");
	ask(&w, "C", "1");
	say(&p, "1 '/a' '' 1 '/b' ''");
	ask(&w, "7", "2.");
	/* A wake that was under way when the client cancelled: both bytes. */
	say(&w, "6 1. '/c'");
	say(&p, "1 '/c' ''");
	ask(&w, "C", "0 1");
	leave(&w);
	leave(&p);
	store_free(s);
}

static void a_wait_that_an_old_client_gave_up_sends_no_stray_byte(void **state)
{
	struct store *s = new_store(NULL);
	struct peer w, p;

	(void)state;
	join(&w, s);
	join(&p, s);
	ask(&w, "5 1. '/k'", "");
	ask(&w, "6", "0.");
	say(&p, "0 '/k' 'v'");
	ask(&w, "6", "1.");
	leave(&w);
	leave(&p);
	store_free(s);
}

static void the_waits_of_a_client_that_left_are_forgotten(void **state)
{
	struct store *s = new_store(NULL);
	size_t before;
	struct peer w, p;

	(void)state;
	join_current(&p, s);
	say(&p, "1 '/x' '' 8 '/x'");
	before = store_bytes(s);
	join_current(&w, s);
	say(&w, "6 3. '/a' '/b' '/c'");
	assert_true(store_bytes(s) > before);
	leave(&w);
	store_client_sent(p.c, store_client_output(p.c).len);
	say(&p, "1 '/a' '' 1 '/b' ''");
	ask(&p, "8 '/a' 8 '/b' 7", "1. 1. 0.");
	assert_true(store_bytes(s) <= before);
	leave(&p);
	store_free(s);
}

static void a_push_wakes_one_waiter_the_oldest(void **state)
{
	struct store *s = new_store(NULL);
	struct peer a, b, p;

	(void)state;
	join_current(&a, s);
	join_current(&b, s);
	join_current(&p, s);
	say(&a, "6 2. '/q' '/q'");
	say(&b, "6 1. '/q'");
	say(&p, "E '/q' '1'");
	expect(&a, "0");
	expect(&b, "");
	ask(&a, "F '/q'", "1. '1'");
	say(&a, "6 1. '/q'"); /* now behind b */
	say(&p, "E '/q' '2'");
	expect(&a, "");
	expect(&b, "0");
	ask(&b, "F '/q'", "1. '2'");
	ask(&b, "F '/q'", "0.");
	leave(&a);
	leave(&b);
	leave(&p);
	store_free(s);
}

static void a_push_passes_over_waiters_that_need_more(void **state)
{
	struct store *s = new_store(NULL);
	struct peer a, b, p;

	(void)state;
	join_current(&a, s);
	join_current(&b, s);
	join_current(&p, s);
	say(&a, "6 2. '/q' '/more'");
	say(&b, "6 1. '/q'");
	say(&p, "E '/q' '1'");
	expect(&a, "");
	expect(&b, "0");
	say(&p, "1 '/more' ''");
	expect(&a, "0");
	leave(&a);
	leave(&b);
	leave(&p);
	store_free(s);
}

static void a_barrier_opens_for_all_at_the_last_arrival(void **state)
{
	struct store *s = new_store(NULL);
	struct peer a, b, w, p;

	(void)state;
	join_current(&a, s);
	join_current(&b, s);
	join_current(&w, s);
	join_current(&p, s);
	say(&w, "6 1. '/b'");
	ask(&a, "12 '/b' 3.", "");
	expect(&w, "0"); /* the key is there from the first arrival on */
	ask(&b, "12 '/b' 3.", "");
	expect(&a, "");
	/* A time-out in the client: the arrival still counts. */
	ask(&b, "C", "1");
	ask(&p, "12 '/b' 3.", "0");
	expect(&a, "0");
	expect(&b, "");
	ask(&b, "12 '/b' 3.", "0");
	leave(&a);
	leave(&b);
	leave(&w);
	leave(&p);
	store_free(s);
}

static const struct {
	const char *value, *reply;
} counters[] = {
	{ "7", "8." },
	{ " \t+7", "8." },
	{ "-7", "FFFFFFFFFFFFFFFA." },
	{ "7 apples", "8." },
	{ "9223372036854775807", "8000000000000000." },
	{ "", NULL },
	{ "apples", NULL },
	{ "-", NULL },
	{ "9223372036854775808", NULL },
};

static void a_counter_is_read_as_stoll_does(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
		struct store *s = new_store(NULL);
		char set[64];
		struct peer p, other;

		join_current(&p, s);
		join_current(&other, s);
		snprintf(set, sizeof(set), "1 '/n' '%s'", counters[i].value);
		say(&p, set);
		if (counters[i].reply) {
			ask(&p, "4 '/n' 1.", counters[i].reply);
		} else {
			assert_true(feed(&p, "4 '/n' 1.", false) < 0);
			assert_true(feed(&p, "7", false) < 0); /* and stays closed */
		}
		ask(&other, "7", "1.");
		leave(&p);
		leave(&other);
		store_free(s);
	}
}

static const char *const refused[] = {
	/* no such operation, in the current dialect and in the old one */
	"0 CE F7 85 3C 13",
	"0 CE F7 85 3C FF",
	"C",
	"47 45 54 20 2F 20",
	/* wrong magic */
	"0 CE F7 85 3C 0 CE F7 85 3D",
	/* a key of 8193 bytes and of as many as there can be */
	"0 CE F7 85 3C 3 2001.",
	"0 CE F7 85 3C 3 FFFFFFFFFFFFFFFF.",
	"0 0 0 1 0 0 0 0 0",
	/* a value of 8 MiB + 1 */
	"0 CE F7 85 3C 1 '/k' 800001.",
	"0 CE F7 85 3C 1 '/k' FFFFFFFFFFFFFFF8.",
	/* 131073 keys */
	"0 CE F7 85 3C 6 20001.",
	"0 CE F7 85 3C B 8000000000000000.",
};

static void what_breaks_the_protocol_is_refused_at_once(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		for (int one_by_one = 0; one_by_one < 2; one_by_one++) {
			struct store *s = new_store(NULL);
			struct peer p;
			int r;

			join(&p, s);
			r = feed(&p, refused[i], one_by_one);
			assert_true(r == -EPROTO || r == -EMSGSIZE);
			expect(&p, "");
			leave(&p);
			store_free(s);
		}
	}
}

static void a_length_costs_nothing_before_its_bytes_came(void **state)
{
	struct store *s = new_store(NULL);
	struct peer p;

	(void)state;
	join_current(&p, s);
	say(&p, "1 '/k' 800000.");
	say(&p, "78 78 78");
	assert_true(store_bytes(s) < 4096);
	leave(&p);
	assert_int_equal(store_bytes(s), 0);
	store_free(s);
}

static void the_largest_key_and_value_pass(void **state)
{
	size_t n_key = 8 << 10, n_value = 8 << 20;
	struct store *s = new_store(NULL);
	struct buf b = bytes("1 2000.");
	uint8_t *fill = malloc(n_value);
	uint64_t len = n_value;
	struct slice out;
	struct peer p;

	(void)state;
	memset(fill, 'x', n_value);
	assert_int_equal(buf_add(&b, fill, n_key), 0);
	assert_int_equal(buf_add(&b, &len, sizeof(len)), 0);
	assert_int_equal(buf_add(&b, fill, n_value), 0);
	join_current(&p, s);
	for (size_t i = 0; i < buf_len(&b); i += 1000) {
		size_t n = buf_len(&b) - i < 1000 ? buf_len(&b) - i : 1000;

		assert_int_equal(store_client_feed(p.c, buf_data(&b) + i, n), 0);
	}
	say(&p, "3 2000.");
	assert_int_equal(store_client_feed(p.c, fill, n_key), 0);
	out = store_client_output(p.c);
	assert_int_equal(out.len, n_value + 8);
	assert_memory_equal(out.data + 8, fill, n_value);
	assert_true(store_client_is_paused(p.c));
	assert_int_equal(store_output_bytes(s), n_value + 8); /* no reserve */
	store_client_sent(p.c, out.len);
	assert_int_equal(store_output_bytes(s), 0);
	/* Idle again, it holds the value and no buffer. */
	assert_true(store_bytes(s) < n_value + n_key + 4096);
	leave(&p);
	store_free(s);
	buf_fini(&b);
	free(fill);
}

/* What the next limits forbid, each against limits that allow the rest. */
static const struct {
	size_t offset, limit;
	const char *fine, *too_much;
} limit_cases[] = {
	{ offsetof(struct store_limits, keys), 2, "1 '/a' '' 1 '/b' '' 1 '/a' 'x'",
	  "4 '/c' 1." },
	{ offsetof(struct store_limits, items), 2, "E '/a' '' E '/b' ''", "E '/a' ''" },
	{ offsetof(struct store_limits, client_waits), 3, "6 3. '/a' '/b' '/c'",
	  "6 1. '/d'" },
	{ offsetof(struct store_limits, waits), 3, "6 3. '/a' '/b' '/c'", "12 '/e' 2." },
	{ offsetof(struct store_limits, reply), 16, "1 '/k' '12345678' 3 '/k'",
	  "9 '/k' '9'" },
	{ offsetof(struct store_limits, reply), 24, "1 '/1234567' '' 11",
	  "1 '/l' '' 11" },
	{ offsetof(struct store_limits, request), 40, "B 1. '/k' '123456789012'",
	  "B 1. '/k' '12345678901234'" },
	{ offsetof(struct store_limits, total), 4096, "1 '/k' '12345678'",
	  "1 '/l' 1000." },
};

static void a_limit_closes_the_one_who_exceeds_it(void **state)
{
	static char zeros[4096];

	(void)state;
	for (size_t i = 0; i < sizeof(limit_cases) / sizeof(limit_cases[0]); i++) {
		struct store_limits limits = store_default_limits;
		struct store *s;
		struct peer p, other;
		int r;

		memcpy((char *)&limits + limit_cases[i].offset, &limit_cases[i].limit,
		       sizeof(size_t));
		s = new_store(&limits);
		join_current(&p, s);
		join_current(&other, s);
		say(&p, limit_cases[i].fine);
		store_client_sent(p.c, store_client_output(p.c).len);
		r = feed(&p, limit_cases[i].too_much, false);
		if (r == 0)
			r = store_client_feed(p.c, zeros, sizeof(zeros));
		assert_true(r == -ENOBUFS || r == -EMSGSIZE);
		leave(&p);
		ask(&other, "D 1 2 3 4", "1 2 3 4");
		leave(&other);
		store_free(s);
	}
}

static void requests_wait_while_replies_are_unread(void **state)
{
	struct store_limits limits = store_default_limits;
	struct store *s;
	struct peer p, other;

	(void)state;
	limits.backlog = 32;
	s = new_store(&limits);
	join_current(&p, s);
	join_current(&other, s);
	say(&p, "1 '/k' '12345678'");
	say(&p, "3 '/k' 3 '/k' 3 '/k' 1 '/done' '' 6 1. '/k'");
	assert_true(store_client_is_paused(p.c));
	ask(&other, "5 1. '/done'", "1");
	expect(&p, "'12345678' '12345678'");
	assert_false(store_client_is_paused(p.c));
	assert_int_equal(store_client_feed(p.c, NULL, 0), 0);
	expect(&p, "'12345678' 0");
	ask(&other, "5 1. '/done'", "0");
	leave(&p);
	leave(&other);
	store_free(s);
}

static void a_watcher_that_never_reads_is_given_up(void **state)
{
	struct store_limits limits = store_default_limits;
	struct store *s;
	struct peer w, p;
	int told;

	(void)state;
	limits.reply = 100;
	s = new_store(&limits);
	join(&w, s);
	join(&p, s);
	say(&w, "7 '/k'");
	told = w.told;
	for (int i = 0; i < 10; i++)
		say(&p, "0 '/k' '0123456789'");
	assert_true(w.told > told);
	assert_int_equal(store_client_feed(w.c, NULL, 0), -EMSGSIZE);
	leave(&w);
	ask(&p, "6", "1.");
	leave(&p);
	store_free(s);
}

static char *repeat(const char *text, int n, const char *before, const char *after)
{
	char *out = calloc(1, strlen(before) + strlen(after) +
				      (size_t)n * (strlen(text) + 1) + 1);

	assert_non_null(out);
	strcpy(out, before);
	for (char *at = out + strlen(out); n; n--)
		at += sprintf(at, "%s ", text);
	strcat(out, after);
	return out;
}

/* What @p gets until nothing comes any more, read @step bytes at a time; never
 * more than @most were held for it. */
static struct buf read_all(struct peer *p, size_t step, size_t most)
{
	struct buf got = { 0 };
	struct slice out;

	while ((out = store_client_output(p->c)).len) {
		size_t n = out.len < step ? out.len : step;

		assert_true(out.len <= most);
		assert_int_equal(buf_add(&got, out.data, n), 0);
		store_client_sent(p->c, n);
		assert_int_equal(store_client_feed(p->c, NULL, 0), 0);
	}
	assert_false(store_client_is_held(p->c));
	return got;
}

static void a_long_list_of_values_is_given_in_pieces(void **state)
{
	enum { N = 200, VALUE = 40, BACKLOG = 100 };
	char *ask_all = repeat("'/k' '/none' '/l'", N, "A 258. ", "D 1 2 3 4 3 '/l'");
	char *reply = repeat("'0123456789012345678901234567890123456789' '' 'l'", N, "",
			     "1 2 3 4 'l'");
	struct buf want = bytes(reply);

	(void)state;
	for (int i = 0; i < 4; i++) {
		struct store_limits limits = store_default_limits;
		struct store *s;
		struct buf got;
		struct peer p;

		limits.backlog = BACKLOG;
		limits.reply = VALUE + 8; /* of one value, then */
		s = new_store(&limits);
		join_current(&p, s);
		say(&p, "1 '/k' '0123456789012345678901234567890123456789' 1 '/l' 'l'");
		assert_int_equal(feed(&p, ask_all, i & 1), 0);
		assert_true(store_client_is_held(p.c));
		assert_true(store_client_is_paused(p.c));
		assert_true(store_output_bytes(s) <= 2 * (BACKLOG + VALUE + 8));
		got = read_all(&p, i & 2 ? 7 : SIZE_MAX, BACKLOG + VALUE + 8);
		assert_true(slice_eq(slice(&got), slice(&want)));
		buf_fini(&got);
		leave(&p);
		assert_int_equal(store_output_bytes(s), 0);
		store_free(s);
	}
	free(ask_all);
	free(reply);
	buf_fini(&want);
}

static void a_client_that_leaves_within_a_list_takes_its_output_along(void **state)
{
	struct store_limits limits = store_default_limits;
	struct store *s;
	struct peer p;

	(void)state;
	limits.backlog = 16;
	s = new_store(&limits);
	join_current(&p, s);
	say(&p, "1 '/k' '0123456789'");
	say(&p, "A 4. '/k' '/k' '/k' '/k'");
	assert_true(store_client_is_held(p.c));
	leave(&p);
	assert_int_equal(store_output_bytes(s), 0);
	store_free(s);
}

static void a_burst_of_requests_is_served_in_turns(void **state)
{
	struct store_limits limits = store_default_limits;
	struct store *s;
	struct peer p;

	(void)state;
	limits.burst = 2;
	s = new_store(&limits);
	join(&p, s);
	say(&p, "0 CE F7 85 3C 4 '/n' 1. 4 '/n' 1. 4 '/n' 1. 4 '/n' 1. 4");
	expect(&p, "1.");
	assert_true(store_client_is_held(p.c));
	assert_false(store_client_is_paused(p.c));
	say(&p, "'/n'");
	expect(&p, "2. 3.");
	assert_true(store_client_is_held(p.c));
	assert_int_equal(store_client_feed(p.c, NULL, 0), 0);
	expect(&p, "4.");
	assert_false(store_client_is_held(p.c)); /* what is left is no whole request */
	ask(&p, "1.", "5.");
	leave(&p);
	store_free(s);
}

/* One that takes all the room there is for output, with a value of 900 bytes. */
static struct store *new_full_store(struct peer *greedy)
{
	struct store_limits limits = store_default_limits;
	char *set = repeat("78", 900, "1 '/big' 384. ", "");
	struct store *s;

	limits.backlog = 64;
	limits.output = 1024;
	s = new_store(&limits);
	join_current(greedy, s);
	say(greedy, set);
	say(greedy, "3 '/big'");
	assert_true(store_output_bytes(s) >= limits.output);
	free(set);
	return s;
}

static void unread_output_of_one_lets_others_store_and_ask(void **state)
{
	struct peer greedy, p;
	struct store *s = new_full_store(&greedy);
	char *set = repeat("79", 5000, "1 '/other' 1388. ", "");

	(void)state;
	join_current(&p, s);
	say(&p, set);
	ask(&p, "4 '/n' 1.", "1.");
	ask(&p, "3 '/n' 5 1. '/other'", "'1' 0");
	assert_int_equal(feed(&p, "3 '/other'", false), -ENOBUFS);
	assert_int_equal(store_client_feed(greedy.c, NULL, 0), 0);
	leave(&p);
	leave(&greedy);
	store_free(s);
	free(set);
}

static void an_item_whose_pop_is_refused_stays_for_another(void **state)
{
	struct peer greedy, a, b;
	struct store *s = new_full_store(&greedy);
	char *item = repeat("7A", 250, "FA. ", ""), text[2048];

	(void)state;
	join_current(&a, s);
	join_current(&b, s);
	snprintf(text, sizeof(text), "E '/q' %s", item);
	say(&b, text);
	assert_int_equal(feed(&a, "F '/q'", false), -ENOBUFS);
	leave(&a);
	leave(&greedy);
	ask(&b, "10 '/q'", "1.");
	snprintf(text, sizeof(text), "1. %s", item);
	ask(&b, "F '/q'", text);
	leave(&b);
	store_free(s);
	free(item);
}

static void watches_outlast_requests_and_have_a_limit(void **state)
{
	struct store_limits limits = store_default_limits;
	struct store *s;
	struct peer w, p;

	(void)state;
	limits.watches = 3;
	limits.client_waits = 1;
	s = new_store(&limits);
	join(&w, s);
	join(&p, s);
	ask(&w, "7 '/a' 7 '/b'", "3 3");
	ask(&w, "5 1. '/a'", "");
	ask(&w, "6", "0."); /* gives up the wait, not the watches */
	ask(&w, "3 '/other' 1.", "1.");
	say(&p, "0 '/a' 'v'");
	expect(&w, "1 '/a' '' 'v'");
	say(&p, "0 '/b' 'v'");
	expect(&w, "1 '/b' '' 'v'");
	leave(&w);
	join(&w, s);
	ask(&w, "7 '/a' 7 '/a' 7 '/a'", "3 3 3");
	assert_int_equal(feed(&w, "7 '/a'", false), -ENOBUFS);
	leave(&w);
	leave(&p);
	store_free(s);
}

static void waits_that_ended_count_no_more(void **state)
{
	enum { MAX = 3 };
	struct store_limits limits = store_default_limits;
	struct store *s;
	struct peer w, p;

	(void)state;
	limits.client_waits = limits.waits = MAX;
	s = new_store(&limits);
	join_current(&w, s);
	join_current(&p, s);
	for (int i = 0; i < 2 * MAX; i++) {
		say(&w, "6 2. '/a' '/b'");
		say(&p, "1 '/a' '' 1 '/b' ''");
		expect(&w, "0");
		ask(&p, "8 '/a' 8 '/b'", "1. 1.");
	}
	for (int i = 0; i < 2 * MAX; i++)
		ask(&w, "6 2. '/a' '/b' C", "1");
	for (int i = 0; i < 2 * MAX; i++) {
		say(&w, "6 2. '/a' '/b'");
		leave(&w);
		join_current(&w, s);
	}
	leave(&w);
	leave(&p);
	store_free(s);
}

static void a_wait_that_is_over_leaves_no_byte(void **state)
{
	struct store *s = new_store(NULL);
	size_t before;
	struct peer w, p;

	(void)state;
	join_current(&p, s);
	say(&p, "1 '/x' '' 8 '/x'");
	expect(&p, "1.");
	before = store_bytes(s);
	join_current(&w, s);
	for (int i = 0; i < 3; i++) {
		say(&w, "6 3. '/a' '/b' '/a'");
		assert_true(store_bytes(s) > before);
		ask(&w, "C", "1");
		assert_int_equal(store_bytes(s), before);
	}
	say(&w, "6 2. '/a' '/b'");
	leave(&w);
	assert_int_equal(store_bytes(s), before);
	join(&w, s);
	ask(&w, "7 '/a' 7 '/b'", "3 3");
	leave(&w);
	assert_int_equal(store_bytes(s), before);
	leave(&p);
	store_free(s);
}

/* A store of 8 KiB in all, in which '/k' has 3000 bytes. */
static struct store *new_small_store(struct peer *p)
{
	struct store_limits limits = store_default_limits;
	char *set = repeat("78", 3000, "1 '/k' BB8. ", "");
	struct store *s;

	limits.total = 8192;
	s = new_store(&limits);
	join_current(p, s);
	say(p, set);
	free(set);
	return s;
}

static void a_request_that_does_not_fit_while_it_arrives_is_refused(void **state)
{
	static char zeros[1000];
	struct peer p;
	struct store *s = new_small_store(&p);
	int r = feed(&p, "1 '/l' 2710.", false);

	(void)state;
	for (int i = 0; i < 9 && r == 0; i++) {
		r = store_client_feed(p.c, zeros, sizeof(zeros));
		/* A buffer grows to twice what it holds at the most. */
		assert_true(store_bytes(s) < 2 * 8192);
	}
	assert_int_equal(r, -ENOBUFS);
	leave(&p);
	store_free(s);
}

static void a_value_does_not_grow_beyond_what_there_is(void **state)
{
	char *append = repeat("79", 500, "9 '/k' 1F4. ", "");
	struct peer p, other;
	struct store *s = new_small_store(&p);
	int r = 0;

	(void)state;
	join_current(&other, s);
	for (int i = 0; i < 20 && r == 0; i++) {
		r = feed(&p, append, false);
		assert_true(store_bytes(s) <= 8192);
	}
	assert_int_equal(r, -ENOBUFS);
	ask(&other, "5 1. '/k'", "0");
	leave(&p);
	leave(&other);
	store_free(s);
	free(append);
}

static void a_client_may_leave_while_its_meaning_is_open(void **state)
{
	struct store *s = new_store(NULL);
	struct peer p;

	(void)state;
	join(&p, s);
	say(&p, "8 '/k'");
	assert_true(store_client_is_ambiguous(p.c));
	leave(&p);
	assert_int_equal(store_bytes(s), 0);
	store_free(s);
}

static void a_hundred_thousand_keys_are_found_again(void **state)
{
	enum { N = 100000 };
	struct store *s = new_store(NULL);
	char text[64], reply[32];
	size_t len = 0;
	struct peer p;

	(void)state;
	join_current(&p, s);
	for (int i = 0; i < N; i++) {
		snprintf(text, sizeof(text), "1 '/key/%d' '%d'", i, i * 7);
		say(&p, text);
		/* Also while the table grows. */
		snprintf(text, sizeof(text), "3 '/key/%d'", i / 2);
		snprintf(reply, sizeof(reply), "'%d'", i / 2 * 7);
		ask(&p, text, reply);
	}
	for (int i = 0; i < N; i += 3) {
		snprintf(text, sizeof(text), "3 '/key/%d'", i);
		snprintf(reply, sizeof(reply), "'%d'", i * 7);
		ask(&p, text, reply);
	}
	for (int i = 0; i < N; i += 2) {
		snprintf(text, sizeof(text), "8 '/key/%d'", i);
		ask(&p, text, "1.");
	}
	snprintf(reply, sizeof(reply), "%x.", N / 2);
	ask(&p, "7", reply);
	for (int i = 1; i < N; i += 2)
		len += sizeof(uint64_t) +
		       (size_t)snprintf(text, sizeof(text), "/key/%d", i);
	say(&p, "11");
	assert_int_equal(store_client_output(p.c).len, sizeof(uint64_t) + len);
	leave(&p);
	store_free(s);
}

/*
 * A random walk of four clients over four keys, against a model that keeps
 * everything in arrays.
 */

enum { N_PEERS = 4, N_NAMES = 4, N_STEPS = 200000, MAX_ITEMS = 8 };

struct model {
	struct {
		bool present;
		char value[64];
		char items[MAX_ITEMS][8];
		int n_items;
	} keys[N_NAMES];
	struct {
		bool waits[N_NAMES];
		int barrier; /* key, or -1 */
		uint64_t since;
		char want[64]; /* what the client is to be sent */
	} peers[N_PEERS];
	uint64_t now;
};

static uint32_t chance(uint32_t n)
{
	static uint64_t x = 88172645463325252ULL;

	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return (uint32_t)(x >> 33) % n;
}

static bool model_waits(const struct model *m, int p)
{
	for (int k = 0; k < N_NAMES; k++)
		if (m->peers[p].waits[k])
			return true;
	return false;
}

/* Key @k came for one waiter. Returns whether its wait is over. */
static bool model_end_wait(struct model *m, int p, int k)
{
	m->peers[p].waits[k] = false;
	if (model_waits(m, p))
		return false;
	strcat(m->peers[p].want, "0 ");
	return true;
}

static void model_wake(struct model *m, int k, bool one)
{
	for (;;) {
		int oldest = -1;

		for (int p = 0; p < N_PEERS; p++)
			if (m->peers[p].waits[k] &&
			    (oldest < 0 || m->peers[p].since < m->peers[oldest].since))
				oldest = p;
		if (oldest < 0 || (model_end_wait(m, oldest, k) && one))
			return;
	}
}

static void model_open_barrier(struct model *m, int k)
{
	for (int p = 0; p < N_PEERS; p++) {
		if (m->peers[p].barrier != k)
			continue;
		m->peers[p].barrier = -1;
		strcat(m->peers[p].want, "0 ");
	}
}

static void model_put(struct model *m, int k, const char *value)
{
	m->keys[k].present = true;
	snprintf(m->keys[k].value, sizeof(m->keys[k].value), "%s", value);
	model_wake(m, k, false);
	model_open_barrier(m, k);
}

static void model_wait(struct model *m, int p, unsigned mask)
{
	m->peers[p].since = ++m->now;
	for (int k = 0; k < N_NAMES; k++)
		m->peers[p].waits[k] =
			mask >> k & 1 && !m->keys[k].present && !m->keys[k].n_items;
	if (!model_waits(m, p))
		strcat(m->peers[p].want, "0 ");
}

static void model_barrier(struct model *m, int p, int k, int world)
{
	int n = m->keys[k].present ? atoi(m->keys[k].value) + 1 : 1;

	m->keys[k].present = true;
	snprintf(m->keys[k].value, sizeof(m->keys[k].value), "%d", n);
	model_wake(m, k, false);
	if (n >= world)
		model_open_barrier(m, k);
	if (n >= world)
		strcat(m->peers[p].want, "0 ");
	else
		m->peers[p].barrier = k;
}

/* One request of peer @p, as text; the model says what is to come back. */
static void random_step(struct model *m, int p, char *text, size_t size)
{
	int k = (int)chance(N_NAMES), v = (int)chance(50);
	char *want = m->peers[p].want, number[16], old[64];

	if (model_waits(m, p) || m->peers[p].barrier >= 0) {
		memset(m->peers[p].waits, 0, sizeof(m->peers[p].waits));
		m->peers[p].barrier = -1;
		snprintf(text, size, "C");
		strcat(want, "1 ");
		return;
	}
	snprintf(number, sizeof(number), "%d", v);
	snprintf(old, sizeof(old), "%s", m->keys[k].present ? m->keys[k].value : "");
	switch (chance(10)) {
	case 0:
		snprintf(text, size, "1 '/%d' '%d'", k, v);
		model_put(m, k, number);
		return;
	case 1:
		snprintf(text, size, "3 '/%d'", k);
		sprintf(want + strlen(want), "'%s' ", old);
		return;
	case 2:
		snprintf(text, size, "4 '/%d' 1.", k);
		v = atoi(old) + 1;
		snprintf(number, sizeof(number), "%d", v);
		sprintf(want + strlen(want), "%x. ", (unsigned)v);
		model_put(m, k, number);
		return;
	case 3:
		snprintf(text, size, "8 '/%d'", k);
		strcat(want, m->keys[k].present ? "1. " : "0. ");
		m->keys[k].present = false;
		return;
	case 4:
		snprintf(text, size, "E '/%d' '%d'", k, v);
		if (m->keys[k].n_items == MAX_ITEMS) {
			snprintf(text, size, "10 '/%d'", k);
			sprintf(want + strlen(want), "%x. ", MAX_ITEMS);
			return;
		}
		snprintf(m->keys[k].items[m->keys[k].n_items++], 8, "%d", v);
		model_wake(m, k, true);
		return;
	case 5:
		snprintf(text, size, "F '/%d'", k);
		sprintf(want + strlen(want), "%x. ", (unsigned)m->keys[k].n_items);
		if (!m->keys[k].n_items)
			return;
		snprintf(old, sizeof(old), "%s", m->keys[k].items[0]);
		sprintf(want + strlen(want), "'%s' ", old);
		memmove(m->keys[k].items[0], m->keys[k].items[1],
			sizeof(m->keys[k].items) - sizeof(m->keys[k].items[0]));
		m->keys[k].n_items--;
		return;
	case 6:
		snprintf(text, size, "2 '/%d' '%d' '%d'", k, v, v + 1);
		snprintf(number, sizeof(number), "%d", v + 1);
		if (!m->keys[k].present) {
			sprintf(want + strlen(want), "'%d' ", v);
		} else if (atoi(old) == v) {
			model_put(m, k, number);
			sprintf(want + strlen(want), "'%s' ", number);
		} else {
			sprintf(want + strlen(want), "'%s' ", old);
		}
		return;
	case 7:
		v = 2 + (int)chance(40);
		snprintf(text, size, "12 '/%d' %x.", k, (unsigned)v);
		model_barrier(m, p, k, v);
		return;
	default:
		snprintf(text, size, "6 3. '/%d' '/%d' '/%d'", k, (k + 1) % N_NAMES, k);
		model_wait(m, p, 1U << k | 1U << (k + 1) % N_NAMES);
		return;
	}
}

static void a_random_walk_agrees_with_a_model(void **state)
{
	struct store *s = new_store(NULL);
	struct model m = { 0 };
	struct peer peers[N_PEERS];

	(void)state;
	for (int p = 0; p < N_PEERS; p++) {
		join_current(&peers[p], s);
		m.peers[p].barrier = -1;
	}
	for (int i = 0; i < N_STEPS; i++) {
		int p = (int)chance(N_PEERS);
		char text[128];

		if (!chance(50)) {
			leave(&peers[p]);
			join_current(&peers[p], s);
			memset(m.peers[p].waits, 0, sizeof(m.peers[p].waits));
			m.peers[p].barrier = -1;
			continue;
		}
		random_step(&m, p, text, sizeof(text));
		assert_int_equal(feed(&peers[p], text, !chance(4)), 0);
		for (int j = 0; j < N_PEERS; j++) {
			expect(&peers[j], m.peers[j].want);
			m.peers[j].want[0] = '\0';
		}
	}
	for (int p = 0; p < N_PEERS; p++)
		leave(&peers[p]);
	store_free(s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_current_request_gets_its_reply),
		cmocka_unit_test(clients_of_2_0_and_before_get_their_replies),
		cmocka_unit_test(clients_of_2_1_get_their_replies),
		cmocka_unit_test(a_whole_conversation_may_arrive_at_once),
		cmocka_unit_test(an_old_set_is_told_from_validate_by_its_length),
		cmocka_unit_test(delete_of_2_0_is_settled_when_nothing_follows),
		cmocka_unit_test(append_of_2_1_may_come_in_two_pieces),
		cmocka_unit_test(watch_key_reports_each_change_with_old_and_new),
		cmocka_unit_test(a_wait_ends_when_the_last_key_comes),
		cmocka_unit_test(every_operation_that_brings_a_key_ends_waits),
		cmocka_unit_test(a_failed_compare_set_wakes_nobody),
		cmocka_unit_test(a_cancelled_wait_is_silent_and_the_client_goes_on),
		cmocka_unit_test(a_wait_that_an_old_client_gave_up_sends_no_stray_byte),
		cmocka_unit_test(the_waits_of_a_client_that_left_are_forgotten),
		cmocka_unit_test(a_push_wakes_one_waiter_the_oldest),
		cmocka_unit_test(a_push_passes_over_waiters_that_need_more),
		cmocka_unit_test(a_barrier_opens_for_all_at_the_last_arrival),
		cmocka_unit_test(a_counter_is_read_as_stoll_does),
		cmocka_unit_test(what_breaks_the_protocol_is_refused_at_once),
		cmocka_unit_test(a_length_costs_nothing_before_its_bytes_came),
		cmocka_unit_test(the_largest_key_and_value_pass),
		cmocka_unit_test(a_limit_closes_the_one_who_exceeds_it),
		cmocka_unit_test(requests_wait_while_replies_are_unread),
		cmocka_unit_test(a_watcher_that_never_reads_is_given_up),
		cmocka_unit_test(a_long_list_of_values_is_given_in_pieces),
		cmocka_unit_test(
			a_client_that_leaves_within_a_list_takes_its_output_along),
		cmocka_unit_test(a_burst_of_requests_is_served_in_turns),
		cmocka_unit_test(unread_output_of_one_lets_others_store_and_ask),
		cmocka_unit_test(an_item_whose_pop_is_refused_stays_for_another),
		cmocka_unit_test(watches_outlast_requests_and_have_a_limit),
		cmocka_unit_test(waits_that_ended_count_no_more),
		cmocka_unit_test(a_wait_that_is_over_leaves_no_byte),
		cmocka_unit_test(a_request_that_does_not_fit_while_it_arrives_is_refused),
		cmocka_unit_test(a_value_does_not_grow_beyond_what_there_is),
		cmocka_unit_test(a_client_may_leave_while_its_meaning_is_open),
		cmocka_unit_test(a_hundred_thousand_keys_are_found_again),
		cmocka_unit_test(a_random_walk_agrees_with_a_model),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
