/* SPDX-License-Identifier: Apache-2.0
 *
 * The seam: compiled into the cffi module, runs inside the embedding process on any of its threads. It starts the
 * zygote and sends it launches; it never forks (posix_spawn(3) is a vfork-like clone in the C library).
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "seam.h"
#include "nsbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The helper binary and join.c's shared object travel inside this module: build_ffi.py writes these. */
extern const unsigned char nsb_helper[], nsb_join[];
extern const unsigned long nsb_helper_size, nsb_join_size;

static void close_fd(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}
#define OWNED_FD __attribute__((cleanup(close_fd))) int

uint32_t nsb_layout(void) { return NSB_LAYOUT; }

int nsb_landlock_abi(void)
{
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, 1u /* LANDLOCK_CREATE_RULESET_VERSION */);
    return abi < 0 ? -errno : (int)abi;
}

static int write_all(int fd, const void *data, size_t size)
{
    const char *p = data;
    while (size) {
        ssize_t n = write(fd, p, size);
        if (n < 0 && errno != EINTR)
            return -errno;
        if (n > 0) {
            p += n;
            size -= (size_t)n;
        }
    }
    return 0;
}

/* Descriptors 0-2 may be closed in the caller; ours must not land there, where file actions would overwrite them. */
static int lift(int fd)
{
    int up = fd < 0 ? -errno : fcntl(fd, F_DUPFD_CLOEXEC, 16);
    if (fd >= 0 && up < 0)
        up = errno == EINVAL ? -EMFILE : -errno; /* 16 itself is beyond RLIMIT_NOFILE: fcntl(2) */
    if (fd >= 0)
        close(fd);
    return up;
}

static int sealed_memory(const char *name, const void *data, size_t size, unsigned flags)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd < 0 && flags && errno == EINVAL) /* MFD_EXEC is newer than 6.2: memfd_create(2) */
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    fd = lift(fd);
    if (fd < 0)
        return fd;
    int ret = write_all(fd, data, size);
    if (ret == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0)
        ret = -errno;
    if (ret == 0)
        return fd;
    close(fd);
    return ret;
}

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U
#endif

/* A sealed descriptor of the shared object that native/join.c is. */
int nsb_join_library(void) { return sealed_memory("nsbox-join", nsb_join, nsb_join_size, MFD_EXEC); }

static int spawn_helper(int memory, int sock, int embedder, pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t all, none;
    char path[40];
    char *argv[] = {(char *)"nsbox-zygote", NULL}, *envp[] = {NULL};
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
    sigfillset(&all);
    sigemptyset(&none);
    int err = posix_spawn_file_actions_init(&actions);
    if (err)
        return -err;
    err = posix_spawnattr_init(&attr);
    for (int fd = 0; err == 0 && fd < 3; fd++)
        err = posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", O_RDWR, 0);
    if (err == 0)
        err = posix_spawn_file_actions_adddup2(&actions, sock, 3);
    if (err == 0)
        err = posix_spawn_file_actions_adddup2(&actions, embedder, 4);
    if (err == 0)
        err = posix_spawnattr_setsigdefault(&attr, &all);
    if (err == 0)
        err = posix_spawnattr_setsigmask(&attr, &none);
    if (err == 0)
        err = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    if (err == 0)
        err = posix_spawn(pid, path, &actions, &attr, argv, envp);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    return -err;
}

/* Starts a zygote; answers the socket to it. Its pid is for information: it ends by itself, with this process. */
int nsb_zygote_start(int *pid)
{
    int pair[2];
    pid_t child = -1;
    OWNED_FD memory = sealed_memory("nsbox-helper", nsb_helper, nsb_helper_size, MFD_EXEC);
    if (memory < 0)
        return memory;
    OWNED_FD embedder = lift((int)syscall(SYS_pidfd_open, getpid(), 0));
    if (embedder < 0)
        return embedder;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -errno;
    int ours = lift(pair[0]);
    OWNED_FD theirs = lift(pair[1]);
    int ret = ours < 0 ? ours : theirs < 0 ? theirs : spawn_helper(memory, theirs, embedder, &child);
    if (ret < 0) {
        if (ours >= 0)
            close(ours);
        return ret;
    }
    *pid = child;
    return ours;
}

enum { MAX_FDS = 8 + NSB_MAX_GIVE + NSB_MAX_JOIN };

