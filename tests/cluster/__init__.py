"""Several servers, and engines of several processes: the cluster suite, `make test-cluster`."""
