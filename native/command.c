/* SPDX-License-Identifier: Apache-2.0
 *
 * Starting a program inside and watching it to its end. No privilege is left here, and nothing that comes from the
 * program is trusted.
 *
 * Two kinds of process watch. init watches the program of the launch: it reaps whatever is orphaned, passes signals on,
 * tells the exact wait status, and its end is the end of every process inside (pid_namespaces(7)). A later program of a
 * sandbox that stays gets a watcher of its own, a fork of init that is a child subreaper (prctl(2)): all that the program
 * leaves behind becomes the watcher's child, so that the one tree can be ended and the sandbox go on.
 */
#include "helper.h"

#include <linux/close_range.h>
#include <linux/mman.h>
#include <linux/prctl.h>

enum {
    SIGNAL_KILL = 9, SIGNAL_CHLD = 17, SFD_FLAGS = 02000000 | 04000, RUSAGE_CHILDREN_WHO = -1, PROT_READ_WRITE = 3,
    SET_CTTY = 0x540E, SET_PTY_LOCK = 0x40045431, GET_PTY_PEER = 0x5441, SET_WINDOW_SIZE = 0x5414,
    VARIABLES_ROOM = 65536, TOGETHER_NS = 1000000, AF_INET_FAMILY = 2, SOCK_STREAM_FLAGS = 1 | 02000000 | 04000
};

/* HUP INT QUIT USR1 USR2 TERM: what a host may send to a service and expects the payload to see. */
static const uint64_t forwarded = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 9 | 1 << 11 | 1 << 14;

static const char *string_at(const struct command *c, uint32_t offset)
{
    return c->base + (offset && offset < c->is->size ? offset : c->is->size - 1);
}

/* count strings one after the other, all of which must end at limit. There the array begins that is filled with pointers to
 * them: were it on top of one, that would have no end any more. */
static int strings_valid(const char *base, uint32_t limit, uint32_t offset, uint32_t count)
{
    const char *s = base + offset, *end = base + limit;
    if (offset >= limit)
        return count == 0;
    while (count && s < end) {
        s += str_len(s) + 1;
        count--;
    }
    return count == 0 && s <= end;
}

int command_valid(const char *base, uint64_t size, const struct nsb_command *c)
{
    uint64_t pointers = ((uint64_t)c->argc + c->envc + c->n_variables + 2) * sizeof(char *);
    return c->magic == NSB_MAGIC && c->size == size && base[size - 1] == 0 && c->n_join <= NSB_MAX_JOIN &&
           c->n_give <= NSB_MAX_GIVE && c->pointers % 8 == 0 && c->pointers >= (uint64_t)((const char *)(c + 1) - base) && pointers < size &&
           c->pointers < size - pointers &&
           strings_valid(base, c->pointers, c->argv, c->argc) && strings_valid(base, c->pointers, c->envp, c->envc);
}

static unsigned n_given(const struct command *c) { return (c->is->n_variables > 0) + c->is->n_give; }

static void take_given(struct command *c, const int *fds)
{
    c->variables = c->is->n_variables ? *fds++ : -1;
    for (c->n_give = 0; c->n_give < c->is->n_give; c->n_give++)
        c->give[c->n_give] = *fds++;
}

/* fds: control socket, standard output, standard error, then as far as there are: standard input, the pipe of variables,
 * what the program is given, cgroups. */
int take_descriptors(struct command *c, const int *fds, unsigned n)
{
    unsigned at = 0, has_input = !!(c->is->flags & NSB_STDIN);
    if (n != 3 + has_input + n_given(c) + c->is->n_join)
        return -EBADF;
    c->control = fds[at++];
    c->output = fds[at++];
    c->error = fds[at++];
    c->input = has_input ? fds[at++] : -1;
    take_given(c, fds + at);
    at += n_given(c);
    for (c->n_join = 0; c->n_join < c->is->n_join; c->n_join++)
        c->join[c->n_join] = fds[at++];
    return 0;
}

/* Answers where the next pointer goes. */
char **fill_pointers(char **out, char *strings, uint32_t count)
{
    for (; count; count--) {
        *out++ = strings;
        strings += str_len(strings) + 1;
    }
    *out = 0;
    return out;
}

