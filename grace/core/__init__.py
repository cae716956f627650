"""Framework-agnostic core; it imports no framework. docs/design.md describes its parts."""
