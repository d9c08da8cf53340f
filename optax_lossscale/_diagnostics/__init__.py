"""Reports on gradients, their tables, a suggested scale, and guards."""
