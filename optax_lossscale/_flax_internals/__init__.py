"""Support of Flax and Haiku, for programs that import them; it imports neither."""
