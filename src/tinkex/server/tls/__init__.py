"""TLS between the servers of a cluster: what a node serves with, whom the others trust, and making certificates.

A server that is alone loads nothing of this package.

Others import:
    contexts        what a node serves with and what the hop verifies with; why a handshake failed
    certificates    an authority and certificates for nodes, for `tinkex cluster cert`; needs the package cryptography
"""
