"""The `tinkex` command. Modules import nothing heavy at the top, so that `--help` is fast.

`main` runs a command, `parser` has the table of all commands, `error_text` turns errors into sentences, `connect`
makes clients from the settings, `arguments` checks values. `commands` has one file per command that uses a service,
`service` one per command that runs or administers a service on this machine.

Others import: main, parser.
"""
