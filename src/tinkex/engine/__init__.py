"""Models, adapters and their maths, in a process of their own. Knows no HTTP, no SQL, no tenant and no request."""
