"""What ``python -m optax_lossscale`` runs."""
