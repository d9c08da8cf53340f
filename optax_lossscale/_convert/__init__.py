"""States of other systems, as they save them, to rules and states of ours and back."""
