"""One training step: from gradients to payloads and back."""
