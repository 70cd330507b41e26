/* SPDX-License-Identifier: Apache-2.0
 *
 * pid 1 of a sandbox. It builds the root, gives up every privilege, and only then starts the payload; from that moment
 * it is an ordinary process of the payload's own user under the payload's own filter, so that owning it gains nothing.
 * What it does then is in command.c.
 */
#include "helper.h"

#include <linux/close_range.h>
#include <linux/futex.h>
#include <linux/mount.h>
#include <linux/prctl.h>

enum { SIGNAL_KILL = 9, PROPAGATION_PRIVATE = 1 << 18 };

NORETURN void die(struct launch *l, uint32_t stage, uint32_t op, long err)
{
    const struct failure why = {stage, op, (int)err};
    report(l->command.control, NSB_MSG_FAILED, &why, l->stamps);
    nsb_exit(1);
}

static void must(struct launch *l, uint32_t stage, long ret)
{
    ret = fault_at(l->plan, stage, ret);
    if (ret < 0)
        die(l, stage, UINT32_MAX, ret);
}

/* A step on the way that everything else waits for. */
static void done(struct launch *l, uint32_t stage, long ret)
{
    must(l, stage, ret);
    if (stage < sizeof l->stamps / sizeof *l->stamps)
        l->stamps[stage] = nsb_now();
}

/* The cgroups of version 1 come first, so that all that follows is counted: a thread that writes 0 to `tasks` moves itself
 * without the kernel's wait for other threads, which a move by somebody else, or through cgroup.procs, would cost. */
static void enter_cgroups(struct launch *l)
{
    NSB_CALL(__NR_prctl, PR_SET_PDEATHSIG, SIGNAL_KILL);
    NSB_CALL(__NR_prctl, PR_SET_NAME, "nsbox-init");
    l->stamps[NSB_STAGE_CLONE] = nsb_now();
    for (uint32_t i = 0; i < l->command.n_join; i++)
        done(l, NSB_STAGE_CGROUP, NSB_CALL(__NR_write, l->command.join[i], "0", 1));
    /* Not by clone3: the root of a cgroup namespace is where its maker is, and only now are we where we belong. */
    done(l, NSB_STAGE_CGROUP, NSB_CALL(__NR_unshare, CLONE_NEWCGROUP));
}

static void wait_for_go(struct launch *l)
{
    struct nsb_msg msg;
    if (recv_packet(l->command.control, &msg, sizeof msg, 0, 0) < (long)sizeof msg || msg.type != NSB_MSG_GO)
        nsb_exit(1);
}

static unsigned wait_for_maps(struct launch *l, int *sources)
{
    char go;
    unsigned n = NSB_MAX_SOURCES + 1;
    if (recv_packet(l->sync, &go, sizeof go, sources, &n) <= 0)
        nsb_exit(1); /* the zygote has told why */
    if (l->plan->flags & NSB_MAPS_BY_CALLER)
        wait_for_go(l);
    l->stamps[NSB_STAGE_IDMAP] = nsb_now();
    return n;
}

/* An unprivileged caller's sources, opened with its own rights; before the scratch file system covers a directory. */
static unsigned open_own_sources(struct launch *l, int *sources)
{
    const struct nsb_plan *plan = l->plan;
    const struct nsb_op *ops = plan_at(l->plan, plan->ops);
    unsigned n = 0;
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        if (!op_has_source(&ops[i]))
            continue;
        int source = n < NSB_MAX_SOURCES ? open_source(plan, &ops[i], -1) : -E2BIG;
        if (source < 0)
            die(l, NSB_STAGE_SOURCE, i, source);
        sources[n++] = source;
    }
    return n;
}

/* While the zygote writes the id maps: what needs the capabilities that CLONE_NEWUSER gave, but no id. */
static void before_identity(struct launch *l)
{
    const struct nsb_plan *plan = l->plan;
    struct mount_attr private = {.propagation = PROPAGATION_PRIVATE};
    const char *hostname = plan_string(plan, plan->hostname);
    if (plan->hostname)
        done(l, NSB_STAGE_HOSTNAME, NSB_CALL(__NR_sethostname, hostname, str_len(hostname)));
    l->staging = (int)NSB_CALL(__NR_openat, AT_FDCWD, plan_string(plan, plan->staging), O_PATH | O_DIRECTORY | O_CLOEXEC);
    done(l, NSB_STAGE_SCRATCH, l->staging);
    done(l, NSB_STAGE_MOUNT, NSB_CALL(__NR_mount_setattr, AT_FDCWD, "/", AT_RECURSIVE, &private, sizeof private));
}

