/*
 * Memory that all ranks of a machine have mapped, for gradients that are reduced
 * where they are. It is the end of the ring's file: one stretch for each rank,
 * filled by accel_alloc() from its beginning, so that what the ranks allocate
 * together lies at the same place in each stretch.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/own.h"
#include "runtime/world.h"

enum { PAGE = 4096 };

/* One accel_alloc(): the same stretch of all ranks' arenas, mapped. */
struct region {
	struct region *next;
	uint64_t from, size; /* in each arena */
	int n_ranks;
	uint8_t *at[]; /* of each rank */
};

static struct region *region_of(const accel_world *w, const void *own, size_t bytes)
{
	const uint8_t *data = own;
	struct region *r = w->regions;

	while (r && (data < r->at[w->local_rank] ||
		     data + bytes > r->at[w->local_rank] + r->size))
		r = r->next;
	return r;
}

void *arena_of(const accel_world *w, int rank, const void *own)
{
	struct region *r = region_of(w, own, 1);

	return r->at[rank] + ((const uint8_t *)own - r->at[w->local_rank]);
}

bool in_arena(const accel_world *w, const struct piece *pieces, size_t n,
	      uint64_t *ret_tag)
{
	uint64_t tag = HASH_START;

	*ret_tag = 0;
	if (!w->regions)
		return false;
	for (size_t i = 0; i < n; i++) {
		const uint8_t *data = pieces[i].data;
		struct region *r =
			pieces[i].bytes ? region_of(w, data, pieces[i].bytes) : NULL;

		if (!pieces[i].bytes)
			continue;
		if (!r)
			return false;
		tag = hash_number(tag, r->from + (uint64_t)(data - r->at[w->local_rank]));
		tag = hash_number(tag, pieces[i].bytes);
	}
	*ret_tag = tag;
	return true;
}

static struct region *region_free(struct region *r)
{
	for (int i = 0; r && i < r->n_ranks; i++)
		if (r->at[i])
			(void)munmap(r->at[i], r->size);
	free(r);
	return NULL;
}

DEFINE_OWN(region, struct region, region_free)

void arenas_free(accel_world *w)
{
	while (w->regions) {
		struct region *r = w->regions;

		w->regions = r->next;
		(void)region_free(r);
	}
}

/* ---- is there room? ------------------------------------------------------------ */

static uint64_t number_in(const char *path, const char *key)
{
	FILE *f = fopen(path, "re");
	unsigned long long n = UINT64_MAX;
	char line[256];

	if (!f)
		return UINT64_MAX;
	while (n == UINT64_MAX && fgets(line, sizeof(line), f))
		if (strncmp(line, key, strlen(key)) == 0)
			(void)sscanf(line + strlen(key), "%llu", &n);
	(void)fclose(f);
	return n;
}

/* Of what a container uses, the part that only caches files. */
static uint64_t reclaimable(const char *stat, uint64_t used)
{
	static const char *const keys[] = { "active_file ", "inactive_file " };
	uint64_t sum = 0;

	for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
		uint64_t n = number_in(stat, keys[i]);

		sum += n == UINT64_MAX ? 0 : n;
	}
	return sum < used ? sum : used;
}

/* What this machine, or the container we are in, has left; in bytes. */
static uint64_t memory_left(void)
{
	static const char *const limits[][3] = {
		{ "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
		  "/sys/fs/cgroup/memory.stat" },
		{ "/sys/fs/cgroup/memory/memory.limit_in_bytes",
		  "/sys/fs/cgroup/memory/memory.usage_in_bytes",
		  "/sys/fs/cgroup/memory/memory.stat" },
	};
	uint64_t kib = number_in("/proc/meminfo", "MemAvailable:");
	uint64_t left = kib == UINT64_MAX ? UINT64_MAX : kib * 1024;

	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		uint64_t max = number_in(limits[i][0], "");
		uint64_t used = number_in(limits[i][1], "");

		if (max == UINT64_MAX || used == UINT64_MAX)
			continue;
		used -= reclaimable(limits[i][2], used);
		used = used < max ? used : max;
		left = max - used < left ? max - used : left;
	}
	return left;
}

static int check_room(const accel_world *w, uint64_t bytes)
{
	uint64_t left = memory_left();
	uint64_t room = w->ring ? w->ring->arena_bytes - w->arena_used : UINT64_MAX / 2;

	if (bytes > left / (uint64_t)w->local_size)
		return fail(ACCEL_E_MEMORY,
			    "alloc: %llu bytes for each of %d ranks, where %llu bytes of "
			    "memory are left on this machine",
			    (unsigned long long)bytes, w->local_size,
			    (unsigned long long)left);
	if (bytes > room)
		return fail(ACCEL_E_MEMORY,
			    "alloc: %llu bytes, where a rank has room for %llu more "
			    "(`ulimit -f` bounds it)",
			    (unsigned long long)bytes, (unsigned long long)room);
	return 0;
}

