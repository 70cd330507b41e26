"""A host that allows no user namespaces: refused at once, with the setting and the command that mends it."""

import pytest

import nsbox
from nsbox.errors import NsboxError, SandboxUnavailable


def test_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(SandboxUnavailable, match=r"user\.max_user_namespaces") as caught:
        nsbox.run(["true"])
    assert "sysctl -w user.max_user_namespaces=" in str(caught.value)


def test_refused_again_and_nothing_stays() -> None:
    with pytest.raises(NsboxError):
        nsbox.run(["true"])
