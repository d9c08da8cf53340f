"""The demonstration that ``python -m optax_lossscale`` runs."""
