/* SPDX-License-Identifier: Apache-2.0
 *
 * The contract between Python and C. The part between the markers is read by the C compiler and, as the same text, by
 * cffi; a change of any layout here raises NSB_LAYOUT, which both sides compare before the first launch.
 *
 * A launch is one read-only blob (struct nsb_plan, then its arrays and strings, all by offset from its start) and a
 * handful of descriptors. Offset 0 stands for "absent". The blob comes from the embedding process, which is trusted;
 * it is bounds-checked all the same, because a wrong offset in pid 1 would be found by somebody hostile.
 */
#ifndef NSBOX_H
#define NSBOX_H

#include <stdint.h>

/* cdef:begin */
enum { NSB_MAGIC = 0x786f626e, NSB_LAYOUT = 11, NSB_MAX_SOURCES = 200, NSB_MAX_JOIN = 8, NSB_MAX_GIVE = 8, NSB_MAX_SOCKETS = 12, NSB_LAST_MESSAGE = 0x7fffffff, NSB_MAX_BLOB = 16777216 };

/* What was being done. Names are shown to users; the order is the order of a launch. */
enum nsb_stage {
    NSB_STAGE_REQUEST, NSB_STAGE_CLONE, NSB_STAGE_CGROUP, NSB_STAGE_IDMAP, NSB_STAGE_SOURCE, NSB_STAGE_NETWORK, NSB_STAGE_HOSTNAME,
    NSB_STAGE_IDENTITY, NSB_STAGE_SCRATCH, NSB_STAGE_MOUNT, NSB_STAGE_PIVOT, NSB_STAGE_LIMITS, NSB_STAGE_CAPABILITIES,
    NSB_STAGE_LANDLOCK, NSB_STAGE_SECCOMP, NSB_STAGE_EXEC, NSB_STAGE_RUN, NSB_N_STAGES
};

enum nsb_op_kind {
    NSB_OP_LOWER,    /* src becomes the next overlay layer, l0, l1, ... */
    NSB_OP_OVERLAY,  /* data: "l1:l0"; dst: "" is the new root, else a place beneath it */
    NSB_OP_BIND,     /* src onto dst */
    NSB_OP_TMPFS,    /* size bytes, inodes, mode onto dst */
    NSB_OP_SECRETS,  /* a ramfs on dst with what comes through the secrets pipe; read-only inside */
    NSB_OP_SCRATCH,  /* a fresh directory of the scratch file system (counted there) onto dst */
    NSB_OP_PROC, NSB_OP_DEV,
    NSB_OP_MASK,     /* dst, an entry of /proc or an absolute place, is covered, or stays read-only with NSB_RO */
    NSB_OP_UPPER     /* make dst in the upper directory of the root, before NSB_OP_OVERLAY uses it */
};

enum nsb_op_flags {
    NSB_RO = 1, NSB_NOEXEC = 2, NSB_RECURSIVE = 4,
    NSB_IDMAP_RANGE = 8,   /* file ids are shifted as the sandbox's own ids are */
    NSB_IDMAP_OWNER = 16,  /* the owner of src appears as the payload's uid, nobody else is mapped */
    NSB_DIRECTORY = 32     /* what is masked is a directory */
};

enum nsb_plan_flags {
    NSB_HOST_SOURCES = 1,  /* privileged caller: the zygote opens the sources, init never sees a host path */
    NSB_SETGROUPS_DENY = 2,
    NSB_NETWORK = 4,       /* a network namespace of its own, with nothing but loopback */
    NSB_CGROUP_FD = 8,     /* a descriptor for CLONE_INTO_CGROUP */
    NSB_MAPS_BY_CALLER = 16, /* the embedding process has newuidmap write the maps, then says go on the control socket */
    NSB_SCRATCH_DIR = 32,
    NSB_NET_WAIT = 128,    /* once NSB_MSG_NETWORK is out, init waits for NSB_MSG_GO */
    NSB_SECRETS = 256,     /* a pipe full of secrets, last of the request's descriptors */
    NSB_JOIN = 512,        /* before the filter init says NSB_MSG_JOIN, can be entered by setns(2), and waits for NSB_MSG_GO */
    NSB_PASS_ROOT = 64     /* with NSB_MSG_STARTED come: the root, the scratch file system, the secrets if there are any */
};

enum nsb_command_flags {
    NSB_STDIN = 1,         /* a descriptor for standard input; else it is the sandbox's /dev/null */
    NSB_TTY = 2,           /* a pseudo-terminal of the sandbox is the standard streams; its master comes with STARTED */
    NSB_KEEP = 4,          /* what the command leaves running lives on until the sandbox ends */
    NSB_CONNECT = 8,       /* no program: a TCP socket that connects to a port of the loopback comes with STARTED */
    NSB_TOGETHER = 16      /* STARTED may come with the end, where that comes within a millisecond: one message to wake up for */
};

