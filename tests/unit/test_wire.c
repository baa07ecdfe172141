#include "tests/unit/unit.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/err.h"
#include "base/loop.h"
#include "rendezvous/link.h"
#include "rendezvous/messages.h"

static const struct msg_output output = {
	.rank = 3,
	.stream = STREAM_ERR,
	.data = { (const uint8_t *)"ab\0c\n", 5 },
	.skipped_lines = UINT64_C(1) << 40,
};

/* A value in every field of every message, and back. */
static void every_message_survives_the_wire(void **state)
{
	(void)state;
	for (unsigned type = 0; type < N_MSG_TYPES; type++) {
		const struct message *m = message_of(type);
		union message_any in, back;
		struct buf list = { 0 }, wire = { 0 }, a = { 0 }, b = { 0 };
		struct slice_list strings = { 0 };

		if (!m)
			continue;
		memset(&in, 0, sizeof(in));
		assert_int_equal(slice_list_add(&list, &strings.n, "x", 1), 0);
		assert_int_equal(slice_list_add(&list, &strings.n, "", 0), 0);
		strings.body = buf_slice(&list);
		for (size_t i = 0; i < m->n_fields; i++) {
			void *at = (char *)&in + m->fields[i].offset;

			switch (m->fields[i].kind) {
			case F_U32:
			case F_I32:
				*(uint32_t *)at = (uint32_t)(0xfffffff0 + i);
				break;
			case F_U64:
				*(uint64_t *)at = UINT64_MAX - i;
				break;
			case F_BYTES:
				*(struct slice *)at = slice_of("a\0b", 3);
				break;
			case F_LIST:
			case F_SECRET:
				*(struct slice_list *)at = strings;
				break;
			}
		}
		assert_int_equal(wire_encode(&wire, m, &in), 0);
		assert_int_equal(wire_decode(m, buf_slice(&wire), &back, NULL), 0);
		assert_int_equal(wire_print(&a, m, &in), 0);
		assert_int_equal(wire_print(&b, m, &back), 0);
		assert_true(slice_eq(buf_slice(&a), buf_slice(&b)));
		assert_true(buf_len(&a) > strlen(m->name));
		buf_fini(&list);
		buf_fini(&wire);
		buf_fini(&a);
		buf_fini(&b);
	}
}

static void a_frame_cut_anywhere_asks_for_more(void **state)
{
	struct buf wire = { 0 };
	struct frame f;

	(void)state;
	assert_int_equal(
		frame_encode(&wire, MSG_OUTPUT, 9, message_of(MSG_OUTPUT), &output), 0);
	for (size_t len = 0; len < buf_len(&wire); len++)
		assert_int_equal(frame_decode(slice_of(buf_data(&wire), len), &f, NULL),
				 0);
	assert_int_equal(frame_decode(buf_slice(&wire), &f, NULL), 1);
	assert_int_equal(f.type, MSG_OUTPUT);
	assert_int_equal(f.epoch, 9);
	assert_int_equal(f.len, buf_len(&wire));
	buf_fini(&wire);
}

static void a_field_cut_short_is_an_error_that_names_it(void **state)
{
	struct buf wire = { 0 };
	struct msg_output back;
	struct err e = { 0 };

	(void)state;
	assert_int_equal(wire_encode(&wire, message_of(MSG_OUTPUT), &output), 0);
	assert_int_equal(wire_decode(message_of(MSG_OUTPUT),
				     slice_of(buf_data(&wire), 15), &back, &e),
			 -EBADMSG);
	assert_non_null(strstr(e.text, "msg_output.data"));
	assert_null(back.data.data);
	buf_fini(&wire);
}

static void a_message_of_an_older_peer_leaves_later_fields_zero(void **state)
{
	struct buf wire = { 0 };
	struct msg_output back;

	(void)state;
	assert_int_equal(wire_encode(&wire, message_of(MSG_OUTPUT), &output), 0);
	assert_int_equal(wire_decode(message_of(MSG_OUTPUT), slice_of(buf_data(&wire), 8),
				     &back, NULL),
			 0);
	assert_int_equal(back.rank, 3);
	assert_int_equal(back.data.len, 0);
	assert_int_equal(back.skipped_lines, 0);
	buf_fini(&wire);
}

