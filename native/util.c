/* SPDX-License-Identifier: Apache-2.0
 * The few things that a C library would give, and the packets between the three processes. */
#include "helper.h"

#include <linux/futex.h>

/* The compiler may call these four whatever the flags (GCC manual, "Standards": freestanding environments). */
void *memset(void *to, int c, size_t n)
{
    for (char *p = to; n--;)
        *p++ = (char)c;
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t n)
{
    char *p = to;
    for (const char *q = from; n--;)
        *p++ = *q++;
    return to;
}

NORETURN void __stack_chk_fail(void) { __builtin_trap(); } /* also ends pid 1, which an abort() would not */

/* The zero in the lowest byte ends what is copied as a string. No variable here may be one that the compiler guards. */
void renew_guard(void)
{
    unsigned long *guard = nsb_area() + GUARD_WORD;
    NSB_CALL(__NR_getrandom, guard, sizeof *guard, 4 /* GRND_INSECURE */);
    *guard &= ~0xfful;
}

size_t str_len(const char *s)
{
    size_t n = 0;
    while (s[n])
        n++;
    return n;
}

int str_equal(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

int open_beneath(int dir, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = resolve};
    long ret;
    /* -EAGAIN: a rename or mount elsewhere raced with the walk, the kernel asks to try again: openat2(2). */
    int tries = 32;
    do
        ret = NSB_CALL(__NR_openat2, dir, path, &how, sizeof how);
    while ((ret == -EAGAIN || ret == -EINTR) && --tries);
    return (int)ret;
}

/* Writes value in decimal and a final NUL; answers the place of the NUL. */
char *put_number(char *out, unsigned long value)
{
    char digits[24];
    int n = 0;
    do
        digits[n++] = (char)('0' + value % 10);
    while (value /= 10);
    while (n)
        *out++ = digits[--n];
    *out = 0;
    return out;
}

/* Offset 0 is the empty string. The blob ends in NUL (plan_valid() saw to it), so that every string inside it ends. */
const char *plan_string(const struct nsb_plan *plan, uint32_t offset)
{
    return (const char *)plan + (offset && offset < plan->size ? offset : plan->size - 1);
}

static int array_valid(const struct nsb_plan *plan, uint32_t offset, uint64_t count, uint64_t each)
{
    return count == 0 || (offset >= sizeof *plan && offset % 8 == 0 && count * each <= plan->size &&
                          offset <= plan->size - count * each);
}

static int sockets_valid(const struct nsb_plan *plan)
{
    const struct nsb_socket *s = plan_at((struct nsb_plan *)plan, plan->sockets);
    if (plan->n_sockets > NSB_MAX_SOCKETS || !array_valid(plan, plan->sockets, plan->n_sockets, sizeof *s))
        return 0;
    for (uint32_t i = 0; i < plan->n_sockets; i++)
        if (!array_valid(plan, s[i].options, s[i].n_options, sizeof(struct nsb_sockopt)) ||
            !array_valid(plan, s[i].address, s[i].address_size, 1))
            return 0;
    return 1;
}

int plan_valid(const struct nsb_plan *plan, uint64_t size)
{
    if (size < sizeof *plan + 8 || plan->magic != NSB_MAGIC || plan->layout != NSB_LAYOUT || plan->size != size ||
        ((const char *)plan)[size - 1] != 0)
        return 0;
    return array_valid(plan, plan->ops, plan->n_ops, sizeof(struct nsb_op)) &&
           array_valid(plan, plan->rlimits, plan->n_rlimits, sizeof(struct nsb_rlimit)) &&
           array_valid(plan, plan->rules, plan->n_rules, sizeof(struct nsb_rule)) &&
           array_valid(plan, plan->affinity, plan->n_affinity, 1) && array_valid(plan, plan->rtnl, plan->n_rtnl, 1) &&
           array_valid(plan, plan->nft, plan->n_nft, 1) && sockets_valid(plan) &&
           array_valid(plan, plan->filter, plan->n_filter, 8) && plan->n_filter <= 4096 && plan->n_filter > 0 &&
           command_valid((const char *)plan, size, &plan->command);
}

