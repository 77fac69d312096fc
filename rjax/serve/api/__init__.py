"""The routes. The only room of the server that sees both the requests and the engine."""
