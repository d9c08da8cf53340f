"""No window, and no figure left open."""

import pytest
from matplotlib import pyplot

pyplot.switch_backend("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")
