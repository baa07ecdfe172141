/* Bytes, string arrays, guessing names, folders and files. */

#include "tests/unit/unit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/near.h"
#include "base/own.h"
#include "base/path.h"
#include "base/strv.h"

/* A folder of its own for each test, removed by the shell's rm. */
static int make_folder(void **state)
{
	char *folder = strdup("/tmp/test_base.XXXXXX");

	*state = mkdtemp(folder);
	return *state && chdir(folder) == 0 ? 0 : -1;
}

static int remove_folder(void **state)
{
	OWN_MEM char *command = NULL;
	int r = chdir("/");

	if (r == 0 && asprintf(&command, "rm -rf '%s'", (char *)*state) > 0)
		r = system(command);
	free(*state);
	return r;
}

static mode_t mode_of(const char *path)
{
	struct stat st;

	assert_return_code(lstat(path, &st), errno);
	return st.st_mode & 07777;
}

static void touch(const char *path, mode_t mode)
{
	OWN_FD int fd = open(path, O_WRONLY | O_CREAT, mode);

	assert_true(fd >= 0);
	assert_return_code(fchmod(fd, mode), errno);
}

/* --- buf --- */

static void bytes_come_out_in_the_order_they_went_in(void **state)
{
	struct buf b = { 0 };
	unsigned char in = 0, out = 0;

	(void)state;
	for (int round = 0; round < 2000; round++) {
		for (int i = 0; i < round % 37; i++, in++)
			assert_int_equal(buf_add(&b, &in, 1), 0);
		for (int i = 0; i < round % 31 && buf_len(&b); i++, out++) {
			assert_int_equal(*buf_data(&b), out);
			buf_consume(&b, 1);
		}
	}
	for (; buf_len(&b); out++) {
		assert_int_equal(*buf_data(&b), out);
		buf_consume(&b, 1);
	}
	assert_int_equal(in, out);
	buf_fini(&b);
}

static void an_emptied_big_buffer_gives_its_memory_back(void **state)
{
	struct buf b = { 0 };

	(void)state;
	assert_non_null(buf_reserve(&b, 100000));
	buf_grow(&b, 100000);
	buf_consume(&b, 100000);
	assert_null(b.mem);
	assert_int_equal(b.cap, 0);
}

static void a_reserve_that_cannot_be_is_refused(void **state)
{
	struct buf b = { 0 };

	(void)state;
	assert_int_equal(buf_add(&b, "abc", 3), 0);
	assert_null(buf_reserve(&b, SIZE_MAX / 2));
	assert_int_equal(buf_len(&b), 3);
	buf_fini(&b);
}

static void formatted_text_is_appended(void **state)
{
	struct buf b = { 0 };

	(void)state;
	assert_int_equal(buf_add_str(&b, "a"), 0);
	assert_int_equal(buf_addf(&b, "%d-%s", 7, "x"), 0);
	assert_true(slice_eq(buf_slice(&b), slice_str("a7-x")));
	assert_false(slice_eq(buf_slice(&b), slice_str("a7-y")));
	buf_fini(&b);
}

/* --- strv --- */

static void an_array_ends_in_null_and_owns_copies(void **state)
{
	struct strv s = { 0 };
	char word[] = "one";

	(void)state;
	assert_int_equal(strv_add(&s, word), 0);
	word[0] = 'X';
	assert_int_equal(strv_addn(&s, "twofold", 3), 0);
	assert_int_equal(strv_addf(&s, "%d", 3), 0);
	assert_int_equal(s.n, 3);
	assert_string_equal(s.v[0], "one");
	assert_string_equal(s.v[1], "two");
	assert_string_equal(s.v[2], "3");
	assert_null(s.v[3]);
	strv_fini(&s);
	assert_int_equal(s.n, 0);
}

