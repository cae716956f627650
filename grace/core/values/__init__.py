"""Values: tensors, configurations, units and plans."""
