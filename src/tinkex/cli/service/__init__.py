"""Commands that run or administer a service on this machine."""
