/* SPDX-License-Identifier: Apache-2.0
 *
 * pid 1 of a sandbox. It builds the root, gives up every privilege, and only then starts the payload; from that moment
 * it is an ordinary process of the payload's own user under the payload's own filter, so that owning it gains nothing.
 * What it does then is in command.c.
 */
#include "helper.h"

#include <linux/close_range.h>
#include <linux/mount.h>
#include <linux/prctl.h>

enum { SIGNAL_KILL = 9, PROPAGATION_PRIVATE = 1 << 18 };

NORETURN void die(struct launch *l, uint32_t stage, uint32_t op, long err)
{
    const struct failure why = {stage, op, (int)err};
    report(l->command.control, NSB_MSG_FAILED, &why, l->stamps);
    nsb_exit(1);
}

static void done(struct launch *l, uint32_t stage, long ret)
{
    ret = fault_at(l->plan, stage, ret);
    if (ret < 0)
        die(l, stage, UINT32_MAX, ret);
    if (stage < sizeof l->stamps / sizeof *l->stamps)
        l->stamps[stage] = nsb_now();
}

/* While the zygote writes the id maps: what needs the capabilities that CLONE_NEWUSER gave, but no id. The cgroups of
 * version 1 come first, so that all that follows is counted: a thread that writes 0 to `tasks` moves itself without the
 * kernel's wait for other threads, which a move by somebody else, or through cgroup.procs, would cost. */
static void before_identity(struct launch *l, struct net_task *net)
{
    const struct nsb_plan *plan = l->plan;
    struct mount_attr private = {.propagation = PROPAGATION_PRIVATE};
    NSB_CALL(__NR_prctl, PR_SET_PDEATHSIG, SIGNAL_KILL);
    NSB_CALL(__NR_prctl, PR_SET_NAME, "nsbox-init");
    l->stamps[NSB_STAGE_CLONE] = nsb_now();
    for (uint32_t i = 0; i < l->command.n_join; i++)
        done(l, NSB_STAGE_CGROUP, NSB_CALL(__NR_write, l->command.join[i], "0", 1));
    /* Not by clone3: the root of a cgroup namespace is where its maker is, and only now are we where we belong. */
    done(l, NSB_STAGE_CGROUP, NSB_CALL(__NR_unshare, CLONE_NEWCGROUP));
    if (plan->flags & NSB_NETWORK) {
        long ret = net_start(net, plan, l->command.control);
        if (ret < 0)
            die(l, NSB_STAGE_NETWORK, UINT32_MAX, ret);
    }
    const char *hostname = plan_string(plan, plan->hostname);
    if (plan->hostname)
        done(l, NSB_STAGE_HOSTNAME, NSB_CALL(__NR_sethostname, hostname, str_len(hostname)));
    l->staging = (int)NSB_CALL(__NR_openat, AT_FDCWD, plan_string(plan, plan->staging), O_PATH | O_DIRECTORY | O_CLOEXEC);
    done(l, NSB_STAGE_SCRATCH, l->staging);
    done(l, NSB_STAGE_MOUNT, NSB_CALL(__NR_mount_setattr, AT_FDCWD, "/", AT_RECURSIVE, &private, sizeof private));
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
    done(l, NSB_STAGE_PIVOT, enter_root(l));
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

static void give_up_privileges(struct launch *l, struct watcher *w, struct net_task *net)
{
    struct nsb_pollfd life = {l->life, NSB_POLLIN, 0};
    struct __kernel_timespec now = {0, 0};
    done(l, NSB_STAGE_LANDLOCK, restrict_files(l->plan));
    if (l->plan->flags & NSB_NETWORK)
        done(l, NSB_STAGE_NETWORK, net_finish(net));
    if (l->plan->flags & NSB_NET_WAIT)
        wait_for_go(l);
    keep_descriptors(l, w);
    done(l, NSB_STAGE_LIMITS, set_limits(l->plan));
    done(l, NSB_STAGE_CAPABILITIES, drop_capabilities(l->plan));
    if (l->plan->flags & NSB_JOIN)
        let_join(l);
    /* The zygote may have died at a moment when the parent-death signal was not set. */
    if (NSB_CALL(__NR_ppoll, &life, 1, &now, 0, 0) != 0)
        nsb_exit(1);
    done(l, NSB_STAGE_SECCOMP, load_filter(l->plan));
}

NORETURN void init_main(struct launch *l)
{
    UNSET int sources[NSB_MAX_SOURCES + 1];
    const struct nsb_plan *plan = l->plan;
    UNSET struct net_task net;
    struct watcher w = {.command = &l->command, .is_init = 1, .life = l->life, .signals = -1, .null = -1, .pass = {-1, -1, -1},
                        .payload = -1, .stamps = l->stamps};
    before_identity(l, &net);
    unsigned n = wait_for_maps(l, sources);
    net_may_tell(&net);
    done(l, NSB_STAGE_IDENTITY, become(plan->setup_uid, plan->setup_gid, !(plan->flags & NSB_SETGROUPS_DENY)));
    if (!(plan->flags & NSB_HOST_SOURCES))
        n = open_own_sources(l, sources);
    build_root(l, sources, n);
    give_up_privileges(l, &w, &net);
    start_command(&w);
    watch(&w);
}
