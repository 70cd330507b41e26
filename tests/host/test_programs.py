"""Real programs under the default profile: a sandbox that breaks them is switched off by its users."""

import base64
import hashlib
import json
import os
import subprocess
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

import nsbox


def good(result: nsbox.Result) -> str:
    """What a run that must succeed has printed."""
    assert result.ok, f"{result!r}\n{result.stdout_text[-2000:]}\n{result.stderr_text[-2000:]}"
    return result.stdout_text


def python(code: str, **options: Any) -> str:
    """Run ``code`` in the system's interpreter inside, and give its output."""
    return good(nsbox.run(["python3", "-c", textwrap.dedent(code)], **options))


def needs(program: str) -> str:
    """Where ``program`` is beneath /usr, which is what a sandbox sees of the host; skip where it is not."""
    for folder in ("/usr/local/bin", "/usr/bin", "/usr/sbin"):
        if os.access(f"{folder}/{program}", os.X_OK):
            return f"{folder}/{program}"
    pytest.skip(f"{program} is not installed beneath /usr on this host")


def test_python() -> None:
    assert python("import ssl, ctypes, json, decimal; print(6 * 7)") == "42\n"


def test_shell_pipes_and_jobs() -> None:
    script = "seq 100 | sort -r | head -n 1; (sleep 0.05; echo late) & wait; echo $((1 + 1)) >/tmp/n; cat /tmp/n"
    assert good(nsbox.run(["sh", "-c", script])) == "99\nlate\n2\n"


def test_here_documents_and_substitution() -> None:
    assert good(nsbox.run(["sh", "-c", "cat <<X\n$(printf hello)\nX"])) == "hello\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with one commit."""
    needs("git")
    at = tmp_path / "repository"
    at.mkdir()
    (at / "file").write_text("content\n")
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", **identity}
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=at, env=env, check=True)
    return at


def test_git_clone_of_a_read_only_mount(repository: Path) -> None:
    # git refuses a repository of another owner unless told.
    script = (
        "git config --global --add safe.directory '*'; "
        "git clone -q file:///src copy && cat copy/file && git -C copy log --format=%s"
    )
    assert good(nsbox.run(["sh", "-c", script], ro=[(str(repository), "/src")])) == "content\nfirst\n"


def test_git_clone_of_a_read_only_mount_without_being_told(repository: Path) -> None:
    assert (
        good(nsbox.run(["sh", "-c", "git clone -q /src copy && cat copy/file"], ro=[(str(repository), "/src")]))
        == "content\n"
    )


def test_git_in_a_workspace(repository: Path) -> None:
    script = """
        git clone -q . /tmp/copy && cat /tmp/copy/file
        echo more >>file && git -c user.name=a -c user.email=a@b commit -qam second && git log --format=%s
    """
    assert good(nsbox.run(["sh", "-ec", script], workspace=str(repository))) == "content\nsecond\nfirst\n"
    assert (repository / "file").read_text() == "content\n"


def test_gcc_compiles_and_the_program_runs() -> None:
    needs("gcc")
    source = '#include <stdio.h>\n#include <math.h>\nint main(void) { printf("%.0f\\n", sqrt(1764)); }\n'
    script = "cat >x.c && gcc -O2 -o x x.c -lm && ./x"
    assert good(nsbox.run(["sh", "-c", script], stdin=source)) == "42\n"


def test_make_and_static_library(tmp_path: Path) -> None:
    needs("make"), needs("gcc")
    (tmp_path / "Makefile").write_text(
        "all: p\n\t./p\np: p.c liba.a\n\tgcc -o p p.c -L. -la\nliba.a: a.o\n\tar rcs $@ $^\n"
    )
    (tmp_path / "a.c").write_text("int a(void) { return 7; }\n")
    (tmp_path / "p.c").write_text('#include <stdio.h>\nint a(void);\nint main(void) { printf("%d\\n", a()); }\n')
    assert good(nsbox.run(["make", "-s"], workspace=str(tmp_path))) == "7\n"
    assert sorted(os.listdir(tmp_path)) == ["Makefile", "a.c", "p.c"]


