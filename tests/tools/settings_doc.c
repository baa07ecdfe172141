/* Prints docs/settings.md from the table of settings; a test holds them equal. */

#include <stdio.h>

#include "base/buf.h"
#include "config/schema.h"

int main(void)
{
	struct buf out = { 0 };
	int r = schema_print_markdown(&out);

	if (!r && fwrite(buf_data(&out), 1, buf_len(&out), stdout) != buf_len(&out))
		r = -1;
	buf_fini(&out);
	return r < 0;
}
