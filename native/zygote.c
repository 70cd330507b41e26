/* SPDX-License-Identifier: Apache-2.0
 *
 * Theory of operation
 *
 * The embedding process may have gigabytes mapped and any number of threads; forking it costs tens of milliseconds and
 * inherits its secrets. So it starts this program once, with posix_spawn(3), from a sealed memfd, and asks it for
 * sandboxes. The zygote is small, single-threaded, holds no secret, and keeps the caller's identity.
 *
 *   embedding process --(SEQPACKET: request + blob + descriptors)--> zygote --clone3--> init, pid 1 of the sandbox
 *          ^------------(SEQPACKET per sandbox: struct nsb_msg)---------+-----------------+      |
 *          +------------(pipes: stdin, stdout, stderr)-------------------------------- payload <--+ vfork, execve
 *
 * Per request: clone3 makes init in its namespaces; the zygote writes its id maps and, for a privileged caller, opens
 * and id-maps the sources of mounts, which init could not reach as its new self; all of that overlaps with what init
 * can do meanwhile (bring lo up). Then one packet with the mounts lets init go on, and one packet with a pidfd tells
 * the embedding process. Everything later is between init and the embedding process.
 *
 * Deaths. The zygote watches a pidfd of the embedding process: that is the whole thread group, unlike
 * PR_SET_PDEATHSIG, which fires when the thread that started us ends. Each init has PR_SET_PDEATHSIG on the zygote,
 * which has one thread, and reads the life pipe, whose only writer is the zygote. So an embedding process that dies,
 * even by SIGKILL, takes every process of every sandbox with it. The zygote reaps every init.
 */
#include "helper.h"

#include <linux/close_range.h>
#include <linux/keyctl.h>
#include <linux/mman.h>
#include <linux/prctl.h>

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif

enum { PROT_READ_WRITE = 3, AF_UNIX_FAMILY = 1, SEQPACKET_CLOEXEC = 5 | 02000000, SIGNALFD_FLAGS = 02000000 | 04000, KILL = 9, CHLD = 17 };

struct zygote { int life[2]; int signals; };

/* Never less: pivot_root(2) and kill(-1) of an init without one of them would be the host's. init itself makes the network
 * namespace (net.c) and the cgroup namespace (init.c), each for a reason told there. */
static const uint64_t namespaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS;

