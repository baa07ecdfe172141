/*
 * Encoding, decoding and printing of messages from their tables. Knows no
 * message and no socket.
 */

#include "rendezvous/wire.h"

#include <ctype.h>
#include <endian.h>
#include <errno.h>

#include "base/err.h"

enum { PRINT_MAX = 64 };

static int put_u32(struct buf *out, uint32_t val)
{
	uint32_t be = htobe32(val);

	return buf_add(out, &be, sizeof(be));
}

static int put_u64(struct buf *out, uint64_t val)
{
	uint64_t be = htobe64(val);

	return buf_add(out, &be, sizeof(be));
}

static int put_bytes(struct buf *out, struct slice s)
{
	int r;

	if (s.len > FRAME_MAX)
		return -EMSGSIZE;
	r = put_u32(out, (uint32_t)s.len);
	return r < 0 ? r : buf_add(out, s.data, s.len);
}

static int put_field(struct buf *out, const struct field *f, const void *msg)
{
	const void *member = (const char *)msg + f->offset;
	const struct slice_list *list = member;
	int r;

	switch (f->kind) {
	case F_U32:
	case F_I32:
		return put_u32(out, *(const uint32_t *)member);
	case F_U64:
		return put_u64(out, *(const uint64_t *)member);
	case F_BYTES:
		return put_bytes(out, *(const struct slice *)member);
	case F_LIST:
	case F_SECRET:
		r = put_u32(out, list->n);
		return r < 0 ? r : put_bytes(out, list->body);
	}
	return -EINVAL;
}

int wire_encode(struct buf *out, const struct message *m, const void *msg)
{
	size_t before = buf_len(out);
	int r = 0;

	for (size_t i = 0; i < m->n_fields && !r; i++)
		r = put_field(out, &m->fields[i], msg);
	if (!r && buf_len(out) - before > FRAME_MAX)
		r = -EMSGSIZE;
	if (r < 0)
		out->end = out->start + before;
	return r;
}

static int take_bytes(struct slice *in, const uint8_t **ret, size_t len)
{
	if (in->len < len)
		return -EBADMSG;
	*ret = in->data;
	in->data += len;
	in->len -= len;
	return 0;
}

static int get_u32(struct slice *in, uint32_t *ret)
{
	const uint8_t *p;
	uint32_t be;
	int r = take_bytes(in, &p, sizeof(be));

	if (r < 0)
		return r;
	memcpy(&be, p, sizeof(be));
	*ret = be32toh(be);
	return 0;
}

static int get_u64(struct slice *in, uint64_t *ret)
{
	const uint8_t *p;
	uint64_t be;
	int r = take_bytes(in, &p, sizeof(be));

	if (r < 0)
		return r;
	memcpy(&be, p, sizeof(be));
	*ret = be64toh(be);
	return 0;
}

static int get_bytes(struct slice *in, struct slice *ret)
{
	uint32_t len;
	int r = get_u32(in, &len);

	if (r < 0)
		return r;
	ret->len = len;
	return take_bytes(in, &ret->data, len);
}

/* The list is walked once here, so that slice_list_next() cannot fail. */
static int get_list(struct slice *in, struct slice_list *ret)
{
	struct slice body, one;
	int r = get_u32(in, &ret->n);

	if (r < 0)
		return r;
	r = get_bytes(in, &ret->body);
	body = ret->body;
	for (uint32_t i = 0; i < ret->n && !r; i++)
		r = get_bytes(&body, &one);
	return !r && body.len ? -EBADMSG : r;
}

static int get_field(struct slice *in, const struct field *f, void *msg)
{
	void *member = (char *)msg + f->offset;

	switch (f->kind) {
	case F_U32:
	case F_I32:
		return get_u32(in, member);
	case F_U64:
		return get_u64(in, member);
	case F_BYTES:
		return get_bytes(in, member);
	case F_LIST:
	case F_SECRET:
		return get_list(in, member);
	}
	return -EINVAL;
}

int wire_decode(const struct message *m, struct slice body, void *msg, struct err *err)
{
	memset(msg, 0, m->size);
	for (size_t i = 0; i < m->n_fields && body.len; i++) {
		int r = get_field(&body, &m->fields[i], msg);

		if (r < 0) {
			/* Nothing half-read may be used. */
			memset(msg, 0, m->size);
			return err_set(err, r, "%s.%s is malformed", m->name,
				       m->fields[i].name);
		}
	}
	return 0;
}

bool slice_list_next(struct slice_list *list, struct slice *ret)
{
	if (!list->n)
		return false;
	list->n--;
	return get_bytes(&list->body, ret) == 0;
}

