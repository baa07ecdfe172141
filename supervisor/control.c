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

struct control {
	struct loop *loop;
	int fd;
	bool bound;
	struct watch *watch;
	struct timer *pause;
	struct sockaddr_un addr;
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

static int send_packet(int to, unsigned type, const void *msg, int fd)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct buf out = { 0 };
	struct iovec iov;
	struct msghdr packet = { .msg_iov = &iov, .msg_iovlen = 1 };
	int r = frame_encode(&out, type, 0, message_of(type), msg);

	if (fd >= 0) {
		packet.msg_control = &control;
		packet.msg_controllen = sizeof(control);
		control.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						 .cmsg_level = SOL_SOCKET,
						 .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
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

	return r < 0 ? r : send_packet(c->fd, MSG_STATUS, &status, -1);
}

static int answer_page(struct client *c, const struct msg_page_ask *ask)
{
	int fd = c->control->ops->on_page(c->control->data, ask->rank);
	struct msg_page page = { .rank = ask->rank, .error = fd < 0 ? -fd : 0 };

	return send_packet(c->fd, MSG_PAGE, &page, fd < 0 ? -1 : fd);
}

static int answer(struct client *c, struct slice packet)
{
	union message_any msg;
	struct frame f;

	if (frame_decode(packet, &f, NULL) != 1 || f.len != packet.len)
		return -EBADMSG;
	if (!message_of(f.type)) {
		msg.unknown.type = f.type;
		return send_packet(c->fd, MSG_UNKNOWN, &msg, -1);
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
	struct control *c = data;

	watch_set(c->watch, WATCH_READ);
}

static void on_connection(void *data, int events)
{
	struct control *c = data;
	OWN_FD int fd = accept4(c->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct client *client;

	(void)events;
	/* Out of descriptors, the caller stays at the door: look again later. */
	if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
		watch_set(c->watch, 0);
		timer_start(c->pause, PAUSE_MS);
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

/*
 * Whoever finds a socket that nobody listens on takes its job for dead, so it
 * gets its name only when it listens: it is bound to that name less its ending
 * and renamed.
 */
static int bind_listening(struct control *c, const char *path, struct err *err)
{
	char *dot = c->addr.sun_path + (strrchr(path, '.') - path);

	strcpy(c->addr.sun_path, path);
	if (dot <= c->addr.sun_path)
		return err_set(err, -EINVAL, "control socket %s has no ending", path);
	*dot = 0;
	if (bind(c->fd, (struct sockaddr *)&c->addr, sizeof(c->addr)) < 0)
		return err_sys(err, "bind %s", c->addr.sun_path);
	c->bound = true;
	(void)chmod(c->addr.sun_path, 0600);
	if (listen(c->fd, SOMAXCONN) < 0)
		return err_sys(err, "listen on %s", c->addr.sun_path);
	if (rename(c->addr.sun_path, path) < 0)
		return err_sys(err, "rename %s", c->addr.sun_path);
	strcpy(c->addr.sun_path, path);
	return 0;
}

DEFINE_OWN(control, struct control, control_free)

int control_new(struct control **ret, struct loop *loop, const char *path,
		const struct control_ops *ops, void *data, struct err *err)
{
	OWN(own_control) struct control *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return err_set(err, -ENOMEM, "control socket");
	c->fd = -1;
	c->loop = loop;
	c->ops = ops;
	c->data = data;
	c->addr.sun_family = AF_UNIX;
	if (strlen(path) >= sizeof(c->addr.sun_path))
		return err_set(err, -ENAMETOOLONG, "control socket %s", path);
	c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (c->fd < 0)
		return err_sys(err, "control socket");
	r = bind_listening(c, path, err);
	if (!r)
		r = watch_new(&c->watch, loop, c->fd, WATCH_READ, on_connection, c, err);
	if (!r)
		r = timer_new(&c->pause, loop, on_pause_over, c, err);
	if (r < 0)
		return r;
	*ret = take(c);
	return 0;
}

struct control *control_free(struct control *c)
{
	if (!c)
		return NULL;
	while (c->clients)
		client_free(c->clients);
	c->watch = watch_free(c->watch);
	c->pause = timer_free(c->pause);
	own_close(&c->fd);
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
