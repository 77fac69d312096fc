"""What the server keeps between requests, bounded for each tenant: responses, prefixes."""
