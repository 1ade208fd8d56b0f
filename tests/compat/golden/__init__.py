"""Golden wire data: what the official clients send, what they make of answers, and the tools that record it."""
