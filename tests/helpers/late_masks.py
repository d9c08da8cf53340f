"""Plugin ``-p late_masks``: no update is masked in place."""

from optax_lossscale._transform import mask

mask._in_place_or = lambda at_end, *_: at_end
