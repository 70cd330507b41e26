"""A throw-away virtual machine: a Debian kernel under QEMU, this machine's own root file system below an overlay.

Nothing is installed and no disk image is made. The kernel comes from a Debian package by name, from the mirror that apt
is configured for. The guest's root is this machine's, read-only over 9p, below an overlay in the guest's memory: every
program and path is there, and every write is gone when the machine stops. See README.md.
"""

import argparse
import contextlib
import lzma
import os
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITES = {"6.1": "bookworm", "6.12": "trixie"}  #: kernel series → the Debian release that has it
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "zstd": "zstd",
    "lz4": "lz4",
}
#: what is needed until the root is mounted; the rest is loaded on demand, by this machine's own modprobe
BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_blk")
CGROUPS = ("v2", "hybrid", "v1")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


class Unavailable(Exception):
    """No virtual machine can be had here, or not with this kernel; the text says why and what to do."""


def cache() -> Path:
    """Where kernels are kept between runs. Several hundred MB each; may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsbox" / "vm"


def check_programs() -> None:
    """Raises Unavailable for what must be installed first."""
    if os.uname().machine != "x86_64":
        raise Unavailable(f"the kernels are for x86_64, this is {os.uname().machine}")
    missing = [package for name, package in PROGRAMS.items() if not shutil.which(name, path=_PATH)]
    busybox = shutil.which("busybox", path=_PATH)
    if busybox and b"/ld-linux" in Path(busybox).read_bytes():
        missing.append("busybox-static")  # it runs where there is no libc yet
    if missing:
        raise Unavailable(
            f"missing packages; run: sudo apt-get install --no-install-recommends {' '.join(sorted(missing))}"
        )


def _run(command: Sequence[str], **options: object) -> str:
    env = {**os.environ, "LC_ALL": "C", "PATH": _PATH}
    done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Unavailable(f"{shlex.join(command[:1])} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return str(done.stdout)


# The kernel ---------------------------------------------------------------------------------------------------------


def _mirror() -> str:
    """The address of the Debian mirror that this machine's apt uses."""
    if not shutil.which("apt-get", path=_PATH):
        raise Unavailable("there is no apt here to fetch Debian kernels with")
    wanted = "$(ORIGIN) $(LABEL) $(COMPONENT) $(REPO_URI)"
    for line in _run(["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"]).splitlines():
        if line.startswith("Debian Debian main "):
            return line.split()[3]
    raise Unavailable("apt is configured for no Debian mirror here (or `apt-get update` has never run)")


class Apt:
    """apt for another release of the same mirror, with lists and downloads of its own."""

    def __init__(self, suite: str) -> None:
        self.suite = suite
        base = cache() / f"apt-{suite}"
        for name in ("lists/partial", "cache/archives/partial"):
            (base / name).mkdir(parents=True, exist_ok=True)
        signed = f"[signed-by={_KEYRING}] " if os.path.exists(_KEYRING) else ""
        (base / "sources.list").write_text(f"deb {signed}{_mirror()} {suite} main\n")
        settings = {
            "Dir::Etc::sourcelist": base / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": base / "lists",
            "Dir::Cache": base / "cache",
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
        }
        self._options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def __call__(self, program: str, *words: str, cwd: Path | None = None) -> str:
        return _run([program, *self._options, *words], cwd=cwd)

    def update(self) -> None:
        try:
            # Without the option an unreachable mirror is a warning.
            self("apt-get", "-qq", "-o", "APT::Update::Error-Mode=any", "update")
        except Unavailable as error:
            raise Unavailable(f"Debian {self.suite} is not to be had from this machine's mirror: {error}") from None

    def depends(self, package: str, pattern: str) -> list[str]:
        lines = self("apt-cache", "depends", package).splitlines()
        return [found[1] for line in lines if (found := re.search(rf"Depends: ({pattern})$", line.strip()))]


