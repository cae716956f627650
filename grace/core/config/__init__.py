"""Configuration: the options, the registries of methods, schedules, and what is recommended."""
