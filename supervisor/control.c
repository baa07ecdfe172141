#include "supervisor/control.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"

enum { MAX_CLIENTS = 256, PACKET_MAX = 4096, PAUSE_MS = 100 };

struct client {
	struct control *control;
	int fd;
	struct watch *watch;
	struct client *next;
};

struct listener {
	struct control *control;
	int fd;
	struct watch *watch;
	struct timer *pause;
};

struct control {
	struct loop *loop;
	struct listener by_path, by_name;
	bool bound;
	struct sockaddr_un addr; /* of the path */
	const struct control_ops *ops;
	void *data;
	struct client *clients;
	int n_clients;
};

static void client_free(struct client *c)
{
	struct client **at = &c->control->clients;

	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	c->control->n_clients--;
	c->watch = watch_free(c->watch);
	own_close(&c->fd);
	free(c);
}

/* With those of @fds that are open; NULL: none. */
static int send_packet(int to, unsigned type, const void *msg, const int *fds)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(PAGE_FDS * sizeof(int))];
	} control = { 0 };
	struct buf out = { 0 };
	struct iovec iov;
	struct msghdr packet = { .msg_iov = &iov, .msg_iovlen = 1 };
	size_t n = 0;
	int r = frame_encode(&out, type, 0, message_of(type), msg);

	while (fds && n < PAGE_FDS && fds[n] >= 0)
		n++;
	if (n) {
		packet.msg_control = &control;
		packet.msg_controllen = CMSG_SPACE(n * sizeof(int));
		control.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(n * sizeof(int)),
						 .cmsg_level = SOL_SOCKET,
						 .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.head), fds, n * sizeof(int));
	}
	iov = (struct iovec){ buf_data(&out), buf_len(&out) };
	if (!r && sendmsg(to, &packet, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
		r = -errno;
	buf_fini(&out);
	return r;
}

static int answer_status(struct client *c)
{
	struct msg_status status;
	int r = c->control->ops->on_status(c->control->data, &status);

	return r < 0 ? r : send_packet(c->fd, MSG_STATUS, &status, NULL);
}

static int answer_page(struct client *c, const struct msg_page_ask *ask)
{
	int fds[PAGE_FDS];
	int r = c->control->ops->on_page(c->control->data, ask->rank, fds);
	struct msg_page page = { .rank = ask->rank, .error = -r };

	return send_packet(c->fd, MSG_PAGE, &page, r < 0 ? NULL : fds);
}

static int answer(struct client *c, struct slice packet)
{
	union message_any msg;
	struct frame f;

	if (frame_decode(packet, &f, NULL) != 1 || f.len != packet.len)
		return -EBADMSG;
	if (!message_of(f.type)) {
		msg.unknown.type = f.type;
		return send_packet(c->fd, MSG_UNKNOWN, &msg, NULL);
	}
	if (wire_decode(message_of(f.type), f.body, &msg, NULL) < 0)
		return -EBADMSG;
	switch (f.type) {
	case MSG_STATUS_ASK:
		return answer_status(c);
	case MSG_PAGE_ASK:
		return answer_page(c, &msg.page_ask);
	default:
		return -EBADMSG;
	}
}

static void on_packet(void *data, int events)
{
	struct client *c = data;
	uint8_t bytes[PACKET_MAX];
	ssize_t n = recv(c->fd, bytes, sizeof(bytes), MSG_DONTWAIT);

	(void)events;
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0 || answer(c, slice_of(bytes, (size_t)n)) < 0)
		client_free(c);
}

static bool is_ours(int fd)
{
	struct ucred peer;
	socklen_t len = sizeof(peer);

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 &&
	       (peer.uid == geteuid() || peer.uid == 0);
}

static void on_pause_over(void *data)
{
	struct listener *l = data;

	watch_set(l->watch, WATCH_READ);
}

static void on_connection(void *data, int events)
{
	struct listener *l = data;
	struct control *c = l->control;
	OWN_FD int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct client *client;

	(void)events;
	/* Out of descriptors, the caller stays at the door: look again later. */
	if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
		watch_set(l->watch, 0);
		timer_start(l->pause, PAUSE_MS);
	}
	if (fd < 0 || !is_ours(fd) || c->n_clients >= MAX_CLIENTS)
		return;
	client = calloc(1, sizeof(*client));
	if (!client)
		return;
	client->control = c;
	client->fd = fd;
	if (watch_new(&client->watch, c->loop, fd, WATCH_READ, on_packet, client, NULL) <
	    0) {
		free(client);
		return;
	}
	(void)take_fd(&fd);
	client->next = c->clients;
	c->clients = client;
	c->n_clients++;
}

