"""A task with real data and no download: predict words of Python's manual."""

import re
from collections import Counter
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

VOCABULARY = 1000
CONTEXT = 8
WINDOW = 4
HELD_OUT = 4096


class Batch(NamedTuple):
    """Positions in a text.

    Attributes:
        words: int32 of shape (batch, 8), the words before the position; 0 is unknown.
        weights: float32 of shape (batch, 8), 1 for known words and 0 for unknown ones.
        labels: int32 of shape (batch, 4), the words that come next.
    """

    words: np.ndarray
    weights: np.ndarray
    labels: np.ndarray


class Task(NamedTuple):
    """Every position of the training text, and some positions of held-out text."""

    train: Batch
    held_out: Batch


def load_task() -> Task:
    """Split the language reference that ``help()`` shows into words and positions."""
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    words = re.findall(r"[a-z_]+|[^\sa-z_]", text)
    common = [word for word, _ in Counter(words).most_common(VOCABULARY)]
    number = {word: i for i, word in enumerate(common, start=1)}
    numbers = np.array([number.get(word, 0) for word in words], np.int32)

    cut = int(0.9 * len(numbers))
    held_out = _positions(numbers[cut:])
    spread = np.linspace(0, len(held_out.words) - 1, HELD_OUT).astype(int)
    return Task(_positions(numbers[:cut]), take(held_out, spread))


def take(batch: Batch, rows: np.ndarray) -> Batch:
    return Batch(*(field[rows] for field in batch))


def _positions(numbers: np.ndarray) -> Batch:
    windows = np.lib.stride_tricks.sliding_window_view(numbers, CONTEXT + WINDOW)
    words = np.ascontiguousarray(windows[:, :CONTEXT])
    labels = np.ascontiguousarray(windows[:, CONTEXT:])
    return Batch(words, (words > 0).astype(np.float32), labels)
