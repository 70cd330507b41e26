/* SPDX-License-Identifier: Apache-2.0
 *
 * pid 1 of a sandbox. It builds the root, gives up every privilege, and only then starts the payload; from that moment
 * it is an ordinary process of the payload's own user under the payload's own filter, so that owning it gains nothing.
 * It reaps whatever is orphaned, passes signals on, tells the payload's exact wait status, and its end is the end of
 * every process inside: pid_namespaces(7).
 */
#include "helper.h"

#include <linux/close_range.h>
#include <linux/mount.h>
#include <linux/prctl.h>

enum { SIGNAL_KILL = 9, SIGNAL_CHLD = 17, SFD_FLAGS = 02000000 | 04000, PROPAGATION_PRIVATE = 1 << 18, RUSAGE_CHILDREN_WHO = -1 };

struct init {
    struct launch *l;
    int signals, null;
    long payload;
};

/* HUP INT QUIT USR1 USR2 TERM: what a host may send to a service and expects the payload to see. */
static const uint64_t forwarded = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 9 | 1 << 11 | 1 << 14;

static NORETURN void die(struct launch *l, uint32_t stage, uint32_t op, long err)
{
    const struct failure why = {stage, op, (int)err};
    report(l->control, NSB_MSG_FAILED, &why, l->stamps);
    nsb_exit(1);
}

static void done(struct launch *l, uint32_t stage, long ret)
{
    if (ret < 0)
        die(l, stage, UINT32_MAX, ret);
    if (stage < sizeof l->stamps / sizeof *l->stamps)
        l->stamps[stage] = nsb_now();
}