/* One packet with descriptors beside it. */
static int send_with(int sock, const void *data, size_t size, const int *fds, unsigned n)
{
    union { struct cmsghdr head; char space[CMSG_SPACE(MAX_FDS * sizeof(int))]; } control;
    struct iovec iov = {(void *)data, size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n > MAX_FDS)
        return -E2BIG;
    if (n) {
        memset(&control, 0, sizeof control);
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(&control.head), fds, n * sizeof(int));
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(n * sizeof(int));
    }
    ssize_t ret;
    do
        ret = sendmsg(sock, &msg, MSG_NOSIGNAL);
    while (ret < 0 && errno == EINTR);
    return ret < 0 ? -errno : 0;
}

/* Keeps up to room of the descriptors of a packet, closes the rest; answers how many are kept. */
static unsigned take_fds(struct msghdr *msg, int *fds, unsigned room)
{
    unsigned kept = 0;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(msg); head; head = CMSG_NXTHDR(msg, head)) {
        if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
            if (kept < room)
                fds[kept++] = fd;
            else
                close(fd);
        }
    }
    return kept;
}

/* One packet of a sandbox; answers the number of descriptors that came beside it. -EPIPE is end-of-file: nobody is there
 * any more. What comes may come from a hostile process: anything but exactly one message is -EPROTO. */
static int receive(int control, struct nsb_msg *out, int *fds, unsigned room)
{
    union { struct cmsghdr head; char space[CMSG_SPACE(MAX_FDS * sizeof(int))]; } buffer;
    struct iovec iov = {out, sizeof *out};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &buffer, .msg_controllen = sizeof buffer};
    ssize_t ret;
    /* ECONNRESET says, once, that the peer has ended without reading all of ours; what it said before is still there. */
    do
        ret = recvmsg(control, &msg, MSG_CMSG_CLOEXEC);
    while (ret < 0 && (errno == EINTR || errno == ECONNRESET));
    if (ret < 0)
        return -errno;
    unsigned kept = take_fds(&msg, fds, room);
    if ((size_t)ret == sizeof *out && !(msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return (int)kept;
    while (kept)
        close(fds[--kept]);
    return ret == 0 ? -EPIPE : -EPROTO;
}

/* Sends a packet with a blob and fds beside it. */
static int send_blob(int sock, const void *packet, size_t packet_size, const void *blob, size_t size, const int *fds,
                     unsigned n_fds)
{
    int all[MAX_FDS];
    if (n_fds + 1 > MAX_FDS)
        return -E2BIG;
    OWNED_FD memory = sealed_memory("nsbox-blob", blob, size, 0);
    if (memory < 0)
        return memory;
    all[0] = memory;
    memcpy(all + 1, fds, n_fds * sizeof *fds);
    return send_with(sock, packet, packet_size, all, n_fds + 1);
}

/* The same with a new socket to answer on before fds; answers our end of that socket. */
static int ask(int sock, const void *packet, size_t packet_size, const void *blob, size_t size, const int *fds, unsigned n_fds)
{
    int pair[2], all[MAX_FDS];
    if (n_fds + 1 > MAX_FDS)
        return -E2BIG;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -errno;
    all[0] = pair[1];
    memcpy(all + 1, fds, n_fds * sizeof *fds);
    int ret = send_blob(sock, packet, packet_size, blob, size, all, n_fds + 1);
    close(pair[1]);
    if (ret == 0)
        return pair[0];
    close(pair[0]);
    return ret;
}

/* Asks the zygote for a sandbox: 0, with answer of type NSB_MSG_CLONED or NSB_MSG_FAILED and made the socket to its init
 * and a pidfd, or -1 for either. A negative answer means that the zygote itself could not be asked. */
int nsb_launch(int zygote, const void *blob, size_t size, const int *fds, unsigned n_fds, struct nsb_msg *answer,
               int *made)
{
    return nsb_ask(zygote, NSB_LAUNCH, blob, size, fds, n_fds, answer, made);
}

/* The same for the other kinds of request. */
int nsb_ask(int zygote, uint32_t kind, const void *blob, size_t size, const int *fds, unsigned n_fds,
            struct nsb_msg *answer, int *made)
{
    struct nsb_request request = {NSB_MAGIC, NSB_LAYOUT, (uint32_t)size, n_fds + 2, kind, 0};
    made[0] = made[1] = -1;
    int sock = ask(zygote, &request, sizeof request, blob, size, fds, n_fds);
    if (sock < 0)
        return sock;
    int ret = receive(sock, answer, &made[1], 1);
    if (ret >= 0) {
        made[0] = sock;
        return 0;
    }
    close(sock);
    return ret == -EPIPE ? -ENODATA : ret; /* it was asked, and said nothing: dropped, or it died just now */
}

/* An init that was taken over may never read: nobody waits for it longer than an honest one could take. That of a sandbox
 * which another thread has closed by now is -1, which poll(2) would pass over. */
static int has_room(int control)
{
    struct pollfd room = {control, POLLOUT, 0};
    if (control < 0)
        return -EBADF;
    return poll(&room, 1, 5000) == 1 ? 0 : -EAGAIN;
}

/* Asks a sandbox's init to start another program; answers the socket to the watcher of that program. */
int nsb_run(int control, const void *blob, size_t size, const int *fds, unsigned n_fds)
{
    const struct nsb_msg msg = {.type = NSB_MSG_RUN, .err = (int)size};
    int ret = has_room(control);
    return ret < 0 ? ret : ask(control, &msg, sizeof msg, blob, size, fds, n_fds);
}

/* Has the init of a sandbox that was made without a program start it. */
int nsb_start(int control, const void *blob, size_t size, const int *fds, unsigned n_fds)
{
    const struct nsb_msg msg = {.type = NSB_MSG_START, .err = (int)size};
    int ret = has_room(control);
    return ret < 0 ? ret : send_blob(control, &msg, sizeof msg, blob, size, fds, n_fds);
}

/* openat2(2), which the C library does not wrap. RESOLVE_IN_ROOT makes a sandbox's root the end of every path. */
int nsb_open_in(int root, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = resolve};
    long ret;
    int tries = 64;
    do
        ret = syscall(SYS_openat2, root, path, &how, sizeof how);
    while (ret < 0 && (errno == EAGAIN || errno == EINTR) && --tries);
    return ret < 0 ? -errno : (int)ret;
}

