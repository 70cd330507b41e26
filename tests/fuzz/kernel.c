/* SPDX-License-Identifier: Apache-2.0
 *
 * A kernel that does nothing and believes nothing. The helper runs on it inside a fuzzer: what it receives comes from the
 * fuzzer's input, and so does how each system call ends. The kernel reads every byte that a call refers to, so that the
 * address sanitizer sees a pointer that leads elsewhere, and keeps a table of descriptors: none is closed twice, and none is
 * open after a request that was not before.
 *
 * A process is one run: whoever exits, executes a program, or has made too many calls is left by longjmp(3). clone(2)
 * answers as in the child or as in the parent, as the input says; the other one is for another run.
 */
#include "kernel_api.h"

#include <asm/unistd.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/sched.h>
#include <linux/stat.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_FDS = 1024, MOST_CALLS = 4000, FIRST_PID = 100, USAGE = 144, TRUNCATED = 0x20, CONTROL_TRUNCATED = 8 };
enum { ENOENT_ = 2, ECHILD_ = 10, EFAULT_ = 14, EINVAL_ = 22, EMFILE_ = 24 };

/* As the helper has them: sys.h. */
struct vector { void *base; size_t len; };
struct message { void *name; int namelen; struct vector *iov; size_t iovlen; void *control; size_t controllen; unsigned flags; };
struct control { size_t len; int level, type; int fds[]; };
struct pollfd_ { int fd; short events, revents; };

static struct {
    const uint8_t *script;
    size_t left;
    struct packet (*receive)(int sock);
    unsigned calls;
    unsigned char open[MOST_FDS];
    int watched, n_watched;   /* the socket of requests, and how many descriptors were open when it was last asked */
    void *mapped[4];
    struct packet packet;     /* the last that was received: its blob is what gets mapped */
    void (*thread)(void *);
    void *argument;
    int *running;
    jmp_buf ended, thread_ended, *leave;
    unsigned long area[8];
} kernel;

static _Noreturn void wrong(const char *what, long which)
{
    fprintf(stderr, "kernel: %s (%ld)\n", what, which);
    abort();
}

static unsigned script(void)
{
    if (!kernel.left)
        return 0;
    kernel.left--;
    return *kernel.script++;
}

static size_t fill(void *to, size_t size)
{
    memset(to, 0, size);
    for (size_t i = 0; i < size && kernel.left; i++)
        ((uint8_t *)to)[i] = (uint8_t)script();
    return size;
}

static void look(const void *at, size_t size)
{
    static volatile unsigned char sum;
    for (size_t i = 0; i < size; i++)
        sum = (unsigned char)(sum + ((const unsigned char *)at)[i]);
}

static void text(long at)
{
    if (at)
        look((const void *)at, strlen((const char *)at));
}

static void texts(char *const *list)
{
    while (*list)
        text((long)*list++);
}

/* What a call that can fail answers: value, mostly. */
static long fails_or(long value)
{
    unsigned how = script();
    return how >= 0xc0 ? -(long)(how - 0xbf) : value;
}

int kernel_open(void)
{
    for (int fd = 5; fd < MOST_FDS; fd++)
        if (!kernel.open[fd]) {
            kernel.open[fd] = 1;
            return fd;
        }
    return -EMFILE_;
}

static long opened(void)
{
    long ret = fails_or(0);
    return ret < 0 ? ret : kernel_open();
}

static long closed(long fd)
{
    if (fd < 0)
        return -9;
    if (fd >= MOST_FDS || !kernel.open[fd])
        wrong("a descriptor that is not open is closed", fd);
    kernel.open[fd] = 0;
    return 0;
}

static int count_open(void)
{
    int n = 0;
    for (int fd = 0; fd < MOST_FDS; fd++)
        n += kernel.open[fd];
    return n;
}

static long pair(int *fds)
{
    long ret = fails_or(0);
    if (ret < 0)
        return ret;
    fds[0] = kernel_open();
    fds[1] = kernel_open();
    return 0;
}

static _Noreturn void leave(void) { longjmp(*kernel.leave, 1); }

