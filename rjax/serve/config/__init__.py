"""The command line of the server, and the options and limits that it sets."""
