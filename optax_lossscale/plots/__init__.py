"""Plots of gradients and loss scales, for notebooks and for print.

They need matplotlib: ``pip install matplotlib``.
"""

from .._public import set_module as _set_module
from ._gradient_range import plot_gradient_range
from ._loss_scale import plot_loss_scale

__all__ = ["plot_gradient_range", "plot_loss_scale"]

_set_module(__name__, __all__)