/* Variables that are secret are in no blob, which is a memfd and may be swapped: they go from a pipe into memory that is
 * locked, as far as RLIMIT_MEMLOCK lets, and that is wiped as soon as the program has its own copy. Answers its address. */
static long take_variables(const struct command *c)
{
    uint32_t size = 0, strings = 0;
    if (c->variables < 0)
        return 0;
    long n, at = NSB_CALL(__NR_mmap, 0, VARIABLES_ROOM, PROT_READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (nsb_failed(at))
        return at;
    NSB_CALL(__NR_mlock, at, VARIABLES_ROOM);
    while ((n = NSB_CALL(__NR_read, c->variables, at + size, VARIABLES_ROOM - size)) > 0)
        size += (uint32_t)n;
    nsb_close(c->variables);
    for (uint32_t i = 0; i < size; i++)
        strings += ((const char *)at)[i] == 0;
    return n < 0 ? n : strings < c->is->n_variables ? -EPROTO : at;
}

static void wipe_variables(long at)
{
    if (at <= 0)
        return;
    memset((char *)at, 0, VARIABLES_ROOM);
    NSB_CALL(__NR_munmap, at, VARIABLES_ROOM);
}

/* What the program is given becomes 3, 4, ... and all else is closed. All of it is moved out of the way first: one may have
 * the number that another shall get. */
static long give_descriptors(const struct command *c)
{
    int moved[NSB_MAX_GIVE], end = 3 + (int)c->n_give;
    long ret = 0;
    for (uint32_t i = 0; ret >= 0 && i < c->n_give; i++)
        ret = moved[i] = (int)NSB_CALL(__NR_fcntl, c->give[i], F_DUPFD_CLOEXEC, end);
    for (uint32_t i = 0; ret >= 0 && i < c->n_give; i++)
        ret = NSB_CALL(__NR_dup3, moved[i], 3 + i, 0);
    return ret < 0 ? ret : NSB_CALL(__NR_close_range, end, ~0u, 0);
}

struct attempt { int err, found, too_early; };

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
    UNSET char candidate[4096];
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

/* Runs in the vforked child: the watcher's memory, descriptors of its own. *a is read after it executed or ended. */
static NOINLINE NORETURN void payload_main(const struct watcher *w, int tty, char **argv, char **envp,
                                           volatile struct attempt *a)
{
    const struct command *c = w->command;
    struct attempt attempt = {0, 0, 0};
    uint64_t none = 0;
    int slash = 0;
    NSB_CALL(__NR_setsid);
    NSB_CALL(__NR_dup3, tty >= 0 ? tty : c->input >= 0 ? c->input : w->null, 0, 0);
    NSB_CALL(__NR_dup3, tty >= 0 ? tty : c->output, 1, 0);
    NSB_CALL(__NR_dup3, tty >= 0 ? tty : c->error, 2, 0);
    if (tty >= 0)
        NSB_CALL(__NR_ioctl, 0, SET_CTTY, 0);
    a->err = (int)give_descriptors(c);
    /* Only now, when /proc/self/fd leads nowhere any more: a link there would make a descriptor of ours, which is outside
     * the payload's root, its working directory. */
    if (a->err >= 0)
        a->err = (int)NSB_CALL(__NR_chdir, string_at(c, c->is->cwd));
    if (a->err < 0) {
        a->too_early = 1;
        nsb_exit(127);
    }
    NSB_CALL(__NR_umask, 022);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_SETMASK, &none, 0, sizeof none);
    for (const char *s = argv[0]; *s; s++)
        slash |= *s == '/';
    if (slash)
        try_execute(&attempt, argv[0], argv, envp);
    else
        search_path(&attempt, string_at(c, c->is->path), argv, envp);
    a->found = attempt.found;
    a->err = attempt.err;
    nsb_exit(127);
}

static NORETURN void refuse(const struct watcher *w, uint32_t type, long err, int status)
{
    struct nsb_msg msg = {.type = type, .stage = NSB_STAGE_EXEC, .op = UINT32_MAX, .err = (int)err, .status = status};
    send_packet(w->command->control, &msg, sizeof msg, 0, 0);
    nsb_exit(1);
}

