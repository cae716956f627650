"""The array operations of frameworks, which the core finds by the table of backends and imports when asked for one."""
