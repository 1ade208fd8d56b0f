"""Tests of `tinkex.testing`: by raw HTTP, so that nothing of the SDK vouches for itself."""
