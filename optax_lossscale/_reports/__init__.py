"""Reports that run a program and measure it. Nothing else needs this folder."""
