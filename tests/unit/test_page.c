/* What the supervisor and the runtime share: its layout, its seals, its limits. */

#include "tests/unit/unit.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/own.h"
#include "base/page.h"
#include "rendezvous/messages.h"

static const uint8_t nonce[NONCE_SIZE] = "0123456789abcdef";

static void assert_sealed_file(int fd, uint64_t inode)
{
	const int wanted = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_ino, inode);
	assert_int_equal(fcntl(fd, F_GET_SEALS) & wanted, wanted);
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	assert_true(ftruncate(fd, 1) < 0);
	assert_true(ftruncate(fd, st.st_size + 1) < 0);
}

static struct ring_page read_ring(int fd)
{
	struct ring_page page;

	assert_int_equal(pread(fd, &page, sizeof(page), 0), sizeof(page));
	return page;
}

static struct ring_page make_ring(uint32_t n_ranks, int *ret_fd)
{
	uint64_t inode;

	assert_int_equal(ring_new(ret_fd, &inode, nonce, n_ranks, NULL), 0);
	assert_sealed_file(*ret_fd, inode);
	return read_ring(*ret_fd);
}

static void the_layout_is_the_one_that_older_programs_know(void **state)
{
	(void)state;
	assert_int_equal(offsetof(struct control_page, nonce), 16);
	assert_int_equal(offsetof(struct control_page, owner), 40);
	assert_int_equal(offsetof(struct control_page, n_cores), 44);
	assert_int_equal(offsetof(struct control_page, ring_fd), 48);
	assert_int_equal(offsetof(struct control_page, ring_inode), 56);
	assert_int_equal(offsetof(struct control_page, stop), 64);
	assert_int_equal(offsetof(struct control_page, state), 68);
	assert_int_equal(offsetof(struct control_page, step), 72);
	assert_int_equal(offsetof(struct ring_page, size), 16);
	assert_int_equal(offsetof(struct ring_page, nonce), 24);
	assert_int_equal(offsetof(struct ring_page, cells), 48);
	assert_int_equal(offsetof(struct ring_page, abort_state), 80);
	assert_int_equal(offsetof(struct ring_page, abort_text), 96);
	assert_true(sizeof(struct control_page) <= PAGE_SIZE);
	assert_true(sizeof(struct ring_page) <= 4096);
}

static void a_control_page_says_whose_it_is(void **state)
{
	const struct page_spec spec = {
		.nonce = nonce,
		.rank = 5,
		.attempt = 2,
		.n_cores = 12,
		.ring_fd = 9,
		.ring_inode = 1234,
	};
	struct control_page page;
	uint64_t inode;
	OWN_FD int fd = -1;

	(void)state;
	assert_int_equal(page_new(&fd, &inode, &spec, NULL), 0);
	assert_sealed_file(fd, inode);
	assert_int_equal(pread(fd, &page, sizeof(page), 0), sizeof(page));
	assert_int_equal(page.magic, PAGE_MAGIC);
	assert_int_equal(page.version, PAGE_VERSION);
	assert_int_equal(page.size, PAGE_SIZE);
	assert_memory_equal(page.nonce, nonce, NONCE_SIZE);
	assert_int_equal(page.rank, 5);
	assert_int_equal(page.attempt, 2);
	assert_int_equal(page.n_cores, 12);
	assert_int_equal(page.ring_fd, 9);
	assert_int_equal(page.ring_inode, 1234);
	assert_int_equal(page.owner, 0);
	assert_int_equal(page.stop, 0);
	assert_int_equal(page.state, PAGE_UNUSED);
	assert_int_equal(page.step, 0);
}