int write_file_at(int dir, const char *name, const char *text)
{
    OWNED_FD fd = (int)NSB_CALL(__NR_openat, dir, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return fd;
    long ret = NSB_CALL(__NR_write, fd, text, str_len(text));
    return ret < 0 ? (int)ret : 0;
}

int open_process(long pid)
{
    char path[40] = "/proc/";
    put_number(path + 6, (unsigned long)pid);
    return (int)NSB_CALL(__NR_openat, AT_FDCWD, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

int write_maps(int process, const char *uid_map, const char *gid_map, int deny_setgroups)
{
    int ret = deny_setgroups ? write_file_at(process, "setgroups", "deny") : 0;
    if (ret == 0)
        ret = write_file_at(process, "uid_map", uid_map);
    return ret == 0 ? write_file_at(process, "gid_map", gid_map) : ret;
}

void single_map(char *out, uint32_t inside, uint32_t outside)
{
    out = put_number(out, inside);
    *out++ = ' ';
    out = put_number(out, outside);
    memcpy(out, " 1", 3);
}

/* User namespaces for MOUNT_ATTR_IDMAP: that of the sandbox itself, and one in which the owner of a source appears as
 * the payload. The last of the second kind is kept for the next source, which mostly has the same owner. */
struct idmaps { int range, owner; uint32_t uid, gid; };

/* The namespace's only process is killed as soon as a descriptor holds the namespace. */
static int owner_namespace(const struct nsb_plan *plan, uint32_t uid, uint32_t gid)
{
    char uid_map[32], gid_map[32];
    struct clone_args args = {.flags = CLONE_NEWUSER, .exit_signal = CHLD};
    single_map(uid_map, uid, plan->host_uid);
    single_map(gid_map, gid, plan->host_gid);
    long us = NSB_CALL(__NR_getpid), pid = NSB_CALL(__NR_clone3, &args, sizeof args);
    if (pid == 0) {
        /* If we are killed meanwhile it must not live on with our sockets and the writing end of the life pipe. */
        NSB_CALL(__NR_close_range, 3, ~0u, 0);
        NSB_CALL(__NR_prctl, PR_SET_PDEATHSIG, KILL);
        while (NSB_CALL(__NR_getppid) == us)
            NSB_CALL(__NR_ppoll, 0, 0, 0, 0, 0);
        nsb_exit(1);
    }
    if (pid < 0)
        return (int)pid;
    OWNED_FD process = open_process(pid);
    int ns = process < 0 ? process : write_maps(process, uid_map, gid_map, 0);
    if (ns == 0)
        ns = (int)NSB_CALL(__NR_openat, process, "ns/user", O_RDONLY | O_CLOEXEC);
    NSB_CALL(__NR_kill, pid, KILL);
    NSB_CALL(__NR_wait4, pid, 0, NSB_WALL, 0);
    return ns;
}

static int idmap_for(struct idmaps *maps, const struct nsb_plan *plan, const struct nsb_op *op)
{
    struct statx st;
    if (op->flags & NSB_IDMAP_RANGE)
        return maps->range;
    if (!(op->flags & NSB_IDMAP_OWNER))
        return NSB_NOTHING;
    long ret = NSB_CALL(__NR_statx, AT_FDCWD, plan_string(plan, op->src), AT_SYMLINK_NOFOLLOW, STATX_UID | STATX_GID, &st);
    if (ret < 0)
        return (int)ret;
    if (maps->owner < 0 || maps->uid != st.stx_uid || maps->gid != st.stx_gid) {
        nsb_close_fd(&maps->owner);
        *maps = (struct idmaps){maps->range, owner_namespace(plan, st.stx_uid, st.stx_gid), st.stx_uid, st.stx_gid};
    }
    return maps->owner;
}

/* One source of a privileged caller, opened with its own rights. What is only read may fall back to no id map where the
 * file system knows none (mount_setattr(2): EINVAL): then it shows the owner as nobody. */
static int host_source(struct idmaps *maps, const struct nsb_plan *plan, const struct nsb_op *op)
{
    int userns = idmap_for(maps, plan, op);
    if (userns < 0 && userns != NSB_NOTHING)
        return userns;
    int fd = open_source(plan, op, userns);
    if (fd == -EINVAL && op->kind == NSB_OP_BIND && op->flags & NSB_RO && op->flags & NSB_IDMAP_OWNER)
        fd = open_source(plan, op, -1);
    return fd;
}

/* Answers the number of sources, or -errno with why->op set. */
static int open_sources(const struct nsb_plan *plan, int process, int *fds, struct failure *why)
{
    const struct nsb_op *ops = plan_at((struct nsb_plan *)plan, plan->ops);
    OWNED_FD range = (int)NSB_CALL(__NR_openat, process, "ns/user", O_RDONLY | O_CLOEXEC);
    struct idmaps maps = {.range = range, .owner = -1};
    int n = 0, ret = range < 0 ? range : 0;
    for (uint32_t i = 0; ret >= 0 && i < plan->n_ops; i++) {
        if (!op_has_source(&ops[i]))
            continue;
        why->op = i;
        ret = n < NSB_MAX_SOURCES ? host_source(&maps, plan, &ops[i]) : -E2BIG;
        if (ret >= 0)
            fds[n++] = ret;
    }
    nsb_close_fd(&maps.owner);
    while (ret < 0 && n)
        nsb_close(fds[--n]);
    return ret < 0 ? ret : n;
}

/* What the zygote owes a child that waits for it: maps, sources, and the packet that says both are there. */
static int equip(const struct nsb_plan *plan, long pid, int sync, int control, int pidfd, struct failure *why)
{
    const struct nsb_msg cloned = {.type = NSB_MSG_CLONED, .pid = (int)pid};
    UNSET int fds[NSB_MAX_SOURCES + 1];
    int n = 0;
    char go = 0;
    OWNED_FD process = open_process(pid);
    why->stage = NSB_STAGE_IDMAP;
    int ret = process < 0 ? process : 0;
    if (ret == 0 && !(plan->flags & NSB_MAPS_BY_CALLER))
        ret = write_maps(process, plan_string(plan, plan->uid_map), plan_string(plan, plan->gid_map),
                         !!(plan->flags & NSB_SETGROUPS_DENY));
    ret = (int)fault_at(plan, NSB_STAGE_IDMAP, ret);
    if (ret == 0 && plan->flags & NSB_HOST_SOURCES) {
        why->stage = NSB_STAGE_SOURCE;
        n = ret = open_sources(plan, process, fds, why);
        ret = (int)fault_at(plan, NSB_STAGE_SOURCE, ret);
    }
    /* init talks on the same socket as soon as it may go on; the host side is told of the clone before. */
    if (ret >= 0)
        ret = (int)send_packet(control, &cloned, sizeof cloned, &pidfd, 1);
    if (ret >= 0)
        ret = (int)send_packet(sync, &go, sizeof go, fds, (unsigned)n);
    while (n > 0) /* open_sources() answers none when it fails */
        nsb_close(fds[--n]);
    return ret < 0 ? ret : 0;
}

static void launch(struct zygote *z, struct launch *l)
{
    struct failure why = {.stage = NSB_STAGE_CLONE, .op = UINT32_MAX};
    int pair[2], pidfd_number = -1;
    struct clone_args args = {.flags = namespaces | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&pidfd_number,
                              .exit_signal = CHLD};
    if (l->cgroup >= 0) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)l->cgroup;
    }
    why.err = (int)NSB_CALL(__NR_socketpair, AF_UNIX_FAMILY, SEQPACKET_CLOEXEC, 0, pair);
    if (why.err < 0)
        return report(l->command.control, NSB_MSG_FAILED, &why, 0);
    OWNED_FD ours = pair[0];
    l->sync = pair[1];
    long pid = NSB_CALL(__NR_clone3, &args, sizeof args);
    if (pid == 0) {
        nsb_close(z->life[1]);
        nsb_close(ZYGOTE_SOCKET);
        nsb_close(ZYGOTE_EMBEDDER);
        nsb_close(z->signals);
        nsb_close(ours);
        l->life = z->life[0];
        renew_guard();
        init_main(l);
    }
    nsb_close(l->sync);
    OWNED_FD pidfd = pidfd_number;
    why.err = pid < 0 ? (int)pid : (int)fault_at(l->plan, NSB_STAGE_CLONE, 0);
    if (why.err == 0)
        why.err = equip(l->plan, pid, ours, l->command.control, pidfd, &why);
    if (why.err < 0) {
        /* init, if there is one, waits on the other end of ours and ends with it. */
        if (pid > 0)
            NSB_CALL(__NR_kill, pid, KILL);
        return report(l->command.control, NSB_MSG_FAILED, &why, 0);
    }
}

/* fds: the blob, what take_descriptors() expects, the cgroup for CLONE_INTO_CGROUP, the pipe of secrets. */
static int receive_launch(struct launch *l, const int *fds, unsigned n, uint32_t size)
{
    if (!plan_valid(l->plan, size))
        return -EPROTO;
    l->command.base = (char *)l->plan;
    l->command.is = &l->plan->command;
    if (l->plan->flags & NSB_SECRETS)
        l->secrets = fds[--n];
    if (l->plan->flags & NSB_CGROUP_FD && n > 1)
        l->cgroup = fds[--n];
    return n > 1 ? take_descriptors(&l->command, fds + 1, n - 1) : -EPROTO;
}

/* NSB_NEST. Its answer is NSB_MSG_CLONED, without any process. */
static void serve_nest(int control)
{
    struct failure why = {.stage = NSB_STAGE_IDMAP, .op = UINT32_MAX, .err = (int)nest()};
    report(control, why.err < 0 ? NSB_MSG_FAILED : NSB_MSG_CLONED, &why, 0);
}

static void serve(struct zygote *z, const struct nsb_request *request, const int *fds, unsigned n)
{
    struct failure why = {.stage = NSB_STAGE_REQUEST, .op = UINT32_MAX, .err = -EPROTO};
    struct launch l = {.cgroup = -1, .staging = -1, .scratch = -1, .root = -1, .dev = -1, .proc = -1, .secrets = -1};
    int control = n > 1 ? fds[1] : -1;
    if (request->magic != NSB_MAGIC || request->layout != NSB_LAYOUT || request->size > NSB_MAX_BLOB || n < 2)
        return report(control, NSB_MSG_FAILED, &why, 0);
    if (request->kind == NSB_NEST)
        return serve_nest(control);
    if (request->kind == NSB_TEMPLATE)
        return start_template(fds, n, request->size);
    long at = NSB_CALL(__NR_mmap, 0, request->size, PROT_READ_WRITE, MAP_PRIVATE, fds[0], 0);
    if (nsb_failed(at)) {
        why.err = (int)at;
        return report(control, NSB_MSG_FAILED, &why, 0);
    }
    l.plan = (struct nsb_plan *)at;
    why.err = receive_launch(&l, fds, n, request->size);
    if (why.err < 0)
        report(control, NSB_MSG_FAILED, &why, 0);
    else
        launch(z, &l);
    NSB_CALL(__NR_munmap, at, request->size);
}

static long next_request(struct zygote *z)
{
    int fds[8 + NSB_MAX_GIVE + NSB_MAX_JOIN];
    unsigned n = sizeof fds / sizeof *fds;
    struct nsb_request request = {0};
    long ret = recv_packet(ZYGOTE_SOCKET, &request, sizeof request, fds, &n);
    if (ret > 0)
        serve(z, &request, fds, n);
    for (unsigned i = 0; i < n; i++)
        nsb_close(fds[i]);
    return ret;
}

static void reap(struct zygote *z)
{
    UNSET char drop[512];
    while (NSB_CALL(__NR_read, z->signals, drop, sizeof drop) > 0)
        ;
    while (NSB_CALL(__NR_wait4, -1, 0, NSB_WNOHANG | NSB_WALL, 0) > 0)
        ;
}

static long start(struct zygote *z)
{
    uint64_t chld = 1ull << (CHLD - 1), core[2] = {0, 0};
    default_signals();
    NSB_CALL(__NR_close_range, ZYGOTE_EMBEDDER + 1, ~0u, 0);
    NSB_CALL(__NR_umask, 0);
    NSB_CALL(__NR_setsid);
    NSB_CALL(__NR_chdir, "/");
    NSB_CALL(__NR_prctl, PR_SET_NAME, "nsbox-zygote");
    NSB_CALL(__NR_prlimit64, 0, 4 /* RLIMIT_CORE */, core, 0);
    /* Keyrings are in no namespace: leave the caller's session keyring for an empty one, once for all sandboxes, which
     * every policy keeps from keyctl(2). ENOSYS: a kernel without keys; EDQUOT: keep what we have, out of reach. */
    NSB_CALL(__NR_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_BLOCK, &chld, 0, sizeof chld);
    long ret = NSB_CALL(__NR_pipe2, z->life, O_CLOEXEC);
    z->signals = ret == 0 ? (int)NSB_CALL(__NR_signalfd4, -1, &chld, sizeof chld, SIGNALFD_FLAGS) : -1;
    return z->signals < 0 ? z->signals : 0;
}

/* Nobody needs the sandboxes any more. They are killed and reaped here, so that a host whose pid 1 does not reap is left no
 * zombie; one that is stuck in the kernel is left to its parent-death signal. */
static NORETURN void finish(struct zygote *z)
{
    nsb_close(z->life[1]);
    kill_children();
    for (int i = 0; i < 500 && NSB_CALL(__NR_wait4, -1, 0, NSB_WNOHANG | NSB_WALL, 0) >= 0; i++) {
        struct __kernel_timespec pause = {0, 2000000}; /* each time anew: the call writes what is left of it, ppoll(2) */
        NSB_CALL(__NR_ppoll, 0, 0, &pause, 0, 0);
    }
    nsb_exit(0);
}

static NOINLINE NORETURN void run(void)
{
    struct zygote z = {{-1, -1}, -1};
    if (start(&z) < 0)
        nsb_exit(1);
    struct nsb_pollfd fds[3] = {{ZYGOTE_SOCKET, NSB_POLLIN, 0}, {ZYGOTE_EMBEDDER, NSB_POLLIN, 0}, {z.signals, NSB_POLLIN, 0}};
    for (;;) {
        long ret = NSB_CALL(__NR_ppoll, fds, 3, 0, 0, 0);
        if (ret < 0 && ret != -EINTR)
            finish(&z);
        if (fds[1].revents)
            finish(&z);
        if (fds[2].revents)
            reap(&z);
        long got = fds[0].revents ? next_request(&z) : 1;
        if (got <= 0 && got != -EMSGSIZE)
            finish(&z);
    }
}

NORETURN void nsb_main(unsigned long *area);

/* area: 64 bytes above every frame, for the stack guard: a static variable would take a second segment. */
__attribute__((used)) NORETURN void nsb_main(unsigned long *area)
{
    nsb_set_area(area);
    renew_guard();
    run();
}

NSB_ENTRY;
