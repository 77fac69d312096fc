"""Builds what a server needs: the engine, the service and the app."""