/* While the zygote writes the id maps: what needs the capabilities that CLONE_NEWUSER gave, but no id. */
static void before_identity(struct launch *l, struct net_task *net)
{
    const struct nsb_plan *plan = l->plan;
    struct mount_attr private = {.propagation = PROPAGATION_PRIVATE};
    NSB_CALL(__NR_prctl, PR_SET_PDEATHSIG, SIGNAL_KILL);
    NSB_CALL(__NR_prctl, PR_SET_NAME, "nsbox-init");
    l->stamps[NSB_STAGE_CLONE] = nsb_now();
    if (plan->flags & NSB_NETWORK) {
        long ret = net_start(net);
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

static unsigned wait_for_maps(struct launch *l, int *sources)
{
    char go;
    unsigned n = NSB_MAX_SOURCES + 1;
    if (recv_packet(l->sync, &go, sizeof go, sources, &n) <= 0)
        nsb_exit(1); /* the zygote has told why */
    if (l->plan->flags & NSB_MAPS_BY_CALLER) {
        struct nsb_msg msg;
        if (recv_packet(l->control, &msg, sizeof msg, 0, 0) < (long)sizeof msg || msg.type != NSB_MSG_GO)
            nsb_exit(1);
    }
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
static void close_others(const int *keep, unsigned n)
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

static void keep_descriptors(struct init *i)
{
    struct launch *l = i->l;
    uint64_t watched = forwarded | 1u << (SIGNAL_CHLD - 1);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_SETMASK, &watched, 0, sizeof watched);
    i->signals = (int)NSB_CALL(__NR_signalfd4, -1, &watched, sizeof watched, SFD_FLAGS);
    i->null = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC);
    if (i->signals < 0 || i->null < 0)
        die(l, NSB_STAGE_LIMITS, UINT32_MAX, i->signals < 0 ? i->signals : i->null);
    for (int fd = 0; fd < 3; fd++)
        NSB_CALL(__NR_dup3, i->null, fd, O_CLOEXEC);
    const int keep[] = {l->control, l->life, l->input, l->output, l->error, i->signals, i->null};
    close_others(keep, sizeof keep / sizeof *keep);
}

static void give_up_privileges(struct init *i, struct net_task *net)
{
    struct launch *l = i->l;
    struct nsb_pollfd life = {l->life, NSB_POLLIN, 0};
    struct __kernel_timespec now = {0, 0};
    done(l, NSB_STAGE_LANDLOCK, restrict_files(l->plan));
    if (l->plan->flags & NSB_NETWORK)
        done(l, NSB_STAGE_NETWORK, net_finish(net));
    keep_descriptors(i);
    done(l, NSB_STAGE_LIMITS, set_limits(l->plan));
    done(l, NSB_STAGE_CAPABILITIES, drop_capabilities(l->plan));
    /* A change of ids clears the parent-death signal (prctl(2)); the zygote may have died before it is set anew. */
    NSB_CALL(__NR_prctl, PR_SET_PDEATHSIG, SIGNAL_KILL);
    if (NSB_CALL(__NR_ppoll, &life, 1, &now, 0, 0) != 0)
        nsb_exit(1);
    done(l, NSB_STAGE_SECCOMP, load_filter(l->plan));
}

static char **fill_pointers(struct nsb_plan *plan, uint32_t first, uint32_t strings, uint32_t count)
{
    char **out = (char **)plan_at(plan, plan->pointers) + first;
    char *s = plan_at(plan, strings);
    for (uint32_t i = 0; i < count; i++) {
        out[i] = s;
        s += str_len(s) + 1;
    }
    out[count] = 0;
    return out;
}

struct attempt { int err, found; };

static void try_execute(struct attempt *a, const char *path, char **argv, char **envp)
{
    int err = (int)NSB_CALL(__NR_execve, path, argv, envp);
    int exists = NSB_CALL(__NR_faccessat, AT_FDCWD, path, 0) == 0;
    /* execvp(3): the first real obstacle is what the user should hear of, not that later directories lack the name. */
    if (a->err == 0 || (exists && !a->found))
        a->err = err;
    a->found |= exists;
}

static void search_path(struct attempt *a, const char *path, char **argv, char **envp)
{
    char candidate[4096];
    size_t name = str_len(argv[0]);
    while (*path) {
        size_t n = 0;
        while (path[n] && path[n] != ':')
            n++;
        if (n && n + name + 2 <= sizeof candidate) {
            memcpy(candidate, path, n);
            candidate[n] = '/';
            memcpy(candidate + n + 1, argv[0], name + 1);
            try_execute(a, candidate, argv, envp);
        }
        path += n + (path[n] == ':');
    }
    if (a->err == 0)
        a->err = -ENOENT;
}

/* Runs in the vforked child: init's memory, own descriptors. What it writes to *a is read after it ended. */
static NOINLINE NORETURN void payload_main(struct init *i, char **argv, char **envp, volatile struct attempt *a)
{
    struct launch *l = i->l;
    struct attempt attempt = {0, 0};
    uint64_t none = 0;
    int slash = 0;
    NSB_CALL(__NR_setsid);
    NSB_CALL(__NR_dup3, l->input >= 0 ? l->input : i->null, 0, 0);
    NSB_CALL(__NR_dup3, l->output, 1, 0);
    NSB_CALL(__NR_dup3, l->error, 2, 0);
    NSB_CALL(__NR_close_range, 3, ~0u, 0);
    NSB_CALL(__NR_umask, 022);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_SETMASK, &none, 0, sizeof none);
    for (const char *s = argv[0]; *s; s++)
        slash |= *s == '/';
    if (slash)
        try_execute(&attempt, argv[0], argv, envp);
    else
        search_path(&attempt, plan_string(l->plan, l->plan->path), argv, envp);
    a->found = attempt.found;
    a->err = attempt.err;
    nsb_exit(127);
}

static void start_payload(struct init *i)
{
    struct launch *l = i->l;
    struct nsb_plan *plan = l->plan;
    volatile struct attempt a = {0, 0};
    char **argv = fill_pointers(plan, 0, plan->argv, plan->argc);
    char **envp = fill_pointers(plan, plan->argc + 1, plan->envp, plan->envc);
    long ret = NSB_CALL(__NR_chdir, plan_string(plan, plan->cwd));
    if (ret < 0)
        die(l, NSB_STAGE_EXEC, UINT32_MAX, ret);
    i->payload = NSB_CALL(__NR_clone, CLONE_VM | CLONE_VFORK | SIGNAL_CHLD);
    if (i->payload == 0)
        payload_main(i, argv, envp, &a);
    if (i->payload < 0)
        die(l, NSB_STAGE_EXEC, UINT32_MAX, i->payload);
    if (a.err < 0) {
        struct nsb_msg msg = {.type = NSB_MSG_EXEC_FAILED, .err = a.err, .status = a.found ? 126 : 127};
        send_packet(l->control, &msg, sizeof msg, 0, 0);
        nsb_exit(1);
    }
    NSB_CALL(__NR_chdir, "/");
    nsb_close(l->input);
    nsb_close(l->output);
    nsb_close(l->error);
    done(l, NSB_STAGE_EXEC, 0);
    report(l->control, NSB_MSG_STARTED, 0, l->stamps);
}

