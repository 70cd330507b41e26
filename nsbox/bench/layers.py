"""What each layer costs on this host: one layer added at a time, from a bare process to a sandbox with egress.

The lower rows are the kernel's own price: one clone(2) with the namespaces so far and one execve(2), in C
(native/floor.c). The upper rows are real sandboxes whose plan was cut down: what a row leaves out, no launch does.
"""

import os
from collections.abc import Callable
from typing import Any

from nsbox._native import lib
from nsbox.bench import netns, svg
from nsbox.bench.frame import Benchmark, Found, Setting, table
from nsbox.bench.measure import TRUE, Samples, difference_interval, measure, median, percentile, spawn

BASELINE = "posix_spawn"
#: name, flag of clone(2); in the order in which they are added
NAMESPACES = (
    ("user", 0x10000000),
    ("pid", 0x20000000),
    ("ipc", 0x08000000),
    ("uts", 0x04000000),
    ("cgroup", 0x02000000),
    ("mount", 0x00020000),
    ("net", 0x40000000),
)
_TRUE = TRUE.encode()
#: one instruction: every call is allowed (seccomp(2)); a launch always loads a filter
_ALLOW_ALL = (0x06).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
_NO_CGROUP: dict[str, Any] = {"memory": None, "pids": None, "cpus": None, "io": None, "watch": frozenset()}
ALLOW = ("192.0.2.1",)  #: documentation only, never reached: RFC 5737


def floor(flags: int, loopback: bool = False) -> Callable[[], None]:
    """/bin/true in bare namespaces. The call raises RuntimeError where the kernel refuses them."""

    def once() -> None:
        status = lib.nsb_floor(flags, int(loopback), _TRUE)
        if status:
            raise RuntimeError(f"clone with flags {flags:#x}: {'status' if status > 0 else 'errno'} {abs(status)}")

    return once


def floors() -> dict[str, Callable[[], None]]:
    """A bare clone, then one namespace more in each row, then the loopback device."""
    flags, out = 0, {"clone, exec": floor(0)}
    for name, flag in NAMESPACES:
        flags |= flag
        out[f"+ {name} namespace"] = floor(flags)
    return {**out, "+ loopback device up": floor(flags, loopback=True)}


def everything(loopback: bool = True) -> Callable[[], None]:
    """The floor of what nsbox has by default."""
    flags = 0
    for _, flag in NAMESPACES:
        flags |= flag
    return floor(flags, loopback)


class _Cut:
    """A prepared Spec with layers left out."""

    def __init__(self) -> None:
        from nsbox.launch import prepare
        from nsbox.plan import landlock
        from nsbox.prepared import program_of
        from nsbox.spec import Spec

        self.whole = prepare(Spec())
        self.has_cgroup = self.whole.plan.limits.cgroup
        self._no_rules = landlock.ruleset(0, [])
        self._program = program_of(self.whole.spec, self.whole.plan)

    def prepared(self, *has: str) -> Any:
        """Only these of: proc, masks, net, landlock, seccomp, cgroup."""
        from nsbox.encode import compile_plan

        plan = self.whole.plan
        left_out = {kind for kind, name in (("proc", "proc"), ("mask", "masks")) if name not in has}
        plan = plan._replace(
            ops=tuple(op for op in plan.ops if op.kind not in left_out),
            network="net" in has,
            landlock=plan.landlock if "landlock" in has else self._no_rules,
            limits=plan.limits if "cgroup" in has else plan.limits._replace(**_NO_CGROUP),
        )
        program = self._program if "seccomp" in has else _ALLOW_ALL
        return self.whole._replace(plan=plan, compiled=compile_plan(plan, self.whole.skeleton, program))


def launched(prepared: Any) -> Callable[[], None]:
    """One sandbox a call, from the plan to the end of everything inside; no report is made of it."""
    from nsbox.launch import launch
    from nsbox.supervise import Run, drive

    def once() -> None:
        handle = launch(prepared, [TRUE])
        try:
            watch = Run(handle)
            drive(watch)
            if watch.status != 0:
                raise RuntimeError(f"{TRUE} in a sandbox: {watch.error or watch.status}")
        finally:
            handle.close()

    return once