static void take_identity(struct launch *l)
{
    const struct nsb_plan *plan = l->plan;
    must(l, NSB_STAGE_IDENTITY, become(plan->setup_uid, plan->setup_gid, !(plan->flags & NSB_SETGROUPS_DENY)));
}

static void build_root(struct launch *l, const int *sources, unsigned n_sources)
{
    const struct nsb_plan *plan = l->plan;
    const struct nsb_op *ops = plan_at(l->plan, plan->ops);
    unsigned next = 0;
    done(l, NSB_STAGE_SCRATCH, make_scratch(l));
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        OWNED_FD source = -1;
        if (op_has_source(&ops[i]))
            source = next < n_sources ? sources[next++] : -EBADF;
        long ret = source < -1 ? source : play_op(l, &ops[i], source);
        if (ret < 0)
            die(l, NSB_STAGE_MOUNT, i, ret);
    }
    done(l, NSB_STAGE_MOUNT, 0);
}

/* The thread that builds the root. Directories and descriptors are every thread's, ids and capabilities are its own. */
struct builder { char stack[65536] __attribute__((aligned(16))); struct launch *l; int running; };

static void build(struct launch *l)
{
    UNSET int sources[NSB_MAX_SOURCES + 1];
    before_identity(l);
    unsigned n = wait_for_maps(l, sources);
    tell_progress(&l->progress, NSB_MAPPED);
    take_identity(l);
    done(l, NSB_STAGE_IDENTITY, 0);
    if (!(l->plan->flags & NSB_HOST_SOURCES))
        n = open_own_sources(l, sources);
    build_root(l, sources, n);
    l->ruleset = make_ruleset(l->plan, l->root);
    done(l, NSB_STAGE_PIVOT, enter_root(l));
    tell_progress(&l->progress, NSB_ROOTED);
    must(l, NSB_STAGE_PIVOT, drop_old_root());
}

static NORETURN void builder_main(void *argument)
{
    build(((struct builder *)argument)->l);
    for (;;)
        NSB_CALL(__NR_exit, 0);
}

/* A new thread goes where the fewest run at that moment, which may be behind its maker, though in the next the other
 * processor is idle; and it stays there for milliseconds, until somebody balances. So it is told not to be here. */
static void move_away(long thread)
{
    UNSET unsigned long mask[1024 / sizeof(unsigned long)];
    unsigned cpu = 0;
    const unsigned long bits = 8 * sizeof *mask;
    long size = NSB_CALL(__NR_sched_getaffinity, thread, sizeof mask, mask);
    if (size > 0 && NSB_CALL(__NR_getcpu, &cpu, 0, 0) == 0 && cpu / 8 < (unsigned long)size) {
        mask[cpu / bits] &= ~(1ul << cpu % bits);
        NSB_CALL(__NR_sched_setaffinity, thread, size, mask); /* fails where no other is allowed */
    }
}

static void start_builder(struct builder *b, struct launch *l)
{
    const unsigned long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    b->l = l;
    b->running = 1;
    long ret = nsb_thread(__NR_clone, flags, b->stack + sizeof b->stack, builder_main, b, &b->running);
    if (ret < 0)
        die(l, NSB_STAGE_CLONE, UINT32_MAX, ret);
    move_away(ret);
}

static void join_builder(struct builder *b)
{
    while (__atomic_load_n(&b->running, __ATOMIC_ACQUIRE))
        NSB_CALL(__NR_futex, &b->running, FUTEX_WAIT, 1, 0, 0, 0);
}

/* Closes every descriptor from 3 up that is not in keep. */
void close_others(const int *keep, unsigned n)
{
    unsigned from = 3;
    for (;;) {
        unsigned next = ~0u;
        for (unsigned i = 0; i < n; i++)
            if (keep[i] >= (int)from && (unsigned)keep[i] < next)
                next = (unsigned)keep[i];
        if (next > from)
            NSB_CALL(__NR_close_range, from, next == ~0u ? next : next - 1, 0);
        if (next == ~0u)
            return;
        from = next + 1;
    }
}

