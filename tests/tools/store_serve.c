/*
 * Hosts the key-value store and nothing else: what acceld does on node 0, for
 * tests and benchmarks. Prints "port N" once it listens; ends with its stdin.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/loop.h"
#include "base/opt.h"
#include "rendezvous/store_server.h"

static const struct opt options[] = {
	{ .name = "port", .arg = "N", .group = "Options", .help = "0: a free one" },
};

static int on_option(void *data, const struct opt *o, const char *value, struct err *err)
{
	long long port;

	if (parse_int(&port, value, 0, UINT16_MAX) < 0)
		return err_set(err, -EINVAL, "--%s %s: not a port", o->name, value);
	*(uint16_t *)data = (uint16_t)port;
	return 0;
}

static void on_stdin(void *data, int events)
{
	char bytes[256];

	(void)events;
	if (read(STDIN_FILENO, bytes, sizeof(bytes)) <= 0)
		loop_stop(data);
}

static int serve(uint16_t port, struct err *err)
{
	struct loop *loop = NULL;
	struct watch *input = NULL;
	struct store_server *server = NULL;
	int r = loop_new(&loop, err);

	if (r == 0)
		r = watch_new(&input, loop, STDIN_FILENO, WATCH_READ, on_stdin, loop,
			      err);
	if (r == 0)
		r = store_server_new(&server, loop, port, err);
	if (r == 0) {
		printf("port %u\n", store_server_port(server));
		fflush(stdout);
		loop_run(loop);
	}
	(void)store_server_free(server);
	(void)watch_free(input);
	(void)loop_free(loop);
	return r;
}

int main(int argc, char **argv)
{
	struct err err = { 0 };
	uint16_t port = 0;
	int r = opt_parse(options, 1, argc, argv, on_option, &port, &err);

	if (r >= 0)
		r = serve(port, &err);
	if (r < 0)
		fprintf(stderr, "store_serve: %s\n", err.text);
	return r < 0;
}
