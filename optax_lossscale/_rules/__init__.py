"""The rules, what they share, and the base that others derive from."""
