/* SPDX-License-Identifier: Apache-2.0
 *
 * A shared object of its own, without a C library, that a template interpreter loads: how a process that was forked from
 * it enters a sandbox, and gives up there what init gives up. Whatever the interpreter's version, it is this code, and
 * the code is init's own (privileges.c). Everything answers 0 or -errno.
 */
#include "helper.h"

#include <linux/prctl.h>

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif
#define EXPORTED __attribute__((visibility("default"), used))

EXPORTED long nsb_adopt(void);
EXPORTED long nsb_fork(int cgroup);
EXPORTED long nsb_enter(int init, uint64_t namespaces, const int *cgroups, uint32_t n);
EXPORTED long nsb_confine(const struct nsb_plan *plan, uint64_t size, uint32_t *stage);

/* Whoever enters a pid namespace by setns(2) is not its init's child, and that init cannot end before somebody reaps him. */
long nsb_adopt(void) { return NSB_CALL(__NR_prctl, PR_SET_CHILD_SUBREAPER, 1); }

/* A fork that is born in a cgroup of version 2: to be moved there costs milliseconds, for the kernel then waits for every
 * other fork of the host. The C library is not told, so its child may do no more than fork itself in the ordinary way. */
long nsb_fork(int cgroup)
{
    struct clone_args args = {.flags = CLONE_INTO_CGROUP, .exit_signal = 17 /* SIGCHLD */, .cgroup = (uint64_t)cgroup};
    return NSB_CALL(__NR_clone3, &args, sizeof args);
}

/* The cgroups of version 1 first, and by "0", as init does: what is done inside is counted, and a `tasks` file takes a
 * thread that moves itself without waiting. Children are inside from then on, the caller itself stays in its pid namespace. */
long nsb_enter(int init, uint64_t namespaces, const int *cgroups, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        long ret = NSB_CALL(__NR_write, cgroups[i], "0", 1);
        if (ret < 0)
            return ret;
    }
    return NSB_CALL(__NR_setns, init, namespaces);
}

/* Everything that init gives up, in its order. *stage tells what was being done. */
long nsb_confine(const struct nsb_plan *plan, uint64_t size, uint32_t *stage)
{
    /* 0 to 2 are its streams, 3 is where it is asked. */
    *stage = NSB_STAGE_REQUEST;
    long ret = NSB_CALL(__NR_close_range, 4, ~0u, 0);
    if (ret < 0 || !plan_valid(plan, size))
        return ret < 0 ? ret : -EPROTO;
    NSB_CALL(__NR_setsid);
    *stage = NSB_STAGE_LANDLOCK;
    ret = restrict_files(make_ruleset(plan, AT_FDCWD));
    if (ret == 0) {
        *stage = NSB_STAGE_LIMITS;
        ret = set_limits(plan);
    }
    if (ret == 0) {
        *stage = NSB_STAGE_CAPABILITIES;
        ret = drop_capabilities(plan);
    }
    /* As after an execve(2), which is how every other payload starts. */
    if (ret == 0)
        ret = NSB_CALL(__NR_prctl, PR_SET_DUMPABLE, 1);
    if (ret == 0) {
        *stage = NSB_STAGE_SECCOMP;
        ret = load_filter(plan);
    }
    return ret;
}
