/* Frames and messages from a peer that means harm. */

#include "rendezvous/messages.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct slice in = slice_of(data, size);
	struct frame f;

	while (frame_decode(in, &f, NULL) == 1) {
		const struct message *m = message_of(f.type);
		union message_any msg;
		struct buf text = { 0 }, again = { 0 };

		if (m && wire_decode(m, f.body, &msg, NULL) == 0) {
			(void)wire_print(&text, m, &msg);
			(void)wire_encode(&again, m, &msg);
		}
		buf_fini(&text);
		buf_fini(&again);
		in.data += f.len;
		in.len -= f.len;
	}
	return 0;
}
