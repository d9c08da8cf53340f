"""States of other systems, as they save them, to rules and states of ours and back."""

from ._jax import (
    from_flax_state_dict as from_flax_state_dict,
)
from ._jax import (
    from_jmp_state_dict as from_jmp_state_dict,
)
from ._jax import (
    to_flax_state_dict as to_flax_state_dict,
)
from ._jax import (
    to_jmp_state_dict as to_jmp_state_dict,
)
from ._keras import (
    from_keras_state_dict as from_keras_state_dict,
)
from ._keras import (
    to_keras_state_dict as to_keras_state_dict,
)
from ._torch import (
    from_megatron_state_dict as from_megatron_state_dict,
)
from ._torch import (
    from_torch_state_dict as from_torch_state_dict,
)
from ._torch import (
    to_megatron_state_dict as to_megatron_state_dict,
)
from ._torch import (
    to_torch_state_dict as to_torch_state_dict,
)
