"""Models of requests and responses, their field policy, errors and logprobs; no engine, no HTTP."""
