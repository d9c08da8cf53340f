"""Gradients with loss scaling: one scale, one per block, and retries."""