/* A new pseudo-terminal of the sandbox's own devpts. Answers the master; *slave is the other end. size: rows << 16 | columns,
 * there before the program looks. */
static int open_terminal(uint32_t size, int *slave)
{
    const struct { uint16_t rows, columns, width, height; } window = {(uint16_t)(size >> 16), (uint16_t)size, 0, 0};
    int unlock = 0;
    int master = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0)
        return master;
    NSB_CALL(__NR_ioctl, master, SET_PTY_LOCK, &unlock);
    NSB_CALL(__NR_ioctl, master, SET_WINDOW_SIZE, &window);
    *slave = (int)NSB_CALL(__NR_ioctl, master, GET_PTY_PEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    return *slave < 0 ? *slave : master;
}

static void tell_started(struct watcher *w, int master)
{
    struct nsb_msg msg = {.type = NSB_MSG_STARTED, .pid = (int)w->payload};
    int fds[4];
    unsigned n = 0;
    for (unsigned i = 0; i < 3; i++)
        if (w->pass[i] >= 0)
            fds[n++] = w->pass[i];
    if (master >= 0)
        fds[n++] = master;
    if (w->stamps)
        memcpy(msg.stamps, w->stamps, sizeof msg.stamps);
    msg.stamps[NSB_STAGE_EXEC] = w->executed;
    send_packet(w->command->control, &msg, sizeof msg, fds, n);
    while (n)
        nsb_close(fds[--n]);
    w->pass[0] = w->pass[1] = w->pass[2] = -1;
    w->untold = 0;
}

/* For a host that forwards one of its ports: a socket keeps the network namespace that it was made in. It does not block
 * here, so that whoever listens inside, or does not, cannot hold this watcher. */
static NORETURN void connect_inside(struct watcher *w)
{
    const struct { uint16_t family, port; uint32_t address, rest[2]; } to = {
        AF_INET_FAMILY, __builtin_bswap16((uint16_t)w->command->is->detail), __builtin_bswap32(0x7f000001), {0, 0}};
    int sock = (int)NSB_CALL(__NR_socket, AF_INET_FAMILY, SOCK_STREAM_FLAGS, 0);
    long ret = sock < 0 ? sock : NSB_CALL(__NR_connect, sock, &to, sizeof to);
    if (ret < 0 && ret != -EINPROGRESS)
        refuse(w, NSB_MSG_FAILED, ret, 0);
    tell_started(w, sock);
    nsb_exit(0);
}

void start_command(struct watcher *w)
{
    struct command *c = w->command;
    volatile struct attempt a = {0, 0, 0};
    int slave = -1, master = -1;
    if (c->is->argc == 0) {
        /* Nobody reads what a watcher that waits would say, and a socket that is closed over unread packets is reset. */
        if (w->is_init)
            tell_started(w, -1);
        return;
    }
    if (c->is->flags & NSB_CONNECT && !w->is_init)
        connect_inside(w);
    if (c->is->flags & NSB_TTY && (master = open_terminal(c->is->detail, &slave)) < 0)
        refuse(w, NSB_MSG_FAILED, master, 0);
    long secret = take_variables(c);
    if (nsb_failed(secret))
        refuse(w, NSB_MSG_FAILED, secret, 0);
    char **argv = (char **)(void *)(c->base + c->is->pointers), **envp = argv + c->is->argc + 1;
    fill_pointers(argv, c->base + c->is->argv, c->is->argc);
    fill_pointers(fill_pointers(envp, c->base + c->is->envp, c->is->envc), (char *)secret, c->is->n_variables);
    w->payload = NSB_CALL(__NR_clone, CLONE_VM | CLONE_VFORK | SIGNAL_CHLD);
    if (w->payload == 0)
        payload_main(w, slave, argv, envp, &a);
    wipe_variables(secret);
    if (w->payload < 0)
        refuse(w, NSB_MSG_FAILED, w->payload, 0);
    if (a.too_early)
        refuse(w, NSB_MSG_FAILED, a.err, 0);
    if (a.err < 0)
        refuse(w, NSB_MSG_EXEC_FAILED, a.err, a.found ? 126 : 127);
    /* Output and error stay open: who reads them sees their end with ours, and is not woken up for each. */
    nsb_close(c->input);
    for (uint32_t i = 0; i < c->n_give; i++)
        nsb_close(c->give[i]);
    nsb_close(slave);
    w->executed = nsb_now();
    w->untold = c->is->flags & NSB_TOGETHER && master < 0;
    if (!w->untold)
        tell_started(w, master);
}

