/* SPDX-License-Identifier: Apache-2.0
 *
 * The root of a sandbox, built with the descriptor-based mount API (mount_setattr(2), open_tree(2), fsopen(2)).
 *
 * Two rules hold everywhere here. A source is opened without following any symbolic link: the caller's path was made
 * canonical before, and what was checked is what is opened. A destination is resolved by openat2(2) as if the new root
 * were "/", so that no link in a hostile tree leads out, and what is missing is made there, never on the host.
 */
#include "helper.h"

#include <linux/mount.h>

#ifndef MOUNT_ATTR_IDMAP
#define MOUNT_ATTR_IDMAP 0x00100000
#endif

enum { PATH_SIZE = 4096, DETACH = 2, STATX_TYPE_ONLY = 1, TYPE_MASK = 0170000, TYPE_DIRECTORY = 0040000 };

static int is_directory(int fd)
{
    struct statx st;
    long ret = NSB_CALL(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_TYPE_ONLY, &st);
    return ret < 0 ? (int)ret : (st.stx_mode & TYPE_MASK) == TYPE_DIRECTORY;
}

int op_has_source(const struct nsb_op *op) { return op->kind == NSB_OP_LOWER || op->kind == NSB_OP_BIND; }

/* A detached copy of the mount at op's source, with its attributes on. idmap_userns is -1, or its id map is laid over. */
int open_source(const struct nsb_plan *plan, const struct nsb_op *op, int idmap_userns)
{
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
    unsigned deep = op->flags & NSB_RECURSIVE ? AT_RECURSIVE : 0;
    OWNED_FD path = open_beneath(AT_FDCWD, plan_string(plan, op->src), O_PATH, 0, RESOLVE_NO_SYMLINKS);
    if (path < 0)
        return path;
    int tree = (int)NSB_CALL(__NR_open_tree, path, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | deep);
    if (tree < 0)
        return tree;
    if (op->flags & NSB_RO)
        attr.attr_set |= MOUNT_ATTR_RDONLY;
    if (op->flags & NSB_NOEXEC)
        attr.attr_set |= MOUNT_ATTR_NOEXEC;
    if (idmap_userns >= 0) {
        attr.attr_set |= MOUNT_ATTR_IDMAP;
        attr.userns_fd = (uint64_t)idmap_userns;
    }
    attr.propagation = 1 << 18; /* MS_PRIVATE */
    long ret = NSB_CALL(__NR_mount_setattr, tree, "", AT_EMPTY_PATH | deep, &attr, sizeof attr);
    if (ret == 0)
        return tree;
    nsb_close(tree);
    return (int)ret;
}

/* The mounts that we made are known by their unique ids (statx(2)). */
static uint64_t mount_id(int fd)
{
    struct statx st;
    return NSB_CALL(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_MNT_ID, &st) == 0 ? st.stx_mnt_id : 0;
}

static void remember_own(struct launch *l, int tree)
{
    if (l->n_own < sizeof l->own / sizeof *l->own)
        l->own[l->n_own++] = mount_id(tree);
}

static int is_own(const struct launch *l, int fd)
{
    uint64_t id = mount_id(fd);
    for (uint32_t i = 0; i < l->n_own; i++)
        if (id && l->own[i] == id)
            return 1;
    return 0;
}

static long attach(int tree, int dir, const char *name)
{
    unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | (*name ? 0 : MOVE_MOUNT_T_EMPTY_PATH);
    return NSB_CALL(__NR_move_mount, tree, "", dir, name, flags);
}

struct option { const char *key, *value; };

static int new_filesystem(const char *type, const struct option *options, unsigned n, unsigned attributes)
{
    OWNED_FD fs = (int)NSB_CALL(__NR_fsopen, type, FSOPEN_CLOEXEC);
    if (fs < 0)
        return fs;
    for (unsigned i = 0; i < n; i++) {
        unsigned kind = options[i].value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG;
        long ret = NSB_CALL(__NR_fsconfig, fs, kind, options[i].key, options[i].value, 0);
        if (ret < 0)
            return (int)ret;
    }
    long ret = NSB_CALL(__NR_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0);
    if (ret < 0)
        return (int)ret;
    return (int)NSB_CALL(__NR_fsmount, fs, FSMOUNT_CLOEXEC, attributes);
}

