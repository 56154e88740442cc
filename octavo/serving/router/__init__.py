"""`octavo route`: one address in front of several servers. A light process without an engine."""