struct nsb_op { uint32_t kind, flags, src, dst, data, mode, uid, gid; uint64_t size, inodes; };
struct nsb_rlimit { uint32_t resource, unused; uint64_t soft, hard; };
/* A socket that is made in the network namespace and passed out: options are set in order, then bind(2), listen(2). */
struct nsb_socket { int32_t family, type, protocol, backlog; uint32_t options, n_options, address, address_size; };
struct nsb_sockopt { int32_t level, name, value, unused; };
struct nsb_secret { uint32_t name_size, size, mode, unused; }; /* then the name and the value */
struct nsb_rule { uint32_t path, unused; uint64_t access; };

/* A program to start: the one of a launch, or a later one of a sandbox that stays (NSB_MSG_RUN), where it opens a blob
 * of its own. argv, envp: strings one after the other; pointers: room for argc + envc + n_variables + 2 pointers; path: PATH
 * for argv[0]; n_variables: more of envp, which come through a pipe and are in no blob; n_give: descriptors that become
 * the program's from 3 up; n_join: descriptors of `tasks` (cgroup v1) or cgroup.procs (v2). argc 0: nothing to start yet; a
 * later command's watcher then waits in its cgroup for another NSB_MSG_RUN, on its own socket. */
struct nsb_command {
    uint32_t magic, size, flags, cwd, path, argv, argc, envp, envc, pointers, n_variables, n_give, n_join, detail; /* NSB_CONNECT: the port; NSB_TTY: rows << 16 | columns */
};

struct nsb_plan {
    uint32_t magic, layout, size, flags;
    uint32_t uid_map, gid_map;               /* text for /proc/PID/{uid,gid}_map */
    uint32_t setup_uid, setup_gid;           /* ids inside while the root is built */
    uint32_t uid, gid;                       /* ids inside of init and the payload from then on */
    uint32_t host_uid, host_gid;             /* the payload's ids as the host sees them */
    uint32_t staging, hostname;              /* staging: an existing host directory to build on */
    uint32_t ops, n_ops, rlimits, n_rlimits, rules, n_rules, filter, n_filter;
    uint32_t scratch_dir, affinity, n_affinity; /* affinity: mask for sched_setaffinity(2), n bytes of it */
    uint32_t fault_stage;                    /* for tests: 1 + the stage that goes wrong; 0: none */
    int32_t nice, ioprio;                    /* setpriority(2), ioprio_set(2); 0: as the caller's */
    int32_t fault;                           /* the -errno that it answers, or 1: it never comes back */
    uint32_t unused;
    uint32_t rtnl, n_rtnl, nft, n_nft;       /* netlink batches for the network namespace, in bytes */
    uint32_t sockets, n_sockets;
    uint64_t scratch_size, scratch_inodes;
    uint64_t landlock_fs, landlock_scoped;   /* handled_access_fs, scoped; both 0: no ruleset */
    struct nsb_command command;
};

enum nsb_msg_type {
    NSB_MSG_CLONED = 1,   /* zygote: pid, and a pidfd beside it */
    NSB_MSG_FAILED,       /* zygote or init: stage, op, err */
    NSB_MSG_STARTED,      /* init: the payload executes; stamps */
    NSB_MSG_EXEC_FAILED,  /* init: err */
    NSB_MSG_EXITED,       /* init: the payload's wait status and usage, where something else is left to be ended */
    NSB_MSG_ENDED,        /* init: nothing is left inside; the same status, usage of everything */
    NSB_MSG_NETWORK,      /* init: rtnetlink and netfilter sockets of the network namespace, then the plan's sockets */
    NSB_MSG_JOIN,         /* init: a process that was started elsewhere may come in now; see NSB_JOIN */
    NSB_MSG_KILL = 64,    /* host: kill every process of this sandbox, or of this command, then report */
    NSB_MSG_SIGNAL,       /* host: err is a signal for the payload; with op 1 for every process of the sandbox */
    NSB_MSG_GO,           /* host: the maps are written */
    NSB_MSG_RUN,          /* host: start another program; err is the size of the blob, which comes first of the descriptors */
    NSB_MSG_START         /* host: start the program of a launch that had none; err and the blob as above, then the pipe of variables and what it is given */
};

struct nsb_msg {
    uint32_t type, stage, op;
    int32_t err, status, pid;
    int64_t utime_us, stime_us, maxrss_kb, inblock, oublock;
    uint64_t stamps[20];  /* CLOCK_MONOTONIC nanoseconds at the end of each stage, 0 where it did not happen */
};

/* NSB_NEST: the zygote goes into a user namespace that maps its own id only; what it launches later is beneath that.
 * NSB_TEMPLATE: a program outside of any sandbox, see native/template.c; the blob is a struct nsb_command. */
enum nsb_request_kind { NSB_LAUNCH, NSB_NEST, NSB_TEMPLATE };
struct nsb_request { uint32_t magic, layout, size, n_fds, kind, unused; };
/* cdef:end */

#endif