static int new_tmpfs(uint64_t size, uint64_t inodes, uint32_t mode)
{
    char sizes[24], nodes[24], modes[8];
    for (int i = 3, m = (int)mode; i >= 0; i--, m >>= 3)
        modes[i] = (char)('0' + (m & 7));
    modes[4] = 0;
    put_number(sizes, size);
    put_number(nodes, inodes);
    const struct option options[] = {{"mode", modes}, {"size", sizes}, {"nr_inodes", nodes}};
    unsigned n = size ? (inodes ? 3 : 2) : 1;
    return new_filesystem("tmpfs", options, n, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

/* Makes what is missing of path beneath root, one component a step, and opens its last directory. An existing symbolic
 * link is followed as the inside would follow it; a dangling one is refused (mkdirat says EEXIST, openat2 ENOENT). Nothing
 * is ever made on a mount that shows the host's files, whatever may be written there later. */
static int make_directories(const struct launch *l, const char *path)
{
    const int root = l->root;
    UNSET char prefix[PATH_SIZE];
    size_t length = str_len(path), i = 0;
    if (length >= PATH_SIZE)
        return -ENAMETOOLONG;
    int at = open_beneath(root, ".", O_PATH | O_DIRECTORY, 0, RESOLVE_IN_ROOT);
    while (at >= 0) {
        while (path[i] == '/')
            i++;
        if (!path[i])
            return at;
        OWNED_FD parent = at;
        size_t start = i;
        while (path[i] && path[i] != '/')
            i++;
        memcpy(prefix, path, i);
        prefix[i] = 0;
        at = open_beneath(root, prefix, O_PATH | O_DIRECTORY, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
        if (at != -ENOENT)
            continue;
        long ret = is_own(l, parent) ? NSB_CALL(__NR_mkdirat, parent, prefix + start, 0755) : -EROFS;
        if (ret < 0)
            return ret == -EEXIST ? -ELOOP : (int)ret;
        at = open_beneath(root, prefix, O_PATH | O_DIRECTORY, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
    }
    return at;
}

/* Splits path at its last slash into the directory (made where missing) and the name. */
static int open_parent(const struct launch *l, const char *path, const char **name)
{
    UNSET char dir[PATH_SIZE];
    size_t last = 0, length = str_len(path);
    if (length >= PATH_SIZE)
        return -ENAMETOOLONG;
    for (size_t i = 0; i < length; i++)
        if (path[i] == '/')
            last = i + 1;
    memcpy(dir, path, last);
    dir[last] = 0;
    *name = path + last;
    return make_directories(l, dir);
}

static int open_target(const struct launch *l, const char *path, int directory)
{
    int at = open_beneath(l->root, path, O_PATH, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
    if (at != -ENOENT)
        return at;
    if (directory)
        return make_directories(l, path);
    const char *name;
    OWNED_FD parent = open_parent(l, path, &name);
    if (parent < 0)
        return parent;
    if (!is_own(l, parent))
        return -EROFS;
    OWNED_FD made = (int)NSB_CALL(__NR_openat, parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (made < 0)
        return made == -EEXIST ? -ELOOP : made;
    return open_beneath(l->root, path, O_PATH, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
}

static long attach_at(const struct launch *l, int tree, const char *path, int directory)
{
    OWNED_FD target = open_target(l, path, directory);
    return target < 0 ? target : attach(tree, target, "");
}

/* The same for a mount of our own making. */
static long attach_own(struct launch *l, int tree, const char *path)
{
    long ret = attach_at(l, tree, path, 1);
    if (ret == 0)
        remember_own(l, tree);
    return ret;
}

/* The scratch file system holds every byte that the sandbox writes: upper and work directories, /dev/shm, copies. It is
 * stacked on a host directory in our own mount namespace only because overlayfs wants its layers attached; it goes out
 * of sight with the old root. From here on the working directory is its root. */
long make_scratch(struct launch *l)
{
    const struct nsb_plan *plan = l->plan;
    if (plan->flags & NSB_SCRATCH_DIR) {
        const struct nsb_op op = {.kind = NSB_OP_BIND, .src = plan->scratch_dir};
        l->scratch = open_source(plan, &op, -1);
    } else {
        l->scratch = new_tmpfs(plan->scratch_size, plan->scratch_inodes, 0755);
    }
    if (l->scratch < 0)
        return l->scratch;
    long ret = attach(l->scratch, l->staging, "");
    return ret == 0 ? NSB_CALL(__NR_fchdir, l->scratch) : ret;
}

static void layer_name(char *out, char kind, uint32_t number)
{
    *out++ = kind;
    put_number(out, number);
}

static long play_lower(struct launch *l, int source)
{
    char name[16];
    layer_name(name, 'l', l->layer++);
    long ret = NSB_CALL(__NR_mkdirat, l->scratch, name, 0755);
    return ret == 0 ? attach(source, l->scratch, name) : ret;
}

/* Parents are made as they come: the upper directory is ours alone and still empty. */
static long play_upper(struct launch *l, const struct nsb_op *op)
{
    UNSET char path[PATH_SIZE];
    const char *dst = plan_string(l->plan, op->dst);
    size_t length = str_len(dst);
    memcpy(path, "u0", 3);
    long ret = NSB_CALL(__NR_mkdirat, l->scratch, path, 0755);
    if (length + 3 > sizeof path)
        return -ENAMETOOLONG;
    for (size_t i = 1; i <= length && (ret == 0 || ret == -EEXIST); i++) {
        if (dst[i] && dst[i] != '/')
            continue;
        memcpy(path + 2, dst, i);
        path[2 + i] = 0;
        ret = NSB_CALL(__NR_mkdirat, l->scratch, path, 0755);
    }
    if (ret < 0 && ret != -EEXIST)
        return ret;
    ret = NSB_CALL(__NR_fchmodat, l->scratch, path, op->mode);
    return ret < 0 ? ret : NSB_CALL(__NR_fchownat, l->scratch, path, op->uid, op->gid, 0);
}

/* op->size numbers the overlay; its upper directory lends the merged root its mode and owner. */
static long play_overlay(struct launch *l, const struct nsb_op *op)
{
    char upper[16], work[16];
    const char *dst = plan_string(l->plan, op->dst);
    layer_name(upper, 'u', (uint32_t)op->size);
    layer_name(work, 'w', (uint32_t)op->size);
    const struct option options[] = {{"source", "nsbox"}, {"lowerdir", plan_string(l->plan, op->data)},
                                     {"upperdir", upper}, {"workdir", work}, {"userxattr", 0}};
    long ret = NSB_CALL(__NR_mkdirat, l->scratch, upper, op->mode);
    if (ret == 0 || ret == -EEXIST)
        ret = NSB_CALL(__NR_fchownat, l->scratch, upper, op->uid, op->gid, 0);
    if (ret == 0)
        ret = NSB_CALL(__NR_mkdirat, l->scratch, work, 0700);
    if (ret < 0)
        return ret;
    OWNED_FD tree = new_filesystem("overlay", options, 5, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    if (tree < 0)
        return tree;
    if (*dst)
        return attach_own(l, tree, dst);
    remember_own(l, tree);
    ret = NSB_CALL(__NR_mkdirat, l->scratch, "root", 0755);
    if (ret == 0)
        ret = attach(tree, l->scratch, "root");
    if (ret == 0)
        l->root = (int)NSB_CALL(__NR_openat, l->scratch, "root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return ret == 0 && l->root < 0 ? l->root : ret;
}

static long play_scratch(struct launch *l, const struct nsb_op *op)
{
    char name[16];
    layer_name(name, 'd', (uint32_t)op->size);
    long ret = NSB_CALL(__NR_mkdirat, l->scratch, name, 0755);
    if (ret == 0)
        ret = NSB_CALL(__NR_fchmodat, l->scratch, name, op->mode);
    if (ret == 0)
        ret = NSB_CALL(__NR_fchownat, l->scratch, name, op->uid, op->gid, 0);
    if (ret < 0)
        return ret;
    OWNED_FD tree = (int)NSB_CALL(__NR_open_tree, l->scratch, name, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    return tree < 0 ? tree : attach_own(l, tree, plan_string(l->plan, op->dst));
}

static long play_bind(struct launch *l, const struct nsb_op *op, int source)
{
    int directory = is_directory(source);
    return directory < 0 ? directory : attach_at(l, source, plan_string(l->plan, op->dst), directory);
}

static long play_tmpfs(struct launch *l, const struct nsb_op *op)
{
    OWNED_FD tree = new_tmpfs(op->size, op->inodes, op->mode);
    if (tree < 0)
        return tree;
    long ret = NSB_CALL(__NR_fchownat, tree, "", op->uid, op->gid, AT_EMPTY_PATH);
    return ret < 0 ? ret : attach_own(l, tree, plan_string(l->plan, op->dst));
}

static long read_exactly(int fd, void *to, size_t size)
{
    char *p = to;
    while (size) {
        long n = NSB_CALL(__NR_read, fd, p, size);
        if (n <= 0)
            return n < 0 ? n : -EPIPE;
        p += n;
        size -= (size_t)n;
    }
    return 0;
}

/* One secret from the pipe into a file. Answers 1, or 0 at the end of the pipe. */
static long play_secret(int pipe, int tree, const struct nsb_op *op)
{
    struct nsb_secret head;
    UNSET char name[256], part[4096];
    long ret = NSB_CALL(__NR_read, pipe, &head, sizeof head);
    if (ret == 0)
        return 0;
    if (ret != sizeof head || head.name_size == 0 || head.name_size >= sizeof name)
        return ret < 0 ? ret : -EPROTO;
    ret = read_exactly(pipe, name, head.name_size);
    name[head.name_size] = 0;
    OWNED_FD file = ret < 0 ? -1 : (int)NSB_CALL(__NR_openat, tree, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0);
    if (file < 0)
        return ret < 0 ? ret : file;
    while (ret >= 0 && head.size) {
        size_t n = head.size < sizeof part ? head.size : sizeof part;
        ret = read_exactly(pipe, part, n);
        if (ret >= 0)
            ret = NSB_CALL(__NR_write, file, part, n);
        head.size -= (uint32_t)n;
    }
    memset(part, 0, sizeof part);
    if (ret >= 0)
        ret = NSB_CALL(__NR_fchmod, file, head.mode);
    if (ret >= 0)
        ret = NSB_CALL(__NR_fchownat, file, "", op->uid, op->gid, AT_EMPTY_PATH);
    return ret < 0 ? ret : 1;
}

/* ramfs, since its pages are never swapped, and a user namespace may mount it. It has no size limit, so it is read-only
 * where the payload sees it; a second mount, writable, goes to the host side, which takes secrets away in time. */
static long play_secrets(struct launch *l, const struct nsb_op *op)
{
    const struct option options[] = {{"mode", "0700"}};
    struct mount_attr readonly = {.attr_set = MOUNT_ATTR_RDONLY};
    OWNED_FD pipe = l->secrets;
    l->secrets = -1;
    OWNED_FD tree = new_filesystem("ramfs", options, 1, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    long ret = tree;
    do
        ret = ret < 0 ? ret : play_secret(pipe, tree, op);
    while (ret > 0);
    if (ret == 0)
        ret = NSB_CALL(__NR_fchownat, tree, "", op->uid, op->gid, AT_EMPTY_PATH);
    if (ret == 0)
        ret = attach_own(l, tree, plan_string(l->plan, op->dst));
    if (ret == 0)
        ret = l->secrets = (int)NSB_CALL(__NR_open_tree, tree, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    return ret < 0 ? ret : NSB_CALL(__NR_mount_setattr, tree, "", AT_EMPTY_PATH, &readonly, sizeof readonly);
}

static long play_proc(struct launch *l, const struct nsb_op *op)
{
    l->proc = new_filesystem("proc", 0, 0, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    return l->proc < 0 ? l->proc : attach_at(l, l->proc, plan_string(l->plan, op->dst), 1);
}

/* An entry of the proc that was just mounted, by its name there. NSB_RO: it stays, read-only. Else it reads as empty:
 * a file by /dev/null, a directory by the skeleton's /var/empty. An entry that this kernel does not have is no error. An
 * absolute name is a place in the new root, where a link is never followed: it would leave what it points to uncovered. */
static long play_mask(struct launch *l, const struct nsb_op *op)
{
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY};
    const char *name = plan_string(l->plan, op->dst);
    OWNED_FD tree = op->flags & NSB_RO ? (int)NSB_CALL(__NR_open_tree, l->proc, name, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
                    : op->flags & NSB_DIRECTORY
                        ? (int)NSB_CALL(__NR_open_tree, l->scratch, "l0/var/empty", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
                        : (int)NSB_CALL(__NR_open_tree, l->dev, "null", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0)
        return tree == -ENOENT ? 0 : tree;
    long ret = op->flags & NSB_RO ? NSB_CALL(__NR_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) : 0;
    if (ret < 0)
        return ret;
    if (*name == '/') {
        OWNED_FD target = open_beneath(l->root, name, O_PATH | O_NOFOLLOW, 0, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
        return target < 0 ? target : attach(tree, target, "");
    }
    ret = attach(tree, l->proc, name);
    return ret == -ENOENT ? 0 : ret;
}

static const char *const device_paths[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"};

/* The skeleton has a /dev with the links and an empty file for each node, so that nothing is made here: the directory is
 * attached read-only, and each node is the host's, bound (mknod(2) of a device is refused in a user namespace). */
static long play_dev(struct launch *l, const struct nsb_op *op)
{
    const struct option pts[] = {{"mode", "620"}, {"ptmxmode", "666"}};
    const unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW;
    l->dev = (int)NSB_CALL(__NR_open_tree, l->scratch, "l0/dev", flags);
    long ret = l->dev < 0 ? l->dev : attach_at(l, l->dev, plan_string(l->plan, op->dst), 1);
    for (unsigned i = 0; ret >= 0 && i < sizeof device_paths / sizeof *device_paths; i++) {
        OWNED_FD node = (int)NSB_CALL(__NR_open_tree, AT_FDCWD, device_paths[i], flags);
        ret = node < 0 ? node : attach(node, l->dev, device_paths[i] + sizeof "/dev/" - 1);
    }
    if (ret < 0)
        return ret;
    OWNED_FD terminals = new_filesystem("devpts", pts, 2, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    return terminals < 0 ? terminals : attach(terminals, l->dev, "pts");
}

long play_op(struct launch *l, const struct nsb_op *op, int source)
{
    switch (op->kind) {
    case NSB_OP_LOWER: return play_lower(l, source);
    case NSB_OP_UPPER: return play_upper(l, op);
    case NSB_OP_OVERLAY: return play_overlay(l, op);
    case NSB_OP_BIND: return play_bind(l, op, source);
    case NSB_OP_TMPFS: return play_tmpfs(l, op);
    case NSB_OP_SCRATCH: return play_scratch(l, op);
    case NSB_OP_SECRETS: return play_secrets(l, op);
    case NSB_OP_PROC: return play_proc(l, op);
    case NSB_OP_DEV: return play_dev(l, op);
    case NSB_OP_MASK: return play_mask(l, op);
    default: return -ENOSYS;
    }
}

/* pivot_root(2): with "." for both, the old root is stacked on the new one, where ".." from "/" still leads to it. */
long enter_root(struct launch *l)
{
    long ret = NSB_CALL(__NR_fchdir, l->root);
    return ret == 0 ? NSB_CALL(__NR_pivot_root, ".", ".") : ret;
}

/* Takes it off. umount2(2) waits for a grace period of RCU: no processor may be on a walk through it any more. */
long drop_old_root(void)
{
    long ret = NSB_CALL(__NR_umount2, ".", DETACH);
    return ret == 0 ? NSB_CALL(__NR_chdir, "/") : ret;
}
