"""The compiled seccomp filter of a policy, from a private cache where possible.

Compiling costs tens of milliseconds, most of it importing (dataclasses, tomllib, and pyseccomp, which starts ldconfig
to find its library). So nothing of that is imported here at the top: a hit reads two files.
"""

import binascii
import os
import stat

from nsbox.errors import SpecError
from nsbox.profiles import profiles_dir

_Request = tuple[str, str, tuple[str, ...], tuple[str, ...], bool]
_memory: dict[_Request, bytes] = {}


def cached_filter(
    name: str,
    arch: str | None = None,
    extra_allow: tuple[str, ...] = (),
    extra_deny: tuple[str, ...] = (),
    *,
    set_id: bool = True,
) -> bytes:
    """The program of policy `name`: an array of struct sock_filter for seccomp(2).

    `arch` is this machine's by default. `extra_allow` adds calls that some shipped policy allows, `extra_deny` takes
    calls away (EPERM). Without `set_id` no set-id bit can be made (see setid.py). Raises SpecError for unknown names,
    HostError where the host lacks libseccomp and nothing is cached."""
    arch = arch or os.uname().machine
    request = (name, arch, tuple(sorted(set(extra_allow))), tuple(sorted(set(extra_deny))), set_id)
    if request not in _memory:
        _memory[request] = _from_disk_or_compiled(request)
    return _memory[request]


def _from_disk_or_compiled(request: _Request) -> bytes:
    source = os.path.join(profiles_dir(), "seccomp.toml")
    try:
        with open(source, "rb") as file:
            text = file.read()
    except OSError as error:
        raise SpecError(f"cannot read the system-call policies {source}: {error.strerror}") from error
    # All that the result depends on stands in the file itself and is compared whole. The checksum in its name only
    # keeps different requests apart.
    key = repr((*request, _code_version())).encode() + b"\n" + text + b"\0"
    directory = _open_cache()
    try:
        entry = f"seccomp-{binascii.crc32(key):08x}.bpf"
        program = _read(directory, entry, key)
        if program is None:
            program = _compile(request, text, source)
            _write(directory, entry, key, program)
        return program
    finally:
        if directory is not None:
            os.close(directory)


def _compile(request: _Request, text: bytes, source: str) -> bytes:
    from nsbox.plan.bpf import compile_filter
    from nsbox.plan.policy import customised, parse_policies
    from nsbox.plan.setid import without_set_id

    name, arch, allow, deny, set_id = request
    policy = customised(parse_policies(text, source), name, allow, deny)
    return compile_filter(policy if set_id else without_set_id(policy), arch)


def _code_version() -> tuple[object, ...]:
    """Changes whenever the code that compiles does: another program may come of the same policy then."""
    versions: list[object] = []
    for module in ("bpf.py", "policy.py", "setid.py"):
        try:
            status = os.stat(os.path.join(os.path.dirname(__file__), module))
        except OSError:  # in a zip archive, or without sources
            continue
        versions.append((status.st_size, status.st_mtime_ns))
    return tuple(versions)


def _open_cache() -> int | None:
    """A descriptor of the cache directory, made if missing. None where there is no home that is our own to write to."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    if not os.path.isabs(base):
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    path = os.path.join(base, "nsbox")
    try:
        if (opened := _open_private(path)) is not None:
            return opened
        # Under sudo HOME may be another user's. What root made there the user could no longer write.
        anchor = base if os.path.isdir(base) else os.path.dirname(base)
        if os.path.lexists(path) or os.stat(anchor).st_uid != os.geteuid():
            return None
        os.makedirs(base, mode=0o700, exist_ok=True)
        os.mkdir(path, mode=0o700)
        return _open_private(path)
    except FileExistsError:  # another process was faster
        return _open_private(path)
    except OSError:
        return None


def _open_private(path: str) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if _is_ours(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_ours(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(directory: int | None, entry: str, key: bytes) -> bytes | None:
    """The program cached in `entry`, if it was made for `key`, is whole, and nobody else could have written it."""
    if directory is None:
        return None
    try:
        # O_NONBLOCK: were it a fifo, the open would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(entry, flags, dir_fd=directory), "rb") as file:
            if not _is_ours(file.fileno()) or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read()
    except OSError:
        return None
    program = content[len(key) : -4]
    whole = content.startswith(key) and content[-4:] == _checksum(program) and program and len(program) % 8 == 0
    return program if whole else None


def _write(directory: int | None, entry: str, key: bytes, program: bytes) -> None:
    """Caches `program`; the rename makes it appear whole or not at all. On failure the next process compiles anew."""
    if directory is None:
        return
    temporary = f".{entry}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(key + program + _checksum(program))
        os.rename(temporary, entry, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        try:
            os.unlink(temporary, dir_fd=directory)
        except OSError:
            pass


def _checksum(program: bytes) -> bytes:
    return binascii.crc32(program).to_bytes(4, "little")
