"""The framework-agnostic core; imports no framework. See docs/design.md."""