int slice_list_add(struct buf *body, uint32_t *n, const void *data, size_t len)
{
	size_t before = buf_len(body);
	int r = put_bytes(body, slice_of(data, len));

	if (r < 0)
		body->end = body->start + before;
	else
		++*n;
	return r;
}

static int print_bytes(struct buf *out, struct slice s)
{
	size_t shown = s.len < PRINT_MAX ? s.len : PRINT_MAX;
	int r = buf_add_str(out, "\"");

	for (size_t i = 0; i < shown && !r; i++) {
		if (isprint(s.data[i]) && s.data[i] != '"' && s.data[i] != '\\')
			r = buf_add(out, &s.data[i], 1);
		else
			r = buf_addf(out, "\\x%02x", s.data[i]);
	}
	if (r < 0)
		return r;
	return shown < s.len ? buf_addf(out, "\"...(%zu bytes)", s.len)
			     : buf_add_str(out, "\"");
}

static int print_list(struct buf *out, struct slice_list list)
{
	struct slice one;
	int r = buf_add_str(out, "[");

	for (int i = 0; !r && slice_list_next(&list, &one); i++) {
		if (i)
			r = buf_add_str(out, ", ");
		if (!r)
			r = print_bytes(out, one);
	}
	return r < 0 ? r : buf_add_str(out, "]");
}

static int print_field(struct buf *out, const struct field *f, const void *msg)
{
	const void *member = (const char *)msg + f->offset;

	switch (f->kind) {
	case F_U32:
		return buf_addf(out, "%u", *(const uint32_t *)member);
	case F_I32:
		return buf_addf(out, "%d", *(const int32_t *)member);
	case F_U64:
		return buf_addf(out, "%llu",
				(unsigned long long)*(const uint64_t *)member);
	case F_BYTES:
		return print_bytes(out, *(const struct slice *)member);
	case F_LIST:
		return print_list(out, *(const struct slice_list *)member);
	case F_SECRET:
		return buf_addf(out, "(%u, not shown)",
				((const struct slice_list *)member)->n);
	}
	return -EINVAL;
}

int wire_print(struct buf *out, const struct message *m, const void *msg)
{
	int r = buf_add_str(out, m->name);

	for (size_t i = 0; i < m->n_fields && !r; i++) {
		r = buf_addf(out, " %s=", m->fields[i].name);
		if (!r)
			r = print_field(out, &m->fields[i], msg);
	}
	return r;
}

int frame_encode(struct buf *out, unsigned type, uint32_t epoch, const struct message *m,
		 const void *msg)
{
	size_t before = buf_len(out);
	uint16_t be_type = htobe16((uint16_t)type);
	uint32_t be_epoch = htobe32(epoch), be_len = 0;
	uint8_t head[FRAME_HEADER] = { WIRE_VERSION };
	int r;

	memcpy(head + 2, &be_type, sizeof(be_type));
	memcpy(head + 4, &be_epoch, sizeof(be_epoch));
	r = buf_add(out, head, sizeof(head));
	if (r < 0)
		return r;
	r = wire_encode(out, m, msg);
	if (r < 0) {
		out->end = out->start + before;
		return r;
	}
	be_len = htobe32((uint32_t)(buf_len(out) - before - FRAME_HEADER));
	memcpy(buf_data(out) + before + 8, &be_len, sizeof(be_len));
	return 0;
}

int frame_decode(struct slice in, struct frame *ret, struct err *err)
{
	uint16_t be_type;
	uint32_t be_epoch, be_len;

	if (in.len && in.data[0] != WIRE_VERSION)
		return err_set(err, -EPROTO,
			       "the peer speaks version %u of the protocol, not %d",
			       in.data[0], WIRE_VERSION);
	if (in.len < FRAME_HEADER)
		return 0;
	memcpy(&be_type, in.data + 2, sizeof(be_type));
	memcpy(&be_epoch, in.data + 4, sizeof(be_epoch));
	memcpy(&be_len, in.data + 8, sizeof(be_len));
	if (be32toh(be_len) > FRAME_MAX)
		return err_set(err, -EMSGSIZE, "a frame of %u bytes is over the limit",
			       be32toh(be_len));
	if (in.len - FRAME_HEADER < be32toh(be_len))
		return 0;
	*ret = (struct frame){
		.type = be16toh(be_type),
		.epoch = be32toh(be_epoch),
		.body = { in.data + FRAME_HEADER, be32toh(be_len) },
		.len = FRAME_HEADER + (size_t)be32toh(be_len),
	};
	return 1;
}
