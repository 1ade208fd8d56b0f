"""Tests of several servers and engines together, which `make test-cluster` runs: minutes, and gigabytes of tools."""
