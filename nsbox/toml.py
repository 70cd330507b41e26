"""Values as TOML; the standard library only reads it."""

from nsbox.errors import SpecError


def toml(value: object) -> str:
    """One value of a profile file. Raises SpecError for text that is not UTF-8."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        escaped = "".join(c if c >= " " and c not in '"\\\x7f' else f"\\u{ord(c):04x}" for c in value)
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise SpecError(f"{value!r} is not UTF-8, which is all that TOML can hold; use to_dict")
        return f'"{escaped}"'
    return repr(value)
