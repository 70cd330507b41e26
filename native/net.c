/* SPDX-License-Identifier: Apache-2.0
 *
 * The network namespace is the dearest step of a launch: about 0.9 ms, more than the whole root file system. A thread of
 * init makes it while init builds the root; init then enters it. unshare(2) of a network namespace concerns one thread
 * only, and the capabilities it needs are those over our own user namespace, which owns the result either way.
 */
#include "helper.h"

#include <linux/futex.h>
#include <linux/netlink.h>

enum {
    AF_INET_FAMILY = 2, AF_NETLINK_FAMILY = 16, SOCK_DGRAM_CLOEXEC = 2 | 02000000, SOCK_RAW_CLOEXEC = 3 | 02000000,
    SOCK_FLAGS = 02000000 | 04000, IFF_UP_FLAG = 1, IFF_RUNNING_FLAG = 0x40, SET_FLAGS = 0x8914
};

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
static void allow_all_ports(int proc)
{
    OWNED_FD fd = (int)NSB_CALL(__NR_openat, proc, "sys/net/ipv4/ip_unprivileged_port_start", O_WRONLY | O_CLOEXEC);
    if (fd >= 0)
        NSB_CALL(__NR_write, fd, "0", 1);
}

/* One batch and its answer. The kernel works all of it off before send returns; every message that failed is answered, and
 * the last one, by its number, in any case. Answers -errno of the first failure (netlink(7)). */
static long exchange(int sock, const void *batch, size_t size)
{
    UNSET char buffer[8192] __attribute__((aligned(8)));
    long n = NSB_CALL(__NR_sendto, sock, batch, size, 0, 0, 0);
    while (n >= 0) {
        n = NSB_CALL(__NR_recvfrom, sock, buffer, sizeof buffer, 0, 0, 0);
        for (long at = 0; at + (long)sizeof(struct nlmsghdr) + 4 <= n;) {
            const struct nlmsghdr *head = (const void *)(buffer + at);
            int err = *(const int *)(const void *)(buffer + at + sizeof *head);
            if (head->nlmsg_type == NLMSG_ERROR && (err || head->nlmsg_seq == NSB_LAST_MESSAGE))
                return err;
            if (head->nlmsg_len < sizeof *head)
                return -EPROTO;
            at += NLMSG_ALIGN(head->nlmsg_len);
        }
    }
    return n;
}

static int make_socket(const struct nsb_plan *plan, const struct nsb_socket *s)
{
    const struct nsb_sockopt *options = plan_at((struct nsb_plan *)plan, s->options);
    int sock = (int)NSB_CALL(__NR_socket, s->family, s->type | SOCK_FLAGS, s->protocol);
    long ret = sock;
    for (uint32_t i = 0; ret >= 0 && i < s->n_options; i++)
        ret = NSB_CALL(__NR_setsockopt, sock, options[i].level, options[i].name, &options[i].value, sizeof(int));
    if (ret >= 0 && s->address_size)
        ret = NSB_CALL(__NR_bind, sock, plan_at((struct nsb_plan *)plan, s->address), s->address_size);
    if (ret >= 0 && s->backlog)
        ret = NSB_CALL(__NR_listen, sock, s->backlog);
    if (ret >= 0)
        return sock;
    nsb_close_fd(&sock);
    return (int)ret;
}

/* Sets the namespace up while its only rights are ours, and passes what can change it later to the host side: the payload
 * never has any. fds: rtnetlink, netfilter, then the plan's sockets. */
static long furnish(struct net_task *task)
{
    const struct nsb_plan *plan = task->plan;
    const struct nsb_socket *sockets = plan_at((struct nsb_plan *)plan, plan->sockets);
    const struct nsb_msg msg = {.type = NSB_MSG_NETWORK};
    int fds[2 + NSB_MAX_SOCKETS];
    unsigned n = 0;
    long ret = fds[n++] = (int)NSB_CALL(__NR_socket, AF_NETLINK_FAMILY, SOCK_RAW_CLOEXEC, NETLINK_ROUTE);
    if (ret >= 0 && plan->n_rtnl)
        ret = exchange(fds[0], plan_at((struct nsb_plan *)plan, plan->rtnl), plan->n_rtnl);
    if (ret >= 0)
        ret = fds[n++] = (int)NSB_CALL(__NR_socket, AF_NETLINK_FAMILY, SOCK_RAW_CLOEXEC, NETLINK_NETFILTER);
    if (ret >= 0 && plan->n_nft)
        ret = exchange(fds[1], plan_at((struct nsb_plan *)plan, plan->nft), plan->n_nft);
    for (uint32_t i = 0; ret >= 0 && i < plan->n_sockets; i++)
        ret = fds[n++] = make_socket(plan, &sockets[i]);
    while (ret >= 0 && !__atomic_load_n(&task->may_tell, __ATOMIC_ACQUIRE))
        NSB_CALL(__NR_futex, &task->may_tell, FUTEX_WAIT, 0, 0, 0, 0);
    if (ret >= 0)
        ret = send_packet(task->control, &msg, sizeof msg, fds, n);
    while (n)
        nsb_close_fd(&fds[--n]);
    return ret < 0 ? ret : 0;
}

static NORETURN void make_namespace(void *argument)
{
    struct net_task *task = argument;
    task->err = NSB_CALL(__NR_unshare, CLONE_NEWNET);
    if (task->err == 0)
        task->err = loopback_up();
    if (task->err == 0) /* else this is still the host's namespace */
        allow_all_ports(task->proc);
    if (task->err == 0)
        task->err = task->ns = (int)NSB_CALL(__NR_openat, task->proc, "thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    if (task->err >= 0 && task->plan->n_nft)
        task->err = furnish(task);
    for (;;)
        NSB_CALL(__NR_exit, 0);
}

/* The thread goes on while init changes the root, which is every thread's: it reaches the host's /proc by descriptor. */
long net_start(struct net_task *task, const struct nsb_plan *plan, int control)
{
    const unsigned long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    task->proc = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (task->proc < 0)
        return task->proc;
    task->plan = plan;
    task->control = control;
    task->running = 1;
    task->may_tell = 0;
    task->ns = -1;
    long ret = nsb_thread(__NR_clone, flags, task->stack + sizeof task->stack, make_namespace, task, &task->running);
    return ret < 0 ? ret : 0;
}

/* The zygote has told the host side of the clone: from here on the thread may say things on the same socket. */
void net_may_tell(struct net_task *task)
{
    __atomic_store_n(&task->may_tell, 1, __ATOMIC_RELEASE);
    NSB_CALL(__NR_futex, &task->may_tell, FUTEX_WAKE, 1, 0, 0, 0);
}

/* Waits until the thread is gone: from here on init is single-threaded, as everything that gives up privileges wants. */
long net_finish(struct net_task *task)
{
    while (__atomic_load_n(&task->running, __ATOMIC_ACQUIRE))
        NSB_CALL(__NR_futex, &task->running, FUTEX_WAIT, 1, 0, 0, 0);
    nsb_close(task->proc);
    if (task->err < 0)
        return task->err;
    long ret = NSB_CALL(__NR_setns, task->ns, CLONE_NEWNET);
    nsb_close(task->ns);
    return ret;
}
