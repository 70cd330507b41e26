/* SPDX-License-Identifier: Apache-2.0
 * What the files of the helper share. See docs/theory.md for the processes and the order of steps. */
#ifndef NSBOX_HELPER_H
#define NSBOX_HELPER_H

#include "nsbox.h"
#include "sys.h"

/* Descriptors with fixed places in the zygote. */
enum { ZYGOTE_SOCKET = 3, ZYGOTE_EMBEDDER = 4 };

/* The stack guard among the words that nsb_area() leads to. */
enum { GUARD_WORD = 5 };

/* A program and what it is given. */
struct command {
    char *base;              /* private mapping of the blob: we may write to it */
    struct nsb_command *is;
    int control;             /* SEQPACKET to the embedding process */
    int input, output, error;
    int variables;           /* a pipe, read to its end before the program starts */
    uint32_t n_give, n_join;
    int give[NSB_MAX_GIVE], join[NSB_MAX_JOIN];
};

/* One launch, as the zygote and then init see it. */
struct launch {
    struct nsb_plan *plan;
    struct command command;
    int sync;                /* zygote -> init: maps are written, sources attached */
    int life;                /* at end-of-file the zygote is gone, and so must we be */
    int cgroup;
    int staging;             /* O_PATH of the directory that the scratch file system is stacked on */
    int scratch, root, dev, proc;
    int ruleset;             /* see make_ruleset() */
    int progress;            /* of the root, see enum progress */
    int secrets;             /* the pipe, then a writable mount of the ramfs for the host side */
    uint32_t layer;          /* number of the next lower layer */
    uint32_t n_own;          /* mounts that we made: missing places may be made there, nowhere else */
    uint64_t own[40];
    uint64_t stamps[20];
};

/* How far the thread that builds the root has come. Each is told once, and waited for as a futex(2). */
enum progress { NSB_MAPPED = 1, /* our ids are mapped */ NSB_ROOTED /* the new root is every thread's root */ };

/* Who watches a command: init, or for a later command of a sandbox that stays a process of its own below init. */
struct watcher {
    struct command *command;
    int is_init, life, signals, null;
    int pass[3];             /* descriptors that go with NSB_MSG_STARTED, or -1 */
    int untold;              /* NSB_MSG_STARTED is still to come */
    uint64_t executed;       /* when the payload did, by the monotonic clock */
    long payload;
    const uint64_t *stamps;
};

/* The error law of the helper: a step answers 0 or a descriptor, or -errno; who knows the stage reports it, once. Where
 * there may be neither a descriptor nor an error the answer is NSB_NOTHING, which is below every -errno. */
enum { NSB_NOTHING = -4096 };
struct failure { uint32_t stage, op; int err; };

/* util.c */
void *memset(void *to, int c, size_t n);
void *memcpy(void *restrict to, const void *restrict from, size_t n);
size_t str_len(const char *s);
int str_equal(const char *a, const char *b);
char *put_number(char *out, unsigned long value);
int open_beneath(int dir, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve);
const char *plan_string(const struct nsb_plan *plan, uint32_t offset);
static inline void *plan_at(struct nsb_plan *plan, uint32_t offset) { return (char *)plan + offset; }
int plan_valid(const struct nsb_plan *plan, uint64_t size);
long send_packet(int sock, const void *data, size_t size, const int *fds, unsigned n_fds);
long recv_packet(int sock, void *data, size_t size, int *fds, unsigned *n_fds);
long fault_at(const struct nsb_plan *plan, uint32_t stage, long ret);
void tell_progress(int *progress, enum progress reached);
void wait_progress(const int *progress, enum progress wanted);
void report(int control, uint32_t type, const struct failure *why, const uint64_t *stamps);

/* What the compiler calls when a function has overwritten the guard in its frame, and the choice of a new guard: only
 * where no function above returns any more. */
NORETURN void __stack_chk_fail(void);
void renew_guard(void);

/* template.c */
long nest(void);
void start_template(const int *fds, unsigned n, uint32_t size);

/* zygote.c */
int open_process(long pid);
int write_maps(int process, const char *uid_map, const char *gid_map, int deny_setgroups);
void single_map(char *out, uint32_t inside, uint32_t outside);
int write_file_at(int dir, const char *name, const char *text);

/* mounts.c */
int open_source(const struct nsb_plan *plan, const struct nsb_op *op, int idmap_userns);
int op_has_source(const struct nsb_op *op);
long make_scratch(struct launch *l);
long play_op(struct launch *l, const struct nsb_op *op, int source);
long enter_root(struct launch *l);
long drop_old_root(void);

/* net.c */
long make_network(struct launch *l, int proc);

/* privileges.c */
long become(uint32_t uid, uint32_t gid, int may_setgroups);
long set_limits(const struct nsb_plan *plan);
int make_ruleset(const struct nsb_plan *plan, int root);
long restrict_files(int ruleset);
long drop_capabilities(const struct nsb_plan *plan);
long load_filter(const struct nsb_plan *plan);
void default_signals(void);

/* command.c */
int command_valid(const char *base, uint64_t size, const struct nsb_command *command);
long map_command(struct command *c, int blob, uint64_t size);
char **fill_pointers(char **out, char *strings, uint32_t count);
int take_descriptors(struct command *c, const int *fds, unsigned n);
long watch_signals(struct watcher *w);
void start_command(struct watcher *w);
void kill_children(void);
NORETURN void watch(struct watcher *w);

/* init.c */
NORETURN void die(struct launch *l, uint32_t stage, uint32_t op, long err);
void close_others(const int *keep, unsigned n);
NORETURN void init_main(struct launch *l);

#endif
