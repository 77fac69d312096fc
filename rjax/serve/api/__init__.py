"""The routes. This is the only package of the server that sees both the requests and the engine."""