/* Between two requests the same descriptors are open. */
static void watch_descriptors(int sock)
{
    if (sock != kernel.watched)
        return;
    int now = count_open();
    if (kernel.n_watched >= 0 && kernel.n_watched != now)
        wrong("a request has left descriptors open, or closed some", now - kernel.n_watched);
    kernel.n_watched = now;
}

static long received(int sock, struct message *msg)
{
    watch_descriptors(sock);
    const struct packet packet = kernel.packet = kernel.receive(sock);
    size_t room = (msg->controllen - sizeof(struct control)) / sizeof(int), n = packet.n_fds;
    struct control *control = msg->control;
    msg->flags = packet.size > msg->iov->len ? TRUNCATED : 0;
    size_t size = packet.size < msg->iov->len ? packet.size : msg->iov->len;
    if (size)
        memcpy(msg->iov->base, packet.data, size);
    if (n > room) {
        n = room;
        msg->flags |= CONTROL_TRUNCATED;
    }
    msg->controllen = n ? sizeof *control + n * sizeof(int) : 0;
    if (n)
        *control = (struct control){sizeof *control + n * sizeof(int), 1, 1};
    for (size_t i = 0; i < n; i++)
        control->fds[i] = kernel_open();
    return (long)size;
}

static long sent(const struct message *msg)
{
    look(msg->iov->base, msg->iov->len);
    const struct control *control = msg->control;
    for (size_t i = 0; msg->controllen && i < (control->len - sizeof *control) / sizeof(int); i++)
        if (control->fds[i] < 0 || control->fds[i] >= MOST_FDS || !kernel.open[control->fds[i]])
            wrong("a descriptor that is not open is sent", control->fds[i]);
    return fails_or((long)msg->iov->len);
}

/* Exactly as long as was asked for, where a real mapping ends with its page: the sanitizer sees the first byte too many. */
static long mapped(size_t size, long flags)
{
    long ret = size ? fails_or(0) : -EINVAL_;
    if (ret < 0)
        return ret;
    for (unsigned i = 0; i < sizeof kernel.mapped / sizeof *kernel.mapped; i++) {
        if (kernel.mapped[i])
            continue;
        kernel.mapped[i] = calloc(1, size);
        size_t n = kernel.packet.blob_size < size ? kernel.packet.blob_size : size;
        if (n && !(flags & 0x20 /* MAP_ANONYMOUS */))
            memcpy(kernel.mapped[i], kernel.packet.blob, n);
        return (long)kernel.mapped[i];
    }
    wrong("mappings are left", 0);
}

static long unmapped(void *at)
{
    for (unsigned i = 0; i < sizeof kernel.mapped / sizeof *kernel.mapped; i++)
        if (kernel.mapped[i] == at) {
            free(at);
            kernel.mapped[i] = NULL;
            return 0;
        }
    wrong("what is unmapped was not mapped", 0);
}

/* The parent's kernel is watched for what stays open; the child keeps what it likes, for its exec or exit closes all. */
static long cloned(unsigned long flags, int *pidfd)
{
    long ret = fails_or(0);
    if (ret < 0)
        return ret;
    if (script() & 1) {
        if (flags & CLONE_PIDFD)
            *pidfd = kernel_open();
        return FIRST_PID;
    }
    kernel.watched = -1;
    return 0;
}

static long waited(int *status, void *usage)
{
    unsigned pid = script();
    if (!pid)
        return -ECHILD_;
    if (status)
        *status = (int)script() << 8;
    if (usage)
        memset(usage, 0, USAGE);
    return (long)pid;
}

static long polled(struct pollfd_ *fds, unsigned long n, const void *timeout)
{
    if (timeout)
        return script() & 1;
    unsigned bits = script() ^ 1;
    for (unsigned long i = 0; i < n; i++)
        fds[i].revents = bits & (1u << i) ? 1 : 0;
    return n ? (long)n : 0;
}

