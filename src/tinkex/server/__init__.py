"""The service: an HTTP API in front of one engine process, with a journal that survives restarts.

Rooms: `http` (what every handler needs), `routes` (one file per kind of call), `openai` (the OpenAI-compatible API),
`limits` (what a tenant may use), `training` (operations from the request to the engine), `sampling` (samples,
tokenizers, chat templates), `upkeep` (files, expiry, models), `console` (the web page).
`named_runs` finds what a person names.

Others import:
    main.serve     run a service until it is stopped
"""
