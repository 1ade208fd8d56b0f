"""The `tinkex` command: one file per noun. Modules import nothing heavy at the top, so that `--help` is instant."""