static void what_the_supervisor_writes_a_mapping_shows(void **state)
{
	const struct page_spec spec = { .nonce = nonce, .ring_fd = -1 };
	const uint32_t on = 1;
	struct control_page *page;
	uint64_t inode;
	OWN_FD int fd = -1;

	(void)state;
	assert_int_equal(page_new(&fd, &inode, &spec, NULL), 0);
	page = mmap(NULL, PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(page, MAP_FAILED);
	assert_int_equal(pwrite(fd, &on, sizeof(on), offsetof(struct control_page, stop)),
			 sizeof(on));
	assert_int_equal(__atomic_load_n(&page->stop, __ATOMIC_ACQUIRE), 1);
	assert_int_equal(page->ring_fd, -1);
	(void)munmap(page, PAGE_SIZE);
}

static void the_parts_of_a_ring_lie_behind_each_other_within_it(void **state)
{
	static const uint32_t sizes[] = { 1, 2, 3, 7, 64, 1000, MAX_LOCAL_RANKS };

	(void)state;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		uint64_t n = sizes[i];
		OWN_FD int fd = -1;
		struct ring_page r = make_ring(sizes[i], &fd);
		struct stat st;

		assert_int_equal(fstat(fd, &st), 0);
		assert_int_equal(r.magic, RING_MAGIC);
		assert_int_equal(r.version, RING_VERSION);
		assert_int_equal(r.n_ranks, n);
		assert_memory_equal(r.nonce, nonce, NONCE_SIZE);
		assert_int_equal(r.size, st.st_size);
		assert_true(r.cells >= sizeof(struct ring_page));
		assert_true(r.slots >= r.cells + n * CELL_BYTES);
		assert_true(r.arenas >=
			    r.slots + n * r.n_slots * (SLOT_HEAD + r.slot_bytes));
		assert_int_equal(r.size, r.arenas + n * r.arena_bytes);
		assert_int_equal((r.cells | r.slots | r.arenas | r.arena_bytes) % 4096,
				 0);
		assert_int_equal(r.slot_bytes % CACHE_LINE, 0);
		assert_true(r.slot_bytes >= 16384);
		assert_true(r.arena_bytes >= 1 << 30);
		assert_int_equal(r.abort_state, 0);
	}
}

static void a_ring_costs_no_memory_until_it_is_used(void **state)
{
	OWN_FD int fd = -1;
	struct stat st;

	(void)state;
	(void)make_ring(MAX_LOCAL_RANKS, &fd);
	assert_int_equal(fstat(fd, &st), 0);
	assert_true(st.st_blocks * 512 <= 2 * 4096);
}

static void that_a_rank_has_ended_is_noted_in_its_own_cell(void **state)
{
	uint32_t ended[3];
	OWN_FD int fd = -1;
	struct ring_page r;

	(void)state;
	r = make_ring(3, &fd);
	assert_int_equal(ring_note_ended(fd, 1), 0);
	for (unsigned i = 0; i < 3; i++)
		assert_int_equal(pread(fd, &ended[i], sizeof(ended[i]),
				       (off_t)(r.cells + i * CELL_BYTES + CELL_ENDED)),
				 sizeof(ended[i]));
	assert_int_equal(ended[0], 0);
	assert_int_equal(ended[1], 1);
	assert_int_equal(ended[2], 0);
	assert_int_equal(ring_note_ended(-1, 0), -EBADF);
}

static void more_ranks_than_a_ring_holds_are_refused_in_words(void **state)
{
	static const uint32_t sizes[] = { 0, MAX_LOCAL_RANKS + 1, UINT32_MAX };

	(void)state;
	for (int i = 0; i < 3; i++) {
		struct err e = { 0 };
		uint64_t inode = 77;
		int fd = -1;

		assert_int_equal(ring_new(&fd, &inode, nonce, sizes[i], &e), -EINVAL);
		assert_int_equal(fd, -1);
		assert_int_equal(inode, 77);
		assert_non_null(strstr(e.text, "1024"));
	}
}

