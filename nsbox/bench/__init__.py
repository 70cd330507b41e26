"""What isolation costs on this host, measured: ``nsbox bench``, and the programs in benchmarks/.

Nothing else of nsbox imports it but the command.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsbox.bench.frame import Benchmark

#: what ``nsbox bench`` knows, in its order; the first three are what it does unless told otherwise
NAMES = ("layers", "start", "runtime", "throughput", "memory", "program", "pools")
USUAL = NAMES[:3]


def named(name: str) -> "Benchmark":
    """The benchmark of one of ``NAMES``; its module is imported only now."""
    import importlib

    found: Benchmark = importlib.import_module(f"nsbox.bench.{name}").BENCHMARK
    return found
