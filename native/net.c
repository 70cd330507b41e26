/* SPDX-License-Identifier: Apache-2.0
 *
 * The network namespace is the dearest step of a launch: about 0.9 ms, more than the whole root file system. A thread of
 * init makes it while init builds the root; init then enters it. unshare(2) of a network namespace concerns one thread
 * only, and the capabilities it needs are those over our own user namespace, which owns the result either way.
 */
#include "helper.h"

#include <linux/futex.h>

enum { AF_INET_FAMILY = 2, SOCK_DGRAM_CLOEXEC = 2 | 02000000, IFF_UP_FLAG = 1, IFF_RUNNING_FLAG = 0x40, SET_FLAGS = 0x8914 };

struct flags_request { char name[16]; short flags; char rest[22]; };

/* Brings lo up; the kernel then adds 127.0.0.1/8, and ::1 where it has IPv6, by itself. */
static long loopback_up(void)
{
    struct flags_request request = {.name = "lo"};
    OWNED_FD sock = (int)NSB_CALL(__NR_socket, AF_INET_FAMILY, SOCK_DGRAM_CLOEXEC, 0);
    if (sock < 0)
        return sock;
    request.flags = IFF_UP_FLAG | IFF_RUNNING_FLAG;
    return NSB_CALL(__NR_ioctl, sock, SET_FLAGS, &request);
}

/* Ports below 1024 are the sandbox's own as much as the others: nobody inside has CAP_NET_BIND_SERVICE. The setting belongs
 * to the network namespace of whoever opens it; a kernel without it is as strict as it always was. */
static void allow_all_ports(void)
{
    OWNED_FD fd = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/proc/sys/net/ipv4/ip_unprivileged_port_start", O_WRONLY | O_CLOEXEC);
    if (fd >= 0)
        NSB_CALL(__NR_write, fd, "0", 1);
}

static NORETURN void make_namespace(void *argument)
{
    struct net_task *task = argument;
    task->err = NSB_CALL(__NR_unshare, CLONE_NEWNET);
    if (task->err == 0)
        task->err = loopback_up();
    allow_all_ports();
    if (task->err == 0)
        task->err = task->ns = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    for (;;)
        NSB_CALL(__NR_exit, 0);
}

/* Must be called while the host's /proc is still in reach. */
long net_start(struct net_task *task)
{
    const unsigned long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    task->running = 1;
    task->ns = -1;
    long ret = nsb_thread(__NR_clone, flags, task->stack + sizeof task->stack, make_namespace, task, &task->running);
    return ret < 0 ? ret : 0;
}

/* Waits until the thread is gone: from here on init is single-threaded, as everything that gives up privileges wants. */
long net_finish(struct net_task *task)
{
    while (__atomic_load_n(&task->running, __ATOMIC_ACQUIRE))
        NSB_CALL(__NR_futex, &task->running, FUTEX_WAIT, 1, 0, 0, 0);
    if (task->err < 0)
        return task->err;
    long ret = NSB_CALL(__NR_setns, task->ns, CLONE_NEWNET);
    nsb_close(task->ns);
    return ret;
}
