"""Eight CPU devices and a Hypothesis profile that gives the same cases every time."""

import chex
import hypothesis

chex.set_n_cpu_devices(8)

hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=100
)
hypothesis.settings.load_profile("fixed")
