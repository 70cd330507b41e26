"""Sandboxes and interpreters made ahead: from lease to result, and how many a second.

python benchmarks/pools.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.pools import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
