"""`with_loss_scaling`: its masks, and its calls of the inner optimizer and the rule."""
