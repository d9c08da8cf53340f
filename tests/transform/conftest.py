"""The other layout of the masks, to compare with."""

import pytest

from optax_lossscale._transform import masks


def refuse(*args):
    raise RuntimeError("not here")


@pytest.fixture
def plain_layout(monkeypatch):
    """A function that runs another one with the plain layout of the masks."""

    def run(function, *args):
        with monkeypatch.context() as m, pytest.warns(UserWarning, match="slower"):
            m.setattr(masks, "_masked_early", refuse)
            return function(*args)

    return run
