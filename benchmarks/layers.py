"""What each layer of a sandbox costs on this host, one layer added at a time.

python benchmarks/layers.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.layers import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
