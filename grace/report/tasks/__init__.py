"""The tasks of the study, a module for each kind; `grace.report.task` imports the one that a task needs."""
