#include "base/page.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/own.h"

enum {
	RING_PAGE = 4096,      /* room of the head, and what everything is aligned to */
	MAX_SLOT = 256 * 1024, /* fits a core's second-level cache several times */
	MIN_SLOT = 16 * 1024,
	SMALL_CHUNK = 64 * 1024,
	SLOTS_TOTAL = 64 << 20, /* what all slots may come to */
};

/* Sparse, so only an upper limit; well inside what every address space holds. */
static const uint64_t ARENA_MAX = UINT64_C(1) << 38;

/* A sealed file of @size bytes that begins with @head. */
static int shared_file(int *ret_fd, uint64_t *ret_inode, const char *name, uint64_t size,
		       const void *head, size_t head_len, struct err *err)
{
	OWN_FD int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct stat st;

	if (fd < 0 || ftruncate(fd, (off_t)size) < 0 ||
	    pwrite(fd, head, head_len, 0) != (ssize_t)head_len ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ||
	    fstat(fd, &st) < 0)
		return err_sys(err, "make shared memory (%s)", name);
	*ret_inode = st.st_ino;
	*ret_fd = take_fd(&fd);
	return 0;
}

int page_new(int *ret_fd, uint64_t *ret_inode, const struct page_spec *spec,
	     struct err *err)
{
	struct control_page page = {
		.magic = PAGE_MAGIC,
		.version = PAGE_VERSION,
		.size = PAGE_SIZE,
		.rank = spec->rank,
		.attempt = spec->attempt,
		.n_cores = spec->n_cores,
		.ring_fd = spec->ring_fd,
		.ring_inode = spec->ring_inode,
	};

	memcpy(page.nonce, spec->nonce, NONCE_SIZE);
	return shared_file(ret_fd, ret_inode, "accel-page", PAGE_SIZE, &page,
			   sizeof(page), err);
}

static uint64_t align(uint64_t n)
{
	return (n + RING_PAGE - 1) & ~(uint64_t)(RING_PAGE - 1);
}

static uint32_t slot_bytes_for(uint32_t n_ranks)
{
	uint32_t bytes = MAX_SLOT;

	while (bytes > MIN_SLOT && (uint64_t)bytes * RING_SLOTS * n_ranks > SLOTS_TOTAL)
		bytes /= 2;
	return bytes;
}

/*
 * Small chunks stay in a core's second-level cache from one use to the next; but each
 * is a wait, which is a sleep where ranks share cores.
 */
static uint32_t chunk_bytes_for(uint32_t n_ranks, uint32_t slot_bytes)
{
	bool has_cores = sysconf(_SC_NPROCESSORS_ONLN) >= (long)n_ranks;

	return has_cores && slot_bytes > SMALL_CHUNK ? SMALL_CHUNK : slot_bytes;
}

/* A file larger than the limit on files would end this process by SIGXFSZ. */
static uint64_t file_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
		return UINT64_MAX;
	return limit.rlim_cur;
}

static uint64_t room_for_arenas(uint64_t used, uint32_t n_ranks)
{
	uint64_t limit = file_limit();
	uint64_t room = limit > used ? (limit - used) / n_ranks : 0;

	return (room < ARENA_MAX ? room : ARENA_MAX) & ~(uint64_t)(RING_PAGE - 1);
}

int ring_new(int *ret_fd, uint64_t *ret_inode, const uint8_t *nonce, uint32_t n_ranks,
	     struct err *err)
{
	struct ring_page page = {
		.magic = RING_MAGIC,
		.version = RING_VERSION,
		.n_ranks = n_ranks,
		.n_slots = RING_SLOTS,
		.slot_bytes = slot_bytes_for(n_ranks ? n_ranks : 1),
		.cells = RING_PAGE,
	};

	page.chunk_bytes = chunk_bytes_for(n_ranks, page.slot_bytes);
	if (n_ranks < 1 || n_ranks > MAX_LOCAL_RANKS)
		return err_set(err, -EINVAL,
			       "%u ranks on one machine, where 1 to %d can be", n_ranks,
			       MAX_LOCAL_RANKS);
	memcpy(page.nonce, nonce, NONCE_SIZE);
	page.slots = align(page.cells + (uint64_t)n_ranks * CELL_BYTES);
	page.arenas = align(page.slots + (uint64_t)n_ranks * RING_SLOTS *
						 (SLOT_HEAD + page.slot_bytes));
	page.arena_bytes = room_for_arenas(page.arenas, n_ranks);
	page.size = page.arenas + page.arena_bytes * n_ranks;
	if (page.size > file_limit())
		return err_set(
			err, -EFBIG,
			"shared memory of %u ranks: %llu bytes, where files may have "
			"%llu (`ulimit -f`)",
			n_ranks, (unsigned long long)page.size,
			(unsigned long long)file_limit());
	return shared_file(ret_fd, ret_inode, "accel-ring", page.size, &page,
			   sizeof(page), err);
}

int ring_note_ended(int fd, uint32_t local_rank)
{
	const uint32_t on = 1;
	off_t at = RING_PAGE + (off_t)local_rank * CELL_BYTES + CELL_ENDED;

	return pwrite(fd, &on, sizeof(on), at) == sizeof(on) ? 0 : -errno;
}
