"""The web page at ``/``: a chat, a live graph of the server's metrics, and the prefix cache."""
