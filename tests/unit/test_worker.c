#include "tests/unit/unit.h"

#include <stdbool.h>

#include "supervisor/worker.h"

static void every_state_is_reached(void **state)
{
	bool reached[N_WORKER_STATES] = { [WORKER_NEW] = true };

	(void)state;
	for (int round = 0; round < N_WORKER_STATES; round++)
		for (int i = 0; i < n_worker_rules; i++)
			if (reached[worker_rules[i].from])
				reached[worker_rules[i].to] = true;
	for (int i = 0; i < N_WORKER_STATES; i++)
		assert_true(reached[i]);
}

static void every_rule_is_the_only_one_of_its_kind(void **state)
{
	(void)state;
	for (int i = 0; i < n_worker_rules; i++)
		for (int k = i + 1; k < n_worker_rules; k++)
			assert_false(worker_rules[i].from == worker_rules[k].from &&
				     worker_rules[i].event == worker_rules[k].event);
}

/* After a stop, each state comes to its end by exits alone. */
static void every_state_has_a_way_out_on_stop(void **state)
{
	(void)state;
	for (int s = 0; s < N_WORKER_STATES; s++) {
		enum worker_state at = worker_next((enum worker_state)s, WORKER_STOP);

		at = worker_next(at, WORKER_EXIT_LEFT);
		at = worker_next(at, WORKER_GROUP_GONE);
		assert_int_equal(at, WORKER_ENDED);
	}
}

static void the_end_is_the_end(void **state)
{
	(void)state;
	for (int e = 0; e < N_WORKER_EVENTS; e++)
		assert_int_equal(worker_next(WORKER_ENDED, (enum worker_event)e),
				 WORKER_ENDED);
}

static void a_worker_that_was_never_started_ends_at_once_on_stop(void **state)
{
	(void)state;
	assert_int_equal(worker_next(WORKER_NEW, WORKER_STOP), WORKER_ENDED);
}

static void a_main_process_that_ends_before_its_group_lingers(void **state)
{
	(void)state;
	assert_int_equal(worker_next(WORKER_RUNNING, WORKER_EXIT_LEFT), WORKER_LINGERING);
	assert_int_equal(worker_next(WORKER_LINGERING, WORKER_EXIT), WORKER_LINGERING);
	assert_int_equal(worker_next(WORKER_LINGERING, WORKER_GROUP_GONE), WORKER_ENDED);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_state_is_reached),
		cmocka_unit_test(every_rule_is_the_only_one_of_its_kind),
		cmocka_unit_test(every_state_has_a_way_out_on_stop),
		cmocka_unit_test(the_end_is_the_end),
		cmocka_unit_test(a_worker_that_was_never_started_ends_at_once_on_stop),
		cmocka_unit_test(a_main_process_that_ends_before_its_group_lingers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
