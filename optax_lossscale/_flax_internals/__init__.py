"""Support of Flax and Haiku, for programs that import them: nothing here does."""
