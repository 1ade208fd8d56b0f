"""The endpoints of the scripted service, one method each. Only `testing` imports them."""
