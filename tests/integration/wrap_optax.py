"""A pytest plugin that wraps the optimizers of optax's own tests."""

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

wrapped_factories_called = []


def wrap(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        wrapped_factories_called.append(factory)
        return ls.with_loss_scaling(factory(*args, **kwargs))

    return wrapped


@contextlib.contextmanager
def wrapped_factories(*modules):
    """Wrap what a test module takes from optax while it is imported, and no longer."""
    with contextlib.ExitStack() as restore:
        for module in modules:
            for name, factory in inspect.getmembers(module, inspect.isfunction):
                returns = str(inspect.signature(factory).return_annotation)
                if "GradientTransformation" in returns:
                    restore.callback(setattr, module, name, factory)
                    setattr(module, name, wrap(factory))
        yield


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"{len(wrapped_factories_called)} optimizers were wrapped"
    )


class WrappedAlias:
    def __getattr__(self, name):
        return wrap(getattr(alias, name))


# These look factories up when a test runs.
importlib.import_module("optax._src.alias_test").alias = WrappedAlias()
common_test = importlib.import_module("optax.contrib._common_test")
get_factory = common_test._get_opt_factory
common_test._get_opt_factory = lambda name: wrap(get_factory(name))

# These hold them in tables.
with wrapped_factories(alias, base, transform, transforms):
    importlib.import_module("optax._src.float64_test")
with wrapped_factories(optax):
    importlib.import_module("optax._src.sharding_test")

# As documented: an accessor that wants the state of one optimizer takes the inner one.
# Some of the tests put schedule-free around the wrapped optimizer instead.
eval_params = contrib.schedule_free_eval_params
contrib.schedule_free_eval_params = lambda state, params: eval_params(
    state.inner_state if isinstance(state, ls.WithLossScalingState) else state, params
)
