"""Tests of the documents and of the site."""
