/*
 * The way to the memory shared with the other ranks and the supervisor.
 *
 * Under accel: the descriptors that were inherited; else, when something between
 * accel and us has closed them, the job's control socket, by path or by abstract
 * name. Under other launchers the lowest local rank makes the ring and hands it out
 * over an abstract socket whose name all ranks can compute.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/own.h"
#include "runtime/world.h"

enum { RETRY_MS = 10, KNOCK_MS = 100, ANSWER_MS = 5000 };

/* ---- checking what a descriptor is ---------------------------------------------- */

/* Sealed shared memory; of @inode, unless that is 0. */
static bool is_shared_file(int fd, uint64_t inode)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &st) == 0 &&
	       (!inode || st.st_ino == inode);
}

static void *map_file(int fd, size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		return NULL;
	(void)madvise(p, size, MADV_DONTFORK);
	(void)madvise(p, size, MADV_DONTDUMP);
	return p;
}

/* 1 and w->page is set, 0 it is something else, or ACCEL_E_VERSION. */
static int use_page(accel_world *w, int fd, int rank, uint64_t inode)
{
	struct control_page *page;
	struct stat st;

	if (fd < 0 || !is_shared_file(fd, inode) || fstat(fd, &st) < 0 ||
	    st.st_size < PAGE_SIZE)
		return 0;
	page = map_file(fd, PAGE_SIZE);
	if (!page)
		return 0;
	if (page->magic == PAGE_MAGIC && page->version != PAGE_VERSION) {
		int r = fail(
			ACCEL_E_VERSION,
			"acceld wrote version %u of the control page, and libaccel %s "
			"reads version %d: install both from the same release",
			page->version, ACCEL_VERSION, PAGE_VERSION);

		(void)munmap(page, PAGE_SIZE);
		return r;
	}
	if (page->magic != PAGE_MAGIC || page->size < sizeof(*page) ||
	    (int)page->rank != rank) {
		(void)munmap(page, PAGE_SIZE);
		return 0;
	}
	w->page = page;
	return 1;
}

static bool is_sound(const struct ring_page *ring, uint64_t file_size)
{
	uint64_t slots = (uint64_t)ring->n_ranks * RING_SLOTS *
			 (SLOT_HEAD + (uint64_t)ring->slot_bytes);

	return ring->magic == RING_MAGIC && ring->n_ranks >= 1 &&
	       ring->n_ranks <= MAX_LOCAL_RANKS && ring->n_slots == RING_SLOTS &&
	       ring->slot_bytes >= 4096 && ring->slot_bytes <= 1 << 24 &&
	       ring->slot_bytes % 4096 == 0 && ring->chunk_bytes >= 4096 &&
	       ring->chunk_bytes <= ring->slot_bytes && ring->chunk_bytes % 4096 == 0 &&
	       ring->cells >= sizeof(*ring) && ring->cells < file_size &&
	       ring->slots < file_size && ring->cells % CACHE_LINE == 0 &&
	       ring->slots % CACHE_LINE == 0 &&
	       ring->slots >= ring->cells + (uint64_t)ring->n_ranks * CELL_BYTES &&
	       ring->arenas >= ring->slots + slots && ring->arenas <= file_size &&
	       ring->arena_bytes <= (file_size - ring->arenas) / ring->n_ranks;
}

/* 1 and w->ring is set; it keeps @fd. 0 it is something else, or ACCEL_E_VERSION. */
static int use_ring(accel_world *w, int fd, uint64_t inode)
{
	struct ring_page head;
	struct stat st;
	int own;

	if (fd < 0 || !is_shared_file(fd, inode) || fstat(fd, &st) < 0 ||
	    pread(fd, &head, sizeof(head), 0) != sizeof(head))
		return 0;
	if (head.magic == RING_MAGIC && head.version != RING_VERSION)
		return fail(ACCEL_E_VERSION,
			    "the ring has version %u, and libaccel %s reads version %d: "
			    "install acceld and libaccel from the same release",
			    head.version, ACCEL_VERSION, RING_VERSION);
	if (!is_sound(&head, (uint64_t)st.st_size) ||
	    (int)head.n_ranks != w->local_size ||
	    (w->page && memcmp(head.nonce, w->page->nonce, NONCE_SIZE) != 0))
		return 0;
	own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (own < 0)
		return 0;
	w->ring = map_file(own, head.arenas);
	if (!w->ring) {
		own_close(&own);
		return 0;
	}
	w->ring_mapped = head.arenas;
	w->ring_fd = own;
	return 1;
}

