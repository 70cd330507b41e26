"""What the nsbox command costs as a process of its own, against an interpreter that does nothing.

python benchmarks/program.py [--quick] [--json FILE] [--svg DIR]     --help tells the rest
"""

import sys

from nsbox.bench.frame import main
from nsbox.bench.program import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
