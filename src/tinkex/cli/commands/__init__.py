"""Commands that use a service through the client, or only this machine. `tinkex.cli.parser` loads them by name.

Others import: console.
"""
