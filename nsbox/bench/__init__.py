"""What isolation costs on this host, measured: ``nsbox bench``, and the programs in benchmarks/.

Nothing else of nsbox imports it but the command.
"""

#: what ``nsbox bench`` knows, in its order; the first three are what it does unless told otherwise
NAMES = ("layers", "start", "runtime", "throughput", "memory", "program", "pools")
USUAL = NAMES[:3]
