"""Tests against the papers, one file per method. Expected numbers are computed without the code under test."""
