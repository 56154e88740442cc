"""From what a user gives to `EngineRequest`s, and the requests that are open."""
