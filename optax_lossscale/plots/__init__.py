"""Plots of gradients and loss scales, for notebooks and for print.

They need matplotlib: ``pip install matplotlib``.
"""

from .._public import set_home as _set_home
from ._gradient_range import plot_gradient_range
from ._loss_scale import plot_loss_scale

__all__ = ["plot_gradient_range", "plot_loss_scale"]

_set_home(__name__, __all__)