static void an_environment_is_changed_by_whole_names(void **state)
{
	const char *const env[] = { "A=1", "AB=2", "A=3", "C", "=x", NULL };
	struct strv s = { 0 };

	(void)state;
	assert_int_equal(strv_add_all(&s, (char *const *)env), 0);
	assert_string_equal(strv_env_get(&s, "AB"), "2");
	assert_null(strv_env_get(&s, "C"));
	assert_int_equal(strv_env_set(&s, "A", "new=value"), 0);
	assert_string_equal(strv_env_get(&s, "A"), "new=value");
	assert_int_equal(s.n, 5);
	strv_env_unset(&s, "A");
	assert_null(strv_env_get(&s, "A"));
	assert_int_equal(s.n, 3);
	assert_null(s.v[3]);
	assert_int_equal(strv_env_set(&s, "N", ""), 0);
	assert_string_equal(strv_env_get(&s, "N"), "");
	strv_fini(&s);
}

/* --- near --- */

static const char *near(const char *word)
{
	static const char *const words[] = { "num-processes", "mixed-precision",
					     "cpu",           "env",
					     "log-dir",       "master-port" };

	return near_match(word, words, sizeof(words) / sizeof(words[0]));
}

static void a_slip_of_the_fingers_finds_its_word(void **state)
{
	(void)state;
	assert_string_equal(near("num-proceses"), "num-processes");
	assert_string_equal(near("num_processes"), "num-processes");
	assert_string_equal(near("NUM-PROCESSES"), "num-processes");
	assert_string_equal(near("log-dri"), "log-dir");
	assert_string_equal(near("cpuu"), "cpu");
	assert_string_equal(near("ecv"), "env");
	assert_string_equal(near("num_procs"), "num-processes");
	assert_string_equal(near("log-dirs"), "log-dir");
}

static void a_beginning_finds_its_word_when_there_is_one(void **state)
{
	static const char *const two[] = { "alpha-one", "alpha-two" };

	(void)state;
	assert_string_equal(near("mixed"), "mixed-precision");
	assert_null(near("mi"));
	assert_null(near_match("alpha", two, 2));
}

static void a_strange_word_finds_nothing(void **state)
{
	char longest[4096];

	(void)state;
	assert_null(near(""));
	assert_null(near("x"));
	assert_null(near("zzzzzz"));
	assert_null(near("gradient-accumulation"));
	memset(longest, 'n', sizeof(longest) - 1);
	longest[sizeof(longest) - 1] = 0;
	assert_null(near(longest));
	assert_null(near_match("cpu", NULL, 0));
}

static void a_swap_of_neighbours_is_one_edit(void **state)
{
	static const char *const words[] = { "abc" };

	(void)state;
	assert_string_equal(near_match("acb", words, 1), "abc");
	assert_null(near_match("cab", words, 1));
}

/* --- folders --- */

static void folders_are_made_with_their_parents(void **state)
{
	struct err err = { 0 };

	(void)state;
	(void)umask(022);
	assert_int_equal(path_make_dirs("a/b/c", &err), 0);
	assert_int_equal(mode_of("a"), 0755);
	assert_int_equal(mode_of("a/b/c"), 0700);
	assert_int_equal(path_make_dirs("a/b/c", &err), 0);
	assert_int_equal(path_make_dirs("d//e/", &err), 0);
	assert_int_equal(mode_of("d/e"), 0700);
	assert_int_equal(err.code, 0);
}

static void a_file_in_the_way_of_a_folder_is_named(void **state)
{
	struct err err = { 0 };

	(void)state;
	touch("file", 0600);
	assert_int_equal(path_make_dirs("file", &err), -ENOTDIR);
	assert_string_equal(err.text, "create folder file: Not a directory");
	assert_int_equal(path_make_dirs("file/below", &err), -ENOTDIR);
	assert_int_equal(path_make_dirs("", &err), -ENOENT);
	assert_return_code(symlink("nowhere", "link"), errno);
	assert_int_equal(path_make_dirs("link", &err), -ENOENT);
}

static void a_folder_that_others_may_write_is_not_private(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(path_private_dir("mine/own", &err), 0);
	assert_return_code(chmod("mine/own", 0777), errno);
	assert_int_equal(path_private_dir("mine/own", &err), -EPERM);
	assert_non_null(strstr(err.text, "mode 0777"));
	assert_return_code(chmod("mine/own", 0720), errno);
	assert_int_equal(path_private_dir("mine/own", &err), -EPERM);
	assert_return_code(chmod("mine/own", 0755), errno);
	assert_int_equal(path_private_dir("mine/own", &err), 0);
}

