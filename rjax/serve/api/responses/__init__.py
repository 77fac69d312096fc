"""OpenAI's Responses API (/v1/responses), implemented by chat runs of `rjax.serve.api.chat`."""