class Kernel:
    """An unpacked kernel package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.release = (folder / "release").read_text().strip()

    @property
    def image(self) -> Path:
        return self.folder / "vmlinux"

    @property
    def modules(self) -> Path:
        return self.folder / "lib" / "modules" / self.release


def kernel(series: str, *, fresh: bool = False) -> Kernel:
    """The newest kernel of a series (``6.1``, ``6.12``), fetched unless it is in the cache. Raises Unavailable."""
    check_programs()
    if series not in SUITES:
        raise Unavailable(f"unknown kernel {series!r}; known are {', '.join(SUITES)}")
    link = cache() / series
    if link.exists() and not fresh:
        return Kernel(link)
    apt = Apt(SUITES[series])
    apt.update()
    images = apt.depends("linux-image-amd64", r"linux-image-[0-9]\S*")
    if not images or not images[0].startswith(f"linux-image-{series}."):
        raise Unavailable(f"Debian {apt.suite} has no kernel {series}: {', '.join(images) or 'none'}")
    folder = cache() / images[0]
    if not (folder / "release").exists():
        _unpack(apt, images[0], folder)
    temporary = link.with_name(f"{series}.{os.getpid()}")
    temporary.symlink_to(folder.name)
    temporary.replace(link)
    return Kernel(link)


def _unpack(apt: Apt, image: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache(), prefix="unpack-") as name:
        work = Path(name)
        # Newer releases keep the image and the modules in packages that linux-image-… depends on.
        packages = [image, *apt.depends(image, r"linux-(?:binary|modules)-[0-9]\S*")]
        apt("apt-get", "-qq", "download", *packages, cwd=work)
        for package in list(work.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(work / "tree")])
            package.unlink()
        tree = work / "tree"
        if not (tree / "lib").exists():
            (tree / "lib").symlink_to("usr/lib")
        modules = next((tree / "lib" / "modules").iterdir())
        _run(["depmod", "-b", str(tree), modules.name])
        compressed = next(path for path in [*(tree / "boot").glob("vmlinuz-*"), modules / "vmlinuz"] if path.exists())
        (tree / "vmlinux").write_bytes(elf_of(compressed.read_bytes()))
        (tree / "release").write_text(modules.name + "\n")
        work.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        tree.rename(folder)


def elf_of(image: bytes) -> bytes:
    """The kernel inside a bzImage. It boots by its PVH entry, which saves decompression under emulation.

    The header is documented in the kernel's Documentation/arch/x86/boot.rst.
    """
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zX"):
        return lzma.LZMADecompressor().decompress(payload)
    for magic, command in ((b"\x28\xb5\x2f\xfd", ["zstd", "-qdc"]), (b"\x02\x21\x4c\x18", ["lz4", "-qdc"])):
        if payload.startswith(magic):
            # Its last four bytes are the size of the result, not part of the compressed stream.
            done = subprocess.run(command, input=payload[:-4], stdout=subprocess.PIPE, check=True)
            return done.stdout
    raise Unavailable("the kernel image is compressed in a way that is not known here")


# The initial file system --------------------------------------------------------------------------------------------


def _module_files(kernel: Kernel) -> Iterable[bytes]:
    """The boot modules and what they need, in the order in which insmod takes them, without what is built in."""
    needs = {}
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[re.sub(r"\.ko.*", "", os.path.basename(path)).replace("-", "_")] = [*reversed(others.split()), path]
    ordered = dict.fromkeys(path for name in BOOT_MODULES for path in needs.get(name, []))
    for path in ordered:
        data = (kernel.modules / path).read_bytes()
        if path.endswith(".xz"):
            data = lzma.decompress(data)
        elif path.endswith(".zst"):
            data = subprocess.run(["zstd", "-qdc"], input=data, stdout=subprocess.PIPE, check=True).stdout
        yield data


def cpio(entries: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive in the "newc" format that the kernel unpacks (Documentation/driver-api/early-userspace)."""
    out = bytearray()
    for number, (name, (mode, data)) in enumerate([*entries.items(), ("TRAILER!!!", (0, b""))], 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do insmod $module || echo "insmod $module failed"; done
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,cache=loose,$options host /lower || echo "the host's root cannot be mounted"
mount -t tmpfs -o size=70%,mode=755 tmpfs /upper
mkdir /upper/u /upper/w
mount -t overlay -o lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w overlay /root
mount -t tmpfs -o mode=755 tmpfs /root/run
mkdir /root/run/vm
mount -t 9p -o $options exchange /root/run/vm
mount --move /dev /root/dev
mount --move /proc /root/proc
mount --move /sys /root/sys
exec switch_root /root /bin/sh /run/vm/guest.sh
"""


def initrd(kernel: Kernel) -> bytes:
    """What runs until this machine's root file system is the guest's."""
    busybox = shutil.which("busybox", path=_PATH) or ""
    folder, program = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755
    folders = ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")
    entries = dict.fromkeys(folders, (folder, b""))
    entries |= {"bin/busybox": (program, Path(busybox).read_bytes()), "init": (program, _INIT.encode())}
    for number, data in enumerate(_module_files(kernel)):
        entries[f"modules/{number:03}"] = (program, data)
    return cpio(entries)


# The machine --------------------------------------------------------------------------------------------------------


def _arguments(kernel: Kernel, exchange: Path, memory: int, append: str) -> list[str]:
    share = "local,path={},security_model=none,multidevs=remap,id={}"
    devices = {
        "fsdev": [share.format("/", "host") + ",readonly=on", share.format(exchange, "exchange")],
        "device": [f"virtio-9p-pci,fsdev={name},mount_tag={name}" for name in ("host", "exchange")],
        "drive": [f"file={exchange}/disk,format=raw,if=virtio,cache=unsafe"],
        "serial": [f"file:{exchange}/console", "chardev:output"],
        "chardev": ["stdio,id=output,signal=off"],
    }
    accelerator = os.environ.get("NSBOX_VM_ACCEL", "tcg,thread=multi")
    line = "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off random.trust_cpu=1 no_timer_check " + append
    return [
        *("qemu-system-x86_64", "-machine", "q35", "-cpu", "max", "-accel", accelerator, "-smp", "2"),
        *("-m", str(memory), "-nodefaults", "-display", "none", "-no-reboot"),
        *("-kernel", str(kernel.image), "-initrd", f"{exchange}/initrd", "-append", line),
        *(word for name, values in devices.items() for value in values for word in (f"-{name}", value)),
    ]


def boot(
    kernel: Kernel,
    command: Sequence[str],
    *,
    cgroup: str = "v2",
    memory: int = 3072,
    timeout: float = 1800,
    results: Path | None = None,
    output: int | None = None,
) -> int:
    """Run ``command`` as root in a machine and answer its exit status.

    ``cgroup`` is one of ``CGROUPS``. What the command puts into /run/vm/results is copied to ``results``. Its output
    goes to the descriptor ``output``, or to this process's own. Raises Unavailable when the machine does not come up,
    TimeoutError when it does not end within ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="nsbox-vm-") as name:
        exchange = Path(name)
        (exchange / "results").mkdir()
        (exchange / "initrd").write_bytes(initrd(kernel))
        (exchange / "guest.sh").write_bytes((HERE / "guest.sh").read_bytes())
        with open(exchange / "disk", "wb") as disk:
            disk.truncate(1 << 30)
        settings = {"vm_directory": os.getcwd(), "vm_modules": str(kernel.modules.resolve()), "vm_cgroup": cgroup}
        lines = [f"{key}={shlex.quote(value)}" for key, value in {**settings, "PATH": _PATH}.items()]
        (exchange / "settings").write_text("\n".join(lines) + "\n")
        (exchange / "command").write_text(shlex.join(command) + "\n")
        append = "cgroup_no_v1=all" if cgroup == "v2" else ""
        arguments = _arguments(kernel, exchange, memory, append)
        machine = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output)
        try:
            machine.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the machine did not end within {timeout:.0f} s; {_tail(exchange)}") from None
        finally:
            machine.kill()
            machine.wait()
            if results is not None:
                shutil.copytree(exchange / "results", results, dirs_exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            return int((exchange / "status").read_text())
        raise Unavailable(f"the machine stopped without a result (QEMU: {machine.returncode}); {_tail(exchange)}")


def _tail(exchange: Path) -> str:
    with contextlib.suppress(OSError):
        return "its console ends: " + (exchange / "console").read_text(errors="replace")[-1500:]
    return "its console is empty"


def main() -> int:
    """The command line; see README.md."""
    parser = argparse.ArgumentParser(prog="run-in-vm", description="Run a command in a throw-away virtual machine.")
    parser.add_argument("-k", "--kernel", default="6.1", help=f"one of {', '.join(SUITES)} (default: %(default)s)")
    parser.add_argument("-c", "--cgroup", default="v2", choices=CGROUPS, help="cgroup hierarchies (default: v2)")
    parser.add_argument("-m", "--memory", default=3072, type=int, metavar="MB")
    parser.add_argument("-t", "--timeout", default=1800, type=float, metavar="SECONDS")
    parser.add_argument("--fresh", action="store_true", help="look for a newer kernel of the series first")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    given = parser.parse_args()
    try:
        chosen = kernel(given.kernel, fresh=given.fresh)
        return boot(chosen, given.command, cgroup=given.cgroup, memory=given.memory, timeout=given.timeout)
    except (Unavailable, TimeoutError) as error:
        print(f"run-in-vm: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