static void add_usage(struct nsb_msg *msg, const struct nsb_rusage *usage)
{
    msg->utime_us = usage->utime_s * 1000000 + usage->utime_us;
    msg->stime_us = usage->stime_s * 1000000 + usage->stime_us;
    msg->maxrss_kb = usage->maxrss;
    msg->inblock = usage->inblock;
    msg->oublock = usage->oublock;
}

/* The payload has ended: tell it at once, end the rest, tell what all of it used. */
static NORETURN void conclude(struct init *i, int status, const struct nsb_rusage *own)
{
    struct nsb_msg msg = {.type = NSB_MSG_EXITED, .status = status};
    struct nsb_rusage usage;
    msg.stamps[NSB_STAGE_RUN] = nsb_now();
    add_usage(&msg, own);
    send_packet(i->l->control, &msg, sizeof msg, 0, 0);
    /* A fork may race with one round of kill(2): the call itself covers every process of the namespace, and those born
     * meanwhile are caught when the wait finds them. */
    while (NSB_CALL(__NR_kill, -1, SIGNAL_KILL) == 0 && NSB_CALL(__NR_wait4, -1, 0, NSB_WALL, 0) > 0)
        ;
    while (NSB_CALL(__NR_wait4, -1, 0, NSB_WALL, 0) > 0)
        ;
    msg.type = NSB_MSG_ENDED;
    NSB_CALL(__NR_getrusage, RUSAGE_CHILDREN_WHO, &usage);
    add_usage(&msg, &usage);
    send_packet(i->l->control, &msg, sizeof msg, 0, 0);
    nsb_exit(0);
}

static void reap_children(struct init *i)
{
    struct nsb_rusage usage;
    int status;
    long pid;
    while ((pid = NSB_CALL(__NR_wait4, -1, &status, NSB_WNOHANG | NSB_WALL, &usage)) > 0)
        if (pid == i->payload)
            conclude(i, status, &usage);
}

struct signal_info { uint32_t number, error; int32_t code; uint32_t pid; char rest[112]; };

static void read_signals(struct init *i)
{
    struct signal_info info;
    while (NSB_CALL(__NR_read, i->signals, &info, sizeof info) == sizeof info)
        /* A sender outside this pid namespace shows as pid 0: only those are passed on. */
        if (info.number != SIGNAL_CHLD && info.pid == 0)
            NSB_CALL(__NR_kill, i->payload, info.number);
    reap_children(i);
}

static void read_control(struct init *i)
{
    struct nsb_msg msg;
    long ret = recv_packet(i->l->control, &msg, sizeof msg, 0, 0);
    if (ret == 0 || (ret < 0 && ret != -EMSGSIZE))
        nsb_exit(1);
    if (ret != sizeof msg)
        return;
    if (msg.type == NSB_MSG_KILL)
        NSB_CALL(__NR_kill, -1, SIGNAL_KILL);
    if (msg.type == NSB_MSG_SIGNAL && msg.err > 0 && msg.err <= 64)
        NSB_CALL(__NR_kill, i->payload, msg.err);
}

NORETURN void init_main(struct launch *l)
{
    int sources[NSB_MAX_SOURCES + 1];
    const struct nsb_plan *plan = l->plan;
    struct init i = {.l = l, .signals = -1, .null = -1, .payload = -1};
    struct net_task net;
    before_identity(l, &net);
    unsigned n = wait_for_maps(l, sources);
    done(l, NSB_STAGE_IDENTITY, become(plan->setup_uid, plan->setup_gid, !(plan->flags & NSB_SETGROUPS_DENY)));
    if (!(plan->flags & NSB_HOST_SOURCES))
        n = open_own_sources(l, sources);
    build_root(l, sources, n);
    give_up_privileges(&i, &net);
    start_payload(&i);
    struct nsb_pollfd fds[3] = {{l->control, NSB_POLLIN, 0}, {l->life, NSB_POLLIN, 0}, {i.signals, NSB_POLLIN, 0}};
    for (;;) {
        reap_children(&i);
        if (NSB_CALL(__NR_ppoll, fds, 3, 0, 0, 0) < 0)
            continue;
        if (fds[1].revents)
            nsb_exit(1);
        if (fds[0].revents)
            read_control(&i);
        if (fds[2].revents)
            read_signals(&i);
    }
}
