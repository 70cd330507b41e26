/* SPDX-License-Identifier: Apache-2.0
 * Giving up: ids, limits, capabilities, files (Landlock), system calls (seccomp). Each is one way. */
#include "helper.h"

#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/prctl.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>

/* A change of ids clears the parent-death signal (prctl(2)), so it is set anew at once. */
long become(uint32_t uid, uint32_t gid, int may_setgroups)
{
    long ret = may_setgroups ? NSB_CALL(__NR_setgroups, 0, 0) : 0;
    if (ret == 0)
        ret = NSB_CALL(__NR_setresgid, gid, gid, gid);
    if (ret == 0)
        ret = NSB_CALL(__NR_setresuid, uid, uid, uid);
    return ret == 0 ? NSB_CALL(__NR_prctl, PR_SET_PDEATHSIG, 9 /* SIGKILL */) : ret;
}

/* A hard limit that the caller already has cannot be raised here, whoever the caller is: CAP_SYS_RESOURCE counts only in
 * the first user namespace (getrlimit(2)). The lower of the two holds. */
long set_limits(const struct nsb_plan *plan)
{
    const struct nsb_rlimit *limits = plan_at((struct nsb_plan *)plan, plan->rlimits);
    for (uint32_t i = 0; i < plan->n_rlimits; i++) {
        uint64_t value[2];
        long ret = NSB_CALL(__NR_prlimit64, 0, limits[i].resource, 0, value);
        value[0] = limits[i].soft < value[1] ? limits[i].soft : value[1];
        value[1] = limits[i].hard < value[1] ? limits[i].hard : value[1];
        if (ret == 0)
            ret = NSB_CALL(__NR_prlimit64, 0, limits[i].resource, value, 0);
        if (ret < 0)
            return ret;
    }
    long ret = plan->nice ? NSB_CALL(__NR_setpriority, 0, 0, plan->nice) : 0;
    if (ret == 0 && plan->ioprio)
        ret = NSB_CALL(__NR_ioprio_set, 1 /* IOPRIO_WHO_PROCESS */, 0, plan->ioprio);
    if (ret < 0 || plan->n_affinity == 0)
        return ret;
    ret = NSB_CALL(__NR_sched_setaffinity, 0, plan->n_affinity, plan_at((struct nsb_plan *)plan, plan->affinity));
    return ret < 0 ? ret : 0;
}

/* landlock(7); the structures are ABI and newer than the headers of some distributions that we build on. */
struct ruleset_attr { uint64_t handled_fs, handled_net, scoped; };
struct path_beneath { uint64_t access; int fd; } __attribute__((packed));
enum { RULE_PATH_BENEATH = 1, TYPE_MASK = 0170000, TYPE_DIRECTORY = 0040000 };

/* What can be granted on a file: execute, write, read, truncate, ioctl. The kernel refuses a rule that grants more. */
static const uint64_t file_rights = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15;

static long add_rule(int ruleset, int root, const char *path, uint64_t access)
{
    struct statx st;
    OWNED_FD fd = open_beneath(root, path, O_PATH, 0, root == AT_FDCWD ? 0 : RESOLVE_IN_ROOT);
    if (fd < 0)
        return fd == -ENOENT ? 0 : fd;
    long ret = NSB_CALL(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_TYPE, &st);
    if (ret < 0)
        return ret;
    if ((st.stx_mode & TYPE_MASK) != TYPE_DIRECTORY)
        access &= file_rights;
    struct path_beneath rule = {access, fd};
    return NSB_CALL(__NR_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &rule, 0);
}

/* root: where the paths of the rules begin; AT_FDCWD: it is everybody's root by now. Answers a descriptor, or NSB_NOTHING
 * where the plan has none. */
int make_ruleset(const struct nsb_plan *plan, int root)
{
    struct ruleset_attr attr = {plan->landlock_fs, 0, plan->landlock_scoped};
    const struct nsb_rule *rules = plan_at((struct nsb_plan *)plan, plan->rules);
    if (!plan->landlock_fs && !plan->landlock_scoped)
        return NSB_NOTHING;
    /* A kernel that does not know the last fields takes the shorter structure; the plan asks only for what it has. */
    size_t size = plan->landlock_scoped ? sizeof attr : sizeof attr.handled_fs;
    int ruleset = (int)NSB_CALL(__NR_landlock_create_ruleset, &attr, size, 0);
    for (uint32_t i = 0; ruleset >= 0 && i < plan->n_rules; i++) {
        long ret = add_rule(ruleset, root, plan_string(plan, rules[i].path), rules[i].access);
        if (ret < 0) {
            nsb_close(ruleset);
            return (int)ret;
        }
    }
    return ruleset;
}

/* What make_ruleset() answered, for the calling thread and all that comes of it; closes it. */
long restrict_files(int ruleset)
{
    if (ruleset < 0)
        return ruleset == NSB_NOTHING ? 0 : ruleset;
    long ret = NSB_CALL(__NR_landlock_restrict_self, ruleset, 0);
    nsb_close(ruleset);
    return ret;
}

/* capabilities(7). Securebits first, for they need CAP_SETPCAP; the bounding set next, for the same reason; the ids
 * while CAP_SETUID is there; last the three sets themselves. no_new_privs then makes set-id bits and file
 * capabilities mean nothing at the next execve(2). */
long drop_capabilities(const struct nsb_plan *plan)
{
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    const unsigned long bits = SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP |
                               SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED | SECBIT_NO_CAP_AMBIENT_RAISE |
                               SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;
    long ret = NSB_CALL(__NR_prctl, PR_SET_SECUREBITS, bits);
    if (ret < 0)
        return ret;
    for (unsigned long cap = 0; ret == 0; cap++)
        ret = NSB_CALL(__NR_prctl, PR_CAPBSET_DROP, cap);
    if (ret != -EINVAL) /* the first number that this kernel does not know ends the loop */
        return ret;
    NSB_CALL(__NR_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL);
    ret = become(plan->uid, plan->gid, !(plan->flags & NSB_SETGROUPS_DENY));
    if (ret == 0)
        ret = NSB_CALL(__NR_capset, &head, none);
    if (ret == 0)
        ret = NSB_CALL(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1);
    /* Nothing inside may ptrace pid 1 or read its /proc entries, though it runs as the same user: ptrace(2). */
    return ret == 0 && !(plan->flags & NSB_JOIN) ? NSB_CALL(__NR_prctl, PR_SET_DUMPABLE, 0) : ret;
}

long load_filter(const struct nsb_plan *plan)
{
    struct sock_fprog program = {(unsigned short)plan->n_filter, plan_at((struct nsb_plan *)plan, plan->filter)};
    return NSB_CALL(__NR_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

struct kernel_sigaction { void *handler; unsigned long flags; void *restorer; uint64_t mask; };

/* A caller may ignore SIGCHLD or SIGPIPE and block signals; ignored and blocked survive execve(2): signal(7). */
void default_signals(void)
{
    struct kernel_sigaction action = {0, 0, 0, 0};
    uint64_t mask = 0;
    for (long sig = 1; sig <= 64; sig++)
        NSB_CALL(__NR_rt_sigaction, sig, &action, 0, sizeof mask);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_SETMASK, &mask, 0, sizeof mask);
}
