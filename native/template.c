/* SPDX-License-Identifier: Apache-2.0
 *
 * A program outside of any sandbox that is to fork itself into sandboxes: the template of a pool of interpreters. It is
 * trusted, but what it becomes is not, and the executable and the libraries of that process are files of the template's
 * mount namespace, in reach through the links of /proc/self. So the template gets a mount namespace in which nothing
 * can be written, where those links lead to read-only mounts for whoever follows them (mount_setattr(2)).
 *
 * To enter a sandbox, an ordinary user must own its user namespace and be in the parent of it; to make the mount namespace
 * he needs a user namespace. So a zygote that serves a template goes into one first, and the sandboxes are made in there.
 */
#include "helper.h"

#include <linux/close_range.h>
#include <linux/mount.h>
#include <linux/prctl.h>

enum { PROPAGATION_PRIVATE = 1 << 18, SIGNAL_CHLD = 17, SIGNAL_KILL = 9, DUP_CLOEXEC = 1030, OUT_OF_THE_WAY = 64 };

long nest(void)
{
    char uid_map[32], gid_map[32];
    uint32_t uid = (uint32_t)NSB_CALL(__NR_geteuid), gid = (uint32_t)NSB_CALL(__NR_getegid);
    single_map(uid_map, uid, uid);
    single_map(gid_map, gid, gid);
    long ret = NSB_CALL(__NR_unshare, CLONE_NEWUSER);
    OWNED_FD process = ret < 0 ? -1 : open_process(NSB_CALL(__NR_getpid));
    return process < 0 ? (ret < 0 ? ret : process) : write_maps(process, uid_map, gid_map, 1);
}

/* Standard output and error, then what was passed as cgroups of the command, from 3 on. Closes all else but the control
 * socket, which goes with execve(2). */
static int arrange(struct command *c)
{
    int fds[3 + NSB_MAX_JOIN], n = 0;
    fds[n++] = c->control;
    fds[n++] = c->output;
    fds[n++] = c->error;
    for (uint32_t i = 0; i < c->n_join; i++)
        fds[n++] = c->join[i];
    for (int i = 0; i < n; i++) {
        fds[i] = (int)NSB_CALL(__NR_fcntl, fds[i], DUP_CLOEXEC, OUT_OF_THE_WAY);
        if (fds[i] < 0)
            return fds[i];
    }
    NSB_CALL(__NR_dup3, fds[1], 0, 0);
    for (int i = 1; i < n; i++)
        NSB_CALL(__NR_dup3, fds[i], i, 0);
    c->control = n;
    NSB_CALL(__NR_dup3, fds[0], n, O_CLOEXEC);
    NSB_CALL(__NR_close_range, n + 1, ~0u, 0);
    return 0;
}

static NORETURN void template_main(struct command *c)
{
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, .propagation = PROPAGATION_PRIVATE};
    struct failure why = {.stage = NSB_STAGE_MOUNT, .op = UINT32_MAX};
    uint64_t none = 0;
    char **argv = (char **)(void *)(c->base + c->is->pointers);
    char **envp = fill_pointers(argv, c->base + c->is->argv, c->is->argc) + 1;
    fill_pointers(envp, c->base + c->is->envp, c->is->envc);
    NSB_CALL(__NR_setsid);
    NSB_CALL(__NR_umask, 022);
    NSB_CALL(__NR_rt_sigprocmask, NSB_SIG_SETMASK, &none, 0, sizeof none);
    why.err = arrange(c);
    if (why.err == 0)
        why.err = (int)NSB_CALL(__NR_unshare, CLONE_NEWNS);
    if (why.err == 0)
        why.err = (int)NSB_CALL(__NR_mount_setattr, AT_FDCWD, "/", AT_RECURSIVE, &attr, sizeof attr);
    if (why.err == 0)
        why.err = (int)NSB_CALL(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1);
    if (why.err == 0) {
        NSB_CALL(__NR_chdir, "/");
        why = (struct failure){NSB_STAGE_EXEC, UINT32_MAX, (int)NSB_CALL(__NR_execve, argv[0], argv, envp)};
    }
    report(c->control, NSB_MSG_FAILED, &why, 0);
    nsb_exit(127);
}

/* fds: the blob, then what take_descriptors() expects. Answers NSB_MSG_CLONED with a pidfd; then the socket ends when the
 * program executes, after NSB_MSG_FAILED if it does not. */
void start_template(const int *fds, unsigned n, uint32_t size)
{
    struct command c = {.control = fds[1]};
    struct failure why = {.stage = NSB_STAGE_REQUEST, .op = UINT32_MAX, .err = (int)map_command(&c, fds[0], size)};
    int pidfd = -1;
    struct clone_args args = {.flags = CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&pidfd, .exit_signal = SIGNAL_CHLD};
    if (why.err < 0)
        return report(c.control, NSB_MSG_FAILED, &why, 0);
    why.err = take_descriptors(&c, fds + 1, n - 1);
    if (why.err == 0) {
        /* The interpreter forks itself once more before it serves: who ends meanwhile is ours to reap. */
        NSB_CALL(__NR_prctl, PR_SET_CHILD_SUBREAPER, 1);
        long pid = NSB_CALL(__NR_clone3, &args, sizeof args);
        if (pid == 0)
            template_main(&c);
        const struct nsb_msg cloned = {.type = NSB_MSG_CLONED, .pid = (int)pid};
        why.err = (int)(pid < 0 ? pid : send_packet(c.control, &cloned, sizeof cloned, &pidfd, 1));
        nsb_close_fd(&pidfd);
    }
    if (why.err < 0)
        report(c.control, NSB_MSG_FAILED, &why, 0);
    NSB_CALL(__NR_munmap, c.base, size);
}
