"""The loss curve of a run, thinned and smoothed as it grows; a resumed run's continues its predecessor's."""

from collections.abc import Mapping
from typing import Any

POINTS = 1500  # maximum points; a longer curve is thinned, as no screen can show more


class Curve:
    """Loss and learning rates by step.

    `before` is the curve of the resumed run, and `at` the step of its state, if known. The first own step settles it.
    """

    def __init__(self, before: "Curve | None" = None, at: int | None = None) -> None:
        self.points: list[tuple[int, float, float]] = []  # step, loss, smoothed loss
        self.rates: list[tuple[int, dict[str, float]]] = []  # step, rates by name
        self.resumed: list[int] = []  # steps after which it was resumed
        self._smooth, self._stride, self._seen = 0.0, 1, 0
        self._before = before
        if at is not None:
            self._follow(at)

    def add(self, step: int, loss: float, rates: Any) -> None:
        """Add a step."""
        if self._before is not None:
            self._follow(step - 1)
            self._before = None
        # The window of the running mean grows with the run, up to some hundred steps, so that short runs are not
        # flattened.
        self._smooth += (loss - self._smooth) * max(0.02, 8 / (self._seen + 8))
        if self._seen % self._stride == 0:
            self.points.append((step, loss, self._smooth))
            self.rates.append((step, rates_by_name(rates)))
        self._seen += 1
        if len(self.points) > POINTS:
            self.points, self.rates, self._stride = self.points[::2], self.rates[::2], self._stride * 2

    def _follow(self, at: int) -> None:
        """Prepend the points of the preceding run up to this step."""
        if self._before is None:
            return
        self.points = [point for point in self._before.points if point[0] <= at]
        self.rates = [row for row in self._before.rates if row[0] <= at]
        self.resumed = [step for step in self._before.resumed if step < at]
        if self.points:
            self.resumed.append(at)
            # The smoothing continues as after this many steps.
            self._smooth, self._stride, self._seen = self.points[-1][2], self._before._stride, at


def rates_by_name(rates: Any) -> dict[str, float]:
    """Return learning rates by name, from one number or several."""
    if isinstance(rates, int | float):
        return {"": float(rates)}
    if not isinstance(rates, Mapping):
        return {}
    return {str(name): float(rate) for name, rate in rates.items() if isinstance(rate, int | float)}
