"""The version, in one place; the changelog's first heading must equal it."""

__version__ = "0.1.0"
PROTOCOL_VERSION = "0.36.0"
"""The release of the official client whose protocol we speak; sent as `sdk_version`."""
