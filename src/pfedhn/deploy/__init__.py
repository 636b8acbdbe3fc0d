"""The same round over a network: a server, and parties on their own machines."""