/* ---- sockets ------------------------------------------------------------------------
 */

/* The address of a path, or of the abstract name of that text. */
static socklen_t address_of(struct sockaddr_un *a, const char *name, bool is_abstract)
{
	size_t len = strlen(name);

	*a = (struct sockaddr_un){ .sun_family = AF_UNIX };
	if (!len || len + 1 > sizeof(a->sun_path))
		return 0;
	memcpy(a->sun_path + is_abstract, name, len);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + is_abstract + len +
			   !is_abstract);
}

static bool is_same_user(int fd)
{
	struct ucred peer;
	socklen_t len = sizeof(peer);

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 &&
	       (peer.uid == geteuid() || peer.uid == 0);
}

/* A connected socket, or -errno. */
static int connect_to(const char *name, bool is_abstract)
{
	OWN_FD int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct sockaddr_un a;
	socklen_t len = address_of(&a, name, is_abstract);

	if (!len)
		return -ENAMETOOLONG;
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, len) < 0)
		return -errno;
	if (!is_same_user(fd))
		return -EPERM;
	return take_fd(&fd);
}

/* One packet with up to @n descriptors (-1 where there is none). Its length, or
 * -errno. */
static ssize_t receive_with(int fd, void *data, size_t size, int *fds, int n)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(4 * sizeof(int))];
	} control;
	struct iovec iov = { data, size };
	struct msghdr m = { .msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control) };
	struct pollfd p = { .fd = fd, .events = POLLIN };
	ssize_t len;

	for (int i = 0; i < n; i++)
		fds[i] = -1;
	do
		len = poll(&p, 1, ANSWER_MS);
	while (len < 0 && errno == EINTR);
	if (len <= 0)
		return len ? -errno : -ETIMEDOUT;
	len = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
	if (len < 0)
		return -errno;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		int got[4], n_got = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		memcpy(got, CMSG_DATA(c), (size_t)n_got * sizeof(int));
		for (int i = 0; i < n_got; i++) {
			if (i < n)
				fds[i] = got[i];
			else
				own_close(&got[i]);
		}
	}
	return len;
}

/* ---- under accel --------------------------------------------------------------------
 */

static bool number_in(const char *name, uint64_t *ret)
{
	const char *text = getenv(name);
	char *end;

	if (!text || !*text)
		return false;
	errno = 0;
	*ret = strtoull(text, &end, 10);
	return !errno && !*end;
}

static int use_inherited(accel_world *w)
{
	uint64_t fd, inode;
	int r;

	if (!number_in("ACCEL_CONTROL_FD", &fd) || fd > INT32_MAX ||
	    !number_in("ACCEL_CONTROL_INO", &inode))
		return 0;
	r = use_page(w, (int)fd, w->rank, inode);
	if (r <= 0)
		return r;
	(void)fcntl((int)fd, F_SETFD, FD_CLOEXEC);
	r = use_ring(w, w->page->ring_fd, w->page->ring_inode);
	if (r > 0)
		(void)fcntl(w->page->ring_fd, F_SETFD, FD_CLOEXEC);
	return r;
}

static int ask_supervisor(accel_world *w, const char *name, bool is_abstract)
{
	OWN_FD int fd = connect_to(name, is_abstract), page = -1, ring = -1;
	struct page_ask ask = { .version = PAGE_WIRE_VERSION,
				.type = htons(PAGE_ASK_TYPE),
				.length = htonl(sizeof(ask.rank)),
				.rank = htonl((uint32_t)w->rank) };
	struct page_answer answer = { 0 };
	int fds[2], r;

	if (fd < 0 || send(fd, &ask, sizeof(ask), MSG_NOSIGNAL) != sizeof(ask) ||
	    receive_with(fd, &answer, sizeof(answer), fds, 2) < 0)
		return 0;
	page = fds[0];
	ring = fds[1];
	if (ntohs(answer.type) != PAGE_ANSWER_TYPE || answer.error)
		return 0;
	r = w->page ? 1 : use_page(w, page, w->rank, 0);
	return r <= 0 ? r : use_ring(w, ring, 0);
}