/* ---- allocating -----------------------------------------------------------------------
 */

/* Alone, it is private memory; else the same stretch of everybody's arena. */
static uint8_t *map_stretch(const accel_world *w, int rank, uint64_t from, uint64_t size)
{
	off_t at = w->ring ? (off_t)(w->ring->arenas +
				     w->ring->arena_bytes * (uint64_t)rank + from)
			   : 0;
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE,
		       w->ring ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS,
		       w->ring ? w->ring_fd : -1, at);

	if (p == MAP_FAILED)
		return NULL;
	if (w->ring) {
		(void)madvise(p, size, MADV_DONTFORK);
		(void)madvise(p, size, MADV_DONTDUMP);
	}
	return p;
}

static int region_new(struct region **ret, const accel_world *w, uint64_t size)
{
	OWN(own_region)
	struct region *r =
		calloc(1, sizeof(*r) + (size_t)w->local_size * sizeof(r->at[0]));

	if (!r)
		return fail(ACCEL_E_MEMORY, "alloc: no memory");
	r->from = w->arena_used;
	r->size = size;
	r->n_ranks = w->local_size;
	for (int i = 0; i < w->local_size; i++) {
		r->at[i] = map_stretch(w, i, r->from, size);
		if (!r->at[i])
			return fail(ACCEL_E_MEMORY,
				    "alloc: map %llu bytes of rank %d: %s",
				    (unsigned long long)size, i, strerror(errno));
	}
	*ret = take(r);
	return 0;
}

static off_t place_of(const accel_world *w, uint64_t from)
{
	return (off_t)(w->ring->arenas + w->ring->arena_bytes * (uint64_t)w->local_rank +
		       from);
}

/* Give the pages back; what is read there afterwards is zero. */
static void unreserve(const accel_world *w, uint64_t from, uint64_t bytes)
{
	(void)fallocate(w->ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			place_of(w, from), (off_t)bytes);
}

/* Pages are taken now: a program gets an error here instead of SIGBUS later. What an
 * earlier program of the same wrapper left there goes first. */
static int reserve(accel_world *w, uint64_t from, uint64_t bytes)
{
	int r;

	unreserve(w, from, bytes);
	do
		r = fallocate(w->ring_fd, 0, place_of(w, from), (off_t)bytes);
	while (r < 0 && errno == EINTR);
	if (r < 0)
		return fail(ACCEL_E_MEMORY, "alloc: reserve %llu bytes: %s",
			    (unsigned long long)bytes, strerror(errno));
	return 0;
}

static bool anybody_refused(const accel_world *w, uint64_t number)
{
	bool refused = false;

	for (int i = 0; i < w->n_active; i++)
		refused |= slot_of(w, w->active[i], number)->head.value != 0;
	return refused;
}

/* All ranks have the memory, or none uses it. */
static int agree(accel_world *w, uint64_t bytes, bool is_last, int own)
{
	struct slot *slot;
	bool refused;
	int r;

	w->head = (struct head){ .kind = KIND_ALLOC, .tag = bytes, .value = own < 0 };
	w->head.op = is_last;
	r = call_begin(w, &slot);
	if (!r)
		r = call_meet(w);
	if (r < 0)
		return r;
	refused = anybody_refused(w, w->next);
	call_end(w, 1);
	if (own < 0 || !refused)
		return own;
	return fail(ACCEL_E_MEMORY, "alloc: another rank found no room for %llu bytes",
		    (unsigned long long)bytes);
}

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);
}

void arena_follow(accel_world *w, uint64_t number)
{
	const struct head *head = &slot_of(w, w->active[0], number)->head;

	if (head->op && !anybody_refused(w, number))
		w->arena_used += whole_pages(head->tag);
}

static int alloc(accel_world *w, uint64_t bytes, void **ret)
{
	uint64_t size = whole_pages(bytes);
	OWN(own_region) struct region *region = NULL;
	int r;

	if (!bytes || bytes > UINT64_MAX / 4096)
		return fail(ACCEL_E_INVALID, "alloc of %llu bytes",
			    (unsigned long long)bytes);
	r = check_room(w, size);
	if (!r)
		r = region_new(&region, w, size);
	/* Nobody takes anything before all have looked at what is left. */
	if (w->ring)
		r = agree(w, bytes, false, r);
	if (!r && w->ring)
		r = agree(w, bytes, true, reserve(w, w->arena_used, size));
	if (r < 0) {
		if (w->ring && region)
			unreserve(w, w->arena_used, size);
		return r;
	}
	*ret = region->at[w->local_rank];
	w->arena_used += size;
	region->next = w->regions;
	w->regions = take(region);
	return 0;
}

int accel_alloc(accel_world *w, uint64_t bytes, void **ret)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, alloc(w, bytes, ret));
}
