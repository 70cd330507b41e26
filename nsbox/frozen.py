"""Frozen values with the looks of ``dataclasses``, whose import alone costs more than starting a sandbox does."""

from __future__ import annotations

from nsbox.light import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_options):
        return lambda function: function


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Gives a class of annotated fields ``__init__`` (which ends with ``__post_init__``, where there is one), equality,
    hash and repr by value, and refuses assignment. Defaults must be immutable. What a ``cached_property`` keeps in an
    instance counts for none of these."""
    names = tuple(cls.__annotations__)
    defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}
    finish = vars(cls).get("__post_init__")

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        values = {**defaults, **dict(zip(names, args, strict=False)), **options}
        if len(args) > len(names) or values.keys() != set(names) or options.keys() & set(names[: len(args)]):
            wrong = sorted(values.keys() ^ set(names))
            raise TypeError(f"{cls.__name__}: missing, unknown or repeated: {', '.join(wrong) or 'argument'}")
        vars(self).update(values)
        if finish:
            finish(self)

    def __setattr__(self: Any, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__} is immutable; make another with {name} changed")

    def __delattr__(self: Any, name: str) -> None:
        __setattr__(self, name, None)

    def __eq__(self: Any, other: object) -> Any:
        if type(other) is not cls:
            return NotImplemented
        return self is other or all(vars(self)[name] == vars(other)[name] for name in names)

    def __hash__(self: Any) -> int:
        return hash(tuple(map(vars(self).__getitem__, names)))

    def __repr__(self: Any) -> str:
        return f"{cls.__name__}({', '.join(f'{name}={vars(self)[name]!r}' for name in names)})"

    given: dict[str, Any] = {"__match_args__": names, "__hash__": vars(cls).get("__hash__") or __hash__}
    for method in (__init__, __setattr__, __delattr__, __eq__, __repr__):
        given[method.__name__] = method
    for name, value in given.items():
        setattr(cls, name, value)
    return cls