enum { MAX_FDS = 250, SOL_SOCKET_LEVEL = 1, SCM_RIGHTS_TYPE = 1, MSG_NOSIGNAL_FLAG = 0x4000, MSG_CMSG_CLOEXEC_FLAG = 0x40000000, MSG_TRUNC_FLAG = 0x20, MSG_CTRUNC_FLAG = 8 };

struct control_buffer { struct nsb_cmsg head; int fds[MAX_FDS]; };

long send_packet(int sock, const void *data, size_t size, const int *fds, unsigned n_fds)
{
    UNSET struct control_buffer control;
    struct nsb_iovec iov = {(void *)data, size};
    struct nsb_msghdr msg = {.iov = &iov, .iovlen = 1};
    if (n_fds > MAX_FDS)
        return -E2BIG;
    if (n_fds) {
        control.head = (struct nsb_cmsg){sizeof control.head + n_fds * sizeof(int), SOL_SOCKET_LEVEL, SCM_RIGHTS_TYPE};
        memcpy(control.fds, fds, n_fds * sizeof(int));
        msg.control = &control;
        msg.controllen = sizeof control.head + n_fds * sizeof(int);
    }
    long ret;
    do
        ret = NSB_CALL(__NR_sendmsg, sock, &msg, MSG_NOSIGNAL_FLAG);
    while (ret == -EINTR);
    return ret;
}

/* One packet; *n_fds comes in as the room in fds and goes out as the number received. 0 is end-of-file. */
long recv_packet(int sock, void *data, size_t size, int *fds, unsigned *n_fds)
{
    UNSET struct control_buffer control;
    struct nsb_iovec iov = {data, size};
    struct nsb_msghdr msg = {.iov = &iov, .iovlen = 1, .control = &control, .controllen = sizeof control};
    unsigned room = n_fds ? *n_fds : 0, got = 0;
    long ret;
    do
        ret = NSB_CALL(__NR_recvmsg, sock, &msg, MSG_CMSG_CLOEXEC_FLAG);
    while (ret == -EINTR);
    if (ret >= 0 && msg.controllen >= sizeof control.head && control.head.level == SOL_SOCKET_LEVEL &&
        control.head.type == SCM_RIGHTS_TYPE)
        got = (unsigned)((control.head.len - sizeof control.head) / sizeof(int));
    for (unsigned i = 0; i < got; i++) {
        if (i < room)
            fds[i] = control.fds[i];
        else
            nsb_close(control.fds[i]);
    }
    if (n_fds)
        *n_fds = got < room ? got : room;
    if (ret >= 0 && (msg.flags & (MSG_TRUNC_FLAG | MSG_CTRUNC_FLAG)))
        return -EMSGSIZE;
    return ret;
}

void tell_progress(int *progress, enum progress reached)
{
    __atomic_store_n(progress, reached, __ATOMIC_RELEASE);
    NSB_CALL(__NR_futex, progress, FUTEX_WAKE, 1, 0, 0, 0);
}

void wait_progress(const int *progress, enum progress wanted)
{
    int now;
    while ((now = __atomic_load_n(progress, __ATOMIC_ACQUIRE)) < (int)wanted)
        NSB_CALL(__NR_futex, progress, FUTEX_WAIT, now, 0, 0, 0);
}

/* Tests break a launch after any stage, to see that nothing stays behind: docs/theory.md, "Faults". */
long fault_at(const struct nsb_plan *plan, uint32_t stage, long ret)
{
    if (ret < 0 || plan->fault_stage != stage + 1)
        return ret;
    while (plan->fault > 0)
        NSB_CALL(__NR_ppoll, 0, 0, 0, 0, 0);
    return plan->fault;
}

void report(int control, uint32_t type, const struct failure *why, const uint64_t *stamps)
{
    struct nsb_msg msg = {.type = type};
    if (why) {
        msg.stage = why->stage;
        msg.op = why->op;
        msg.err = why->err;
    }
    if (stamps)
        memcpy(msg.stamps, stamps, sizeof msg.stamps);
    send_packet(control, &msg, sizeof msg, 0, 0);
}