static void a_folder_or_link_of_another_user_is_not_private(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_int_equal(path_private_dir("theirs", &err), 0);
	assert_return_code(symlink("theirs", "link"), errno);
	assert_int_equal(path_private_dir("link", &err), 0);
	if (geteuid())
		return; /* only root can give things away */
	assert_return_code(lchown("link", 65534, 65534), errno);
	assert_int_equal(path_private_dir("link", &err), -EPERM);
	assert_non_null(strstr(err.text, "link made by another user"));
	assert_return_code(chown("theirs", 65534, 65534), errno);
	assert_int_equal(path_private_dir("theirs", &err), -EPERM);
	assert_non_null(strstr(err.text, "belongs to another user"));
}

/* --- files --- */

static size_t count_files(const char *folder)
{
	DIR *dir = opendir(folder);
	size_t n = 0;

	assert_non_null(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 2;
}

static void a_file_is_written_whole_and_nothing_is_left_beside_it(void **state)
{
	struct buf text = { 0 };
	struct err err = { 0 };

	(void)state;
	(void)umask(022);
	assert_int_equal(path_write_file("f", slice_str("first"), 0600, &err), 0);
	assert_int_equal(path_write_file("f", slice_str("second\0x"), 0600, &err), 0);
	assert_int_equal(mode_of("f"), 0600);
	assert_int_equal(path_read_file(&text, "f", 100, &err), 0);
	assert_true(slice_eq(buf_slice(&text), slice_str("second")));
	assert_int_equal(count_files("."), 1);
	buf_fini(&text);
}

static void a_file_that_cannot_be_written_leaves_nothing(void **state)
{
	struct err err = { 0 };

	(void)state;
	assert_return_code(mkdir("folder", 0700), errno);
	assert_int_equal(path_write_file("folder", slice_str("x"), 0600, &err), -EISDIR);
	assert_string_equal(err.text, "write folder: Is a directory");
	assert_int_equal(path_write_file("none/f", slice_str("x"), 0600, &err), -ENOENT);
	assert_int_equal(count_files("."), 1);
}

static void writing_through_a_link_replaces_the_link(void **state)
{
	struct buf text = { 0 };

	(void)state;
	assert_int_equal(path_write_file("target", slice_str("kept"), 0600, NULL), 0);
	assert_return_code(symlink("target", "link"), errno);
	assert_int_equal(path_write_file("link", slice_str("new"), 0600, NULL), 0);
	assert_int_equal(path_read_file(&text, "target", 100, NULL), 0);
	assert_true(slice_eq(buf_slice(&text), slice_str("kept")));
	buf_fini(&text);
}

static void reading_stops_at_the_limit_and_keeps_what_was_there(void **state)
{
	struct buf text = { 0 };
	struct err err = { 0 };

	(void)state;
	assert_int_equal(path_write_file("f", slice_str("12345"), 0600, NULL), 0);
	assert_int_equal(buf_add_str(&text, "had "), 0);
	assert_int_equal(path_read_file(&text, "f", 5, &err), 0);
	assert_true(slice_eq(buf_slice(&text), slice_str("had 12345")));
	assert_int_equal(path_read_file(&text, "f", 4, &err), -EFBIG);
	assert_int_equal(path_read_file(&text, "none", 4, &err), -ENOENT);
	assert_string_equal(err.text, "read none: No such file or directory");
	assert_int_equal(path_read_file(&text, ".", 4, &err), -EISDIR);
	assert_true(slice_eq(buf_slice(&text), slice_str("had 12345")));
	buf_fini(&text);
}

static void a_file_without_a_size_is_read_to_its_end(void **state)
{
	struct buf text = { 0 };

	(void)state;
	assert_int_equal(path_read_file(&text, "/proc/self/status", 1 << 20, NULL), 0);
	assert_non_null(memmem(buf_data(&text), buf_len(&text), "Threads:", 8));
	buf_fini(&text);
}

static void a_slow_reader_gets_every_byte(void **state)
{
	enum { LEN = 300000 };
	OWN_MEM char *data = calloc(1, LEN);
	int ends[2];
	pid_t child;

	(void)state;
	assert_return_code(pipe2(ends, O_NONBLOCK), errno);
	child = fork();
	if (child == 0) {
		(void)close(ends[0]);
		_exit(fd_write_all(ends[1], data, LEN) == 0 ? 0 : 1);
	}
	(void)close(ends[1]);
	(void)fcntl(ends[0], F_SETFL, 0);
	size_t got = 0;
	ssize_t n;

	while ((n = read(ends[0], data, 4096)) > 0)
		got += (size_t)n;
	assert_int_equal(got, LEN);
	(void)close(ends[0]);
}

static void a_program_is_found_in_the_first_folder_that_has_it(void **state)
{
	OWN_MEM char *found = NULL;
	OWN_MEM char *other = NULL;
	OWN_MEM char *here = NULL;

	(void)state;
	assert_int_equal(path_make_dirs("one/prog", NULL), 0); /* a folder, no program */
	assert_int_equal(path_make_dirs("two", NULL), 0);
	assert_int_equal(path_make_dirs("three", NULL), 0);
	touch("two/prog", 0755);
	touch("three/prog", 0755);
	touch("three/data", 0644);
	touch("local", 0755);
	assert_int_equal(path_find(&found, "prog", "none:one:two:three"), 0);
	assert_string_equal(found, "two/prog");
	assert_int_equal(path_find(&other, "prog", "three:two"), 0);
	assert_string_equal(other, "three/prog");
	assert_int_equal(path_find(&here, "local", ":two:"), 0);
	assert_string_equal(here, "./local");
}

static void a_program_that_is_not_there_or_not_executable_is_told_apart(void **state)
{
	char *found = NULL;

	(void)state;
	assert_int_equal(path_make_dirs("three", NULL), 0);
	touch("three/data", 0644);
	assert_int_equal(path_find(&found, "data", "none:three"), -EACCES);
	assert_int_equal(path_find(&found, "none", "three"), -ENOENT);
	assert_int_equal(path_find(&found, "data", ""), -ENOENT);
	assert_int_equal(path_find(&found, "data", NULL), -ENOENT);
	assert_int_equal(path_find(&found, "", "three"), -ENOENT);
	assert_int_equal(path_find(&found, "three/data", "."), -ENOENT);
	assert_null(found);
}

int main(void)
{
#define IN_FOLDER(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(bytes_come_out_in_the_order_they_went_in),
		cmocka_unit_test(an_emptied_big_buffer_gives_its_memory_back),
		cmocka_unit_test(a_reserve_that_cannot_be_is_refused),
		cmocka_unit_test(formatted_text_is_appended),
		cmocka_unit_test(an_array_ends_in_null_and_owns_copies),
		cmocka_unit_test(an_environment_is_changed_by_whole_names),
		cmocka_unit_test(a_slip_of_the_fingers_finds_its_word),
		cmocka_unit_test(a_beginning_finds_its_word_when_there_is_one),
		cmocka_unit_test(a_strange_word_finds_nothing),
		cmocka_unit_test(a_swap_of_neighbours_is_one_edit),
		IN_FOLDER(folders_are_made_with_their_parents),
		IN_FOLDER(a_file_in_the_way_of_a_folder_is_named),
		IN_FOLDER(a_folder_that_others_may_write_is_not_private),
		IN_FOLDER(a_folder_or_link_of_another_user_is_not_private),
		IN_FOLDER(a_file_is_written_whole_and_nothing_is_left_beside_it),
		IN_FOLDER(a_file_that_cannot_be_written_leaves_nothing),
		IN_FOLDER(writing_through_a_link_replaces_the_link),
		IN_FOLDER(reading_stops_at_the_limit_and_keeps_what_was_there),
		cmocka_unit_test(a_file_without_a_size_is_read_to_its_end),
		cmocka_unit_test(a_slow_reader_gets_every_byte),
		IN_FOLDER(a_program_is_found_in_the_first_folder_that_has_it),
		IN_FOLDER(a_program_that_is_not_there_or_not_executable_is_told_apart),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
