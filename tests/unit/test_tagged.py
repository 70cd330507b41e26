"""What an executor takes for data, of whatever comes from inside."""

import base64
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox.executor import untagged
from nsbox.python_inside import tagged

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable = st.recursive(plain, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
data = st.recursive(
    plain | st.sets(hashable, max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hashable, inner, max_size=4) | st.tuples(inner),
    max_leaves=12,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["list", "set", "dict", "bytes", "complex", "x"]), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(data)
def test_data_comes_back_as_it_was(value: Any) -> None:
    found = untagged(tagged(value))
    assert found == value
    assert type(found) is type(value)


@given(json_values)
def test_anything_else_is_refused(value: Any) -> None:
    try:
        found = untagged(value)
    except (ValueError, TypeError):
        return
    assert type(found).__module__ == "builtins"


@pytest.mark.parametrize("value", [object(), print, type, {"a": object()}, [print]])
def test_objects_are_not_sent(value: Any) -> None:
    with pytest.raises(TypeError):
        tagged(value)


def test_arrays() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    for array in (numpy.arange(6.0).reshape(2, 3), numpy.asfortranarray(numpy.ones((3, 2))), numpy.array(["a", "bc"])):
        found = untagged(tagged(array))
        assert (found == array).all()
        assert found.dtype == array.dtype
    assert untagged(tagged(numpy.float64(2.5))) == 2.5
    with pytest.raises(ValueError):
        tagged(numpy.array([object()]))


def test_an_array_that_lies_is_refused() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    file = io.BytesIO()
    numpy.save(file, numpy.array([1, "x", None], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError):
        untagged({"numpy": base64.b64encode(file.getvalue()).decode()})
    file = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(file, {"shape": (1 << 40,), "fortran_order": False, "descr": "<f8"})
    with pytest.raises(ValueError):
        untagged({"numpy": base64.b64encode(file.getvalue() + b"12345678").decode()})
    with pytest.raises(ValueError):
        untagged({"numpy": base64.b64encode(b"PK\x03\x04rest").decode()})