static void add_usage(struct nsb_msg *msg, const struct nsb_rusage *usage)
{
    msg->utime_us = usage->utime_s * 1000000 + usage->utime_us;
    msg->stime_us = usage->stime_s * 1000000 + usage->stime_us;
    msg->maxrss_kb = usage->maxrss;
    msg->inblock = usage->inblock;
    msg->oublock = usage->oublock;
}

/* SIGKILL to every child that the caller has now. Grandchildren become children when their parents die. */
void kill_children(void)
{
    UNSET char text[4096];
    OWNED_FD fd = (int)NSB_CALL(__NR_openat, AT_FDCWD, "/proc/thread-self/children", O_RDONLY | O_CLOEXEC);
    long n = fd < 0 ? 0 : NSB_CALL(__NR_read, fd, text, sizeof text);
    unsigned long pid = 0;
    for (long i = 0; i < n; i++) {
        if (text[i] >= '0' && text[i] <= '9') {
            pid = pid * 10 + (unsigned long)(text[i] - '0');
            continue;
        }
        if (pid > 1)
            NSB_CALL(__NR_kill, pid, SIGNAL_KILL);
        pid = 0;
    }
}

/* Ends every process in reach: init the whole namespace, another watcher its own tree. */
static void kill_all(const struct watcher *w)
{
    if (w->is_init)
        NSB_CALL(__NR_kill, -1, SIGNAL_KILL);
    else
        kill_children();
}

/* The payload has ended: end the rest, and tell what all of it used. Where there is a rest, that the payload has ended is
 * told before. */
static NORETURN void conclude(struct watcher *w, int status, const struct nsb_rusage *own)
{
    struct nsb_msg msg = {.type = NSB_MSG_EXITED, .status = status};
    struct nsb_rusage usage;
    msg.stamps[NSB_STAGE_RUN] = nsb_now();
    if (w->untold)
        tell_started(w, -1);
    add_usage(&msg, own);
    if (!(w->command->is->flags & NSB_KEEP)) {
        kill_all(w);
        if (NSB_CALL(__NR_wait4, -1, 0, NSB_WNOHANG | NSB_WALL, 0) != -ECHILD) {
            send_packet(w->command->control, &msg, sizeof msg, 0, 0);
            /* A fork may race with one round of killing: what was born meanwhile is found in the next, after a wait. */
            do
                kill_all(w);
            while (NSB_CALL(__NR_wait4, -1, 0, NSB_WALL, 0) > 0);
        }
    }
    msg.type = NSB_MSG_ENDED;
    NSB_CALL(__NR_getrusage, RUSAGE_CHILDREN_WHO, &usage);
    add_usage(&msg, &usage);
    send_packet(w->command->control, &msg, sizeof msg, 0, 0);
    nsb_exit(0);
}

static void reap(struct watcher *w)
{
    struct nsb_rusage usage;
    int status;
    long pid;
    while ((pid = NSB_CALL(__NR_wait4, -1, &status, NSB_WNOHANG | NSB_WALL, &usage)) > 0)
        if (pid == w->payload)
            conclude(w, status, &usage);
}

struct signal_info { uint32_t number, error; int32_t code; uint32_t pid; char rest[112]; };

static void read_signals(struct watcher *w)
{
    struct signal_info info;
    while (NSB_CALL(__NR_read, w->signals, &info, sizeof info) == sizeof info)
        /* A sender outside this pid namespace shows as pid 0: only those are passed on. */
        if (info.number != SIGNAL_CHLD && info.pid == 0 && w->payload > 1)
            NSB_CALL(__NR_kill, w->payload, info.number);
}

