#include "tests/unit/unit.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

#include "rendezvous/verdict.h"

enum { SECOND = 1000000, EXITED_3 = 3 << 8, EXITED_1 = 1 << 8 };

static struct msg_exited ended(uint32_t rank, int32_t status, uint64_t time_us)
{
	return (struct msg_exited){ .rank = rank, .status = status, .time_us = time_us };
}

static struct msg_verdict reach(const struct msg_exited *list, size_t n)
{
	struct failure f = { 0 };
	struct msg_verdict v = { 0 };

	for (size_t i = 0; i < n; i++)
		failure_consider(&f, &list[i]);
	verdict_reach(&v, &f, 0, false);
	v.message = v.tail = v.tail_path = (struct slice){ 0 };
	failure_fini(&f);
	return v;
}

static void success_is_no_failure(void **state)
{
	struct msg_exited e = ended(0, 0, SECOND);
	struct msg_verdict v = { 0 };
	struct failure none = { 0 };

	(void)state;
	assert_false(verdict_is_failure(&e, 0));
	verdict_reach(&v, &none, 0, false);
	assert_int_equal(v.verdict, VERDICT_DONE);
	assert_int_equal(v.exit_code, 0);
}

static void the_earlier_failure_is_the_first(void **state)
{
	struct msg_exited list[] = { ended(2, EXITED_1, 9 * SECOND),
				     ended(1, EXITED_3, 8 * SECOND) };
	struct msg_verdict v = reach(list, 2);

	(void)state;
	assert_int_equal(v.verdict, VERDICT_FAILED);
	assert_int_equal(v.rank, 1);
	assert_int_equal(v.exit_code, 3);
}

static void a_crash_comes_before_the_error_it_caused_elsewhere(void **state)
{
	/* The victim's exit was seen 40 ms before the crash, which dumped core. */
	struct msg_exited list[] = { ended(0, EXITED_1, SECOND),
				     ended(1, SIGSEGV, SECOND + 40000) };
	struct msg_verdict v = reach(list, 2);

	(void)state;
	assert_int_equal(v.rank, 1);
	assert_int_equal(v.exit_code, 128 + SIGSEGV);
}

static void a_crash_long_after_a_failure_is_not_its_cause(void **state)
{
	struct msg_exited list[] = { ended(0, EXITED_1, SECOND),
				     ended(1, SIGSEGV, SECOND + 200000) };

	(void)state;
	assert_int_equal(reach(list, 2).rank, 0);
}

static void who_wrote_its_error_file_first_failed_first(void **state)
{
	/* Rank 0 raised, then hung in an exit handler; rank 1 lost its peer. */
	struct msg_exited list[] = { ended(1, EXITED_3, 5 * SECOND),
				     ended(0, SIGTERM, 6 * SECOND) };
	struct msg_verdict v;

	(void)state;
	list[1].flags = EXIT_SIGNALLED;
	list[1].failed_us = 4 * SECOND;
	assert_true(verdict_is_failure(&list[1], 5 * SECOND));
	v = reach(list, 2);
	assert_int_equal(v.rank, 0);
	/* What ended it was our signal; it had failed by its own account. */
	assert_int_equal(v.exit_code, 1);
}

static void who_was_ended_by_our_signal_has_not_crashed(void **state)
{
	/* Rank 0 reported an error that rank 1's end caused, and was ended by us. */
	struct msg_exited list[] = { ended(1, EXITED_3, SECOND),
				     ended(0, SIGTERM, SECOND + 50000) };
	struct msg_verdict v;

	(void)state;
	list[1].flags = EXIT_SIGNALLED;
	list[1].failed_us = SECOND + 2000;
	v = reach(list, 2);
	assert_int_equal(v.rank, 1);
	assert_int_equal(v.exit_code, 3);
}

static void a_worker_that_was_told_to_end_did_not_fail(void **state)
{
	struct msg_exited e = ended(1, SIGTERM, 6 * SECOND);

	(void)state;
	e.flags = EXIT_SIGNALLED;
	assert_false(verdict_is_failure(&e, 5 * SECOND));
	/* Not even if it complained about that in its error file. */
	e.failed_us = 5 * SECOND + 500000;
	assert_false(verdict_is_failure(&e, 5 * SECOND));
}

static void a_program_that_cannot_be_executed_has_codes_of_its_own(void **state)
{
	struct msg_exited e = ended(0, 127 << 8, SECOND);
	struct msg_verdict v;

	(void)state;
	e.exec_errno = ENOENT;
	v = reach(&e, 1);
	assert_int_equal(v.verdict, VERDICT_NO_EXEC);
	assert_int_equal(v.exit_code, 127);
	e.exec_errno = EACCES;
	assert_int_equal(reach(&e, 1).exit_code, 126);
}

static void a_requested_stop_counts_more_than_how_workers_ended(void **state)
{
	struct failure none = { 0 };
	struct msg_verdict v = { 0 };

	(void)state;
	verdict_reach(&v, &none, SIGINT, false);
	assert_int_equal(v.verdict, VERDICT_STOPPED);
	assert_int_equal(v.exit_code, 130);
}

static void a_job_whose_client_is_lost_says_so(void **state)
{
	struct failure none = { 0 };
	struct msg_verdict v = { 0 };

	(void)state;
	verdict_reach(&v, &none, 0, true);
	assert_int_equal(v.verdict, VERDICT_LOST);
	assert_int_equal(v.exit_code, 4);
}

static void ends_are_described_by_name(void **state)
{
	char text[128];

	(void)state;
	verdict_describe(text, sizeof(text), EXITED_3, 0);
	assert_string_equal(text, "exited with code 3");
	verdict_describe(text, sizeof(text), SIGKILL, 0);
	assert_string_equal(text, "was killed by SIGKILL");
	verdict_describe(text, sizeof(text), SIGSEGV | 0x80, 0);
	assert_string_equal(text, "was killed by SIGSEGV (core dumped)");
	verdict_describe(text, sizeof(text), SIGRTMIN + 1, 0);
	assert_non_null(strstr(text, "signal 35"));
	verdict_describe(text, sizeof(text), 0, ENOENT);
	assert_non_null(strstr(text, "executed: No such file"));
	verdict_describe(text, sizeof(text), 0, EAGAIN);
	assert_non_null(strstr(text, "could not be started"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(success_is_no_failure),
		cmocka_unit_test(the_earlier_failure_is_the_first),
		cmocka_unit_test(a_crash_comes_before_the_error_it_caused_elsewhere),
		cmocka_unit_test(a_crash_long_after_a_failure_is_not_its_cause),
		cmocka_unit_test(who_wrote_its_error_file_first_failed_first),
		cmocka_unit_test(who_was_ended_by_our_signal_has_not_crashed),
		cmocka_unit_test(a_worker_that_was_told_to_end_did_not_fail),
		cmocka_unit_test(a_program_that_cannot_be_executed_has_codes_of_its_own),
		cmocka_unit_test(a_requested_stop_counts_more_than_how_workers_ended),
		cmocka_unit_test(a_job_whose_client_is_lost_says_so),
		cmocka_unit_test(ends_are_described_by_name),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
