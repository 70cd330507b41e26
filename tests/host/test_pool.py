"""Pools: what is leased was used by nobody, does all that a launch does, and is gone afterwards."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import until

import nsbox
from nsbox import errors
from nsbox.crossing import Crossing

PATIENCE_S = 30.0


pytestmark = pytest.mark.usefixtures("gateway_thread")


def test_does_what_a_launch_does() -> None:
    script = "cat; echo err >&2; echo $A $HOME; pwd; exit 3"
    with nsbox.Pool(size=2, timeout=20) as pool:
        assert pool.wait_full(PATIENCE_S)
        result = pool.run(["sh", "-c", script], stdin="in ", env={"A": "b"}, cwd="/tmp")
        cold = nsbox.run(["sh", "-c", script], stdin="in ", env={"A": "b"}, cwd="/tmp", timeout=20)
        assert (result.stdout, result.stderr, result.exit_code) == (cold.stdout, cold.stderr, 3)
        assert result.enforced == cold.enforced
        assert result.usage.keys() == cold.usage.keys()
        assert {*result.to_dict()} - {*cold.to_dict()} == {"lease"}
        assert pool.run(["readlink", "/proc/self/fd/0"]).stdout == b"/dev/null\n"
        assert pool.run(["true"]).steps == {}


def test_nobody_used_it_before() -> None:
    script = """
        ls -A ~ /tmp | grep -c mark; cat /proc/[0-9]*/comm | grep -c sleep
        echo x > ~/mark; echo x > /tmp/mark; sleep 60 > /dev/null 2>&1 & true
    """
    again = "sh -c 'ls -A ~ /tmp | grep -c mark; cat /proc/[0-9]*/comm | grep -c sleep'"
    seen = []
    with nsbox.Pool(size=4, timeout=20) as pool:
        for _ in range(12):
            result = pool.run(["sh", "-c", script])
            assert result.ok
            assert result.stdout.split() == [b"0", b"0"]
            seen.append(result.lease)
        assert pool.run(["sh", "-c", script + again]).stdout.split() == [b"0", b"0", b"2", b"1"], "the control"
    assert len({lease["init_pid"] for lease in seen}) == 12
    assert all(lease["ready_s"] >= 0 for lease in seen)


def test_those_that_wait_share_nothing() -> None:
    with nsbox.Pool(size=5, timeout=20) as pool:
        assert pool.wait_full(PATIENCE_S)
        waiting = [pool.take() for _ in range(5)]
        try:
            identities = [ahead.identity for ahead in waiting]
            for name in ("init_pid", "root_device", "scratch_device"):
                assert len({identity[name] for identity in identities}) == 5, name
            if os.geteuid() == 0:
                own = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in identities[0]["namespaces"]}
                assert len(own) == 7
                for name, ours in own.items():
                    assert len({ours, *(identity["namespaces"][name] for identity in identities)}) == 6, name
                assert len({identity["cgroup"] for identity in identities}) == 5
        finally:
            for ahead in waiting:
                ahead.close()


def test_limits_hold_and_count_from_the_lease() -> None:
    hog = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    with nsbox.Pool(size=2, timeout=0.5, memory="64M", output="1K") as pool:
        assert pool.wait_full(PATIENCE_S)
        time.sleep(0.6)  # longer than a run may take
        assert pool.run(["true"]).ok
        assert pool.run(["sleep", "60"]).reason == "timeout"
        assert pool.run(["sleep", "60"], timeout=0.1).limits_hit[0]["value"] == 0.1
        assert pool.run(["python3", "-c", hog], timeout=20).reason == "memory"
        cut = pool.run(["sh", "-c", "head -c 5000 /dev/zero"])
        assert (len(cut.stdout), cut.stdout_truncated) == (1024, True)
        assert len(pool.run(["sh", "-c", "head -c 5000 /dev/zero"], max_output="2K").stdout) == 2048


def test_streams_and_terminals() -> None:
    chunks: list[bytes] = []
    data = os.urandom(4 << 20)
    with nsbox.Pool(size=2, timeout=20) as pool:
        assert pool.run(["cat"], stdin=data).stdout == data
        assert pool.run(["echo", "a"], on_stdout=chunks.append).stdout == b""
        assert chunks == [b"a\n"]
        assert pool.run(["stty", "size"], tty=(30, 90)).stdout == b"30 90\r\n"


def test_mistakes_are_named_and_use_nothing_up() -> None:
    with pytest.raises(errors.SpecError, match="size"):
        nsbox.Pool(size=0)
    with pytest.raises(errors.SpecError, match="no_such"):
        nsbox.Pool(no_such=1)
    with nsbox.Pool(size=1) as pool:
        with pytest.raises(errors.CommandError) as caught:
            pool.run(["nowhere"])
        assert caught.value.exit_code == 127
        with pytest.raises(errors.SpecError):
            pool.run([])
        with pytest.raises(errors.SpecError):
            pool.run(["true"], timeout=-1)
        with pytest.raises(errors.SpecError):
            pool.run("text")
        with pytest.raises(errors.SetupError, match="/no/such"):
            pool.run(["true"], cwd="/no/such")
        assert pool.run(["true"]).ok
    with pytest.raises(errors.SandboxUnavailable, match="closed"):
        pool.run(["true"])


def test_one_whose_init_is_gone_is_not_given_out() -> None:
    with nsbox.Pool(size=2, timeout=20) as pool:
        assert pool.wait_full(PATIENCE_S)
        first = pool._stock._ready[0][1]
        first.handle.kill()
        first.handle.wait_until_gone()
        assert pool.run(["true"]).ok
        assert pool.counts().discarded == 1


def test_the_helper_is_killed_and_all_that_waited_with_it() -> None:
    """In a process of its own: whose helper it is."""
    code = """
        import os, signal, time, nsbox
        from nsbox import _native
        with nsbox.Pool(size=2, timeout=20) as pool:
            assert pool.wait_full(20)
            waiting = [ahead for _, ahead in pool._stock._ready]
            os.kill(_native.zygote().pid, signal.SIGKILL)
            while any(ahead.healthy() for ahead in waiting):
                time.sleep(0.01)
            print(pool.run(["echo", "a"]).stdout, pool.counts().discarded)
    """
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (shown.stdout, shown.stderr) == ("b'a\\n' 2\n", "")


def test_threads_at_once() -> None:
    trouble: list[object] = []
    with nsbox.Pool(size=3, timeout=30) as pool:

        def work(number: int) -> None:
            for round_ in range(5):
                result = pool.run(["sh", "-c", "cat; echo $N"], stdin=f"{number} ", env={"N": str(round_)})
                if result.stdout != f"{number} {round_}\n".encode():
                    trouble.append(result)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.counts().taken == 60
    assert trouble == []


def test_closed_while_one_runs() -> None:
    pool, results = nsbox.Pool(size=2, timeout=20), list[Any]()
    thread = threading.Thread(target=lambda: results.append(pool.run(["sh", "-c", "sleep 0.5; echo done"])))
    thread.start()
    assert until(lambda: pool.counts().taken == 1, PATIENCE_S)
    pool.close()
    thread.join()
    assert results[0].stdout == b"done\n"


def test_interrupted_run_leaves_nothing() -> None:
    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    with nsbox.Pool(size=1, timeout=20) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(["sh", "-c", "echo a; sleep 60"], on_stdout=interrupt)
        assert pool.run(["true"]).ok


def test_every_lease_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with nsbox.Pool(size=3, timeout=20, log=log) as pool:
        assert pool.wait_full(PATIENCE_S)
        for number in range(4):
            pool.run(["echo", str(number)])
        with pytest.raises(errors.CommandError):
            pool.run(["nowhere"])
    events = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [event for event in events if event["event"] == "sandbox.start"]
    ends = [event for event in events if event["event"] == "sandbox.end"]
    assert [event["argv"] for event in starts] == [*(["echo", str(number)] for number in range(4)), ["nowhere"]]
    assert len({event["sandbox"] for event in starts}) == len(ends) == 5
    assert [event["reason"] for event in ends] == ["exited"] * 4 + ["error"]


def test_a_log_that_cannot_be_written_lets_nothing_run() -> None:
    def refuse(_: object) -> None:
        raise OSError("full")

    with nsbox.Pool(size=1, timeout=20, log=refuse) as pool, pytest.raises(errors.NsboxError, match="full"):
        pool.run(["true"])


def test_workspace_is_as_it_is_at_the_lease(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    os.chmod(tmp_path, 0o755)
    (work / "a").write_text("old")
    with nsbox.Pool(size=2, timeout=20, workspace=str(work), apply=True) as pool:
        assert pool.wait_full(PATIENCE_S)
        (work / "a").write_text("new")
        result = pool.run(["sh", "-c", "cat a; echo made > b"])
        assert result.stdout == b"new"
        assert [entry["path"] for entry in result.boundary["outputs"]] == ["b"]
        assert (work / "b").read_text() == "made\n"
        assert pool.run(["cat", "b"]).stdout == b"made\n"


def test_secrets_are_there_and_masked() -> None:
    secret = nsbox.Secret("token", value="hunter2-hunter2")
    with nsbox.Pool(size=2, timeout=20, secrets=[secret]) as pool:
        result = pool.run(["cat", "/run/secrets/token"])
        assert b"hunter2" not in result.stdout
        assert result.stdout
        assert result.boundary["secrets"][0]["name"] == "token"


def test_published_ports() -> None:
    import urllib.request

    body: list[bytes] = []
    server = "import http.server as h; h.HTTPServer(('127.0.0.1', 8000), h.SimpleHTTPRequestHandler).serve_forever()"

    def fetch(path: str) -> None:
        for _ in range(200):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                    body.append(answer.read())
                    return
            except OSError:
                time.sleep(0.05)

    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    thread = threading.Thread(target=fetch, args=("/",))
    thread.start()
    with nsbox.Pool(size=1) as pool:
        pool.run(["python3", "-c", server], publish=[f"{port}:8000"], timeout=5)
    thread.join()
    assert body
    assert b"Directory listing" in body[0]


@pytest.mark.parametrize("boxes", [True, False])
def test_a_box_from_a_pool(boxes: bool) -> None:
    with nsbox.Pool(size=2, timeout=20, boxes=boxes) as pool:
        with nsbox.Sandbox.from_pool(pool) as box:
            box.write_file("a", "text")
            assert box.run(["cat", "a"]).stdout == b"text"
            snapshot = box.snapshot()
            box.write_file("a", "other")
            box.restore(snapshot)
            assert box.read_file("a") == b"text"
            assert box.run("exit 3", memory="32M").exit_code == 3
        with nsbox.Sandbox.from_pool(pool) as box:
            assert not box.files.exists("a")


def test_filtered_egress_is_the_leases_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    with nsbox.Pool(size=2, timeout=20, net="filtered", allow=["example.org"], log=log) as pool:
        assert pool.wait_full(PATIENCE_S)
        result = pool.run(["python3", "-c", code])
        assert result.exit_code == 1
        assert b"ConnectionRefusedError" in result.stderr
        refused = [(d["address"], d["verdict"]) for d in result.boundary["destinations"]]
        assert refused == [("192.0.2.1", "denied")]
        assert pool.run(["true"]).boundary["destinations"] == []


def test_asyncio_goes_on_while_outputs_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, log = tmp_path / "work", tmp_path / "log"
    work.mkdir()
    at_work, go_on = threading.Event(), threading.Event()
    outputs = Crossing.outputs

    def held(self: Crossing, handle: Any) -> Any:
        at_work.set()
        assert go_on.wait(20), "the loop stands still"
        return outputs(self, handle)

    monkeypatch.setattr(Crossing, "outputs", held)

    async def story() -> None:
        async with nsbox.AsyncPool(size=1, timeout=20, workspace=str(work), apply=True, log=str(log)) as pool:
            task = asyncio.create_task(pool.run(["touch", "made"]))
            await asyncio.to_thread(at_work.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(story(), 120))
    assert (work / "made").exists()
    assert log.read_text().count('"sandbox.end"') == 1


def test_asyncio() -> None:
    async def story() -> None:
        async with nsbox.AsyncPool(size=3, timeout=20) as pool:
            texts = [str(number) for number in range(20)]
            results = await asyncio.gather(*(pool.run(["cat"], stdin=text) for text in texts))
            assert [result.stdout_text for result in results] == texts
            assert all(result.lease for result in results)
            task = asyncio.create_task(pool.run(["sleep", "60"]))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(errors.CommandError):
                await pool.run(["nowhere"])
            assert (await pool.run(["sleep", "60"], timeout=0.1)).reason == "timeout"
            assert pool.counts().taken == 23
        with pytest.raises(errors.SandboxUnavailable):
            await pool.run(["true"])

    asyncio.run(asyncio.wait_for(story(), 120))


def test_one_run_cannot_choose_what_the_next_sees(tmp_path: Path) -> None:
    for name in ("work/data", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent, *tmp_path.rglob("*")):
        folder.chmod(0o777 if folder.is_dir() and folder.is_relative_to(tmp_path) else 0o755)
    work, other = tmp_path / "work", tmp_path / "other"
    (tmp_path / "mine").symlink_to(work / "data")  # a link where nobody inside can write is the caller's
    options = {"rw": [str(work)], "ro": [f"{tmp_path}/mine/file:/seen"]}
    with nsbox.Pool(size=1, **options) as pool:
        assert pool.run(["cat", "/seen"]).stdout == b"work/data"
    assert nsbox.run(["sh", "-c", f"mv {work}/data {work}/old && ln -s {other} {work}/data"], **options).ok
    assert (work / "data/file").read_text() == "other"  # the positive control: who follows it gets there
    with pytest.raises(errors.SpecError, match=f"leads through the link '{work}/data'"):
        nsbox.run(["cat", "/seen"], **options)
    with pytest.raises(errors.SpecError, match="leads through the link"):
        nsbox.Pool(size=1, **options)
