"""Programs: trace a call, change its equations, evaluate it."""
