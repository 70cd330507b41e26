"""The same program inside a sandbox and outside: processor, memory, system calls, files, processes, loopback.

python benchmarks/runtime.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.runtime import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
