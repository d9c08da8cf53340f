"""The cast of products, and what loops then keep. Only `_reports` needs this folder."""