static int listener_open(struct listener *l, struct err *err)
{
	l->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return l->fd < 0 ? err_sys(err, "control socket") : 0;
}

static int listener_watch(struct listener *l, struct err *err)
{
	int r = watch_new(&l->watch, l->control->loop, l->fd, WATCH_READ, on_connection,
			  l, err);

	if (!r)
		r = timer_new(&l->pause, l->control->loop, on_pause_over, l, err);
	return r;
}

static void listener_close(struct listener *l)
{
	l->watch = watch_free(l->watch);
	l->pause = timer_free(l->pause);
	own_close(&l->fd);
}

/*
 * Whoever finds a socket that nobody listens on takes its job for dead, so it
 * gets its name only when it listens: it is bound to that name less its ending
 * and renamed.
 */
static int bind_listening(struct control *c, const char *path, struct err *err)
{
	char *dot = c->addr.sun_path + (strrchr(path, '.') - path);
	int fd = c->by_path.fd;

	strcpy(c->addr.sun_path, path);
	if (dot <= c->addr.sun_path)
		return err_set(err, -EINVAL, "control socket %s has no ending", path);
	*dot = 0;
	if (bind(fd, (struct sockaddr *)&c->addr, sizeof(c->addr)) < 0)
		return err_sys(err, "bind %s", c->addr.sun_path);
	c->bound = true;
	(void)chmod(c->addr.sun_path, 0600);
	if (listen(fd, SOMAXCONN) < 0)
		return err_sys(err, "listen on %s", c->addr.sun_path);
	if (rename(c->addr.sun_path, path) < 0)
		return err_sys(err, "rename %s", c->addr.sun_path);
	strcpy(c->addr.sun_path, path);
	return 0;
}

static int open_path(struct control *c, const char *path, struct err *err)
{
	int r = listener_open(&c->by_path, err);

	if (!r)
		r = bind_listening(c, path, err);
	if (!r)
		r = listener_watch(&c->by_path, err);
	return r;
}

/* A further way in, and no loss where it is not to be had: somebody may sit on the
 * name. */
static void open_name(struct control *c, const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	size_t len = strlen(path);

	memcpy(addr.sun_path + 1, path, len);
	if (listener_open(&c->by_name, NULL) < 0 ||
	    bind(c->by_name.fd, (struct sockaddr *)&addr,
		 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)) < 0 ||
	    listen(c->by_name.fd, SOMAXCONN) < 0 || listener_watch(&c->by_name, NULL) < 0)
		listener_close(&c->by_name);
}

DEFINE_OWN(control, struct control, control_free)

int control_new(struct control **ret, struct loop *loop, const char *path,
		const struct control_ops *ops, void *data, struct err *err)
{
	OWN(own_control) struct control *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return err_set(err, -ENOMEM, "control socket");
	c->by_path = c->by_name = (struct listener){ .control = c, .fd = -1 };
	c->loop = loop;
	c->ops = ops;
	c->data = data;
	c->addr.sun_family = AF_UNIX;
	if (strlen(path) >= sizeof(c->addr.sun_path))
		return err_set(err, -ENAMETOOLONG, "control socket %s", path);
	r = open_path(c, path, err);
	if (r < 0)
		return r;
	open_name(c, path);
	*ret = take(c);
	return 0;
}

struct control *control_free(struct control *c)
{
	if (!c)
		return NULL;
	while (c->clients)
		client_free(c->clients);
	listener_close(&c->by_path);
	listener_close(&c->by_name);
	if (c->bound)
		(void)unlink(c->addr.sun_path);
	free(c);
	return NULL;
}

void control_remove(const char *path)
{
	char before[sizeof(((struct sockaddr_un *)0)->sun_path)];
	char *dot;

	(void)unlink(path);
	(void)snprintf(before, sizeof(before), "%s", path);
	dot = strrchr(before, '.');
	if (dot)
		*dot = 0;
	(void)unlink(before);
}