def make_wheel(folder: Path) -> Path:
    """A wheel by hand, as the binary distribution format describes it."""
    info = "hello_box-1.0.dist-info"
    files = {
        "hello_box.py": "def main():\n    print('hello from a wheel')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: hello-box\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nhello-box = hello_box:main\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = folder / "hello_box-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def test_pip_installs_a_local_wheel_into_the_workspace(tmp_path: Path) -> None:
    if not nsbox.run(["python3", "-m", "pip", "--version"]).ok:
        pytest.skip("the system's python3 has no pip (Debian package python3-pip)")
    wheel = make_wheel(tmp_path)
    script = f"python3 -m pip install -q --no-index --target lib {wheel.name} && PYTHONPATH=lib lib/bin/hello-box"
    assert good(nsbox.run(["sh", "-c", script], workspace=str(tmp_path))) == "hello from a wheel\n"
    assert os.listdir(tmp_path) == [wheel.name]


def test_venv(tmp_path: Path) -> None:
    if not nsbox.run(["python3", "-c", "import venv, ensurepip"]).ok:
        pytest.skip("the system's python3 cannot make virtual environments (Debian package python3-venv)")
    script = "python3 -m venv --without-pip v && v/bin/python -c 'import sys; print(sys.prefix)'"
    assert good(nsbox.run(["sh", "-c", script], workspace=str(tmp_path))) == "/work/v\n"


def test_node() -> None:
    needs("node")
    script = """
        const fs = require("fs"), http = require("http");
        const server = http.createServer((q, a) => a.end("served")).listen(0, "127.0.0.1", () =>
            http.get({port: server.address().port, host: "127.0.0.1"}, a => a.on("data", d => {
                console.log(String(d), fs.readFileSync("/etc/hostname", "utf8").trim()); server.close(); })));
    """
    assert good(nsbox.run(["node", "-e", script])) == "served nsbox\n"


def test_java() -> None:
    needs("java")
    assert "version" in nsbox.run(["java", "-version"]).check().stderr_text


def test_java_compiles_and_runs() -> None:
    needs("javac")
    source = 'class Main { public static void main(String[] a) { System.out.println("jvm " + 42); } }'
    assert good(nsbox.run(["sh", "-c", "cat >Main.java && javac Main.java && java Main"], stdin=source)) == "jvm 42\n"


def test_perl() -> None:
    needs("perl")
    assert good(nsbox.run(["perl", "-e", "print join ',', map { $_ * 2 } 1..3"])) == "2,4,6"


def test_multiprocessing_pool() -> None:
    assert python("import multiprocessing as m; print(m.Pool(2).map(abs, [-1, -2]))") == "[1, 2]\n"


def test_multiprocessing_spawn_and_shared_memory() -> None:
    code = """
        import multiprocessing as m
        from multiprocessing.shared_memory import SharedMemory
        def work(name):
            memory = SharedMemory(name); memory.buf[0] = 9; memory.close()
        if __name__ == "__main__":
            memory = SharedMemory(create=True, size=4096)
            child = m.get_context("spawn").Process(target=work, args=(memory.name,)); child.start(); child.join()
            print(child.exitcode, memory.buf[0]); memory.close(); memory.unlink()
    """
    script = "cat >job.py && python3 job.py"
    assert good(nsbox.run(["sh", "-c", script], stdin=textwrap.dedent(code))) == "0 9\n"


def test_64_threads() -> None:
    code = """
        import threading
        together = threading.Barrier(64)
        seen = []
        def work(number):
            together.wait(20); seen.append(number)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(64)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(sum(seen), len(seen))
    """
    assert python(code) == "2016 64\n"


def test_numpy() -> None:
    if not nsbox.run(["python3", "-c", "import numpy"]).ok:
        pytest.skip("the system's python3 has no numpy (Debian package python3-numpy)")
    assert python("import numpy; a = numpy.ones((200, 200)); print((a @ a).sum())") == "8000000.0\n"


def test_pty_from_script() -> None:
    needs("script")
    assert good(nsbox.run(["script", "-qec", "tty; stty size >/dev/null && echo sized", "/dev/null"])).split() == [
        "/dev/pts/0",
        "sized",
    ]


def test_pty_from_openpty() -> None:
    code = """
        import os, pty
        master, slave = os.openpty()
        print(os.ttyname(slave))
        os.write(slave, b"through"); print(os.read(master, 100).decode())
        pid, master = pty.fork()
        if pid == 0:
            os.execvp("sh", ["sh", "-c", "test -t 0 && echo is a terminal >/dev/tty"])
        print(os.read(master, 100).decode().strip(), os.waitpid(pid, 0)[1])
    """
    assert python(code).splitlines() == ["/dev/pts/0", "through", "is a terminal 0"]


SERVER = """
import http.server, sys, threading, urllib.request, socket
address = sys.argv[1]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
class Server(http.server.ThreadingHTTPServer):
    address_family = family
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"x" * 100000)
    def log_message(self, *arguments): pass
server = Server((address, 8000), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
host = f"[{address}]" if ":" in address else address
print(len(urllib.request.urlopen(f"http://{host}:8000/", timeout=5).read()))
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_http_server_and_client(address: str) -> None:
    if address == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this host has no IPv6")
    assert good(nsbox.run(["python3", "-c", SERVER, address])) == "100000\n"


def test_unix_and_udp_sockets() -> None:
    code = """
        import socket, os
        kinds = [(socket.AF_UNIX, socket.SOCK_STREAM, name) for name in ("/tmp/s", "\\0abstract")]
        for family, kind, name in [*kinds, (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 5353))]:
            server = socket.socket(family, kind); server.bind(name)
            client = socket.socket(family, kind)
            if kind == socket.SOCK_STREAM:
                server.listen(); client.connect(name); peer = server.accept()[0]
                client.sendall(b"ping"); print(peer.recv(10))
            else:
                client.sendto(b"ping", name); print(server.recv(10))
    """
    assert python(code) == "b'ping'\n" * 3


def test_asyncio_subprocess_and_server() -> None:
    code = """
        import asyncio
        async def main():
            async def serve(reader, writer):
                writer.write(await reader.readline()); await writer.drain(); writer.close()
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"echo\\n"); print((await reader.readline()).decode().strip())
            child = await asyncio.create_subprocess_exec("echo", "child", stdout=-1)
            print((await child.communicate())[0].decode().strip())
        asyncio.run(main())
    """
    assert python(code) == "echo\nchild\n"


def test_tar_and_compressors() -> None:
    script = """
        mkdir -p a/b && echo deep >a/b/c && ln -s b a/link && ln a/b/c a/hard && chmod 600 a/b/c
        tar czf a.tar.gz a && rm -r a && tar xpf a.tar.gz && cat a/link/c && stat -c '%a %h' a/b/c
    """
    assert good(nsbox.run(["sh", "-ec", script])) == "deep\n600 2\n"


def test_sqlite() -> None:
    code = """
        import sqlite3
        base = sqlite3.connect("x.db"); base.execute("pragma journal_mode=wal")
        with base:
            base.execute("create table t (a)")
            base.executemany("insert into t values (?)", [(n,) for n in range(1000)])
        print(base.execute("select sum(a) from t").fetchone()[0])
    """
    assert python(code) == "499500\n"


def test_names_home_and_groups() -> None:
    code = """
        import os, pwd, grp
        home = os.path.expanduser("~")
        names = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
        print(*names, home, os.access(home, os.W_OK), os.getcwd())
    """
    assert python(code) == "user user /home/user True /home/user\n"


def test_root_inside() -> None:
    script = "id -u; id -g; echo ~; whoami; touch /etc/mine && mkdir /new && echo ok"
    assert good(nsbox.run(["sh", "-c", script], uid=0)) == "0\n0\n/root\nroot\nok\n"


def test_locale_time_and_certificates() -> None:
    code = """
        import locale, time, ssl, os
        locale.setlocale(locale.LC_ALL, ""); print(locale.getpreferredencoding(), "é".encode("utf-8") == "é".encode())
        print(time.localtime().tm_year >= 2024, os.path.exists("/etc/ssl/certs"))
    """
    expected = f"UTF-8 True\nTrue {os.path.exists('/etc/ssl/certs')}\n"
    assert python(code) == expected


@pytest.mark.parametrize("program", ["strace", "gdb"])
def test_tracing_is_for_permissive_only(program: str) -> None:
    needs(program)
    words = {
        "strace": ["strace", "-o", "/tmp/trace", "true"],
        "gdb": ["gdb", "-q", "-batch", "-ex", "run", "/bin/true"],
    }[program]
    assert good(nsbox.run(words, seccomp="permissive")) is not None
    if program == "strace":
        assert not nsbox.run(words).ok


def test_large_argv_and_environment() -> None:
    argv = ["sh", "-c", "echo $# ${#1} ${#BIG}", "sh", *("x" * 131071 for _ in range(4))]
    assert good(nsbox.run(argv, env={"BIG": "y" * 100000})) == "4 131071 100000\n"


def test_arguments_reach_the_program_byte_for_byte() -> None:
    words: list[str | bytes] = ["", " ", "\n", "a\tb", "'\"\\$`", "é", b"\xff\xfe", "--", "-n", "*"]
    result = nsbox.run(
        [
            "python3",
            "-c",
            "import sys, os, json; print(json.dumps([list(os.fsencode(a)) for a in sys.argv[1:]]))",
            *words,
        ]
    )
    assert json.loads(good(result)) == [list(os.fsencode(word)) for word in words]


def test_every_processor_of_the_host_can_be_counted() -> None:
    assert int(good(nsbox.run(["nproc"], cpus="unlimited"))) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("tool", ["curl", "wget", "ssh", "openssl", "rsync", "go", "rustc", "ruby", "php"])
def test_other_tools_start(tool: str) -> None:
    needs(tool)
    flags = {"ssh": ["-V"], "openssl": ["version"], "go": ["version"]}.get(tool, ["--version"])
    good(nsbox.run([tool, *flags]))
