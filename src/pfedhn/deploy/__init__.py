"""The same round over a network: a server and parties on machines of their own."""