static void what_a_newer_peer_adds_is_ignored(void **state)
{
	struct buf wire = { 0 };
	struct msg_output back;

	(void)state;
	assert_int_equal(wire_encode(&wire, message_of(MSG_OUTPUT), &output), 0);
	assert_int_equal(buf_add(&wire, "future", 6), 0);
	assert_int_equal(
		wire_decode(message_of(MSG_OUTPUT), buf_slice(&wire), &back, NULL), 0);
	assert_true(back.skipped_lines == output.skipped_lines);
	buf_fini(&wire);
}

static void a_list_that_lies_about_its_strings_is_refused(void **state)
{
	struct buf wire = { 0 }, body = { 0 };
	struct msg_plan plan = { 0 }, back;

	(void)state;
	assert_int_equal(slice_list_add(&body, &plan.argv.n, "prog", 4), 0);
	plan.argv.body = buf_slice(&body);
	plan.argv.n = 2; /* one more than there is */
	assert_int_equal(wire_encode(&wire, message_of(MSG_PLAN), &plan), 0);
	assert_int_equal(wire_decode(message_of(MSG_PLAN), buf_slice(&wire), &back, NULL),
			 -EBADMSG);
	buf_fini(&wire);
	plan.argv.n = 0; /* one less */
	assert_int_equal(wire_encode(&wire, message_of(MSG_PLAN), &plan), 0);
	assert_int_equal(wire_decode(message_of(MSG_PLAN), buf_slice(&wire), &back, NULL),
			 -EBADMSG);
	buf_fini(&wire);
	buf_fini(&body);
}

static void an_oversized_frame_is_refused_from_its_header(void **state)
{
	const uint8_t head[FRAME_HEADER] = {
		WIRE_VERSION, 0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0
	};
	struct frame f;

	(void)state;
	assert_int_equal(frame_decode(slice_of(head, sizeof(head)), &f, NULL), -EMSGSIZE);
}

static void another_version_is_refused_at_its_first_byte(void **state)
{
	struct frame f;
	struct err e = { 0 };

	(void)state;
	assert_int_equal(frame_decode(slice_of("\x02", 1), &f, &e), -EPROTO);
	assert_non_null(strstr(e.text, "version 2"));
}

static void an_environment_is_never_printed(void **state)
{
	struct buf body = { 0 }, text = { 0 };
	struct msg_plan plan = { 0 };

	(void)state;
	assert_int_equal(slice_list_add(&body, &plan.env.n, "TOKEN=hush", 10), 0);
	plan.env.body = buf_slice(&body);
	assert_int_equal(wire_print(&text, message_of(MSG_PLAN), &plan), 0);
	assert_int_equal(buf_add(&text, "", 1), 0);
	assert_null(strstr((char *)buf_data(&text), "hush"));
	assert_non_null(strstr((char *)buf_data(&text), "not shown"));
	buf_fini(&body);
	buf_fini(&text);
}

/* ---- links ---- */

struct end {
	struct loop *loop;
	struct link *link;
	int n_messages, stop_after;
	unsigned last_type;
	uint32_t last_rank;
	bool ended, echo;
};

static void on_message(void *data, unsigned type, const union message_any *msg)
{
	struct end *e = data;

	e->n_messages++;
	e->last_type = type;
	if (type == MSG_OUTPUT)
		e->last_rank = msg->output.rank;
	if (e->echo)
		assert_int_equal(link_send(e->link, type, msg), 0);
	if (e->n_messages == e->stop_after)
		loop_stop(e->loop);
}

static void on_end(void *data, const char *reason)
{
	struct end *e = data;

	(void)reason;
	e->ended = true;
	loop_stop(e->loop);
}

static const struct link_ops ops = { .on_message = on_message, .on_end = on_end };

static void on_nothing(void *data)
{
	(void)data;
}

