"""`with_loss_scaling` and `with_master_weights`, and their parts."""
