/* SPDX-License-Identifier: Apache-2.0
 * What the files of the helper share. See docs/theory.md for the processes and the order of steps. */
#ifndef NSBOX_HELPER_H
#define NSBOX_HELPER_H

#include "nsbox.h"
#include "sys.h"

/* Descriptors with fixed places in the zygote. */
enum { ZYGOTE_SOCKET = 3, ZYGOTE_EMBEDDER = 4 };

/* One launch, as the zygote and then init see it. */
struct launch {
    struct nsb_plan *plan;   /* private mapping of the blob: init may write to it */
    int control;             /* SEQPACKET to the embedding process */
    int sync;                /* zygote -> init: maps are written, sources attached */
    int life;                /* at end-of-file the zygote is gone, and so must we be */
    int input, output, error, cgroup;
    int staging;             /* O_PATH of the directory that the scratch file system is stacked on */
    int scratch, root, dev, proc;
    uint32_t layer;          /* number of the next lower layer */
    uint64_t stamps[16];
};

/* The error law of the helper: a step answers 0 or a descriptor, or -errno; who knows the stage reports it, once. */
struct failure { uint32_t stage, op; int err; };

/* util.c */
void *memset(void *to, int c, size_t n);
void *memcpy(void *restrict to, const void *restrict from, size_t n);
size_t str_len(const char *s);
int str_equal(const char *a, const char *b);
char *put_number(char *out, unsigned long value);
const char *plan_string(const struct nsb_plan *plan, uint32_t offset);
static inline void *plan_at(struct nsb_plan *plan, uint32_t offset) { return (char *)plan + offset; }
int plan_valid(const struct nsb_plan *plan, uint64_t size);
long send_packet(int sock, const void *data, size_t size, const int *fds, unsigned n_fds);
long recv_packet(int sock, void *data, size_t size, int *fds, unsigned *n_fds);
void report(int control, uint32_t type, const struct failure *why, const uint64_t *stamps);

/* zygote.c */
int write_file_at(int dir, const char *name, const char *text);

/* mounts.c */
int open_source(const struct nsb_plan *plan, const struct nsb_op *op, int idmap_userns);
int op_has_source(const struct nsb_op *op);
long make_scratch(struct launch *l);
long play_op(struct launch *l, const struct nsb_op *op, int source);
long enter_root(struct launch *l);

/* net.c */
struct net_task { char stack[8192] __attribute__((aligned(16))); int running, ns; long err; };
long net_start(struct net_task *task);
long net_finish(struct net_task *task);

/* privileges.c */
long become(uint32_t uid, uint32_t gid, int may_setgroups);
long set_limits(const struct nsb_plan *plan);
long restrict_files(const struct nsb_plan *plan);
long drop_capabilities(const struct nsb_plan *plan);
long load_filter(const struct nsb_plan *plan);
void default_signals(void);

/* init.c */
NORETURN void init_main(struct launch *l);

#endif