/* In the forked watcher of a later command. */
static NORETURN void watch_later(struct watcher *init, struct command *c)
{
    struct watcher w = {.command = c, .life = -1, .signals = -1, .null = init->null, .pass = {-1, -1, -1}, .payload = -1};
    int keep[6 + NSB_MAX_GIVE + NSB_MAX_JOIN] = {c->control, c->input, c->output, c->error, c->variables, w.null};
    memcpy(keep + 6, c->give, c->n_give * sizeof *keep);
    memcpy(keep + 6 + c->n_give, c->join, c->n_join * sizeof *keep);
    close_others(keep, 6 + c->n_give + c->n_join);
    NSB_CALL(__NR_prctl, PR_SET_NAME, "nsbox-watcher");
    NSB_CALL(__NR_prctl, PR_SET_CHILD_SUBREAPER, 1);
    long ret = watch_signals(&w);
    for (uint32_t i = 0; ret >= 0 && i < c->n_join; i++) {
        ret = NSB_CALL(__NR_write, c->join[i], "0", 1);
        nsb_close(c->join[i]);
    }
    if (ret < 0)
        refuse(&w, NSB_MSG_FAILED, ret, 0);
    start_command(&w);
    watch(&w);
}

/* Maps the blob of a command; what it says of itself has been checked then. */
long map_command(struct command *c, int blob, uint64_t size)
{
    if (size < sizeof *c->is || size > NSB_MAX_BLOB)
        return -EPROTO;
    long at = NSB_CALL(__NR_mmap, 0, size, PROT_READ_WRITE, MAP_PRIVATE, blob, 0);
    if (nsb_failed(at))
        return at;
    c->base = (char *)at;
    c->is = (struct nsb_command *)at;
    if (command_valid(c->base, size, c->is))
        return 0;
    NSB_CALL(__NR_munmap, at, size);
    return -EPROTO;
}

/* NSB_MSG_RUN. What is malformed is answered on the command's own socket where there is one, else dropped. */
static void run_later(struct watcher *init, const struct nsb_msg *msg, const int *fds, unsigned n)
{
    struct command c = {.control = n > 1 ? fds[1] : -1};
    struct failure why = {.stage = NSB_STAGE_REQUEST, .op = UINT32_MAX, .err = -EPROTO};
    uint64_t size = (uint32_t)msg->err;
    why.err = n < 2 ? -EPROTO : (int)map_command(&c, fds[0], size);
    if (why.err < 0)
        return report(c.control, NSB_MSG_FAILED, &why, 0);
    why.err = take_descriptors(&c, fds + 1, n - 1);
    if (why.err == 0) {
        long pid = NSB_CALL(__NR_clone, SIGNAL_CHLD);
        if (pid == 0)
            watch_later(init, &c);
        why.err = pid < 0 ? (int)pid : 0;
    }
    if (why.err < 0)
        report(c.control, NSB_MSG_FAILED, &why, 0);
    NSB_CALL(__NR_munmap, c.base, size);
}

/* The same for a watcher that was made ahead, in a cgroup of its own: it lets go of the socket that it waited on, and from
 * here on is as if it had been forked for this command. Answers how many of fds are the caller's still. */
static unsigned run_now(struct watcher *w, const struct nsb_msg *msg, const int *fds, unsigned n)
{
    struct command c = {.control = n > 1 ? fds[1] : -1}, *old = w->command;
    struct failure why = {.stage = NSB_STAGE_REQUEST, .op = UINT32_MAX};
    why.err = n < 2 ? -EPROTO : (int)map_command(&c, fds[0], (uint32_t)msg->err);
    if (why.err == 0)
        why.err = c.is->argc && !c.is->n_join ? take_descriptors(&c, fds + 1, n - 1) : -EPROTO;
    if (why.err < 0) {
        report(c.control, NSB_MSG_FAILED, &why, 0);
        return n;
    }
    nsb_close_fd(&old->control);
    nsb_close_fd(&old->output);
    nsb_close_fd(&old->error);
    nsb_close_fd(&old->input);
    nsb_close_fd(&old->variables);
    nsb_close(fds[0]);
    *old = c;
    start_command(w);
    return 0;
}