static int find_under_accel(accel_world *w)
{
	const char *path = getenv("ACCEL_SOCKET");
	int r = use_inherited(w);

	if (!r && w->page && w->size == 1)
		return 0; /* nobody to share a ring with */
	if (!r && path)
		r = ask_supervisor(w, path, false);
	if (!r && path)
		r = ask_supervisor(w, path, true);
	if (r || w->size == 1)
		return r < 0 ? r : 0;
	if (w->page && w->page->ring_fd < 0)
		return fail(ACCEL_E_UNREACHABLE,
			    "acceld has no shared memory for the ranks of this machine; "
			    "why, it said when the job started");
	return fail(
		ACCEL_E_UNREACHABLE,
		"the memory that acceld shares with its workers cannot be reached from "
		"here (another container?): neither descriptor %s nor socket %s leads to "
		"it",
		getenv("ACCEL_CONTROL_FD") ?: "(none)", path ?: "(none)");
}

/* ---- under other launchers ------------------------------------------------------------
 */

/* The text that is the same on all ranks of this job here, and no other's. */
static void job_text(const struct identity *id, char *text, size_t size)
{
	static const char *const names[] = {
		"TORCHELASTIC_RUN_ID",
		"TORCHELASTIC_RESTART_COUNT",
		"MASTER_ADDR",
		"MASTER_PORT",
		"GROUP_RANK",
		"PMIX_NAMESPACE",
		"OMPI_MCA_ess_base_jobid",
		"OMPI_MCA_orte_hnp_uri",
		"SLURM_JOB_ID",
		"SLURM_STEP_ID",
		"ACCEL_ATTEMPT",
	};
	size_t n = (size_t)snprintf(text, size, "%u/%s/%d/%d", geteuid(), id->launcher,
				    id->size, id->local_size);

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && n < size; i++)
		n += (size_t)snprintf(text + n, size - n, "/%s", getenv(names[i]) ?: "");
	/* Hydra says nothing that names the job; its ranks have one parent. */
	if (strcmp(id->launcher, "hydra") == 0 && n < size)
		(void)snprintf(text + n, size - n, "/%d/%llu", getppid(),
			       (unsigned long long)start_time_of(getppid()));
}

static void socket_name(const struct identity *id, char *name, size_t size)
{
	uint64_t a = HASH_START, b = UINT64_C(0x9e3779b97f4a7c15);
	char text[4096];

	job_text(id, text, sizeof(text));
	for (const char *s = text; *s; s++) {
		a = hash_byte(a, (uint8_t)*s);
		b = (b + (uint8_t)*s) * UINT64_C(0xbf58476d1ce4e5b9);
		b ^= b >> 29;
	}
	(void)snprintf(name, size, "accel-ring-%016llx%016llx", (unsigned long long)a,
		       (unsigned long long)b);
}

