"""A pytest plugin that has optax's own tests test wrapped optimizers.

``pytest -p wrap_optax --pyargs optax._src.alias_test`` with this folder on the path;
`test_optax_suite` does so.
"""

import contextlib
import functools
import importlib
import inspect

import chex

chex.set_n_cpu_devices(8)

import optax  # noqa: E402
from optax import contrib, transforms  # noqa: E402
from optax._src import alias, base, transform  # noqa: E402

import optax_lossscale as ls  # noqa: E402


def wrap(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        return ls.with_loss_scaling(factory(*args, **kwargs))

    return wrapped


@contextlib.contextmanager
def wrapped_factories():
    """Wrap what a test module takes from optax while it is imported, and no longer."""
    with contextlib.ExitStack() as restore:
        for module in (optax, alias, base, transform, transforms):
            for name, factory in inspect.getmembers(module, inspect.isfunction):
                returns = str(inspect.signature(factory).return_annotation)
                if "GradientTransformation" in returns:
                    restore.callback(setattr, module, name, factory)
                    setattr(module, name, wrap(factory))
        yield


# These fetch factories by name, when a test runs.
for module, name in (
    ("optax._src.alias_test", "_get_opt"),
    ("optax.contrib._common_test", "_get_opt_factory"),
):
    module = importlib.import_module(module)
    get = getattr(module, name)
    setattr(module, name, lambda *args, get=get, **kwargs: wrap(get(*args, **kwargs)))

# These hold them in tables.
with wrapped_factories():
    importlib.import_module("optax._src.float64_test")
    importlib.import_module("optax._src.sharding_test")

# As documented: an accessor that wants the state of one optimizer takes the inner one.
# Some of the tests put schedule-free around the wrapped optimizer instead.
eval_params = contrib.schedule_free_eval_params
contrib.schedule_free_eval_params = lambda state, params: eval_params(
    state.inner_state if isinstance(state, ls.WithLossScalingState) else state, params
)
