"""``nsbox selftest``: attacks, attempted from inside a sandbox on this host, each with its positive control.

Nothing is imported here: the attempts of ``nsbox.selftest.attempts`` run with this package alone in their path.
"""
