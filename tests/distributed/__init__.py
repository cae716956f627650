"""Tests with several real processes: one worker program, launched in every supported way."""
