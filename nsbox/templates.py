"""Where the interpreters of a pool come from: its zygote, and its template, which is made anew in time.

A template is made anew after so many forks (each leaves it a little different: identifiers, the state of allocators),
when it is old, when it has ended, and when its interpreter or a folder of packages has changed. The old one stays until
the last interpreter that was forked from it is gone, for their parent-death signal is its end.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from nsbox.errors import SandboxUnavailable
from nsbox.interpreter import Lease, make
from nsbox.prepared import Prepared
from nsbox.python_env import PythonEnvironment
from nsbox.template import Template, stamp, zygote_for

FORKS = 20_000
AGE_S = 3600.0


class Templates:
    """``make`` and ``gone`` are called by any thread. ``close`` is idempotent; what was made before lives on until it
    is ``gone``."""

    def __init__(self, prepared: Prepared, python: PythonEnvironment, preload: Sequence[str], warm_up: str) -> None:
        """Raises what a ``Template`` raises."""
        self.python, self._preload, self._warm_up = python, tuple(preload), warm_up
        self._lock = threading.Lock()
        self._living: dict[Template, int] = {}  #: how many interpreters are out
        self._forks, self._made_at, self._closed = 0, 0.0, False
        self._stamp: Any = None
        self._zygote = zygote_for(prepared)
        self.current: Template | None = None
        _all.add(self)
        try:
            self._renew(prepared)
        except BaseException:
            self.close()
            raise

    def make(self, prepared: Prepared, on_network: Callable[[str, dict[str, Any]], None] | None = None) -> Lease:
        """A fresh interpreter in a fresh sandbox. Raises what a launch and a ``Template`` raise."""
        with self._lock:
            if self._closed:
                raise SandboxUnavailable("the pool is closed", remedy="make another")
            template = self.current
            if template is None or self._is_old(template):
                template = self._renew(prepared)
            self._forks += 1
            self._living[template] += 1
        try:
            return make(prepared, template, self._zygote, on_network)
        except BaseException:
            self.gone(template)
            raise

    def is_current(self, lease: Lease) -> bool:
        """Whether it was forked from the template that is used now."""
        return lease.template is self.current

    def gone(self, template: Template | None) -> None:
        """An interpreter has been closed."""
        with self._lock:
            if template in self._living:
                self._living[template] -= 1
            self._sweep()

    def _is_old(self, template: Template) -> bool:
        if self._forks >= FORKS or time.monotonic() - self._made_at > AGE_S or not template.is_alive:
            return True
        return bool(self._stamp != stamp(self.python))

    def _renew(self, prepared: Prepared) -> Template:
        now = stamp(self.python)
        made = Template(prepared, self.python, self._zygote, self._preload, self._warm_up)
        self.current, self._living[made] = made, 0
        self._forks, self._made_at, self._stamp = 0, time.monotonic(), now
        self._sweep()
        return made

    def _sweep(self) -> None:
        for template, out in list(self._living.items()):
            if out == 0 and (self._closed or template is not self.current):
                del self._living[template]
                template.close()
        if self._closed and not self._living and self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.close()

    def close(self) -> None:
        """Make no more."""
        with self._lock:
            self._closed = True
            self._sweep()

    def forget(self) -> None:
        """In a forked child: these are the parent's. An end that stayed open here would keep them alive."""
        self._lock, self._closed, self.current = threading.Lock(), True, None
        for template in self._living:
            template.forget()
        if self._zygote is not None:
            os.close(self._zygote.socket)
        self._living, self._zygote = {}, None


_all: "weakref.WeakSet[Templates]" = weakref.WeakSet()


def _after_fork() -> None:
    for templates in list(_all):
        templates.forget()


os.register_at_fork(after_in_child=_after_fork)