static int send_ring(int to, int ring)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { .head = { .cmsg_len = CMSG_LEN(sizeof(int)),
				.cmsg_level = SOL_SOCKET,
				.cmsg_type = SCM_RIGHTS } };
	struct iovec iov = { (char[]){ 1 }, 1 };
	struct msghdr m = { .msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = CMSG_SPACE(sizeof(int)) };

	memcpy(CMSG_DATA(&control.head), &ring, sizeof(ring));
	return sendmsg(to, &m, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* Give the ring to the rank at the door, once. The rank that asks twice is the next
 * program of the same wrapper: it has to wait for ours to follow. False when nobody
 * can be let in. */
static bool serve_one(int listener, int ring, bool *served, int n, int *left)
{
	OWN_FD int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	struct pollfd p = { .fd = fd, .events = POLLIN };
	uint32_t rank;

	/* Out of descriptors or memory, the caller would stay at the door. */
	if (fd < 0)
		return errno == EINTR || errno == ECONNABORTED || errno == EAGAIN;
	/* A rank says who it is in the same moment; who does not is a stranger. */
	if (!is_same_user(fd) || poll(&p, 1, KNOCK_MS) <= 0 ||
	    recv(fd, &rank, sizeof(rank), MSG_DONTWAIT) != sizeof(rank))
		return true;
	if (rank >= (uint32_t)n || served[rank] || send_ring(fd, ring) < 0)
		return true;
	served[rank] = true;
	(*left)--;
	return true;
}

static int not_come(const accel_world *w, const bool *served)
{
	char who[512] = "";
	size_t n = 0;

	for (int r = 1; r < w->local_size && n < sizeof(who); r++)
		if (!served[r])
			n += (size_t)snprintf(who + n, sizeof(who) - n, " %d", r);
	return fail(ACCEL_E_TIMEOUT,
		    "joining: waited %d s (ACCEL_TIMEOUT) for local rank%s", w->timeout_s,
		    who);
}

static int serve_all(accel_world *w, int listener, int ring)
{
	uint64_t looked_ms = now_ms();
	uint64_t deadline = looked_ms + (uint64_t)w->timeout_s * 1000;
	bool served[MAX_LOCAL_RANKS] = { true };
	int left = w->local_size - 1;

	while (left) {
		struct pollfd p = { .fd = listener, .events = POLLIN };
		int n = poll(&p, 1, 100);

		/* Whoever keeps knocking must not keep us from either. */
		if (n <= 0 || now_ms() - looked_ms >= 100) {
			looked_ms = now_ms();
			if (wants_to_give_up())
				return fail(ACCEL_E_INTERRUPTED, "joining: interrupted");
			if (looked_ms >= deadline)
				return not_come(w, served);
		}
		if (n > 0 && !serve_one(listener, ring, served, w->local_size, &left))
			return fail(ACCEL_E_UNREACHABLE, "joining: accept: %s",
				    strerror(errno));
	}
	return 0;
}

static int bind_to(const char *name)
{
	OWN_FD int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct sockaddr_un a;
	socklen_t len = address_of(&a, name, true);

	if (fd < 0 || bind(fd, (struct sockaddr *)&a, len) < 0 ||
	    listen(fd, MAX_LOCAL_RANKS) < 0)
		return -errno;
	return take_fd(&fd);
}

static int fail_foreign(const char *name)
{
	return fail(ACCEL_E_UNREACHABLE,
		    "joining: another user holds the abstract socket %s; give the job "
		    "another identity (MASTER_PORT, or torchrun --rdzv-id)",
		    name);
}

/* Who listens on a name: 0 nobody, -EPERM another user, else it is taken and
 * *@ret_pid the process, 0 where its pid means nothing here. */
static int holder_of(const char *name, int *ret_pid)
{
	/* Nobody ever accepts, so once the queue is full a connection would wait. */
	OWN_FD int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct ucred peer;
	socklen_t size = sizeof(peer);
	struct sockaddr_un a;
	socklen_t len = address_of(&a, name, true);

	*ret_pid = 0;
	if (fd < 0)
		return -errno;
	if (connect(fd, (struct sockaddr *)&a, len) < 0)
		return errno == EAGAIN ? 1 : 0;
	if (!is_same_user(fd))
		return -EPERM;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0)
		*ret_pid = peer.pid;
	return 1;
}

/* An earlier program of the same wrapper may still hold the name. */
static int bind_when_free(const accel_world *w, const char *name)
{
	uint64_t deadline = now_ms() + (uint64_t)w->timeout_s * 1000;
	int fd;

	while ((fd = bind_to(name)) == -EADDRINUSE && now_ms() < deadline) {
		int pid;

		if (holder_of(name, &pid) == -EPERM)
			return fail_foreign(name);
		sleep_ms(RETRY_MS);
		if (wants_to_give_up())
			return fail(ACCEL_E_INTERRUPTED, "joining: interrupted");
	}
	if (fd < 0)
		return fail(ACCEL_E_UNREACHABLE,
			    "joining: bind the abstract socket %s: %s", name,
			    strerror(-fd));
	return fd;
}

/* ---- one process for each rank -------------------------------------------------------
 */

/* Forks do not hold the name: it is this process that is the rank. */
static int held_name = -1;

static void drop_name_in_fork(void)
{
	own_close(&held_name);
}

static void hold_name(accel_world *w, int fd)
{
	static bool is_watching;

	if (!is_watching)
		is_watching = pthread_atfork(NULL, NULL, drop_name_in_fork) == 0;
	w->name_fd = held_name = fd;
}

void release_name(accel_world *w)
{
	if (w->name_fd < 0)
		return;
	w->name_fd = -1;
	own_close(&held_name);
}

static bool is_alive(int pid)
{
	return kill(pid, 0) == 0 || errno != ESRCH;
}

/*
 * Under accel the control page says who a rank is; elsewhere the process that holds
 * the rank's abstract name. A child that inherited the environment finds it taken.
 * A fork may keep the name for a while after its parent, hence the waiting.
 */
