"""What is known of programs: their equations, calls, lines, and where values come from.

`_autocast`, `_reports`, retries and the masks in place need it.
"""
