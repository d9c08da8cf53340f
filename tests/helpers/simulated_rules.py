"""The rules in plain Python, as their documentation states them."""

import dataclasses
import math
from typing import Any

import numpy as np

import optax_lossscale as ls


@dataclasses.dataclass
class Simulated:
    """The state of a rule, in Python numbers."""

    rule: Any
    skipped: int = 0
    in_a_row: int = 0
    skip_rate: float = 0.0
    was_fixed: bool = False

    def __post_init__(self):
        self._begin()

    def _begin(self) -> None:
        """As at the start, but for the counts of skipped steps."""
        self.scale = getattr(self.rule, "init_scale", None) or self.rule.loss_scale
        # None for a rule that does not count.
        self.hysteresis: int | None = getattr(self.rule, "hysteresis", None)
        self.growth, self.largest = 0, 0.0

    def assert_is(self, state: ls.LossScaleState) -> None:
        """Assert the numbers of a state; rules that count differently count alone."""
        expected = {"loss_scale": self.scale, "skip_rate": self.skip_rate}
        expected |= {"skipped_steps": self.skipped, "consecutive_skips": self.in_a_row}
        if self.hysteresis is not None:
            expected |= {"growth_tracker": self.growth}
            expected |= {"hysteresis_tracker": self.hysteresis}
        for name, number in expected.items():
            np.testing.assert_allclose(getattr(state, name), number, 1e-5, 0, name)
        assert bool(state.applied) == (self.in_a_row == 0)

    def record(self, applied: bool) -> None:
        fixed = isinstance(self.rule, ls.FixedLossScale)
        # A fixed scale is not continued, and a fixed rule does not continue one.
        if fixed or self.was_fixed:
            self._begin()
        self.was_fixed = fixed
        self.skipped += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1
        if self.in_a_row <= 25 or self.was_fixed:
            self.skip_rate = 0.99 * self.skip_rate + 0.01 * (not applied)

    def update(self, finite: bool, largest: float = 0.0) -> None:
        self.record(finite)
        if isinstance(self.rule, ls.DynamicLossScale):
            self._count(finite)
        elif isinstance(self.rule, ls.HeadroomLossScale):
            self._measure(finite, largest)
        else:
            self.hysteresis = None

    def _count(self, finite: bool) -> None:
        rule, grown, changed = self.rule, False, False
        if self.hysteresis is None:
            self.hysteresis = rule.hysteresis
        self.hysteresis = min(self.hysteresis, rule.hysteresis)
        self._clip()
        self.growth = self.growth + 1 if finite else 0
        if finite and self.growth >= rule.growth_interval:
            self.scale, self.growth = self.scale * rule.growth_factor, 0
            grown = changed = True
        elif not finite:
            self.hysteresis = max(self.hysteresis - 1, 0)
            if self.hysteresis == 0:
                self.scale, changed = self.scale * rule.backoff_factor, True
        self._clip()
        refills = {"finite": finite, "growth": grown, "change": changed}
        if refills[rule.hysteresis_refill]:
            self.hysteresis = rule.hysteresis

    def _clip(self) -> None:
        self.scale = min(max(self.scale, self.rule.min_scale), self.rule.max_scale)

    def _measure(self, finite: bool, largest: float) -> None:
        rule = self.rule
        limit = 65504 / 2.0**rule.headroom

        def scale_for(largest: float) -> float:
            if not largest:
                return rule.init_scale
            scale = 2.0 ** math.floor(math.log2(limit / largest))
            return min(max(scale, rule.min_scale), rule.max_scale)

        if self.scale < scale_for(self.largest):  # retries lowered it
            self.largest = (1 - 2.0**-12) * limit / self.scale
        lower = self.scale * rule.backoff_factor
        if finite:
            self.largest = max(self.largest * 0.5 ** (1 / rule.half_life), largest)
            self.scale = scale_for(self.largest)
        else:
            self.largest = max(self.largest, (1 - 2.0**-12) * limit / lower)
            self.scale = min(scale_for(self.largest), max(lower, rule.min_scale))
