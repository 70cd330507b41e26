"""Cold starts a second with several workers, against bare clones with the same namespaces.

python benchmarks/throughput.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.throughput import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
