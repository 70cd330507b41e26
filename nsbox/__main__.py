"""``python -m nsbox``: the same as the ``nsbox`` command."""

from nsbox.cli import main

main()
