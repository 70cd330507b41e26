"""The attacks, as a program: ``python3 -m attempts [--control] NAME[:WHAT]...`` prints what came of each.

``done`` means that it worked, else the name of the errno, or the signal that ended it. It needs nothing but a Python
interpreter from 3.9 on, and runs inside a sandbox and, as the positive control, outside. With ``--control`` it first
enters namespaces of its own, where it has every capability: so a control shows that the call works without ever
touching the host. Each attempt is made in a process of its own.

Nothing of nsbox is imported: inside there is only this folder.
"""
