"""What reports have in common: each is a tuple of rows, and so is a part of it."""

from typing import Any, TypeVar

Row = TypeVar("Row", covariant=True)


class Report(tuple[Row, ...]):
    """A tuple of rows whose slice is also a report, with a table."""

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return type(self)(part) if isinstance(index, slice) else part
