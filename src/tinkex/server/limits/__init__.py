"""Enforces the table of limits (`settings/limits.py`): counts what each tenant uses and rejects what is too much.

Others import:
    ledger        `Ledger`: every part of the service that has a limit asks it
    open_files    how many files this process may open, and so how many connections
    quotas        `Quotas`: the bytes of checkpoints, stored and being written
    tenant_turns  `TenantTurns`: one at a time, and tenants in turn
"""
