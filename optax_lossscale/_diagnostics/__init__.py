"""What gradients and the loss scale look like: report, table, suggestion, guard."""
