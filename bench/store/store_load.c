/*
 * Load for a TCPStore server: one process, one thread, any number of clients of
 * the current dialect. Like PyTorch's own client each has one request under way;
 * what has no reply is followed at once by the next.
 *
 *     store_load PORT MIX CLIENTS MILLISECONDS [idle|stalled]
 *
 * "idle" adds a client that does nothing, "stalled" one that asks for large
 * values and reads none of them. Prints requests made and seconds taken.
 */

#include <endian.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
	MAX_CLIENTS = 1024,
	MAX_REQUEST = 512,
	VALUE_LEN = 128,
	N_KEYS = 64, /* of each client */
	LARGE_LEN = 4 << 20,
	N_LARGE = 64, /* requests for it that are never read */
	SETS = 32,    /* between two replies */
};

enum {
	SET = 1,
	GET = 3,
	ADD = 4,
	WAIT = 6,
	GETNUMKEYS = 7,
};

/* @times in a row of @op, the last one's reply being @reply bytes. */
struct step {
	uint8_t op;
	int times;
	size_t reply;
};

static const struct mix {
	const char *name;
	struct step steps[2];
} mixes[] = {
	{ "set", { { SET, SETS, 0 }, { GETNUMKEYS, 1, 8 } } },
	{ "add", { { ADD, 1, 8 }, { ADD, 1, 8 } } },
	{ "get", { { WAIT, 1, 1 }, { GET, 1, 8 + VALUE_LEN } } },
};

struct client {
	int fd, id;
	int step, done; /* @done times of this step */
	unsigned turn;
	size_t expected; /* bytes of the reply still to come */
};

static const uint8_t hello[] = { 0, 0xCE, 0xF7, 0x85, 0x3C };
static const uint8_t value[VALUE_LEN];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void send_all(int fd, const void *data, size_t len)
{
	while (len) {
		ssize_t n = send(fd, data, len, MSG_NOSIGNAL);

		if (n < 0)
			die("send");
		data = (const char *)data + n;
		len -= (size_t)n;
	}
}

static void receive_all(int fd, size_t len)
{
	static char sink[64 << 10];

	while (len) {
		ssize_t n = recv(fd, sink, len < sizeof(sink) ? len : sizeof(sink), 0);

		if (n <= 0)
			die("recv");
		len -= (size_t)n;
	}
}

static uint8_t *put_u64(uint8_t *at, uint64_t v)
{
	v = htole64(v);
	memcpy(at, &v, sizeof(v));
	return at + sizeof(v);
}

static uint8_t *put_bytes(uint8_t *at, const void *data, size_t len)
{
	at = put_u64(at, len);
	memcpy(at, data, len);
	return at + len;
}

static size_t build(uint8_t *request, uint8_t op, const char *key)
{
	uint8_t *at = request;

	*at++ = op;
	if (op == WAIT)
		at = put_u64(at, 1);
	if (op != GETNUMKEYS)
		at = put_bytes(at, key, strlen(key));
	if (op == SET)
		at = put_bytes(at, value, sizeof(value));
	if (op == ADD)
		at = put_u64(at, 1);
	return (size_t)(at - request);
}

static void key_of(char key[64], const struct client *c, uint8_t op, unsigned turn)
{
	snprintf(key, 64, "//%s/%d/%u", op == ADD ? "count" : "default_pg/0//cpu//0",
		 c->id, turn % N_KEYS);
}

static void ask(struct client *c, uint8_t op)
{
	uint8_t request[MAX_REQUEST];
	char key[64];

	key_of(key, c, op, c->turn);
	send_all(c->fd, request, build(request, op, key));
}

/* Make requests until one has a reply. Returns how many. */
static int go_on(struct client *c, const struct mix *m)
{
	int n = 0;

	while (!c->expected) {
		const struct step *s = &m->steps[c->step];

		ask(c, s->op);
		n++;
		c->expected = s->reply;
		c->turn += s->op != WAIT; /* a GET asks for what was waited for */
		if (++c->done == s->times) {
			c->done = 0;
			c->step = !c->step;
		}
	}
	return n;
}