def sandboxes() -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Real sandboxes, one layer more in each row; and what this host cannot have, with the reason."""
    import nsbox
    from nsbox.launch import prepare

    cut = _Cut()
    out: dict[str, Callable[[], object]] = {}
    skipped, has = {}, list[str]()
    rows = [("+ init, id maps, overlay root, /dev", ""), ("+ /proc", "proc"), ("+ masks over /proc", "masks")]
    rows += [("+ net namespace, loopback", "net"), ("+ landlock", "landlock"), ("+ seccomp filter", "seccomp")]
    rows += [("+ cgroup", "cgroup")] if cut.has_cgroup else []
    for name, layer in rows:
        has += [layer] if layer else []
        out[name] = launched(cut.prepared(*has))
    spec = nsbox.Spec()
    out["+ watching limits, Result (nsbox.run)"] = lambda: nsbox.run([TRUE], spec)
    for name, path in (("+ gateway, nft rules", "gateway"), ("+ veth pair, nft rules", "veth")):
        try:
            filtered = launched(prepare(nsbox.Spec(allow=ALLOW, net_path=path)))
            filtered()
        except (nsbox.errors.NsboxError, OSError) as error:
            skipped[name] = str(error)
        else:
            out[name] = filtered
    return out, skipped


def _summary(samples: dict[str, Samples], before: dict[str, str]) -> dict[str, Any]:
    out = {}
    for name, values in samples.items():
        row = {"p50_us": median(values), "p95_us": percentile(values, 0.95)}
        if name in before:
            base = samples[before[name]]
            row["added_us"] = median(values) - median(base)
            row["added_low"], row["added_high"] = difference_interval(values, base)
            row["before"] = before[name]  # type: ignore[assignment]
        out[name] = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
    return out


def chain(bare: list[str], real: list[str]) -> dict[str, str]:
    """Row → the row that it adds one layer to."""
    before = dict(zip([*bare, *real][1:], [*bare, *real], strict=False))
    # The first real sandbox has all namespaces but the network's; the paths of egress are alternatives.
    if real and "+ mount namespace" in bare:
        before[real[0]] = "+ mount namespace"
    run = next((name for name in real if "nsbox.run" in name), None)
    whole = real[real.index(run) - 1] if run else None
    return before | {name: whole for name in real if "nft" in name and whole}


def run(settings: dict[str, Any]) -> Found:
    # For root egress by veth is one of the rows: its devices and rules are then made in a network of our own.
    found = netns.apart(lambda: _run(settings), network=os.geteuid() == 0)
    return found[0], found[1]


def _run(settings: dict[str, Any]) -> Found:
    bare = floors()
    real, skipped = sandboxes()
    for name, call in list(bare.items()):
        try:
            call()
        except RuntimeError as error:
            skipped[name] = str(error)
            del bare[name]
    subjects: dict[str, Callable[[], object]] = {BASELINE: lambda: spawn([TRUE]), **bare, **real}
    samples = measure(subjects, int(settings["runs"]), int(settings["warmup"]))
    rows = _summary(samples, chain([BASELINE, *bare], list(real)))
    return {"rows": rows, "bare": list(bare), "real": list(real), "skipped": skipped}, samples[BASELINE]


def text(report: dict[str, Any]) -> list[str]:
    out = []
    base = report["rows"][BASELINE]["p50_us"]
    for head, names in (("the kernel's own price", [BASELINE, *report["bare"]]), ("sandboxes", report["real"])):
        rows = []
        for name in names:
            row = report["rows"][name]
            added = [f"{row[key]:+.0f}" for key in ("added_us", "added_low", "added_high")] if "added_us" in row else []
            cells = [f"{row['p50_us']:.0f}", f"{row['p95_us']:.0f}", f"{row['p50_us'] / base:.2f}"]
            rows.append([name, *cells, added[0] if added else "", f"{added[1]} to {added[2]}" if added else ""])
        out.append(table([head, "p50 µs", "p95 µs", f"× {BASELINE}", "added µs", "95 % interval"], rows))
    return [*out, *(f"{name} is left out: {why}" for name, why in report["skipped"].items())]


def plots(report: dict[str, Any]) -> dict[str, str]:
    rows = report["rows"]
    bars = [(name, rows[name]["p50_us"], rows[name]["p95_us"]) for name in (BASELINE, *report["bare"], *report["real"])]
    return {
        "layers": svg.bars(
            "One layer added at a time",
            "µs, each row with one layer more; bar and number: median, line: to p95",
            bars,
            mark="nsbox.run",
        )
    }


BENCHMARK = Benchmark(
    "layers",
    "What each layer of a sandbox costs on this host, one layer added at a time.",
    (Setting("runs", 200, 2, 15, "measured rounds"), Setting("warmup", 10, 0, 2, "rounds before them")),
    run,
    text,
    plots,
)
