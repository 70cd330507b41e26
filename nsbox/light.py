"""Stand-ins for modules that cost more to import than a sandbox costs to start.

``typing`` takes half as long as an interpreter needs to start; ``contextlib``, ``functools``, ``re``, ``signal`` and
``threading`` take as long again. Modules on the way of ``nsbox run`` take these under the same names, with that part of
each original that is in use there; type checkers see the originals. What is not here is imported where it is used.
"""

TYPE_CHECKING = False  # type checkers know the name, and take it for true

if TYPE_CHECKING:
    import contextlib as contextlib
    import functools as functools
    import re as re
    import signal as signal
    import threading as threading
    from typing import NamedTuple as NamedTuple
else:
    # What the originals consist of, less the enumerations that they make of every constant.
    import _signal as signal  # noqa: F401
    import _thread
    import sys
    from _collections import _tuplegetter
    from _functools import _lru_cache_wrapper

    class NamedTuple(tuple):
        """typing.NamedTuple by loops: the original generates and compiles code for each class, 0.2 ms."""

        __slots__ = ()
        _fields = ()
        _field_defaults = {}  # noqa: RUF012 - replaced in each class

        def __init_subclass__(cls):
            fields = tuple(cls.__annotations__)
            if not fields:  # a class that only adds methods
                return
            cls._field_defaults = {name: vars(cls)[name] for name in fields if name in vars(cls)}
            cls._fields = cls.__match_args__ = fields
            cls._all_fields = len(fields)
            cls._last = tuple(cls._field_defaults.values())  # a field after one with a default has one, too
            for number, name in enumerate(fields):
                setattr(cls, name, _tuplegetter(number, None))

        def __new__(cls, *args, **options):
            missing = cls._all_fields - len(args)
            if options or not 0 <= missing <= len(cls._last):
                args = cls._complete(args, options)
            elif missing:
                args = (*args, *cls._last[-missing:])
            return tuple.__new__(cls, args)

        @classmethod
        def _complete(cls, args, options):
            fields = cls._fields
            given = dict(zip(fields, args, strict=False))
            values = {**cls._field_defaults, **given, **options}
            if len(args) > len(fields) or len(values) != len(fields) or given.keys() & options.keys():
                wrong = ", ".join(sorted(values.keys() ^ set(fields))) or "arguments"
                raise TypeError(f"{cls.__name__}: missing, unknown or repeated: {wrong}")
            return [values[name] for name in fields]

        @classmethod
        def _make(cls, items):
            return cls(*items)

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **changes):
            changed = tuple.__new__(type(self), map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"{type(self).__name__} has no {', '.join(sorted(changes))}")
            return changed

        __replace__ = _replace  # copy.replace() of Python 3.13

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            inside = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({inside})"

    class _Lazy:
        """A module that is imported when something of it is first wanted."""

        def __init__(self, name):
            self._name = name

        def __getattr__(self, name):
            return getattr(__import__(self._name), name)

    re = _Lazy("re")

    class _CachedProperty:
        def __init__(self, function):
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = vars(instance)[self._name] = self._function(instance)  # found before this from now on
            return value

    class functools:
        """The caches alone; of functions they are the very ones of the original."""

        cached_property = _CachedProperty

        @staticmethod
        def lru_cache(maxsize=128):
            return lambda function: _lru_cache_wrapper(function, maxsize, False, lambda *counts: counts)

        @staticmethod
        def cache(function):
            return functools.lru_cache(None)(function)

    class threading:
        """The locks alone."""

        Lock = _thread.allocate_lock
        RLock = _thread.RLock

    class _Suppress:
        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self._kinds)

    class _ExitStack:
        """Callbacks, called last to first whatever is raised meanwhile; what the last of them raised goes on."""

        def __init__(self):
            self._callbacks = []

        def callback(self, function, /, *args, **options):
            self._callbacks.append((function, args, options))
            return function

        def pop_all(self):
            other = _ExitStack()
            other._callbacks, self._callbacks = self._callbacks, []
            return other

        def close(self):
            self.__exit__(None, None, None)

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            while self._callbacks:
                function, args, options = self._callbacks.pop()
                try:
                    function(*args, **options)
                except BaseException:
                    self.__exit__(*sys.exc_info())
                    raise
            return False

    def _contextmanager(function):
        made = []

        def manager(*args, **options):
            if not made:
                import contextlib as original

                made.append(original.contextmanager(function))
            return made[0](*args, **options)

        return manager

    class contextlib:
        """What undoes and what ignores; ``contextmanager`` takes the original at its first call."""

        ExitStack = _ExitStack
        suppress = _Suppress
        contextmanager = staticmethod(_contextmanager)
