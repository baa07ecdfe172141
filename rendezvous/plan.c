#include "rendezvous/plan.h"

#include <errno.h>
#include <stdlib.h>

#include "base/err.h"

/* Which strings of the message go where. All of them are wanted but one. */
static const struct {
	const char *name;
	size_t from, to;
} plan_strings[] = {
#define STRING(member)                                                                   \
	{                                                                                \
#member, offsetof(struct msg_plan, member),                              \
			offsetof(struct plan, member)                                    \
	}
	STRING(job),  STRING(job_dir),         STRING(socket),      STRING(program),
	STRING(path), STRING(mixed_precision), STRING(master_addr),
#undef STRING
};
enum { N_STRINGS = sizeof(plan_strings) / sizeof(plan_strings[0]) };

static int copy_list(struct strv *to, struct slice_list list)
{
	struct slice one;
	int r = 0;

	while (!r && slice_list_next(&list, &one))
		r = strv_addn(to, (const char *)one.data, one.len);
	return r;
}

static int copy(struct plan *p, const struct msg_plan *msg, struct err *err)
{
	for (int i = 0; i < N_STRINGS; i++) {
		const struct slice *from =
			(const void *)((const char *)msg + plan_strings[i].from);
		char **to = (void *)((char *)p + plan_strings[i].to);

		if (!from->len || memchr(from->data, 0, from->len))
			return err_set(err, -EINVAL, "the plan's %s is not a name",
				       plan_strings[i].name);
		*to = slice_dup(*from);
		if (!*to)
			return err_set(err, -ENOMEM, "plan");
	}
	if (copy_list(&p->argv, msg->argv) < 0 || copy_list(&p->env, msg->env) < 0)
		return err_set(err, -ENOMEM, "plan");
	return 0;
}

int plan_init(struct plan *p, const struct msg_plan *msg, struct err *err)
{
	int r;

	*p = (struct plan){
		.n_processes = msg->n_processes,
		.flags = msg->flags,
		.master_port = msg->master_port,
		.grace_ms = msg->grace_ms,
		.lost_grace_ms = msg->lost_grace_ms,
	};
	r = copy(p, msg, err);
	if (!r && (!p->n_processes || p->n_processes > MAX_PROCESSES))
		r = err_set(err, -EINVAL, "a job has 1 to %d processes, not %u",
			    MAX_PROCESSES, p->n_processes);
	if (!r && !p->argv.n)
		r = err_set(err, -EINVAL, "the plan has no program");
	if (!r && p->master_port > 65535)
		r = err_set(err, -EINVAL, "%u is no port", p->master_port);
	if (r < 0)
		plan_fini(p);
	return r;
}

void plan_fini(struct plan *p)
{
	for (int i = 0; i < N_STRINGS; i++)
		free(*(char **)((char *)p + plan_strings[i].to));
	strv_fini(&p->argv);
	strv_fini(&p->env);
	*p = (struct plan){ 0 };
}
