"""Tests of the adapters, most of them with several real processes."""
