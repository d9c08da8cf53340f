"""The rules, the code they share, and the base class that users derive from."""