/* What init keeps from here on; all else, and every descriptor of the host, is closed. */
static void keep_descriptors(struct launch *l, struct watcher *w)
{
    long ret = watch_signals(w);
    w->null = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC);
    if (ret < 0 || w->null < 0)
        die(l, NSB_STAGE_LIMITS, UINT32_MAX, ret < 0 ? ret : w->null);
    for (int fd = 0; fd < 3; fd++)
        NSB_CALL(__NR_dup3, w->null, fd, O_CLOEXEC);
    if (l->plan->flags & NSB_PASS_ROOT) {
        w->pass[0] = l->root;
        w->pass[1] = l->scratch;
        w->pass[2] = l->secrets;
    }
    const struct command *c = &l->command;
    int keep[11 + NSB_MAX_GIVE] = {c->control, c->input, c->output, c->error, c->variables, l->life, w->signals, w->null,
                                   w->pass[0], w->pass[1], w->pass[2]};
    memcpy(keep + 11, c->give, c->n_give * sizeof *keep);
    close_others(keep, 11 + c->n_give);
}

/* setns(2) by pidfd asks for the right to read this process, so it stays dumpable until whoever was meant to come in says
 * that he is here. Nobody else runs inside by then. */
static void let_join(struct launch *l)
{
    report(l->command.control, NSB_MSG_JOIN, 0, l->stamps);
    wait_for_go(l);
    done(l, NSB_STAGE_CAPABILITIES, NSB_CALL(__NR_prctl, PR_SET_DUMPABLE, 0));
}

/* Once the root is there. The old one may still be on its way out meanwhile: nobody but us is inside. */
static void give_up_privileges(struct launch *l, struct watcher *w)
{
    take_identity(l);
    done(l, NSB_STAGE_LANDLOCK, restrict_files(l->ruleset));
    keep_descriptors(l, w);
    done(l, NSB_STAGE_LIMITS, set_limits(l->plan));
    done(l, NSB_STAGE_CAPABILITIES, drop_capabilities(l->plan));
}

/* From here on init has one thread: credentials and filters are per thread, and none with more may be left. */
static void confine(struct launch *l, struct builder *b)
{
    struct nsb_pollfd life = {l->life, NSB_POLLIN, 0};
    struct __kernel_timespec now = {0, 0};
    join_builder(b);
    if (l->plan->flags & NSB_JOIN)
        let_join(l);
    /* The zygote may have died at a moment when the parent-death signal was not set. */
    if (NSB_CALL(__NR_ppoll, &life, 1, &now, 0, 0) != 0)
        nsb_exit(1);
    done(l, NSB_STAGE_SECCOMP, load_filter(l->plan));
}

/* The root and the network namespace take about as long as each other, and there is a thread for each. The network is made
 * by the one that runs already; the other has to wait for the zygote anyway, which is busy with the maps. */
static void make_world(struct launch *l, struct builder *b)
{
    OWNED_FD proc = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
    must(l, NSB_STAGE_NETWORK, proc);
    start_builder(b, l);
    long ret = make_network(l, proc);
    wait_progress(&l->progress, NSB_MAPPED); /* of a failure, too, the host side hears only after the clone */
    must(l, NSB_STAGE_NETWORK, ret);
    if (l->plan->flags & NSB_NET_WAIT)
        wait_for_go(l);
    wait_progress(&l->progress, NSB_ROOTED);
    done(l, NSB_STAGE_NETWORK, 0);
}

NORETURN void init_main(struct launch *l)
{
    UNSET struct builder builder;
    struct watcher w = {.command = &l->command, .is_init = 1, .life = l->life, .signals = -1, .null = -1, .pass = {-1, -1, -1},
                        .payload = -1, .stamps = l->stamps};
    builder.running = 0;
    enter_cgroups(l);
    if (l->plan->flags & NSB_NETWORK)
        make_world(l, &builder);
    else
        build(l);
    give_up_privileges(l, &w);
    confine(l, &builder);
    start_command(&w);
    watch(&w);
}
