"""What a fresh sandbox costs, against posix_spawn and the programs of this host that isolate.

python benchmarks/start.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.start import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
