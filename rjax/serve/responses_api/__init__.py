"""/v1/responses, OpenAI's Responses API, over the chats of `rjax.serve.chat`."""