/* With the soft limit on the size of files at @bytes, 0 or what ring_new() returned. */
static int ring_under_limit(rlim_t bytes, struct ring_page *ret, struct err *err)
{
	struct rlimit before, limit;
	uint64_t inode;
	OWN_FD int fd = -1;
	int r;

	assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit = before;
	limit.rlim_cur = bytes;
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
	r = ring_new(&fd, &inode, nonce, 2, err);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
	if (!r)
		*ret = read_ring(fd);
	return r;
}

static void a_limit_on_files_shrinks_the_arenas(void **state)
{
	struct ring_page page;

	(void)state;
	assert_int_equal(ring_under_limit(64 << 20, &page, NULL), 0);
	assert_true(page.size <= 64 << 20);
	assert_true(page.arena_bytes >= 16 << 20);
}

static sig_atomic_t n_signals;

static void count_signal(int signo)
{
	(void)signo;
	n_signals++;
}

static void a_limit_on_files_below_a_ring_is_told_in_words_and_by_no_signal(void **state)
{
	struct sigaction count = { .sa_handler = count_signal }, before;
	struct ring_page page;
	struct err e = { 0 };

	(void)state;
	assert_int_equal(sigaction(SIGXFSZ, &count, &before), 0);
	assert_int_equal(ring_under_limit(1 << 20, &page, &e), -EFBIG);
	assert_int_equal(sigaction(SIGXFSZ, &before, NULL), 0);
	assert_int_equal(n_signals, 0);
	assert_non_null(strstr(e.text, "shared memory of 2 ranks"));
	assert_non_null(strstr(e.text, "1048576 (`ulimit -f`)"));
}

/* The library asks with a struct of its own, which knows no table of messages. */
static void question_and_answer_are_the_frames_of_the_supervisor(void **state)
{
	struct msg_page_ask ask = { .rank = 0x01020304 };
	struct msg_page answer = { .error = ENOENT, .rank = 0x01020304 };
	const struct page_ask ask_bytes = {
		.version = PAGE_WIRE_VERSION,
		.type = htobe16(PAGE_ASK_TYPE),
		.length = htobe32(sizeof(uint32_t)),
		.rank = htobe32(0x01020304),
	};
	const struct page_answer answer_bytes = {
		.version = PAGE_WIRE_VERSION,
		.type = htobe16(PAGE_ANSWER_TYPE),
		.length = htobe32(2 * sizeof(uint32_t)),
		.error = (int32_t)htobe32(ENOENT),
		.rank = htobe32(0x01020304),
	};
	struct buf out = { 0 };

	(void)state;
	assert_int_equal(
		frame_encode(&out, MSG_PAGE_ASK, 0, message_of(MSG_PAGE_ASK), &ask), 0);
	assert_int_equal(buf_len(&out), sizeof(ask_bytes));
	assert_memory_equal(buf_data(&out), &ask_bytes, sizeof(ask_bytes));
	buf_fini(&out);
	assert_int_equal(frame_encode(&out, MSG_PAGE, 0, message_of(MSG_PAGE), &answer),
			 0);
	assert_int_equal(buf_len(&out), sizeof(answer_bytes));
	assert_memory_equal(buf_data(&out), &answer_bytes, sizeof(answer_bytes));
	buf_fini(&out);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_layout_is_the_one_that_older_programs_know),
		cmocka_unit_test(a_control_page_says_whose_it_is),
		cmocka_unit_test(what_the_supervisor_writes_a_mapping_shows),
		cmocka_unit_test(the_parts_of_a_ring_lie_behind_each_other_within_it),
		cmocka_unit_test(a_ring_costs_no_memory_until_it_is_used),
		cmocka_unit_test(that_a_rank_has_ended_is_noted_in_its_own_cell),
		cmocka_unit_test(more_ranks_than_a_ring_holds_are_refused_in_words),
		cmocka_unit_test(a_limit_on_files_shrinks_the_arenas),
		cmocka_unit_test(
			a_limit_on_files_below_a_ring_is_told_in_words_and_by_no_signal),
		cmocka_unit_test(question_and_answer_are_the_frames_of_the_supervisor),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
