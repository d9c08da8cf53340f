"""Plugin ``-p late_masks``: no program suits the mask that only makes updates fast."""

from optax_lossscale._transform import early_mask

early_mask.suits = lambda *_: False