/* The kind of file system that a descriptor is on: statfs(2), f_type. */
long long nsb_fs_type(int fd)
{
    struct statfs found;
    return fstatfs(fd, &found) < 0 ? -errno : (long long)(unsigned)found.f_type;
}

enum { MAX_GROUPS = 1024 };

/* What this thread was before nsb_act_as(). */
static _Thread_local struct { uid_t uid; gid_t gid; int n, depth; gid_t groups[MAX_GROUPS]; } own;

/* The C library's own setgroups(2) would change every thread. */
static int thread_groups(int n, const gid_t *groups) { return syscall(SYS_setgroups, n, groups) < 0 ? -errno : 0; }

/* The ids that this thread shows to file systems: setfsuid(2). The C library keeps it to the calling thread, and the
 * kernel takes the file capabilities away with root's id, so that a privileged caller can act as the payload would. Its
 * supplementary groups go as well, for they grant what the payload does not have. Ends with nsb_act_back(), in any case;
 * may be nested. */
int nsb_act_as(unsigned uid, unsigned gid)
{
    if (own.depth++)
        return 0;
    own.uid = (uid_t)setfsuid((uid_t)-1);
    own.gid = (gid_t)setfsgid((gid_t)-1);
    own.n = getgroups(MAX_GROUPS, own.groups);
    if (own.n < 0)
        return -errno;
    int ret = thread_groups(0, NULL);
    if (ret < 0)
        return ret;
    setfsgid(gid);
    setfsuid(uid);
    /* It answers the former id and tells no error: an impossible id asks for the present one. */
    return (unsigned)setfsuid((uid_t)-1) == uid && (unsigned)setfsgid((gid_t)-1) == gid ? 0 : -EPERM;
}

int nsb_act_back(void)
{
    if (--own.depth)
        return 0;
    setfsuid(own.uid);
    setfsgid(own.gid);
    return own.n < 0 ? 0 : thread_groups(own.n, own.groups);
}

int nsb_receive(int control, struct nsb_msg *msg, int *fds, unsigned room) { return receive(control, msg, fds, room); }

/* write(2) that answers -EPIPE without SIGPIPE, whatever the caller does with that signal: it is blocked for this thread
 * and, if the write raised it, taken off again. */
long nsb_write(int fd, const void *data, size_t size)
{
    sigset_t pipe_set, before, pending;
    const struct timespec now = {0, 0};
    sigemptyset(&pipe_set);
    sigaddset(&pipe_set, SIGPIPE);
    sigpending(&pending);
    int was_pending = sigismember(&pending, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_set, &before);
    ssize_t ret = write(fd, data, size);
    long answer = ret < 0 ? -errno : ret;
    if (answer == -EPIPE && !was_pending)
        while (sigtimedwait(&pipe_set, NULL, &now) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return answer;
}

int nsb_tell(int control, uint32_t type, int value, uint32_t op)
{
    struct nsb_msg msg = {.type = type, .err = value, .op = op};
    ssize_t ret;
    do
        ret = send(control, &msg, sizeof msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (ret < 0 && errno == EINTR);
    return ret < 0 ? -errno : 0;
}