/* NSB_MSG_START: a sandbox that was made ahead gets the program of its launch, on the streams that it was made with.
 * Answers how many of fds are the caller's still. */
static unsigned start_first(struct watcher *w, const struct nsb_msg *msg, const int *fds, unsigned n)
{
    struct command *c = w->command;
    if (w->payload >= 0)
        return n;
    long ret = n >= 1 ? map_command(c, fds[0], (uint32_t)msg->err) : -EPROTO;
    if (ret == 0 && (n != 1 + n_given(c) || c->is->argc == 0))
        ret = -EPROTO;
    if (ret < 0)
        refuse(w, NSB_MSG_FAILED, ret, 0);
    take_given(c, fds + 1);
    if (!(c->is->flags & NSB_STDIN)) {
        nsb_close_fd(&c->input);
        c->input = -1;
    }
    w->stamps = 0; /* they were told when it was made */
    start_command(w);
    return 1;
}

static void read_control(struct watcher *w)
{
    struct nsb_msg msg = {0};
    int fds[7 + NSB_MAX_GIVE + NSB_MAX_JOIN];
    unsigned n = sizeof fds / sizeof *fds;
    long ret = recv_packet(w->command->control, &msg, sizeof msg, fds, &n);
    if (ret == 0 || (ret < 0 && ret != -EMSGSIZE)) {
        /* Nobody is interested any more. init's end ends all; another watcher ends its own tree first. */
        if (w->is_init)
            nsb_exit(1);
        do
            kill_all(w);
        while (NSB_CALL(__NR_wait4, -1, 0, NSB_WALL, 0) > 0);
        nsb_exit(1);
    }
    if (ret == sizeof msg && msg.type == NSB_MSG_KILL)
        kill_all(w);
    if (ret == sizeof msg && msg.type == NSB_MSG_SIGNAL && msg.err > 0 && msg.err <= 64) {
        if (msg.op == 1 && w->is_init)
            NSB_CALL(__NR_kill, -1, msg.err);
        else if (w->payload > 1)
            NSB_CALL(__NR_kill, w->payload, msg.err);
    }
    if (ret == sizeof msg && msg.type == NSB_MSG_RUN && w->is_init)
        run_later(w, &msg, fds, n);
    if (ret == sizeof msg && msg.type == NSB_MSG_START && w->is_init)
        n = start_first(w, &msg, fds, n);
    if (ret == sizeof msg && msg.type == NSB_MSG_RUN && !w->is_init && w->payload < 0)
        n = run_now(w, &msg, fds, n);
    while (n)
        nsb_close(fds[--n]);
}

long watch_signals(struct watcher *w)
{
    uint64_t watched = forwarded | 1u << (SIGNAL_CHLD - 1);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_SETMASK, &watched, 0, sizeof watched);
    w->signals = (int)NSB_CALL(__NR_signalfd4, -1, &watched, sizeof watched, SFD_FLAGS);
    return w->signals;
}

NORETURN void watch(struct watcher *w)
{
    struct nsb_pollfd fds[3] = {{w->command->control, NSB_POLLIN, 0}, {w->signals, NSB_POLLIN, 0}, {w->life, NSB_POLLIN, 0}};
    for (;;) {
        struct __kernel_timespec soon = {0, 0};
        reap(w);
        if (w->untold)
            soon.tv_nsec = TOGETHER_NS - (int64_t)(nsb_now() - w->executed);
        if (w->untold && soon.tv_nsec <= 0)
            tell_started(w, -1);
        fds[0].fd = w->command->control;
        if (NSB_CALL(__NR_ppoll, fds, w->life >= 0 ? 3 : 2, w->untold ? &soon : 0, 0, 0) <= 0)
            continue;
        if (w->life >= 0 && fds[2].revents)
            nsb_exit(1);
        if (fds[1].revents)
            read_signals(w);
        if (fds[0].revents)
            read_control(w);
    }
}
