"""Tests of the `tinkex` command."""
