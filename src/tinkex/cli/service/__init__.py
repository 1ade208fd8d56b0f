"""Commands that run or administer a service on this machine. `tinkex.cli.parser` loads them by name.

Others import: data_folder.
"""
