"""What idle sandboxes hold, and what a start costs when many are alive.

python benchmarks/memory.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.memory import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
