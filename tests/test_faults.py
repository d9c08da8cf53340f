"""The faults of ``faults.py`` fit the code, so that they can be tried again."""

import inspect
import re

import faults
import pytest
from helpers import ROOT


@pytest.mark.parametrize(
    "fault", faults.FAULTS, ids=lambda f: f"{f.file}-{f.right:.40}"
)
def test_a_fault_fits_the_code_and_names_a_test(fault):
    source = (ROOT / "optax_lossscale" / fault.file).read_text()
    assert source.count(fault.right) == 1 and fault.right != fault.wrong
    compile(source.replace(fault.right, fault.wrong), fault.file, "exec")
    file, name, *slow = fault.test.split("::")
    tests = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^def {name}\(", tests, re.M) and slow in ([], ["slow"])


def test_every_room_has_faults():
    rooms = {path.name.removesuffix(".py") for path in faults.PACKAGE.iterdir()}
    rooms -= {"__init__", "__main__", "__pycache__", "py.typed"}
    assert rooms == {f.file.split("/")[0].removesuffix(".py") for f in faults.FAULTS}
    assert inspect.getdoc(faults)
