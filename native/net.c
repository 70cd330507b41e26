/* SPDX-License-Identifier: Apache-2.0
 *
 * The network namespace is the dearest step of a launch, as long as all of the root file system. init makes it while a
 * thread of its own builds the root: unshare(2) of a network namespace concerns the calling thread alone, and the
 * capabilities it needs are those over our own user namespace, which owns the result.
 */
#include "helper.h"

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
            if (head->nlmsg_len < sizeof *head || head->nlmsg_len > (unsigned long)(n - at))
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
static long furnish(struct launch *l)
{
    const struct nsb_plan *plan = l->plan;
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
    /* The zygote tells the host side of the clone before, on the same socket. */
    wait_progress(&l->progress, NSB_MAPPED);
    if (ret >= 0)
        ret = send_packet(l->command.control, &msg, sizeof msg, fds, n);
    while (n)
        nsb_close_fd(&fds[--n]);
    return ret < 0 ? ret : 0;
}

/* Meanwhile the root changes, which is every thread's: proc leads to the host's. */
long make_network(struct launch *l, int proc)
{
    long ret = NSB_CALL(__NR_unshare, CLONE_NEWNET);
    if (ret == 0)
        ret = loopback_up();
    if (ret == 0) /* else this is still the host's namespace */
        allow_all_ports(proc);
    return ret == 0 && l->plan->n_nft ? furnish(l) : ret;
}
