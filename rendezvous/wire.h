#pragma once

/*
 * Messages as tables of fields: one encoder, one decoder and one printer serve
 * them all (messages.h has the table). Numbers are big-endian.
 *
 * A frame is version u8, flags u8, type u16, epoch u32, length u32, then that
 * many bytes of fields in table order. A peer of another version may end at an
 * earlier field, which leaves the rest zero, or say more than we know, which is
 * ignored; a field cut short is an error.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

struct err;

enum {
	WIRE_VERSION = 1,
	FRAME_HEADER = 12,
	FRAME_MAX = 16 << 20, /* a plan carries an environment; nothing is larger */
};

/* A list of byte strings as it stands on the wire: @n times u32 length, bytes. */
struct slice_list {
	uint32_t n;
	struct slice body;
};

/* Take the next string off the list. False at the end. */
bool slice_list_next(struct slice_list *list, struct slice *ret);

/* Append one string to the body of a list that is being made. 0 or -ENOMEM. */
int slice_list_add(struct buf *body, uint32_t *n, const void *data, size_t len);

enum field_kind {
	F_U32,
	F_I32,
	F_U64,
	F_BYTES, /* struct slice */
	F_LIST,  /* struct slice_list */
	F_SECRET /* F_LIST, never printed */
};

struct field {
	const char *name;
	enum field_kind kind;
	size_t offset;
};

struct message {
	const char *name;
	const struct field *fields;
	size_t n_fields, size;
};

/* Append the fields of @msg. 0, -ENOMEM, or -EMSGSIZE beyond FRAME_MAX with
 * @out as it was. */
int wire_encode(struct buf *out, const struct message *m, const void *msg);

/* Fill @msg from @body. Slices point into @body and live no longer than it. */
int wire_decode(const struct message *m, struct slice body, void *msg, struct err *err);

/* Append "name field=value ..." for people; bytes escaped and cut at 64. */
int wire_print(struct buf *out, const struct message *m, const void *msg);

struct frame {
	unsigned type;
	uint32_t epoch;
	struct slice body; /* into the bytes decoded from */
	size_t len;        /* of the whole frame */
};

/* Append a frame around the fields of @msg. */
int frame_encode(struct buf *out, unsigned type, uint32_t epoch, const struct message *m,
		 const void *msg);

/* Look at the front of @in. 1 with *@ret filled, 0 when more bytes are needed,
 * -EPROTO for another version, -EMSGSIZE for a length beyond FRAME_MAX. */
int frame_decode(struct slice in, struct frame *ret, struct err *err);
