"""The OpenAI-compatible API: requests read, sampled and returned in the formats of OpenAI.

`requests`, `chat` and `responses` are pure functions over JSON and the engine's events; `routes` does the I/O.

Others import:
    routes.ROUTES                  the routes for the application
    errors.openai_error_response   an exception as an error that OpenAI's clients read
"""