static int claim_name(accel_world *w, const char *ring_name)
{
	uint64_t deadline = now_ms() + (uint64_t)w->timeout_s * 1000;
	char name[96];

	(void)snprintf(name, sizeof(name), "%s-%d", ring_name, w->local_rank);
	for (;;) {
		int fd = bind_to(name), pid, r;

		if (fd >= 0) {
			hold_name(w, fd);
			return 0;
		}
		if (fd != -EADDRINUSE)
			return fail(ACCEL_E_UNREACHABLE,
				    "joining: bind the abstract socket %s: %s", name,
				    strerror(-fd));
		r = holder_of(name, &pid);
		if (r == -EPERM)
			return fail_foreign(name);
		/* A fork of ours that has just begun still has its copy. */
		if (r > 0 && pid != w->pid && (!pid || is_alive(pid)))
			return fail_owned(w, (uint32_t)pid);
		if (wants_to_give_up())
			return fail(ACCEL_E_INTERRUPTED, "joining: interrupted");
		if (now_ms() >= deadline)
			return fail(ACCEL_E_TIMEOUT,
				    "joining: a fork of an earlier rank %d still runs",
				    w->rank);
		sleep_ms(RETRY_MS);
	}
}

static int make_ring(accel_world *w, const char *name)
{
	OWN_FD int listener = bind_when_free(w, name), ring = -1;
	uint8_t nonce[NONCE_SIZE];
	struct err e = { 0 };
	uint64_t inode;
	int r;

	if (listener < 0)
		return listener;
	if (getrandom(nonce, sizeof(nonce), 0) != sizeof(nonce))
		return fail(ACCEL_E_MEMORY, "joining: no random bytes: %s",
			    strerror(errno));
	if (ring_new(&ring, &inode, nonce, (uint32_t)w->local_size, &e) < 0)
		return fail(ACCEL_E_MEMORY, "joining: %s", e.text);
	r = serve_all(w, listener, ring);
	if (r < 0)
		return r;
	return use_ring(w, ring, inode) == 1
		       ? 0
		       : fail(ACCEL_E_MEMORY, "joining: map the ring");
}

/* The ring from rank 0: 1, 0 not yet, or an error. */
static int fetch_ring(accel_world *w, const char *name)
{
	OWN_FD int fd = connect_to(name, true), ring = -1;
	uint32_t rank = (uint32_t)w->local_rank;
	char answer;
	int r;

	if (fd == -EPERM)
		return fail_foreign(name);
	if (fd < 0 || send(fd, &rank, sizeof(rank), MSG_NOSIGNAL) != sizeof(rank) ||
	    receive_with(fd, &answer, 1, &ring, 1) <= 0)
		return 0;
	r = use_ring(w, ring, 0);
	return r ? r
		 : fail(ACCEL_E_UNREACHABLE,
			"joining: local rank 0 handed out "
			"something that is no ring of %d ranks",
			w->local_size);
}

static int wait_for_ring(accel_world *w, const char *name)
{
	uint64_t deadline = now_ms() + (uint64_t)w->timeout_s * 1000;
	int tries = 0;

	for (;;) {
		int r = fetch_ring(w, name);

		if (r)
			return r < 0 ? r : 0;
		if (now_ms() >= deadline)
			return fail(ACCEL_E_TIMEOUT,
				    "joining: waited %d s (ACCEL_TIMEOUT) for "
				    "local rank 0",
				    w->timeout_s);
		sleep_ms(RETRY_MS);
		if (++tries % (100 / RETRY_MS) == 0 && wants_to_give_up())
			return fail(ACCEL_E_INTERRUPTED, "joining: interrupted");
	}
}

int find_pages(accel_world *w, const struct identity *id)
{
	char name[64];
	int r;

	if (id->launcher && strcmp(id->launcher, "accel") == 0) {
		r = find_under_accel(w);
		if (r < 0)
			return r;
	}
	if (w->size != w->local_size)
		return fail(
			ACCEL_E_UNREACHABLE,
			"%d of %d ranks run on this machine; libaccel reaches those of "
			"one machine (PyTorch programs go through torch.distributed)",
			w->local_size, w->size);
	if (w->size == 1 || w->ring)
		return 0;
	socket_name(id, name, sizeof(name));
	r = claim_name(w, name);
	if (r < 0)
		return r;
	return w->local_rank ? wait_for_ring(w, name) : make_ring(w, name);
}
