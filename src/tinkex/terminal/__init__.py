"""Everything that draws in a terminal, for the SDK's `tinkex.progress` and for the command line.

Light on purpose: `tinkex --help` and `import tinkex` must stay fast (docs/decisions/terminal.md). Depends on `errors`
and `clock` only; what it shows is passed in.

Others import:
    format        numbers, sizes, durations, money and dates as text; cleaning and cutting of text; a line made of parts
    curve         a curve as text
    screen        lines that are drawn over: on a terminal, in a notebook, or in a plain file
    progress_bar  the progress of a download or of anything else that counts bytes
    output        what a command prints: tables, fields, JSON, remarks
"""