static void an_answer_in_memory_arrives_after_the_handler_returned(void **state)
{
	struct loop *loop;
	struct end a = { .stop_after = 2 }, b = { .echo = true };
	struct timer *keep;
	struct msg_output msg = output;

	(void)state;
	assert_int_equal(loop_new(&loop, NULL), 0);
	assert_int_equal(link_new_pair(&a.link, &b.link, loop, NULL), 0);
	assert_int_equal(timer_new(&keep, loop, on_nothing, NULL, NULL), 0);
	timer_start(keep, 0); /* the loop has something to wait for */
	a.loop = b.loop = loop;
	link_set_handler(a.link, &ops, &a);
	link_set_handler(b.link, &ops, &b);
	assert_int_equal(link_send(a.link, MSG_OUTPUT, &msg), 0);
	msg.rank = 4;
	assert_int_equal(link_send(a.link, MSG_OUTPUT, &msg), 0);
	assert_int_equal(a.n_messages + b.n_messages, 0);
	loop_once(loop);
	assert_int_equal(b.n_messages, 2);
	assert_int_equal(a.n_messages, 2);
	assert_int_equal(a.last_rank, 4);
	a.link = link_free(a.link);
	assert_int_equal(link_send(b.link, MSG_OUTPUT, &msg), -EPIPE);
	b.link = link_free(b.link);
	timer_free(keep);
	loop_free(loop);
}

static int socket_link(struct end *e, int *ret_other)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0 ||
	    loop_new(&e->loop, NULL) < 0 ||
	    link_new(&e->link, e->loop, ends[0], NULL) < 0)
		return -1;
	link_set_handler(e->link, &ops, e);
	*ret_other = ends[1];
	return 0;
}

static void a_type_nobody_knows_is_answered(void **state)
{
	uint8_t frame[FRAME_HEADER] = { WIRE_VERSION, 0, 0x7f, 0xff };
	uint8_t answer[64];
	struct msg_unknown unknown;
	struct end e = { .stop_after = 1 };
	struct frame f;
	int other = -1;
	ssize_t n;

	(void)state;
	assert_int_equal(socket_link(&e, &other), 0);
	assert_int_equal(write(other, frame, sizeof(frame)), sizeof(frame));
	loop_once(e.loop);
	n = read(other, answer, sizeof(answer));
	assert_true(n > 0);
	assert_int_equal(frame_decode(slice_of(answer, (size_t)n), &f, NULL), 1);
	assert_int_equal(f.type, MSG_UNKNOWN);
	assert_int_equal(wire_decode(message_of(MSG_UNKNOWN), f.body, &unknown, NULL), 0);
	assert_int_equal(unknown.type, 0x7fff);
	assert_false(e.ended);
	link_free(e.link);
	loop_free(e.loop);
	close(other);
}

static void garbage_ends_the_link_and_nothing_else(void **state)
{
	struct end e = { 0 };
	int other = -1;

	(void)state;
	assert_int_equal(socket_link(&e, &other), 0);
	assert_int_equal(write(other, "GET / HTTP/1.1\r\n\r\n", 18), 18);
	loop_run(e.loop);
	assert_true(e.ended);
	assert_int_equal(e.n_messages, 0);
	link_free(e.link);
	loop_free(e.loop);
	close(other);
}

static void messages_sent_before_the_peer_closed_still_arrive(void **state)
{
	struct buf wire = { 0 };
	struct end e = { 0 };
	int other = -1;

	(void)state;
	assert_int_equal(socket_link(&e, &other), 0);
	for (int i = 0; i < 100; i++)
		assert_int_equal(frame_encode(&wire, MSG_OUTPUT, 0,
					      message_of(MSG_OUTPUT), &output),
				 0);
	assert_int_equal(write(other, buf_data(&wire), buf_len(&wire)), buf_len(&wire));
	close(other);
	loop_run(e.loop);
	assert_true(e.ended);
	assert_int_equal(e.n_messages, 100);
	link_free(e.link);
	loop_free(e.loop);
	buf_fini(&wire);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_message_survives_the_wire),
		cmocka_unit_test(a_frame_cut_anywhere_asks_for_more),
		cmocka_unit_test(a_field_cut_short_is_an_error_that_names_it),
		cmocka_unit_test(a_message_of_an_older_peer_leaves_later_fields_zero),
		cmocka_unit_test(what_a_newer_peer_adds_is_ignored),
		cmocka_unit_test(a_list_that_lies_about_its_strings_is_refused),
		cmocka_unit_test(an_oversized_frame_is_refused_from_its_header),
		cmocka_unit_test(another_version_is_refused_at_its_first_byte),
		cmocka_unit_test(an_environment_is_never_printed),
		cmocka_unit_test(an_answer_in_memory_arrives_after_the_handler_returned),
		cmocka_unit_test(a_type_nobody_knows_is_answered),
		cmocka_unit_test(garbage_ends_the_link_and_nothing_else),
		cmocka_unit_test(messages_sent_before_the_peer_closed_still_arrive),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