/* The helper's own thread runs when somebody waits for it, to its end. */
static long slept(void)
{
    if (!kernel.thread)
        leave();
    jmp_buf *outer = kernel.leave;
    kernel.leave = &kernel.thread_ended;
    if (setjmp(kernel.thread_ended) == 0)
        kernel.thread(kernel.argument);
    kernel.leave = outer;
    kernel.thread = NULL;
    *kernel.running = 0;
    return 0;
}

/* Netlink answers: at the end of the script that all went well. */
static long answered(void *buffer, size_t size)
{
    struct nlmsghdr head = {.nlmsg_len = sizeof head + 4, .nlmsg_type = NLMSG_ERROR, .nlmsg_seq = 0x7fffffff};
    if (kernel.left > 4) {
        size_t n = script() + script() * 8;
        return (long)fill(buffer, n < size ? n : size);
    }
    memset(buffer, 0, sizeof head + 4);
    memcpy(buffer, &head, sizeof head);
    return sizeof head + 4;
}

static long executed(long path, char *const *argv, char *const *envp)
{
    text(path);
    texts(argv);
    texts(envp);
    if (script() & 1)
        return -ENOENT_;
    leave();
}

static long looked_at(long path, struct statx *st)
{
    text(path);
    memset(st, 0, sizeof *st);
    st->stx_mode = script() & 1 ? 0100644 : 040755;
    st->stx_mnt_id = script() & 1;
    return fails_or(0);
}

/* The calls that refer to memory, or answer something else than 0. */
static long answer(long n, long a, long b, long c, long d, long e)
{
    static const struct timespec moment = {1, 2};
    switch (n) {
    case __NR_recvmsg: return received((int)a, (struct message *)b);
    case __NR_sendmsg: return sent((const struct message *)b);
    case __NR_mmap: return mapped((size_t)b, d);
    case __NR_munmap: return unmapped((void *)a);
    case __NR_close: return closed(a);
    case __NR_close_range:
        for (long fd = a; fd < MOST_FDS && fd <= (long)(unsigned)b; fd++)
            kernel.open[fd] = 0;
        return 0;
    case __NR_dup3:
        if (b < 0 || b >= MOST_FDS)
            wrong("an impossible descriptor", b);
        kernel.open[b] = 1;
        return b;
    case __NR_exit:
    case __NR_exit_group: leave();
    case __NR_execve: return executed(a, (char *const *)b, (char *const *)c);
    case __NR_clone: return cloned((unsigned long)a, NULL);
    case __NR_clone3: {
        const struct clone_args *args = (const void *)a;
        look(args, (size_t)b);
        return cloned(args->flags, (int *)args->pidfd);
    }
    case __NR_wait4: return waited((int *)b, (void *)d);
    case __NR_ppoll: return polled((struct pollfd_ *)a, (unsigned long)b, (const void *)c);
    case __NR_futex: return b == 0 /* FUTEX_WAIT */ ? slept() : 0;
    case __NR_read: {
        size_t size = script();
        if (size == 0xff)
            return -EINVAL_;
        return (long)fill((void *)b, size < (size_t)c ? size : (size_t)c);
    }
    case __NR_recvfrom: return answered((void *)b, (size_t)c);
    case __NR_write:
    case __NR_sendto:
        look((const void *)b, (size_t)c);
        return fails_or(c);
    case __NR_statx: return looked_at(b, (struct statx *)e);
    case __NR_clock_gettime: memcpy((void *)b, &moment, sizeof moment); return 0;
    case __NR_getrusage: memset((void *)b, 0, USAGE); return 0;
    case __NR_getrandom: return (long)fill((void *)a, (size_t)b);
    case __NR_geteuid: case __NR_getegid: return 1000;
    case __NR_getpid: return 2;
    case __NR_getppid: return 1;
    case __NR_prctl: return a == 24 /* PR_CAPBSET_DROP */ && b > 40 ? -EINVAL_ : 0;
    case __NR_socketpair: return pair((int *)d);
    case __NR_pipe2: return pair((int *)a);
    case __NR_prlimit64:
        if (c)
            look((const void *)c, 16);
        if (d)
            memset((void *)d, 0xff, 16);
        return fails_or(0);
    case __NR_sched_getaffinity: {
        size_t size = script() % 17 * 8;
        return size && size <= (size_t)b ? (long)fill((void *)c, size) : -EINVAL_;
    }
    case __NR_getcpu: *(unsigned *)a = script() * 37; return fails_or(0);
    case __NR_sched_setaffinity: look((const void *)c, (size_t)b); return fails_or(0);
    case __NR_seccomp: {
        const struct sock_fprog *program = (const void *)c;
        look(program->filter, program->len * sizeof *program->filter);
        return fails_or(0);
    }
    case __NR_setsockopt: look((const void *)d, (size_t)e); return fails_or(0);
    case __NR_bind:
    case __NR_connect: look((const void *)b, (size_t)c); return fails_or(0);
    case __NR_sethostname: look((const void *)a, (size_t)b); return fails_or(0);
    case __NR_landlock_create_ruleset: look((const void *)a, (size_t)b); return opened();
    case __NR_openat:
    case __NR_openat2:
    case __NR_open_tree: text(b); return opened();
    case __NR_fsopen: text(a); return opened();
    case __NR_fcntl:
    case __NR_socket:
    case __NR_fsmount:
    case __NR_signalfd4: return opened();
    case __NR_ioctl: return b == 0x5441 /* TIOCGPTPEER */ ? opened() : fails_or(0);
    case __NR_fsconfig: text(c); text(d); return fails_or(0);
    case __NR_mount_setattr: text(b); look((const void *)d, (size_t)e); return fails_or(0);
    case __NR_move_mount: text(b); text(d); return fails_or(0);
    case __NR_symlinkat: text(a); text(c); return fails_or(0);
    case __NR_mkdirat:
    case __NR_fchmodat:
    case __NR_fchownat:
    case __NR_faccessat: text(b); return fails_or(0);
    case __NR_chdir: text(a); return fails_or(0);
    case __NR_landlock_add_rule: look((const void *)c, 12); return fails_or(0);
    case __NR_setgroups: case __NR_setresuid: case __NR_setresgid: case __NR_capset: case __NR_unshare: case __NR_setns:
    case __NR_setpriority: case __NR_ioprio_set: case __NR_listen: case __NR_fchmod: case __NR_fchdir:
    case __NR_pivot_root: case __NR_umount2: case __NR_landlock_restrict_self: case __NR_setsid: case __NR_umask:
        return fails_or(0);
    case __NR_kill:
        if (a == 0)
            wrong("a signal for the whole process group", b);
        return 0;
    case __NR_mlock: case __NR_rt_sigaction: case __NR_rt_sigprocmask: case __NR_keyctl: return 0;
    default: wrong("a system call that kernel.c does not know", n);
    }
}