static int connect_to(uint16_t port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
		die("connect");
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	send_all(fd, hello, sizeof(hello));
	return fd;
}

/* Every key that will be asked for has a value. */
static void fill_keys(struct client *c)
{
	for (c->turn = 0; c->turn < N_KEYS; c->turn++)
		ask(c, SET);
	c->turn = 0;
	ask(c, GETNUMKEYS);
	receive_all(c->fd, sizeof(uint64_t));
}

static void stall(int fd)
{
	static const char key[] = "//large";
	uint8_t *large = calloc(1, LARGE_LEN), request[MAX_REQUEST];
	uint8_t *at = request;

	if (!large)
		die("calloc");
	*at++ = SET;
	at = put_bytes(at, key, strlen(key));
	at = put_u64(at, LARGE_LEN);
	send_all(fd, request, (size_t)(at - request));
	send_all(fd, large, LARGE_LEN);
	free(large);
	for (int i = 0; i < N_LARGE; i++)
		send_all(fd, request, build(request, GET, key));
}

static void on_reply(struct client *c)
{
	char reply[4096];
	ssize_t n = recv(c->fd, reply, c->expected, 0);

	if (n <= 0)
		die("recv");
	c->expected -= (size_t)n;
}

static uint64_t run(struct client *clients, int n, int poll_fd, const struct mix *m,
		    double end)
{
	struct epoll_event events[MAX_CLIENTS];
	uint64_t requests = 0;

	for (int i = 0; i < n; i++)
		requests += (uint64_t)go_on(&clients[i], m);
	while (now() < end) {
		int ready = epoll_wait(poll_fd, events, MAX_CLIENTS, -1);

		if (ready < 0 && errno != EINTR)
			die("epoll_wait");
		for (int i = 0; i < ready; i++) {
			struct client *c = events[i].data.ptr;

			on_reply(c);
			if (!c->expected)
				requests += (uint64_t)go_on(c, m);
		}
	}
	for (int i = 0; i < n; i++)
		receive_all(clients[i].fd, clients[i].expected);
	return requests;
}

static const struct mix *find_mix(const char *name)
{
	for (size_t i = 0; i < sizeof(mixes) / sizeof(mixes[0]); i++)
		if (!strcmp(mixes[i].name, name))
			return &mixes[i];
	fprintf(stderr, "store_load: no mix called %s\n", name);
	exit(2);
}

int main(int argc, char **argv)
{
	static struct client clients[MAX_CLIENTS];
	int poll_fd = epoll_create1(EPOLL_CLOEXEC);

	if (argc < 5) {
		fprintf(stderr, "usage: store_load PORT MIX CLIENTS MILLISECONDS "
				"[idle|stalled]\n");
		return 2;
	}
	uint16_t port = (uint16_t)atoi(argv[1]);
	const struct mix *m = find_mix(argv[2]);
	int n = atoi(argv[3]);

	if (n < 1 || n > MAX_CLIENTS) {
		fprintf(stderr, "store_load: 1 to %d clients\n", MAX_CLIENTS);
		return 2;
	}
	for (int i = 0; i < n; i++) {
		struct epoll_event e = { .events = EPOLLIN, .data.ptr = &clients[i] };

		clients[i] = (struct client){ .fd = connect_to(port), .id = i };
		fill_keys(&clients[i]);
		if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, clients[i].fd, &e) < 0)
			die("epoll_ctl");
	}
	if (argc > 5) {
		int fd = connect_to(port);

		if (!strcmp(argv[5], "stalled"))
			stall(fd);
	}
	/* The caller reads the server's clocks between these lines. */
	printf("ready\n");
	fflush(stdout);
	(void)getchar();

	double start = now();
	uint64_t requests = run(clients, n, poll_fd, m, start + atoi(argv[4]) / 1e3);

	printf("%llu %.6f\n", (unsigned long long)requests, now() - start);
	fflush(stdout);
	(void)getchar();
	return 0;
}