long nsb_syscall6(long n, long a, long b, long c, long d, long e, long f)
{
    (void)f;
    if (++kernel.calls > MOST_CALLS)
        leave();
    return answer(n, a, b, c, d, e);
}

long nsb_thread(long n, unsigned long flags, void *stack_top, void (*fn)(void *), void *arg, int *running)
{
    (void)n, (void)flags, (void)stack_top;
    long ret = fails_or(0);
    if (ret < 0)
        return ret;
    kernel.thread = fn;
    kernel.argument = arg;
    kernel.running = running;
    return FIRST_PID;
}

unsigned long *nsb_area(void) { return kernel.area; }
void nsb_set_area(unsigned long *area) { (void)area; }

void kernel_run(const uint8_t *bytes, size_t size, int watched, struct packet (*receive)(int sock), void (*program)(void))
{
    memset(&kernel, 0, sizeof kernel);
    kernel.script = bytes;
    kernel.left = size;
    kernel.receive = receive;
    kernel.watched = watched;
    kernel.n_watched = -1;
    for (int fd = 0; fd < 5; fd++)
        kernel.open[fd] = 1;
    kernel.leave = &kernel.ended;
    if (setjmp(kernel.ended) == 0)
        program();
    for (unsigned i = 0; i < sizeof kernel.mapped / sizeof *kernel.mapped; i++)
        free(kernel.mapped[i]);
}
